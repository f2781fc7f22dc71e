"""From Hydra's composed configuration to typed, validated objects: the only module that knows Hydra.

Nothing below this receives a `DictConfig`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

import sdopt
from sdopt.designs import Design, as_override, difference
from sdopt.errors import UsageError
from sdopt.optimizations.base import Optimization
from sdopt.pipelines.loading import model_folder, require_options
from sdopt.prompts import resolve_prompts
from sdopt.schema import Hardware, Model, Protocol, Scheduler, Tracking, Workload, out_of_range
from sdopt.variant import Variant

_PACKAGE = Path(sdopt.__file__).parent
# A wheel carries `conf` inside the package; a checkout has it at the top.
CONF = _PACKAGE / "conf" if (_PACKAGE / "conf").is_dir() else _PACKAGE.parent / "conf"
CONFIG_NAME = "config"

_SECTIONS: dict[str, type] = {
    "model": Model,
    "scheduler": Scheduler,
    "workload": Workload,
    "protocol": Protocol,
    "hardware": Hardware,
    "tracking": Tracking,
    "study": Design,
}
_SCALARS = ("dry_run", "objective", "resume", "retry_failed")
_OF_THE_COMMAND = ("resume", "retry_failed")
"""Keys that say how a command runs, and nothing of what the study is."""


@dataclass(frozen=True)
class RunConfig:
    """One composed configuration, typed and within its ranges."""

    model: Model
    scheduler: Scheduler
    workload: Workload
    protocol: Protocol
    hardware: Hardware
    tracking: Tracking
    study: Design
    optimizations: Mapping[str, Optimization]
    choices: Mapping[str, str]
    dry_run: bool
    objective: tuple[str, ...]
    resume: str | None
    retry_failed: bool
    recorded: Mapping[str, Any]


def parse(cfg: DictConfig, choices: Mapping[str, str]) -> RunConfig:
    """Types and validates a composed configuration.

    Args:
        cfg: without Hydra's own node.
        choices: the option chosen in each group (`hydra.runtime.choices`).

    Raises:
        UsageError: all problems at once, each naming its key.
    """
    problems: list[str] = []
    sections: dict[str, Any] = {}
    optimizations: dict[str, Optimization] = {}
    for key, kind in _SECTIONS.items():
        if key in cfg:
            sections[key] = _typed(key, cfg[key], kind, problems)
        else:
            problems.append(f"{key}: this group must be chosen; it cannot be removed")
    for key in map(str, cfg):
        if OmegaConf.is_missing(cfg, key):
            problems.append(f"{key}: must be given, as in {key}=…")
        elif key not in _SECTIONS and key not in _SCALARS:
            optimizations |= _axis(key, cfg[key], problems)
    try:
        objective = cfg.get("objective")
    except OmegaConfBaseException as error:
        problems.append(f"objective: {str(error).splitlines()[0]}")
        objective = ""
    names = tuple(objective) if OmegaConf.is_list(objective) else (objective,)
    if not names or not all(isinstance(name, str) for name in names):
        problems.append("objective: name a metric of the result, as in latency/p50_s, or a list of them")
    problems += [f"{key}: true or false" for key in ("dry_run", "retry_failed") if not isinstance(cfg.get(key), bool)]
    problems += _beyond_types(sections.get("model"), sections.get("scheduler"), sections.get("workload"))
    if problems:
        raise UsageError(problems)
    recorded: Any = OmegaConf.to_container(cfg, resolve=True)
    return RunConfig(
        **sections,
        optimizations=optimizations,
        choices={axis: str(choices.get(axis) or axis.rpartition(".")[2]) for axis in optimizations}
        | {"scheduler": str(choices.get("scheduler"))},
        dry_run=cfg.dry_run,
        objective=names,
        resume=cfg.get("resume"),
        retry_failed=cfg.retry_failed,
        recorded={key: value for key, value in recorded.items() if key not in _OF_THE_COMMAND},
    )


def _beyond_types(model: Model | None, scheduler: Scheduler | None, workload: Workload | None) -> list[str]:
    """Problems of the sections that are well typed."""
    problems = []
    if workload and workload.size is not None and workload.size % 8:
        problems.append(f"workload.size={workload.size}: must be a multiple of 8, the factor of the autoencoder")
    checks: list[tuple[Any, Callable[[Any], Any]]] = [
        (model, model_folder),
        (scheduler, require_options),
        (workload, resolve_prompts),
    ]
    for section, check in checks:
        try:
            if section is not None:
                check(section)
        except UsageError as error:
            problems += error.problems
    return problems


def _axis(key: str, node: Any, problems: list[str]) -> dict[str, Optimization]:
    """The optimization at a top-level key, or those below it where several of one axis combine."""
    if node is None:
        return {}
    if not isinstance(node, DictConfig):
        problems.append(f"{key}: unknown key; the sections are {', '.join([*_SECTIONS, *_SCALARS])}")
        return {}
    missing = [f"{key}.{name!s}" for name in node if OmegaConf.is_missing(node, name)]
    problems += [f"{name}: must be given, as in {name}=…" for name in missing]
    if missing:
        return {}
    nodes = {key: node} if "_target_" in node else {f"{key}.{name!s}": node[name] for name in node}
    made = {path: _typed(path, child, Optimization, problems) for path, child in nodes.items()}
    return {path: option for path, option in made.items() if option is not None}


def _typed(path: str, node: Any, kind: type, problems: list[str]) -> Any:
    """Builds the dataclass of a node, key by key, so that every problem is found and names its key."""
    if not isinstance(node, DictConfig):
        problems.append(f"{path}: must be a group of keys, not {node!r}")
        return None
    values: Any = OmegaConf.to_container(node, resolve=False)
    target = values.pop("_target_", None)
    cls: Any = kind
    if kind in (Design, Optimization):
        if not isinstance(target, str):
            problems.append(f"{path}._target_: must name a class derived from {kind.__module__}.{kind.__name__}")
            return None
        try:
            module, _, name = target.rpartition(".")
            cls = getattr(import_module(module), name)
        except Exception as error:  # whatever importing a user's own module raises
            reason = str(error.__cause__ or error).splitlines()[0]
            problems.append(f"{path}._target_={target}: cannot be imported ({reason}); is its folder on PYTHONPATH?")
            return None
        if not (isinstance(cls, type) and is_dataclass(cls) and issubclass(cls, kind)):
            problems.append(f"{path}._target_={target}: must be a dataclass derived from {kind.__name__}")
            return None
    try:
        schema = OmegaConf.structured(cls)
    except OmegaConfBaseException as error:
        reason = f"{str(error).splitlines()[0]} of its field {error.full_key}"
        problems.append(f"{path}._target_={target}: {reason}; a yaml holds numbers, strings, lists and mappings")
        return None
    OmegaConf.set_readonly(schema, False)
    limits = {field.name: field.metadata for field in fields(cls)}
    before = len(problems)
    for key in values:
        full = f"{path}.{key}"
        if key not in schema:
            problems.append(f"{full}: unknown key; there are {', '.join(map(str, schema)) or 'none'}")
            continue
        if OmegaConf.is_missing(node, key):
            problems.append(f"{full}: must be given, as in {full}=…")
            continue
        try:
            schema = OmegaConf.merge(schema, {key: node[key]})
            wrong = out_of_range(schema[key], limits[key])
        except OmegaConfBaseException as error:
            problems.append(f"{full}: {str(error).splitlines()[0]}")
        else:
            if wrong:
                problems.append(f"{full}={schema[key]}: {wrong}")
    if len(problems) > before:
        return None
    try:
        made = OmegaConf.to_object(schema)
    except OmegaConfBaseException as error:
        problems.append(f"{path}: {str(error).splitlines()[0]}")
        return None
    return made


class HydraComposer:
    """Composes variants inside a running Hydra job, from that job's own overrides."""

    def __init__(self, overrides: Sequence[str], hydra_overrides: Sequence[str] = ()) -> None:
        # A search path given on the command line holds the user's own groups: every composition needs it.
        self._searchpath = [o for o in hydra_overrides if o.lstrip("+~").startswith("hydra.searchpath")]
        self._overrides = list(overrides)
        self.current = self._parse(self._overrides)
        """The job's own configuration. Building a composer raises UsageError where it is not valid."""
        self._default = self._parse([])

    @classmethod
    def of_this_job(cls) -> "HydraComposer":
        # Unresolved, because an override may hold an interpolation of its own.
        overrides: Any = OmegaConf.to_container(HydraConfig.get().overrides, resolve=False)
        return cls(overrides["task"], overrides["hydra"])

    def variant(self, name: str | None, overrides: Sequence[str] = (), plain: bool = False) -> Variant:
        overrides = [as_override(override) for override in overrides]
        try:
            merged = _merge(self._without_optimizations() if plain else self._overrides, overrides)
            # A preset may have changed keys of an option, and would change them in the baseline's option too.
            reset = self._axes() - {_top(_key(override)) for override in overrides} if plain else set()
            run = self._parse(merged, reset)
            asis = self._asis(run)
        except UsageError as error:
            raise UsageError([f"variant '{name or 'candidate'}': {problem}" for problem in error.problems]) from error
        self._require_shared(name or "candidate", run)
        choices = {
            axis: option + _changed_fields(_chosen(run, axis), _chosen(asis, axis))
            for axis, option in run.choices.items()
        }
        chosen = difference(choices, self._default.choices)
        return Variant(
            name=name or ", ".join(f"{axis}={option}" for axis, option in chosen.items()) or "as composed",
            choices=choices,
            overrides=tuple(merged),
            model=run.model,
            scheduler=run.scheduler,
            workload=run.workload,
            protocol=run.protocol,
            hardware=run.hardware,
            optimizations=run.optimizations,
            prompts=resolve_prompts(run.workload),
            config=run.recorded,
        )

    def _axes(self) -> set[str]:
        return {_top(axis) for axis in [*self.current.optimizations, *self._default.optimizations]}

    def _without_optimizations(self) -> list[str]:
        kept = [override for override in self._overrides if _top(_key(override)) not in self._axes()]
        # Named once more, because a preset may have chosen otherwise.
        return kept + [
            f"{axis}={self._default.choices[axis]}" for axis in self._default.optimizations if "." not in axis
        ]

    def _asis(self, run: RunConfig) -> RunConfig:
        """The options of a configuration as their files have them, to see which of their keys were changed."""
        chosen = [
            f"{'' if axis in self._default.choices else '+'}{axis}={option}"
            for axis, option in run.choices.items()
            if "." not in axis and option != self._default.choices.get(axis)
        ]
        try:
            return self._parse(chosen) if chosen else self._default
        except UsageError:
            return run  # an option with a mandatory key does not stand alone

    def _parse(self, overrides: Sequence[str], reset: Collection[str] = ()) -> RunConfig:
        """Composes and types; the axes in `reset` are as in the defaults, whatever chose or changed them."""
        try:
            cfg, choices = self._compose(overrides)
            if reset:
                plain, plain_choices = self._compose([])
                with open_dict(cfg):
                    for axis in reset:
                        cfg[axis] = plain.get(axis)
                choices = choices | {axis: plain_choices.get(axis) for axis in reset}
            return parse(cfg, choices)
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            key = getattr(error, "full_key", None)
            raise UsageError(f"{key}: {str(error).splitlines()[0]}" if key else _in_one_line(error)) from error

    def _compose(self, overrides: Sequence[str]) -> tuple[DictConfig, dict[str, Any]]:
        reject_null_groups(overrides)
        cfg = compose(CONFIG_NAME, [*overrides, *self._searchpath], return_hydra_config=True)
        choices: Any = OmegaConf.to_container(cfg.hydra.runtime.choices)
        return OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"]), choices

    def chosen(self) -> list[str]:
        changed = difference(self.current.choices, self._default.choices)
        return [f"{axis}={option}" for axis, option in changed.items() if axis in self.current.optimizations]

    def without(self, option: str) -> str:
        axis = _key(option)
        default = self._default.choices.get(axis)
        return f"{axis}={default}" if default else f"~{axis}"

    def _require_shared(self, name: str, run: RunConfig) -> None:
        # A study has one protocol, one tracker and one device: set in a variant they would change nothing.
        shared = {
            "protocol": run.protocol == self.current.protocol,
            "tracking": run.tracking == self.current.tracking,
            "hardware.device": run.hardware.device == self.current.hardware.device,
        }
        wrong = [key for key, same in shared.items() if not same]
        if wrong:
            raise UsageError(
                [f"variant '{name}': {key} belongs to the whole study; set it beside study" for key in wrong]
            )


