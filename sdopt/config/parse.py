"""Turns Hydra's composed configuration into typed, validated objects; nothing below receives a `DictConfig`."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BeforeValidator, Field

from sdopt.config.compositions import Composition, composition_errors
from sdopt.config.sections import COMMAND_KEYS, SECTION_NAMES, WORK_SECTIONS
from sdopt.config.typed import MISSING, typed
from sdopt.contract import Contract
from sdopt.errors import UsageError, first_line
from sdopt.gate.rule_checks import require_rules
from sdopt.hardware.cards import require_sheet
from sdopt.options.base import Optimization
from sdopt.pipelines.checks import require_model
from sdopt.pipelines.functions import absolute
from sdopt.pipelines.loading import family_of
from sdopt.pipelines.prompts import negative_prompts, require_latents, resolve_prompts
from sdopt.pipelines.sampling import require_options
from sdopt.pipelines.tasks import require_inputs
from sdopt.quality.metrics import features_of, require_quality
from sdopt.record.configuration import RecordedConfig
from sdopt.schema import (
    Gate,
    Hardware,
    Model,
    Protocol,
    Quality,
    Scheduler,
    Task,
    Tracking,
    Workload,
    wrong_name,
)
from sdopt.statistics.precision import require_precision
from sdopt.study.designs import Design

_TYPES = (
    Model,
    Task,
    Scheduler,
    Workload,
    Protocol,
    Hardware,
    Quality,
    Gate,
    Tracking,
    Design,
)

SECTIONS: dict[str, type] = dict(zip(SECTION_NAMES, _TYPES, strict=True))
"""The type of each section."""

_SCALARS = ("dry_run", "objective", *COMMAND_KEYS)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


@dataclass(frozen=True, kw_only=True)
class _Scalars:
    """The keys that are in no section."""

    dry_run: Annotated[bool, Field(strict=True)] = False
    objective: Annotated[list[str], BeforeValidator(_as_list), Field(min_length=1)] = (
        field(default_factory=list)
    )
    resume: str | None = None
    retry_failed: Annotated[bool, Field(strict=True)] = False


@dataclass(frozen=True, kw_only=True)
class RunConfig(_Scalars):
    """A composed configuration, typed and within its ranges."""

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
    recorded: RecordedConfig


@composition_errors()
def parse(composed: Composition) -> RunConfig:
    """Types and validates a composed configuration. Raises UsageError with all problems at once, each with its key."""
    problems: list[str] = []
    values, choices = resolved(composed.values, problems), composed.choices
    sections: dict[str, Any] = {}
    optimizations: dict[str, Optimization] = {}
    for key, kind in SECTIONS.items():
        if key not in values:
            problems.append(f"{key}: this group must be chosen; it cannot be removed")
        elif values[key] is not _BROKEN:
            sections[key] = typed(key, values[key], kind, problems)
    for key, node in values.items():
        if node == MISSING:
            problems.append(f"{key}: must be given, as in {key}=…")
        elif key not in SECTIONS and key not in _SCALARS and node is not _BROKEN:
            optimizations |= _optimizations_at(key, node, problems)
    scalars = {
        key: values.get(key) for key in _SCALARS if values.get(key) is not _BROKEN
    }
    command: _Scalars | None = typed("", scalars, _Scalars, problems)
    problems += _beyond_types(sections, str(choices.get("gate")))
    if problems or command is None:
        raise UsageError(problems)
    sections = _settled(sections)
    names_of_options = {
        axis: str(choices.get(axis) or axis.rpartition(".")[2])
        for axis in optimizations
    }
    names_of_sections = {
        section: str(choices.get(section)) for section in WORK_SECTIONS
    }
    return RunConfig(
        **sections,
        **vars(command),
        optimizations=optimizations,
        choices=names_of_options | names_of_sections,
        recorded=RecordedConfig(
            **{key: section for key, section in sections.items() if key != "study"},
            study=values["study"],
            options={
                key: value
                for key, value in values.items()
                if key not in (*SECTIONS, *_SCALARS)
            },
            objective=tuple(command.objective),
            dry_run=command.dry_run,
        ),
    )


_BROKEN = object()
"""Stands for a value that could not be resolved."""


def resolved(values: Mapping[str, Any], problems: list[str]) -> Mapping[str, Any]:
    """Returns values with those in the place of interpolations to which these lead."""
    keys = [key for key, node in values.items() if "${" in repr(node)]
    if not keys:
        return values
    mentioned = _mentioned(values, keys)
    cfg = OmegaConf.create(
        {key: node for key, node in values.items() if key in mentioned}
    )
    whole = dict(values)
    for key in keys:
        try:
            node = cfg[key]
            whole[key] = (
                OmegaConf.to_container(node, resolve=True)
                if OmegaConf.is_config(node)
                else node
            )
        except OmegaConfBaseException as error:
            problems.append(f"{error.full_key or key}: {first_line(error)}")
            whole[key] = _BROKEN
    return whole


def _mentioned(values: Mapping[str, Any], keys: Collection[str]) -> set[str]:
    """Returns the sections and groups that some of them may refer to: OmegaConf takes long to build all."""
    mentioned: set[str] = set()
    new = set(keys)
    while new:
        mentioned |= new
        text = " ".join(repr(values[key]) for key in new)
        new = {key for key in values if key not in mentioned and key in text}
    return mentioned


def _beyond_types(sections: Mapping[str, Any], gate: str) -> list[str]:
    """Returns the errors within and between the sections; a badly typed section is None or missing."""
    problems: list[str] = []
    if gate != "none" and (chosen := sections.get("gate")) and not chosen.judges:
        problems.append(
            f"gate={gate}: has no rules, so that nothing would be judged; `defaults: [default]` adds some"
        )
    study: Design | None = sections.get("study")
    if study and (wrong := wrong_name(study.name)):
        problems.append(f"study.name={study.name}: {wrong}")
    checks: list[tuple[Callable[..., Any], tuple[str, ...]]] = [
        (require_model, ("model",)),
        (require_options, ("scheduler",)),
        (resolve_prompts, ("workload", "model")),
        (_require_inputs, ("task", "model", "workload")),
        (require_latents, ("workload", "task", "model")),
        (require_rules, ("gate",)),
        (require_quality, ("quality", "gate", "model")),
        (require_sheet, ("hardware",)),
        (require_precision, ("protocol", "gate")),
    ]
    for check, names in checks:
        needed = [sections.get(name) for name in names]
        try:
            if None not in needed:
                check(*needed)
        except UsageError as error:
            problems += [
                problem for problem in error.problems if problem not in problems
            ]
    return problems


def _require_inputs(task: Task, model: Model, workload: Workload) -> None:
    require_inputs(task, model, workload, family_of(model))


def _settled(sections: dict[str, Any]) -> dict[str, Any]:
    """Fills null values from other sections: replicates and prompts from the gate, threads and features from the model.

    What features another machine would choose, which judges the result later, depends on what is installed there.
    """
    gate, quality, model = (sections[name] for name in ("gate", "quality", "model"))
    if model.factory is not None:
        model = replace(model, factory=absolute(model.factory))
        sections = sections | {"model": model}
    features = (
        list(features_of(quality, model))
        if quality.metrics and model.weights in ("path", "hub")
        else None
    )
    for section, key, value in (
        ("protocol", "replicates", gate.replicates),
        ("quality", "features", features),
        ("quality", "prompt_count", gate.prompt_count if quality.metrics else None),
        ("hardware", "threads", model.threads),
    ):
        if getattr(sections[section], key) is None:
            sections = sections | {section: replace(sections[section], **{key: value})}
    return sections


def drawn_prompts(run: RunConfig) -> tuple[str, ...]:
    """Returns the prompts of the quality pass, the timed ones first; none if `quality.prompt_count` is not set."""
    count = run.quality.prompt_count or 0
    return (
        resolve_prompts(replace(run.workload, prompt_count=count), run.model)
        if count
        else ()
    )


def drawn_negatives(run: RunConfig) -> tuple[str, ...]:
    """Returns the negative prompts of the timed prompts and of those of the quality pass, whichever are more."""
    count = max(run.workload.prompt_count, run.quality.prompt_count or 0)
    return negative_prompts(replace(run.workload, prompt_count=count), run.model)


def _optimizations_at(
    key: str, node: Any, problems: list[str]
) -> dict[str, Optimization]:
    """Builds the optimization at a top-level key, or those below it if the group's options combine; by axis."""
    if not isinstance(node, Mapping):
        sections = ", ".join([*SECTIONS, *_SCALARS])
        problems.append(f"{key}: unknown key; the sections are {sections}")
        return {}
    nodes = {key: node}
    if "_target_" not in node:
        nodes = {f"{key}.{name}": part for name, part in node.items()}
    options = {}
    for axis, part in nodes.items():
        option = typed(axis, part, Optimization, problems)
        if option is not None:
            options[axis] = option.located()
    problems += [
        f"{axis}: {wrong}"
        for axis, option in options.items()
        if (wrong := _wrong_contract(option))
    ]
    return options


def _wrong_contract(option: Optimization) -> str | None:
    """Returns what is wrong with the contract of an option, which a user may have misspelt; None if nothing is."""
    try:
        promised = str(option.contract)
    except ValueError as error:
        promised = str(error)
    if promised in list(Contract):
        return None
    return f"unknown contract ({promised}); choose one of {', '.join(Contract)}"
