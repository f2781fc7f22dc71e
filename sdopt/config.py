"""From Hydra's composed configuration to typed, validated objects: the only module that knows Hydra.

Nothing below this receives a `DictConfig`.
"""

import difflib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
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
from sdopt.hardware import require_sheet
from sdopt.latents import require_latents
from sdopt.optimizations.base import Optimization
from sdopt.pipelines.loading import require_model, require_options
from sdopt.pipelines.tasks import require_inputs
from sdopt.prompts import resolve_prompts
from sdopt.quality.settings import require_quality, require_rules
from sdopt.schema import (
    Gate,
    Hardware,
    Model,
    Protocol,
    Quality,
    Rule,
    Scheduler,
    Sheet,
    Task,
    Tracking,
    Workload,
    out_of_range,
)
from sdopt.variant import Variant

_PACKAGE = Path(sdopt.__file__).parent
# A wheel carries `conf` inside the package; a checkout has it at the top.
CONF = _PACKAGE / "conf" if (_PACKAGE / "conf").is_dir() else _PACKAGE.parent / "conf"
CONFIG_NAME = "config"

_SECTIONS: dict[str, type] = {
    "model": Model,
    "task": Task,
    "scheduler": Scheduler,
    "workload": Workload,
    "protocol": Protocol,
    "hardware": Hardware,
    "quality": Quality,
    "gate": Gate,
    "tracking": Tracking,
    "study": Design,
}
_SCALARS = ("dry_run", "objective", "resume", "retry_failed")
_OF_THE_COMMAND = ("resume", "retry_failed")
"""Keys that say how a command runs, and nothing of what the study is."""
_WORK = ("task", "scheduler")
"""Sections that are choices of a variant, as its optimizations are; a baseline keeps them."""


@dataclass(frozen=True)
class RunConfig:
    """One composed configuration, typed and within its ranges."""

    model: Model
    task: Task
    scheduler: Scheduler
    workload: Workload
    protocol: Protocol
    quality: Quality
    gate: Gate
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


def parse(cfg: DictConfig, choices: Mapping[str, str], whole: bool = True) -> RunConfig:
    """Types and validates a composed configuration.

    Args:
        cfg: without Hydra's own node.
        choices: the option chosen in each group (`hydra.runtime.choices`).
        whole: whether it is to be run, so that files must be there and the sections must go together.

    Raises:
        UsageError: all problems at once, each naming its key.
    """
    problems: list[str] = []
    sections: dict[str, Any] = {}
    optimizations: dict[str, Optimization] = {}
    for key, kind in _SECTIONS.items():
        if key in cfg:
            sections[key] = (_gate if kind is Gate else _typed)(key, cfg[key], kind, problems)
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
    problems += _beyond_types(sections) if whole else []
    if problems:
        raise UsageError(problems)
    recorded: Any = OmegaConf.to_container(cfg, resolve=True)
    return RunConfig(
        **_settled(sections, recorded),
        optimizations=optimizations,
        choices={axis: str(choices.get(axis) or axis.rpartition(".")[2]) for axis in optimizations}
        | {section: str(choices.get(section)) for section in _WORK},
        dry_run=cfg.dry_run,
        objective=names,
        resume=cfg.get("resume"),
        retry_failed=cfg.retry_failed,
        recorded={key: value for key, value in recorded.items() if key not in _OF_THE_COMMAND},
    )


def _beyond_types(sections: Mapping[str, Any]) -> list[str]:
    """Problems of the sections that are well typed; None stands for one that is not."""
    problems = []
    workload: Workload | None = sections.get("workload")
    if workload and workload.size is not None and workload.size % 8:
        problems.append(f"workload.size={workload.size}: must be a multiple of 8, the factor of the autoencoder")
    checks: list[tuple[Callable[..., Any], tuple[str, ...]]] = [
        (require_model, ("model",)),
        (require_options, ("scheduler",)),
        (resolve_prompts, ("workload", "model")),
        (require_inputs, ("task", "model", "workload")),
        (require_latents, ("workload", "task", "model")),
        (require_rules, ("gate",)),
        (require_quality, ("quality", "gate", "model")),
        (require_sheet, ("hardware",)),
    ]
    for check, names in checks:
        needed = [sections.get(name) for name in names]
        try:
            if None not in needed:
                check(*needed)
        except UsageError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    return problems


def _settled(sections: dict[str, Any], recorded: dict[str, Any]) -> dict[str, Any]:
    """The sections with what the gate decides where they leave it open; noted in the record as well."""
    gate = sections["gate"]
    for section, key, value in (
        ("protocol", "replicates", gate.replicates),
        ("quality", "prompt_count", gate.prompt_count),
    ):
        if getattr(sections[section], key) is None:
            sections = sections | {section: replace(sections[section], **{key: value})}
            recorded[section][key] = value
    return sections