def tracking_of(overrides: Sequence[str]) -> Tracking:
    """The tracking section alone, for commands that measure nothing. Raises UsageError."""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return HydraComposer(overrides).current.tracking


class RememberFolder(Callback):
    """Notes where Hydra put the run or the sweep, for the time after `hydra.main`, and with any launcher."""

    run: ClassVar[Path | None] = None
    sweep: ClassVar[Path | None] = None
    occupied: ClassVar[bool] = False
    """Whether a folder was refused because it is another's: its files say nothing of this command."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        RememberFolder.run = Path(config.hydra.run.dir)

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        RememberFolder.sweep = Path(config.hydra.sweep.dir)


def with_resumed(argv: Sequence[str]) -> list[str]:
    """A command line as it is, or where it says `resume=<folder>` that of the run or sweep in the folder.

    Hydra keeps what a study was started with in the folder, so that nothing has to be said again; and where tracking or
    `retry_failed` is said beside `resume`, that holds.

    Raises:
        UsageError: something else is said, or there is nothing to go on with.
    """
    named = [a for a in argv if _bare(a).startswith("resume=") and _bare(a) != "resume=null"]
    if not named:
        if any(_bare(argument) == "retry_failed=true" for argument in argv):
            raise UsageError(
                "retry_failed=true: only a study that is resumed has failures; name it with resume=<folder>"
            )
        return list(argv)
    folder = Path(_bare(named[0]).removeprefix("resume=")).expanduser()
    said = [argument for argument in argv if argument != named[0]]
    kept = [argument for argument in said if _top(_bare(argument).partition("=")[0]) in ("tracking", "retry_failed")]
    refused = [argument for argument in said if argument not in kept and argument not in ("-m", "--multirun")]
    if refused:
        raise UsageError(
            [
                f"{argument}: cannot be changed beside resume, which goes on with the study of its folder; only "
                "tracking and retry_failed can stand there"
                for argument in refused
            ]
        )
    sweep = folder / "multirun.yaml"
    source = sweep if sweep.is_file() else folder / ".hydra" / "hydra.yaml"
    try:
        recorded = OmegaConf.load(source).hydra
        task: Any = OmegaConf.to_container(recorded.overrides.task)
        hydra: Any = OmegaConf.to_container(recorded.overrides.hydra)
        added = [item.path for item in recorded.runtime.config_sources if item.provider == "command-line"]
    except (OSError, OmegaConfBaseException, ValueError) as error:
        raise UsageError(
            f"resume={folder}: there is no {source.relative_to(folder)} that says what was run there; "
            "name the folder of a run or of a sweep"
        ) from error
    place = "hydra.sweep.dir" if sweep.is_file() else "hydra.run.dir"
    ours = ("hydra.mode", "hydra.sweep.dir", "hydra.run.dir", *_OF_THE_COMMAND)
    return [
        *(["-m"] if sweep.is_file() else []),
        *(part for path in added for part in ("--config-dir", path)),
        *(override for override in _merge(task, kept) if _key(override) not in ours),
        *(override for override in hydra if _key(override) not in ours),
        *(override for override in kept if _key(override) in ours),
        f"{place}={_quoted(str(folder))}",
        f"resume={_quoted(str(folder))}",
    ]


def _bare(argument: str) -> str:
    return argument.lstrip("+")


def _quoted(value: str) -> str:
    """A string as Hydra's grammar takes it, whatever is in it."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def reject_null_groups(overrides: Sequence[str]) -> None:
    """Raises UsageError where a group is set to null, on which Hydra would only end with a traceback."""
    for override in overrides:
        key, _, value = override.partition("=")
        if value == "null" and (CONF / key).is_dir() and key != "experiment":
            options = ", ".join(sorted(path.stem for path in (CONF / key).glob("*.yaml")))
            raise UsageError(f"{key}=null: a group is chosen, not emptied; choose one of {options}")


