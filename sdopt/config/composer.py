"""Composes variants from the overrides of a command."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from sdopt.config.compositions import (
    Composition,
    Compositions,
    initialized,
    search_path,
)
from sdopt.config.edits import Edit, at, edited, in_group, key_value, read_edit
from sdopt.config.groups import default_choice, has_default, override_of
from sdopt.config.models import with_own_options
from sdopt.config.overrides import group_of, key_of, merge_overrides
from sdopt.config.parse import (
    SECTIONS,
    RunConfig,
    drawn_negatives,
    drawn_prompts,
    parse,
    resolved,
)
from sdopt.config.sections import COMMAND_KEYS, WORK_SECTIONS
from sdopt.config.typed import typed
from sdopt.errors import UsageError
from sdopt.options.base import Optimization
from sdopt.pipelines.lora_files import USUAL_NAME
from sdopt.pipelines.prompts import resolve_prompts
from sdopt.record.choices import (
    NONE,
    as_choice,
    as_override,
    difference,
    listed,
    written_value,
)
from sdopt.schema import THRESHOLDS
from sdopt.variant import Variant

_LORA = "lora"

_OF_COMMANDS = ("study", "hydra", "dry_run", "objective", *COMMAND_KEYS)
"""Sections and keys that say what a command does."""


class HydraComposer:
    """Composes variants where Hydra is initialized, from the overrides of a job.

    Args:
        overrides: the job's overrides.
        hydra_overrides: overrides of Hydra's own keys; a search path among them leads to the user's own groups.
        composed: what Hydra has composed of them already, and its own node; None to compose it here.
        compositions: what was composed with the same overrides of Hydra's own keys; None for none.

    Raises:
        UsageError: the job's own configuration is not valid.
    """

    def __init__(
        self,
        overrides: Sequence[str],
        hydra_overrides: Sequence[str] = (),
        composed: tuple[DictConfig, DictConfig] | None = None,
        compositions: Compositions | None = None,
    ) -> None:
        self._hydra_overrides = tuple(hydra_overrides)
        self._compositions = compositions or Compositions(hydra_overrides)
        self._overrides = with_own_options(
            overrides, self._compositions.options("model")
        )
        # A design composes the same variants again and again.
        self._parsed: dict[tuple[tuple[str, ...], bool], RunConfig] = {}
        self._job = self._compositions.of(self._overrides, composed)
        self.current = parse(self._job)
        """The job's own configuration."""

    @cached_property
    def _defaults(self) -> Composition:
        return self._compositions.of([])

    @cached_property
    def _default(self) -> RunConfig:
        return parse(self._defaults)

    @property
    def chooses_features(self) -> bool:
        """Whether nobody has named the features by which images are scored, so that what is at hand decides."""
        return (
            self.current.quality.metrics
            and self._job.values["quality"].get("features") is None
        )

    def refresh(self) -> None:
        """Parses the job's configuration again, after what is at hand has changed."""
        self._parsed.clear()
        self.current = parse(self._job)

    @classmethod
    def of_this_job(cls, cfg: DictConfig) -> "HydraComposer":
        """Returns the composer of the running Hydra job, which has composed `cfg`. Raises UsageError as `__init__`."""
        hydra: Any = HydraConfig.get()
        # Unresolved, because an override may hold an interpolation of its own.
        overrides: Any = OmegaConf.to_container(hydra.overrides, resolve=False)
        return cls(overrides["task"], overrides["hydra"], (cfg, hydra))

    @cached_property
    def _anew(self) -> Compositions:
        """What is composed from the user's own files as they are now, which may be long after the job began."""
        return Compositions(self._hydra_overrides)

    def again(self, overrides: Sequence[str]) -> "HydraComposer":
        """Returns the composer of another job in the same folders. Raises UsageError as `__init__`."""
        return HydraComposer(overrides, self._hydra_overrides, compositions=self._anew)

    def variant(
        self, name: str | None, overrides: Sequence[str] = (), plain: bool = False
    ) -> Variant:
        """Composes a variant; see `sdopt.study.designs.Composer`."""
        try:
            words = with_own_options(
                list(map(as_override, overrides)), self._compositions.options("model")
            )
            edit = read_edit(words, self._compositions)
            run, merged = self._composed(edit, plain)
        except UsageError as error:
            raise UsageError(
                [
                    f"variant '{name or 'candidate'}': {problem}"
                    for problem in error.problems
                ]
            ) from error
        self._require_shared(name or "candidate", run, edit.overrides)
        changed = self._changed_in(run)
        choices = {}
        for axis, option in run.choices.items():
            choices[axis] = option + _as_text(changed[axis])
        return Variant(
            name=name
            or listed(difference(choices, self._default.choices))
            or "without options",
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
            pictured=drawn_prompts(run),
            negatives=drawn_negatives(run),
            changed=_by_key(changed),
            config_dirs=self._compositions.own_folders,
            config=run.recorded,
        )

    def chosen(self) -> list[str]:
        """Lists the job's options beyond the defaults; see `sdopt.study.designs.Composer`."""
        changed = difference(self.current.choices, self._default.choices)
        return [
            as_choice(axis, option)
            for axis, option in changed.items()
            if axis in self.current.optimizations
        ]

    @property
    def changed(self) -> dict[str, Any]:
        """The keys of the job's options that have other values than in their files, by full name."""
        return _by_key(self._changed_in(self.current))

    def without(self, option: str) -> str:
        """Returns the override that takes an option back; see `sdopt.study.designs.Composer`."""
        group, axes = group_of(key_of(option)), self.axes(option)
        others = [
            o
            for axis, o in self.current.choices.items()
            if group_of(axis) == group and axis not in axes
        ]
        if others:
            return override_of(group, f"[{','.join(others)}]")
        return default_choice(group)

    def axes(self, option: str) -> list[str]:
        """Returns the axes that an option chooses on; see `sdopt.study.designs.Composer`."""
        chosen = self._compositions.axes(option)
        # Hydra says what is wrong with an option, and lists the others, once a variant is composed of it.
        return [key_of(option)] if chosen is None else list(chosen)

    def options(self, group: str) -> list[str]:
        """Lists the options of a group beside its default; see `sdopt.study.designs.Composer`."""
        names = self._compositions.options(group)
        if not names:
            groups = ", ".join(sorted(self._groups()))
            raise UsageError(
                f"study.options: unknown group '{group}'; choose one of {groups}"
            )
        named = [override_of(group, option) for option in names]
        return [option for option in named if option != default_choice(group)]

    def _composed(self, edit: Edit, plain: bool) -> tuple[RunConfig, list[str]]:
        """Returns the job's configuration with an edit, and the overrides of both."""
        groups = self._groups()
        before = self._without_optimizations() if plain else self._overrides
        staying = [axis for axis in chain(*edit.choices.values()) if "." in axis]
        if lora := self._lora_of(edit):
            staying.append(_LORA)
            before = [override for override in before if not _is_of_lora(override)]
            before += lora
            edit.settings[:0] = map(key_value, lora)
        merged = merge_overrides(before, edit.overrides, staying)
        merged = [override for override in merged if override.lstrip("~") not in groups]
        key = tuple(merged), plain
        if key not in self._parsed:
            if edit.presets:
                composition = self._compositions.of(merged)
            else:
                others = (
                    {group: in_group(self._defaults.choices, group) for group in groups}
                    if plain
                    else {}
                )
                composition = edited(self._job, edit, self._compositions, others)
            self._parsed[key] = parse(composition)
        return self._parsed[key], merged

    def _lora_of(self, edit: Edit) -> list[str]:
        """Returns the job's keys of its LoRA, if an edit chooses another way to use one: its file stays the same.

        Keys that this way does not have, such as that of a second LoRA, are left behind. An option with a file of its
        own, as `lcm_sd15`, is another LoRA.
        """
        chosen = edit.choices.get(_LORA, {}).get(_LORA, NONE)
        if chosen == NONE:
            return []
        option = at(self._compositions.load_option(_LORA, chosen), _LORA) or {}
        has_a_file = option.get("path") or option.get("weight_name")
        if has_a_file and chosen != self.current.choices.get(_LORA):
            return []
        keys = []
        # A preset may have set them, too.
        for name, value in self._changed_in(self.current)[_LORA].items():
            if name in option:
                keys.append(f"{_LORA}.{name}={written_value(value)}")
        return keys

    def _groups(self) -> set[str]:
        """Returns the groups of the optimizations."""
        return {
            group_of(axis)
            for axis in [*self.current.optimizations, *self._default.optimizations]
        }

    def _without_optimizations(self) -> list[str]:
        overrides = [
            override
            for override in self._overrides
            if group_of(key_of(override)) not in self._groups()
        ]
        # Named once more, because a preset may have chosen otherwise.
        return overrides + [
            default_choice(group)
            for group in sorted(self._groups())
            if has_default(group)
        ]

    def _changed_in(self, run: RunConfig) -> dict[str, dict[str, Any]]:
        """Returns by axis the keys of an option that have other values than in its file."""
        changed = {}
        for axis in run.choices:
            own = self._as_in_its_file(run, axis)
            changed[axis] = _changed_fields(_chosen(run, axis), own)
        return changed

    def _as_in_its_file(self, run: RunConfig, axis: str) -> Any:
        """Returns the option of an axis without the keys that a job or a variant has changed."""
        option = run.choices[axis]
        if option == self._default.choices.get(axis):
            return _chosen(self._default, axis)
        values = self._compositions.load_option(group_of(axis), option) or {}
        if "${" in repr(values):  # a file may refer to what else the run has
            recorded = asdict(run.recorded)
            values = resolved(recorded | recorded.pop("options") | values, [])
        node = at(values, axis)
        option_of_file = (
            typed(axis, node, SECTIONS.get(axis, Optimization), [])
            if isinstance(node, dict)
            else None
        )
        if option_of_file is None:
            return _chosen(run, axis)
        if isinstance(option_of_file, Optimization):
            return option_of_file.located()
        return option_of_file

    def _require_shared(
        self, name: str, run: RunConfig, overrides: Sequence[str]
    ) -> None:
        """Raises UsageError if a variant sets a key of the whole study, which would have no effect."""
        job = self.current
        wrong = [key for key in map(key_of, overrides) if group_of(key) in _OF_COMMANDS]
        wrong += [
            key
            for key in ("protocol", "tracking", "gate")
            if getattr(run, key) != getattr(job, key)
        ]
        machine = ("device", "sheet", "emulate_memory")
        wrong += [
            f"hardware.{key}"
            for key in machine
            if getattr(run.hardware, key) != getattr(job.hardware, key)
        ]
        # Features that nobody named are those of the model, and a study has one set of them.
        features = (run if run.model == job.model else job).quality.features
        if replace(run.quality, features=features) != job.quality:
            wrong.append("quality")
        mine, others = (side.workload.shapes(side.model) for side in (run, job))
        # Rounds time every variant at every shape, and compare them shape by shape.
        if mine != others and not len(mine) == len(others) == 1:
            wrong.append("a list in workload.size or workload.batch_size")
        if wrong:
            raise UsageError(
                [
                    f"variant '{name}': {key} applies to the whole study; set it outside of the variant"
                    for key in wrong
                ]
            )