def _pictured(run: RunConfig) -> tuple[str, ...]:
    """Prompts of the quality pass: those that are timed come first; without metrics there are no others."""
    count = run.workload.prompt_count
    if run.quality.metrics and run.quality.prompt_count is not None:
        count = run.quality.prompt_count
    return resolve_prompts(replace(run.workload, prompt_count=count), run.model)


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


def _gate(path: str, node: Any, kind: type, problems: list[str]) -> Gate | None:
    """A gate, its rules typed one by one: OmegaConf leaves what is in a list within a mapping untyped."""
    if not isinstance(node, DictConfig):
        return _typed(path, node, kind, problems)
    gate = _typed(path, OmegaConf.masked_copy(node, [str(key) for key in node if key != "rules"]), kind, problems)
    rules: dict[str, list[Rule]] = {}
    for contract, listed in (node.get("rules") or {}).items():
        if not OmegaConf.is_list(listed):
            problems.append(f"{path}.rules.{contract}: must be a list of rules")
            continue
        made = [_typed(f"{path}.rules.{contract}[{i}]", rule, Rule, problems) for i, rule in enumerate(listed)]
        rules[str(contract)] = [rule for rule in made if rule is not None]
    return None if gate is None else replace(gate, rules=rules)


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
    hints = get_type_hints(cls)
    within: dict[str, Any] = {}
    before = len(problems)
    for key in values:
        full = f"{path}.{key}"
        if key not in limits:
            problems.append(f"{full}: unknown key; there are {', '.join(limits) or 'none'}")
            continue
        if OmegaConf.is_missing(node, key):
            problems.append(f"{full}: must be given, as in {full}=…")
            continue
        kind_within = _dataclass_within(hints[key])
        if kind_within is not None and values[key] is not None:
            within[key] = _typed(full, node[key], kind_within, problems)
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
        made: Any = OmegaConf.to_object(schema)
    except OmegaConfBaseException as error:
        problems.append(f"{path}: {str(error).splitlines()[0]}")
        return None
    return replace(made, **within)


def _dataclass_within(annotation: Any) -> Any:
    """`Sheet` of `Sheet` and of `Sheet | None`."""
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else [annotation]
    return next((kind for kind in kinds if is_dataclass(kind)), None)


class HydraComposer:
    """Composes variants inside a running Hydra job, from that job's own overrides."""

    def __init__(self, overrides: Sequence[str], hydra_overrides: Sequence[str] = ()) -> None:
        # A search path given on the command line holds the user's own groups: every composition needs it.
        self._searchpath = [o for o in hydra_overrides if o.lstrip("+~").startswith("hydra.searchpath")]
        self._overrides = list(overrides)
        # To compose takes a tenth of a second, and a design asks for the same again and again.
        self._parsed: dict[tuple[tuple[str, ...], frozenset[str], bool], RunConfig] = {}
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
        except UsageError as error:
            raise UsageError([f"variant '{name or 'candidate'}': {problem}" for problem in error.problems]) from error
        self._require_shared(name or "candidate", run)
        choices = {
            axis: option + _changed_fields(_chosen(run, axis), self._asis(run, axis))
            for axis, option in run.choices.items()
        }
        chosen = difference(choices, self._default.choices)
        return Variant(
            name=name or ", ".join(f"{axis}={option}" for axis, option in chosen.items()) or "as composed",
            choices=choices,
            overrides=tuple(merged),
            model=run.model,
            task=run.task,
            scheduler=run.scheduler,
            workload=run.workload,
            protocol=run.protocol,
            hardware=run.hardware,
            optimizations=run.optimizations,
            prompts=resolve_prompts(run.workload, run.model),
            pictured=_pictured(run),
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

    def _asis(self, run: RunConfig, axis: str) -> Any:
        """The option of an axis as its file has it, to see which of its keys were changed."""
        option, default = run.choices[axis], self._default.choices.get(axis)
        if "." in axis or option == default:
            return _chosen(self._default, axis)
        try:
            prefix = "" if axis in self._default.choices else "+"
            return _chosen(self._parse([f"{prefix}{axis}={option}"], whole=False), axis)
        except UsageError:
            return _chosen(run, axis)  # an option with a mandatory key does not stand alone

    def _parse(self, overrides: Sequence[str], reset: Collection[str] = (), whole: bool = True) -> RunConfig:
        """Composes and types, once; the axes in `reset` are as in the defaults, whatever chose or changed them."""
        key = (tuple(overrides), frozenset(reset), whole)
        if key not in self._parsed:
            self._parsed[key] = self._parse_anew(overrides, reset, whole)
        return self._parsed[key]

    def _parse_anew(self, overrides: Sequence[str], reset: Collection[str], whole: bool) -> RunConfig:
        try:
            cfg, choices = self._compose(overrides)
            if reset:
                plain, plain_choices = self._compose([])
                with open_dict(cfg):
                    for axis in reset:
                        cfg[axis] = plain.get(axis)
                choices = choices | {axis: plain_choices.get(axis) for axis in reset}
            return parse(cfg, choices, whole)
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
            **{
                f"hardware.{key}": getattr(run.hardware, key) == getattr(self.current.hardware, key)
                for key in ("device", "sheet", "emulate_memory")
            },
        }
        shared |= {"quality": run.quality == self.current.quality, "gate": run.gate == self.current.gate}
        wrong = [key for key, same in shared.items() if not same]
        if wrong:
            raise UsageError(
                [f"variant '{name}': {key} belongs to the whole study; set it beside study" for key in wrong]
            )