def in_sweep() -> bool:
    """Whether the running Hydra job is one of many."""
    return HydraConfig.get().mode == RunMode.MULTIRUN


def job_folder() -> Path:
    """The folder that Hydra made for the running job."""
    return Path(HydraConfig.get().runtime.output_dir)


def _in_one_line(error: Exception) -> str:
    """What Hydra says, with the choices that it lists but without the paths that it searched."""
    said = str(error).partition("Config search path")[0]
    return " ".join(said.replace("\n\t", ", ").replace(":, ", ": ").split())


def _merge(overrides: Sequence[str], more: Sequence[str]) -> list[str]:
    """Overrides followed by more; where those replace a group, what was said of its keys goes with it."""
    replaced = [key for key in map(_key, more) if "." not in key]
    kept = [o for o in overrides if not any(_key(o) == key or _key(o).startswith(key + ".") for key in replaced)]
    return [*kept, *more]


def _key(override: str) -> str:
    """`compiler` of `compiler=inductor` and of `+compiler=mine`; `compiler.mode` of `compiler.mode=default`."""
    try:
        return str(OverridesParser.create().parse_override(override).key_or_group)
    except HydraException as error:
        raise UsageError(f"{override}: not an override ({str(error).splitlines()[0]}); write key=value") from error


def _top(key: str) -> str:
    return key.partition(".")[0].partition("/")[0]


def _chosen(run: RunConfig, axis: str) -> Any:
    return run.scheduler if axis == "scheduler" else run.optimizations.get(axis)


def _changed_fields(option: Any, asis: Any) -> str:
    if asis is None or type(option) is not type(asis):
        return ""
    names = [field.name for field in fields(option) if getattr(option, field.name) != getattr(asis, field.name)]
    return f"({', '.join(f'{name}={getattr(option, name)}' for name in names)})" if names else ""