def _is_of_lora(override: str) -> bool:
    return key_of(override).startswith(f"{_LORA}.")


@contextmanager
def composer_of(
    overrides: Sequence[str], config_dir: Path | None = None
) -> Iterator[HydraComposer]:
    """Yields a composer outside of any Hydra job. Raises UsageError if the configuration is not valid."""
    with initialized():
        yield HydraComposer(overrides, search_path(config_dir))


def gate_of(overrides: Sequence[str], config_dir: Path | None = None) -> RunConfig:
    """Returns the configuration with the chosen gate (`default` if none is chosen), for commands that measure nothing.

    Raises:
        UsageError: it is not valid, or a key is given that has no effect on what was measured.
    """
    thresholds = [f"protocol.{name}" for name in THRESHOLDS]
    others = [override for override in overrides if key_of(override) not in thresholds]
    require_sections(others, "gate", "tracking")
    with composer_of(with_gate(overrides), config_dir) as composer:
        return composer.current


def require_sections(overrides: Sequence[str], *sections: str) -> None:
    """Raises UsageError for overrides that would have no effect on a finished result."""
    passed = [
        override
        for override in overrides
        if group_of(key_of(override)) not in (*sections, "hydra")
    ]
    if passed:
        known = " and ".join(sections)
        raise UsageError(
            [
                f"{override}: has no effect on a finished result, only keys of {known} have"
                for override in passed
            ]
        )


