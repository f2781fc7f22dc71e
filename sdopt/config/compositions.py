"""Composes `conf/` and the user's own groups by Hydra's public calls, and explains what Hydra says."""

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import escape
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from traceback import walk_tb
from typing import Any

from hydra import compose
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]  # OmegaConf raises it

from sdopt.config.card_options import offer_cards
from sdopt.config.groups import (
    choices_of,
    data_sheets,
    default_choice,
    default_options,
    require_chosen,
    require_overrides,
)
from sdopt.config.overrides import group_of, key_of, parsed_override, quoted, resembling
from sdopt.config.paths import CONF, CONFIG_NAME, config_name_of, options_of, read_yaml
from sdopt.config.sections import SECTION_NAMES
from sdopt.config.sources import read_marked_files
from sdopt.errors import UsageError, command_line, shell_word
from sdopt.hardware.names import cards_named, nearest_cards
from sdopt.text_files import decoded

offer_cards()
read_marked_files()

PACKAGED = {"pkg://hydra.conf", f"file://{CONF}", str(CONF), "structured://"}
"""The search path of a command without folders of the user's own."""


_OPEN = ("scheduler.options", "tracking.tags")
"""Mappings whose keys are the user's."""


@dataclass(frozen=True)
class Composition:
    """A composed configuration without Hydra's own node, and the option chosen on each axis."""

    cfg: DictConfig
    choices: dict[str, Any]


_packaged: dict[tuple[str, ...], Composition] = {}
_packaged_files: dict[tuple[str, str], DictConfig | None] = {}
_packaged_options: dict[str, list[str]] = {}
"""What was composed of packaged files alone, which do not change while a program runs."""


class Compositions:
    """Makes the compositions of one job, each once. Hydra must be initialized.

    Args:
        hydra_overrides: overrides of Hydra's own keys; a search path among them leads to the user's own groups.

    Raises:
        UsageError: a folder of the user's own cannot be read, or has files that Hydra would pass over.
    """

    def __init__(self, hydra_overrides: Sequence[str]) -> None:
        self._searchpath = [o for o in hydra_overrides if o.lstrip("+~").startswith("hydra.searchpath")]
        self._loader = GlobalHydra.instance().config_loader()
        sources = {str(source.path) for source in self._loader.get_search_path().get_path()}
        packaged = not self._searchpath and sources <= PACKAGED
        given: list[Any] = [parsed_override(override).value() for override in self._searchpath]
        own = [*sources - PACKAGED, *(str(path) for paths in given for path in paths or ())]
        _require_own_names(own)
        self.own_folders = tuple(dict.fromkeys(path.removeprefix("file://") for path in own))
        """Folders with groups of the user's own."""
        self._made: dict[tuple[str, ...], Composition] = _packaged if packaged else {}
        self._files: dict[tuple[str, str], DictConfig | None] = _packaged_files if packaged else {}
        self._options: dict[str, list[str]] = _packaged_options if packaged else {}
        self._axes: dict[str, dict[str, str] | None] = {}

    def of(self, overrides: Sequence[str], composed: tuple[DictConfig, DictConfig] | None = None) -> Composition:
        """Composes overrides; `composed` is what Hydra has made of them already, and its own node.

        Raises:
            UsageError: Hydra cannot compose them.
        """
        key = tuple(overrides)
        if key not in self._made:
            require_overrides(overrides)
            with composition_errors():
                if composed is None:
                    cfg = compose(CONFIG_NAME, [*self._searchpath, *overrides], return_hydra_config=True)
                    composed = cfg, cfg.hydra
                self._made[key] = self._read(overrides, *composed)
        return self._made[key]

    def option(self, group: str, option: str) -> DictConfig | None:
        """Composes the file of an option alone; returns None if that fails, as it does for a preset."""
        key = group, option
        if key not in self._files:
            self._files[key] = None
            with suppress(HydraException, OmegaConfBaseException, ValueError, OSError):
                found = self._read_file(group, option)
                # Of a group that is not there Hydra makes a key.
                self._files[key] = found if OmegaConf.is_dict(found.get(group, {})) else None
        return self._files[key]

    def options(self, group: str) -> list[str]:
        """Lists the options of a group on the search path; none if there is no such group."""
        if group not in self._options:  # Hydra composes the whole configuration for each answer
            found = self._loader.get_group_options(group, ObjectType.CONFIG, CONFIG_NAME, self._searchpath)
            self._options[group] = found
        return self._options[group]

    def axes(self, override: str) -> dict[str, str] | None:
        """Returns the options that an override of a group chooses, by axis; None if it is no choice of options.

        Raises:
            UsageError: two of them exclude each other.
        """
        if override not in self._axes:
            self._axes[override] = self._find_axes(override)
        return self._axes[override]

    def _find_axes(self, override: str) -> dict[str, str] | None:
        group = key_of(override)
        if "." in group or "=" not in override or override.startswith("~"):
            return None
        value = parsed_override(override).value()
        found: list[tuple[str, str]] = []
        for name in value if isinstance(value, list) else [value]:
            file = self.option(group, str(name))
            if file is None:
                return None
            found += [(axis, str(name)) for axis in axes_in(file) or [group.replace("/", ".")]]
        return _distinct(found)

    def _read(self, overrides: Sequence[str], cfg: DictConfig, hydra: DictConfig) -> Composition:
        choices = {str(group): option for group, option in hydra.runtime.choices.items()}
        OmegaConf.set_struct(cfg, None)
        with open_dict(cfg):
            cfg.pop("hydra", None)
        require_chosen(cfg)
        if any(_combines(cfg, str(key), choices) for key in cfg):
            # The choices that Hydra lists omit the options of a group that was chosen as a list.
            merged = self._loader.compute_defaults_list(CONFIG_NAME, [*self._searchpath, *overrides], RunMode.RUN)
            choices |= _axes_of(merged.defaults)
        return Composition(cfg, choices)

    def _read_file(self, group: str, option: str) -> DictConfig:
        """Composes an option's file: a file that builds on no other needs no Hydra for it."""
        for source in [] if self._searchpath else self._loader.get_sources():
            if source.is_config(f"{group}/{option}"):
                found = source.load_config(f"{group}/{option}")
                package = found.header.get("package") or group.replace("/", ".")
                if "defaults" in found.config or "_" in (package[0], package[-1]):
                    break
                cfg = OmegaConf.create()
                OmegaConf.update(cfg, package, found.config, force_add=True)
                return cfg
        return compose(None, [*self._searchpath, f"+{group}={option}"])


