"""Composes `conf/` and the user's own groups by Hydra's public calls."""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.utils import JobRuntime
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]  # OmegaConf raises it

from sdopt.config.card_options import offer_cards
from sdopt.config.groups import require_chosen, require_overrides
from sdopt.config.overrides import group_of, key_of, parsed_override
from sdopt.config.paths import CONF, CONFIG_NAME, options_of, study_named
from sdopt.config.sections import SECTION_NAMES
from sdopt.config.sources import read_marked_files
from sdopt.errors import UsageError, first_line, one_line
from sdopt.record.choices import quoted
from sdopt.text_files import decoded

offer_cards()
read_marked_files()

PACKAGED = {"pkg://hydra.conf", f"file://{CONF}", str(CONF), "structured://"}
"""The search path of a command without folders of the user's own."""


_ONE_THREAD = threading.RLock()


Values = Mapping[str, Any]
"""Nested plain values by key; interpolations and `???` are texts."""


@dataclass(frozen=True)
class Composition:
    """A composed configuration, and the option chosen on each axis.

    Attributes:
        values: without Hydra's own node; never changed.
        choices: the options by axis.
    """

    values: Values
    choices: Values


_packaged: dict[tuple[str, ...], Composition] = {}
_packaged_files: dict[tuple[str, str], Values | None] = {}
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
        self._searchpath = [
            o for o in hydra_overrides if o.lstrip("+~").startswith("hydra.searchpath")
        ]
        self._loader = GlobalHydra.instance().config_loader()
        sources = {
            str(source.path) for source in self._loader.get_search_path().get_path()
        }
        packaged = not self._searchpath and sources <= PACKAGED
        folders = [*sources - PACKAGED]
        for override in self._searchpath:
            paths: Any = parsed_override(override).value()
            folders += map(str, paths or ())
        _require_own_names(folders)
        self.own_folders = tuple(
            dict.fromkeys(path.removeprefix("file://") for path in folders)
        )
        """Folders with groups of the user's own."""
        self._made: dict[tuple[str, ...], Composition] = _packaged if packaged else {}
        self._files: dict[tuple[str, str], Values | None] = (
            _packaged_files if packaged else {}
        )
        self._options: dict[str, list[str]] = _packaged_options if packaged else {}
        self._axes: dict[str, dict[str, str] | None] = {}

    def of(
        self,
        overrides: Sequence[str],
        composed: tuple[DictConfig, DictConfig] | None = None,
    ) -> Composition:
        """Composes overrides; `composed` is what Hydra has made of them already, and its own node.

        Raises:
            UsageError: Hydra cannot compose them.
        """
        key = tuple(overrides)
        if key not in self._made:
            require_overrides(overrides)
            with composition_errors():
                if composed is None:
                    cfg = compose(
                        CONFIG_NAME,
                        [*self._searchpath, *overrides],
                        return_hydra_config=True,
                    )
                    composed = cfg, cfg.hydra
                self._made[key] = self._read(overrides, *composed)
        return self._made[key]

    def load_option(self, group: str, option: str) -> Values | None:
        """Returns what an option's file sets, by section or group; None if it sets more than its own, as presets do."""
        key = group, option
        if key not in self._files:
            self._files[key] = None
            with suppress(HydraException, OmegaConfBaseException, ValueError, OSError):
                values = plain(self._read_file(group, option))
                # Of a group that is not there Hydra makes a key.
                if isinstance(values.get(group, {}), dict):
                    self._files[key] = values
        return self._files[key]

    def options(self, group: str) -> list[str]:
        """Lists the options of a group on the search path; none if there is no such group."""
        if (
            group not in self._options
        ):  # Hydra composes the whole configuration for each answer
            names = self._loader.get_group_options(
                group, ObjectType.CONFIG, CONFIG_NAME, self._searchpath
            )
            self._options[group] = names
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
        chosen: list[tuple[str, str]] = []
        for name in value if isinstance(value, list) else [value]:
            file = self.load_option(group, str(name))
            if file is None:
                return None
            chosen += [
                (axis, str(name)) for axis in axes_in(file) or [group.replace("/", ".")]
            ]
        return distinct(chosen)

    def _read(
        self, overrides: Sequence[str], cfg: DictConfig, hydra: DictConfig
    ) -> Composition:
        choices = {
            str(group): option for group, option in hydra.runtime.choices.items()
        }
        values = plain(cfg)
        values.pop("hydra", None)
        require_chosen(values)
        study = values.get("study")
        if isinstance(study, dict) and "name" in study:
            study["name"] = study_named(study["name"], choices.get("experiment"))
        if any(_combines(key, node, choices) for key, node in values.items()):
            # The choices that Hydra lists omit the options of a group that was chosen as a list.
            merged = self._loader.compute_defaults_list(
                CONFIG_NAME, [*self._searchpath, *overrides], RunMode.RUN
            )
            choices |= _axes_of(merged.defaults)
        return Composition(values, choices)

    def _read_file(self, group: str, option: str) -> DictConfig:
        """Composes an option's file: a packaged file that builds on no other needs no Hydra for it."""
        for source in self._loader.get_sources():  # they come before `_searchpath`
            if source.is_config(f"{group}/{option}"):
                file = source.load_config(f"{group}/{option}")
                package = file.header.get("package") or group.replace("/", ".")
                if "defaults" in file.config or "_" in (package[0], package[-1]):
                    break
                cfg = OmegaConf.create()
                OmegaConf.update(cfg, package, file.config, force_add=True)
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
            problems.append(
                f"hydra.searchpath: {folder} is no folder; write file:///folder, or pkg://package.folder"
            )
            continue
        names = [path.relative_to(CONF) for path in sorted(CONF.rglob("*.yaml"))]
        passed = [
            name for name in names if _differs(root.joinpath(str(name)), CONF / name)
        ]
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
        return own.is_file() and OmegaConf.create(
            decoded(own.read_bytes())
        ) != OmegaConf.load(packaged)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException):
        return True