def with_gate(overrides: Sequence[str]) -> list[str]:
    """Returns overrides with the gate `default`, unless they choose one."""
    chosen = any(key_of(override) == "gate" for override in overrides)
    return [*([] if chosen else ["gate=default"]), *overrides]


def _chosen(run: RunConfig, axis: str) -> Any:
    return getattr(run, axis) if axis in WORK_SECTIONS else run.optimizations.get(axis)


def _changed_fields(option: Any, asis: Any) -> dict[str, Any]:
    """Returns the fields in which an option differs from its file, by name."""
    if asis is None or type(option) is not type(asis):
        return {}
    pairs = {
        field.name: (getattr(option, field.name), getattr(asis, field.name))
        for field in fields(option)
    }
    return {name: value for name, (value, usual) in pairs.items() if value != usual}


def _by_key(changed: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the keys of options by their full names."""
    keys = {}
    for axis, fields_of_axis in changed.items():
        for name, value in fields_of_axis.items():
            keys[f"{axis}.{name}"] = value
    return keys


def _as_text(changed: Mapping[str, Any]) -> str:
    """Returns changed fields as a choice names them, as in `(mode=max-autotune)`."""
    shown = []
    for name, value in changed.items():
        several = isinstance(value, list)
        plain = list(map(_without_folder, value)) if several else _without_folder(value)
        shown.append(f"{name}={plain}")
    return f"({', '.join(shown)})" if shown else ""


def _without_folder(value: Any) -> Any:
    """Returns the name of a file without its folder, or in the last one if all LoRAs have it; else the value itself."""
    if not isinstance(value, str):
        return value
    path = Path(value)
    return "/".join(path.parts[-2:]) if path.name == USUAL_NAME else path.name