def _require_own_names(folders: Iterable[str]) -> None:
    """Checks the user's own folders: of two files of one name Hydra reads the packaged one, without a word.

    Raises:
        UsageError: a folder is not there, or has a file of a packaged name that says something else.
    """
    problems = []
    for folder in dict.fromkeys(folders):
        scheme, _, place = folder.rpartition("://")
        try:
            root = files(place) if scheme == "pkg" else Path(place)
        except ImportError:
            root = Path("/nowhere")
        if scheme not in ("pkg", "file", "") or not root.is_dir():
            problems.append(f"hydra.searchpath: {folder} is no folder; write file:///folder, or pkg://package.folder")
            continue
        names = [path.relative_to(CONF) for path in sorted(CONF.rglob("*.yaml"))]
        passed = [name for name in names if _differs(root.joinpath(str(name)), CONF / name)]
        if passed:
            more = f" (and {len(passed) - 1} more)" if len(passed) > 1 else ""
            problems.append(
                f"{root.joinpath(str(passed[0]))}{more}: Hydra would read sdopt's own file of this name instead: "
                "rename yours"
            )
    if problems:
        raise UsageError(problems)


def _differs(own: Traversable, packaged: Path) -> bool:
    """Returns whether a file of a packaged name says something else, or nothing that can be read."""
    try:
        return own.is_file() and OmegaConf.create(decoded(own.read_bytes())) != OmegaConf.load(packaged)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException):
        return True


@contextmanager
def composition_errors() -> Iterator[None]:
    """Raises what Hydra and OmegaConf raise as UsageError, each a line that names its key."""
    try:
        yield
    except RecursionError as error:
        raise UsageError("a file's defaults list leads back to the file itself: take it out there") from error
    except (HydraException, OmegaConfBaseException, ValueError, YAMLError) as error:
        cause: BaseException | None = error
        while cause is not None:  # OmegaConf wraps what a resolver raises
            if isinstance(cause, UsageError):
                raise cause from error
            cause = cause.__cause__ or cause.__context__
        if isinstance(error, YAMLError):  # it says where, and its own file and line
            raise UsageError(" ".join(str(error).split())) from error
        key = getattr(error, "full_key", None)
        raise UsageError(f"{key}: {_said(error)}" if key else in_one_line(error)) from error
    except (AssertionError, AttributeError) as error:  # OmegaConf's, for a key that is null: +hydra.sweeper.params.x=1
        if isinstance(error, AttributeError) and "full_key" not in str(error):
            raise
        said = str(error).splitlines()[0]
        way = "give all of it, as in KEY={a: 1}; of Hydra's own keys in a preset's file"
        raise UsageError(f"an override sets a key within null ({said}): {way}") from error


def _said(error: BaseException) -> str:
    return re.sub("field .* is not Optional", "must have a value", str(error).partition("\n")[0])