@contextmanager
def composition_errors() -> Iterator[None]:
    """Raises what Hydra and OmegaConf raise as UsageError, in their own words."""
    try:
        yield
    except (
        HydraException,
        OmegaConfBaseException,
        ValueError,
        YAMLError,
        RecursionError,
    ) as error:
        cause: BaseException | None = error
        while cause is not None:  # OmegaConf wraps what a resolver raises
            if isinstance(cause, UsageError):
                raise cause from error
            cause = cause.__cause__ or cause.__context__
        raise UsageError(in_one_line(error)) from error
    except (
        AssertionError,
        AttributeError,
    ) as error:  # OmegaConf's, for a key within null
        if isinstance(error, AttributeError) and "full_key" not in str(error):
            raise
        null = "an override sets a key within null, as hydra.sweeper.params is"
        raise UsageError(f"{null}: {in_one_line(error)}") from error


def in_one_line(error: BaseException) -> str:
    """Returns a line on what Hydra, OmegaConf or YAML refuse: the key or the option, and what they say of it."""
    if isinstance(error, YAMLError):  # says where, and that is on its last lines
        return one_line(error)
    said = first_line(error)
    if isinstance(error, MissingConfigException):
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        if not group:
            return said
        options = error.options or options_of(
            group
        )  # of a list of options Hydra says none
        listed = (
            f"; the options are {', '.join(options)}"
            if 0 < len(options) <= _LISTED
            else ""
        )
        return f"{group}={option}: {said.rstrip('.')}{listed}"
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException):
        return f"{cause.full_key}: {said.rstrip('.')}; {first_line(cause)}"
    key = getattr(error, "full_key", None)
    return f"{key}: {said}" if key else said


_LISTED = 60
"""Most options that a message lists; there are some hundred cards."""


def plain(cfg: DictConfig) -> dict[str, Any]:
    """Returns a configuration as plain values; interpolations and `???` stay texts."""
    values: Any = OmegaConf.to_container(cfg, resolve=False)
    return {str(key): value for key, value in values.items()}


def axes_in(values: Values) -> list[str]:
    """Returns the axes of the optimizations in a configuration."""
    axes = []
    for key, node in values.items():
        if key in SECTION_NAMES or not isinstance(node, dict):
            continue
        if "_target_" in node:
            axes.append(key)
        else:
            axes += [
                f"{key}.{name}" for name, part in node.items() if isinstance(part, dict)
            ]
    return axes


def distinct(found: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Returns options by axis. Raises UsageError if two lie on one axis, or one within another."""
    options: dict[str, str] = {}
    for axis, option in found:
        if options.setdefault(axis, option) != option:
            raise UsageError(
                f"{group_of(axis)}=[{options[axis]},{option}]: both set {axis}; choose one of them"
            )
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
    chosen = []
    for file in merged:
        group, _, option = str(file.config_path).rpartition("/")
        # A file that another option of its group builds on is part of that option.
        if (
            group_of(group) not in ("", "hydra")
            and file.package
            and not str(file.parent).startswith(f"{group}/")
        ):
            chosen.append((file.package, option))
    return distinct(chosen)


def _combines(key: str, node: Any, choices: Values) -> bool:
    """Returns whether a group was chosen as a list, or by an option that sets a key within it."""
    if key in SECTION_NAMES or not isinstance(node, dict):
        return False
    return key not in choices or "_target_" not in node


@contextmanager
def initialized() -> Iterator[None]:
    """Initializes Hydra, whose state is the process's, in one thread at a time; a program's own use of it stays."""
    with _ONE_THREAD:
        base, job = VersionBase.instance().version_base, JobRuntime().get("name")
        of_program = GlobalHydra.instance().hydra  # as within @hydra.main
        GlobalHydra.instance().clear()
        try:
            with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
                yield
        finally:
            GlobalHydra.instance().hydra = of_program
            VersionBase.instance().version_base = base
            JobRuntime().set("name", job)


def composition_of(overrides: Sequence[str], config_dir: Path | None) -> Composition:
    """Composes overrides outside of any Hydra job.

    Raises:
        UsageError: Hydra cannot compose them, or there is no such folder.
    """
    with initialized():
        return Compositions(search_path(config_dir)).of(overrides)


def search_path(config_dir: Path | None) -> list[str]:
    """Returns the override that has Hydra look into the user's own folder, too. Raises UsageError if it is none."""
    if config_dir is not None and not config_dir.is_dir():
        raise UsageError(
            f"config_dir={config_dir}: there is no such folder; name one with groups of your own"
        )
    return (
        [f"hydra.searchpath=[{quoted(f'file://{config_dir.absolute()}')}]"]
        if config_dir
        else []
    )