def tracking_of(overrides: Sequence[str]) -> Tracking:
    """The tracking section alone, for commands that measure nothing. Raises UsageError."""
    with composer_of(overrides) as composer:
        return composer.current.tracking


@contextmanager
def composer_of(overrides: Sequence[str], config_dir: Path | None = None) -> Iterator[HydraComposer]:
    """A composer outside of any Hydra job, with a folder of the user's own groups. Raises UsageError."""
    path = [f"hydra.searchpath=[file://{config_dir.absolute()}]"] if config_dir else []
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        yield HydraComposer(overrides, path)


def optimization_options(config_dir: Path | None = None) -> Iterator[tuple[str, str]]:
    """Each option of each group that is neither a section of its own nor a preset: (group, option)."""
    for folder in [CONF, *([config_dir] if config_dir else [])]:
        for path in sorted(folder.glob("*/*.yaml")):
            if path.parent.name not in (*_SECTIONS, "experiment"):
                yield path.parent.name, path.stem


@cache
def data_sheets() -> Mapping[str, Sheet]:
    """The packaged data sheets, by option of the group `hardware`. Raises UsageError where a file is wrong."""
    problems: list[str] = []
    nodes = {path.stem: OmegaConf.load(path) for path in sorted((CONF / "hardware").glob("*.yaml"))}
    sheets = {
        option: _typed(f"{option}.sheet", node.sheet, Sheet, problems)
        for option, node in nodes.items()
        if "sheet" in node and node.sheet is not None
    }
    if problems:
        raise UsageError(problems)
    return sheets


@dataclass(frozen=True)
class GateConfig:
    """What judging a result that exists needs."""

    gate: Gate
    tracking: Tracking


def gate_of(overrides: Sequence[str]) -> GateConfig:
    """The gate, `default` where none is chosen, and the tracking section. Raises UsageError."""
    chosen = any(_key(override) == "gate" for override in overrides)
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        run = HydraComposer([*([] if chosen else ["gate=default"]), *overrides]).current
    return GateConfig(run.gate, run.tracking)


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


def explain(error: Exception) -> str:
    """What Hydra says, without the paths that it searched; of a key that is unknown, what was perhaps meant."""
    said = str(error).partition("Config search path")[0].strip()
    unknown = re.match(r"Could not override '([^']+)'", said)
    if unknown is None:
        return said
    near = difflib.get_close_matches(unknown[1], _known_keys(), n=2)
    advice = f"did you mean {' or '.join(near)}? " if near else ""
    added = f"what is not among the defaults, as a group of your own, takes a +, as in +{unknown[1]}=…"
    return f"{unknown[1]}: there is no such key; {advice}`sdopt run --help` lists all; {added}"


def _known_keys() -> list[str]:
    """Every group and every key of the plain configuration, in full."""
    with ExitStack() as stack:
        if not GlobalHydra.instance().is_initialized():
            stack.enter_context(initialize_config_dir(version_base="1.3", config_dir=str(CONF)))
        plain = OmegaConf.to_container(compose(CONFIG_NAME), resolve=False)
    # Groups of which nothing is chosen, as `experiment`, are in no configuration.
    keys = [folder.name for folder in CONF.iterdir() if folder.is_dir()]
    nodes: list[tuple[str, Any]] = [("", plain)]
    while nodes:
        prefix, node = nodes.pop()
        if isinstance(node, dict):
            nodes += [(f"{prefix}.{key}" if prefix else str(key), value) for key, value in node.items()]
        if prefix:
            keys.append(prefix)
    return list(dict.fromkeys(keys))


def _in_one_line(error: Exception) -> str:
    """`explain`, with the choices that Hydra lists on the same line."""
    return " ".join(explain(error).replace("\n\t", ", ").replace(":, ", ": ").split())


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
    return getattr(run, axis) if axis in _WORK else run.optimizations.get(axis)


def _changed_fields(option: Any, asis: Any) -> str:
    if asis is None or type(option) is not type(asis):
        return ""
    names = [field.name for field in fields(option) if getattr(option, field.name) != getattr(asis, field.name)]
    values = {name: getattr(option, name) for name in names}
    shown = {name: Path(value).name if isinstance(value, str) else value for name, value in values.items()}
    return f"({', '.join(f'{name}={value}' for name, value in shown.items())})" if shown else ""