def axes_in(cfg: DictConfig) -> list[str]:
    """Returns the axes of the optimizations in a configuration."""
    found = []
    for key in [key for key in map(str, cfg) if key not in SECTION_NAMES]:
        if not (OmegaConf.is_missing(cfg, key) or OmegaConf.is_interpolation(cfg, key)) and OmegaConf.is_dict(cfg[key]):
            node = cfg[key]
            names = [] if node is None else [name for name in node if not OmegaConf.is_missing(node, name)]
            below = [f"{key}.{name}" for name in names if OmegaConf.is_dict(node[name])]
            found += [key] if "_target_" in names else below
    return found


def _distinct(found: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Returns options by axis. Raises UsageError if two lie on one axis, or one within another."""
    options: dict[str, str] = {}
    for axis, option in found:
        if options.setdefault(axis, option) != option:
            raise UsageError(f"{group_of(axis)}=[{options[axis]},{option}]: both set {axis}; choose one of them")
    for axis, option in options.items():
        group, _, name = axis.rpartition(".")
        if group in options:
            whole = options[group]
            raise UsageError(
                f"{group}=[{whole},{option}]: {group}/{whole}.yaml sets {group} itself; to combine it with {name}, "
                f"begin the file with `# @package {group}.{whole}`"
            )
    return options


def _axes_of(merged: Sequence[ResultDefault]) -> dict[str, str]:
    """Returns the option of each axis, from the files that Hydra merges and where it puts them."""
    found = []
    for file in merged:
        group, _, option = str(file.config_path).rpartition("/")
        # A file that another option of its group builds on is part of that option.
        if group_of(group) not in ("", "hydra") and file.package and not str(file.parent).startswith(f"{group}/"):
            found.append((file.package, option))
    return _distinct(found)


def _combines(cfg: DictConfig, key: str, choices: Mapping[str, Any]) -> bool:
    """Returns whether a group was chosen as a list, or by an option that sets a key within it."""
    if key in SECTION_NAMES or OmegaConf.is_missing(cfg, key) or not OmegaConf.is_dict(cfg[key]):
        return False
    return key not in choices or "_target_" not in cfg[key]


def _explained(error: Exception, command: str) -> str:
    """Returns Hydra's message without the paths that it searched; for an unknown key, names similar ones."""
    message = str(error).partition("Config search path")[0].strip()
    if several := re.match(r"Ambiguous value for argument '(.*?)=(.*)'$", message, re.MULTILINE):
        key, values = several.groups()  # Hydra's own advice lacks the quotes that a shell takes away
        ways = shell_word(f"{key}={quoted(values)}"), shell_word(f"{key}=[{values}]")
        sweep = ", to measure each: add -m" if command == "run" else ""
        return f"{key}={values}: several values{sweep}; as one text write {ways[0]}, as a list {ways[1]}"
    message = _with_way_out(message, error, command)
    unknown = re.match(r"Could not override '([^']+)'", message)
    nested = r"In 'experiment/.*': Could not find 'experiment/(?=\w+/)"
    written = rf"(?:In '.*': Could not override '|Multiple values for |{nested})(?:experiment/)?(\w+)"
    if grouped := re.match(written, message):
        own = f"write `- override /{grouped[1]}: …` in its defaults list"
        return f"{grouped[1]}: begin the file with `# @package _global_`, and {own}"
    within = "|".join(folder.name for folder in CONF.iterdir() if folder.is_dir())  # a group; its option may be a path
    found = rf"In '[^']*': Could not (?:find|load) '({within}|[^']+(?=/[^'/]+'))/([^']+)'"
    if unknown is None and (option := re.match(found, message)):
        known = re.findall(r"^\t(\S+)$", message, re.MULTILINE) or options_of(option[1])  # of a list Hydra says none
        near = _near(option[1], option[2], known)
        advice = f"did you mean {' or '.join(near)}? " if near else ""
        if option[1] == "hardware" and not re.search(r"\d", option[2]):  # `gpu`: its options are cards, a page of them
            advice = "hardware=auto takes the GPU where there is one, and hardware.device=cuda:1 the second of them; "
        choices = f"the options are {', '.join(known)}" if known else "there is no such group"
        if option[1] == "hardware" and near:  # some hundred cards
            choices = f"`sdopt {command} --help` lists all"
        if plugin := re.fullmatch(r"hydra/(launcher|sweeper)", option[1]):
            name = option[2].partition("_")[0]
            choices += f"; others are plugins, as in pip install hydra-{name}-{plugin[1]}"
        choices += "; or a path, or owner/name on the hub" if option[1] == "model" else ""
        other = (
            "; another scheduler of diffusers by its class, as in scheduler.class_name=EulerAncestralDiscreteScheduler"
        )
        choices += other if option[1] == "scheduler" else ""
        return f"{option[1]}={option[2]}: unknown option; {advice}{choices}{_own_file(option[1], option[2])}"
    if unknown is None:
        return message
    if options := _options_with(unknown[1]):
        group = unknown[1].partition(".")[0]
        chosen = " or ".join(f"{group}={option}" for option in options)
        more = "; beside experiment=…, which has its own, +study.variants.NAME=[…] adds one"
        own = more if unknown[1] == "study.variants" else ""
        return f"{unknown[1]}: the chosen {group} has no such key; choose {chosen} as well{own}"
    known = [key for key in _known_keys(command) if not key.endswith("._target_")]
    same = [key for key in known if key.rpartition(".")[2] == unknown[1]]
    near = same or difflib.get_close_matches(unknown[1], known, n=2)
    advice = f"did you mean {' or '.join(near)}? " if near else ""
    added = f"; a key or group that is not in the defaults list needs a +, as in +{unknown[1]}=…"
    more = added if command == "run" and not near else ""
    return f"{unknown[1]}: unknown key; {advice}`sdopt {command} --help` lists all{more}"


def _near(group: str, name: str, known: Collection[str]) -> list[str]:
    """Returns the options that may be meant; of cards those of the same name, or else the nearest of the same kind."""
    if group != "hardware":
        return resembling(name, known)
    sheets = data_sheets()
    return cards_named(name, sheets) or nearest_cards(name, sheets) or resembling(name, known)


def _with_way_out(message: str, error: Exception, command: str) -> str:
    """Returns a message of Hydra's with the key and the way out that it lacks; others as they are."""
    if message.startswith("Config group override must be a string"):  # Hydra does not say which
        frames = [frame.f_locals for frame, _ in walk_tb(error.__traceback__)]
        number = next((found["override"].input_line for found in reversed(frames) if "override" in found), "a number")
        group, _, name = number.partition("=")
        near = _near(group, name, choices_of(group))
        advice = f"did you mean {' or '.join(near)}? " if near else ""
        message = f"{number}: no option is named by a number alone; {advice}`sdopt {command} --help` lists all"
    if message.startswith("Error merging override ") and error.__cause__:
        message = f"{message.removeprefix('Error merging override ')}: {_said(error.__cause__)}"
    if (deleted := re.match(r"Could not delete '(.*?)'", message)) and deleted[1] in default_options():
        message += f"; {default_choice(deleted[1])} chooses nothing"
    for key in _OPEN:
        if within := re.match(rf"Could not override '{re.escape(key)}(?:\.(.+?))?'", message):
            message = f"{key}: takes keys of any name, each with a +, as in +{key}.{within[1] or 'NAME'}=…"
    if message.startswith("BasicSweeper does not support"):
        message += ": write choice(…) or range(…), or name a sweeper that draws, as hydra/sweeper=optuna does"
    return message


def _own_file(group: str, option: str) -> str:
    """Returns how the option's file in a folder here is found, if there is one; else ""."""
    named = [file for file in (Path(option), Path(f"{option}.yaml")) if file.parent.name == group and file.is_file()]
    for file in named or sorted(Path().glob(f"*/{escape(group)}/{escape(option)}.y*ml")):
        given = command_line("run", "--config-dir", file.parent.parent, f"{group}={file.stem}")
        return f"; {file} is one with `{given} …`" if file.suffix == ".yaml" else f"; {file} must be named .yaml"
    return ""


def _options_with(key: str) -> list[str]:
    """Returns the options of a key's group that have it; [] if it is of no group."""
    group, _, name = key.partition(".")
    files = sorted((CONF / group).glob("*.yaml")) if name else []
    return [file.stem for file in files if name in read_yaml(file)]


def _known_keys(command: str) -> list[str]:
    """Returns every key of a command's default configuration, in full, and every group of `sdopt run`."""
    keys = []
    if command == "run":  # groups of which nothing is chosen, as `experiment`, are in no configuration
        keys = [folder.name for folder in CONF.iterdir() if folder.is_dir()]
    whole = read_yaml(CONF / f"{config_name_of(command)}.yaml")
    chosen = [entry for entry in whole.pop("defaults", ()) if isinstance(entry, dict)]
    whole.pop("hydra", None)
    for entry in chosen:
        for group, option in entry.items():
            if isinstance(option, str) and (CONF / group).is_dir():
                whole[group] = read_yaml(CONF / group / f"{option}.yaml")
    nodes: list[tuple[str, Any]] = [("", whole)]
    while nodes:
        prefix, node = nodes.pop()
        if isinstance(node, dict):
            nodes += [(f"{prefix}.{key}" if prefix else str(key), value) for key, value in node.items()]
        if prefix:
            keys.append(prefix)
    return list(dict.fromkeys(keys))


def in_one_line(error: Exception, command: str = "run") -> str:
    """Returns what Hydra says of a command's overrides, as one line with the choices that it lists below each other."""
    return " ".join(_explained(error, command).replace("\n\t", ", ").replace(":, ", ": ").split())
