"""Composes variants from the overrides of a command."""

import copy
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import OverrideType
from hydra.core.utils import JobRuntime
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from sdopt.config.compositions import Composition, Compositions, composition_errors
from sdopt.config.groups import default_choice, has_default, override_of, require_overrides
from sdopt.config.models import with_own_options
from sdopt.config.overrides import group_of, key_of, merge_overrides, parsed_override, quoted
from sdopt.config.parse import SECTIONS, RunConfig, drawn_negatives, drawn_prompts, parse
from sdopt.config.paths import CONF
from sdopt.config.sections import COMMAND_KEYS, LOAD, WORK_SECTIONS
from sdopt.config.typed import build_typed
from sdopt.errors import UsageError
from sdopt.options.base import Optimization
from sdopt.pipelines.prompts import resolve_prompts
from sdopt.record.choices import NONE, as_choice, as_override, difference, listed
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

    Raises:
        UsageError: the job's own configuration is not valid.
    """

    def __init__(
        self,
        overrides: Sequence[str],
        hydra_overrides: Sequence[str] = (),
        composed: tuple[DictConfig, DictConfig] | None = None,
    ) -> None:
        self.hydra_overrides = tuple(hydra_overrides)
        """Those of Hydra's own keys."""
        self._compositions = Compositions(hydra_overrides)
        self._overrides = with_own_options(overrides, self._compositions.options("model"))
        # A design composes the same variants again and again.
        self._parsed: dict[tuple[tuple[str, ...], bool], RunConfig] = {}
        self._job = self._compositions.of(self._overrides, composed)
        self.current = _parsed(self._job)
        """The job's own configuration."""
        self._defaults = self._compositions.of([])
        self._default = _parsed(self._defaults)

    @property
    def chooses_features(self) -> bool:
        """Whether nobody has named the features by which images are scored, so that what is at hand decides."""
        return self.current.quality.metrics and self._job.cfg.quality.features is None

    def refresh(self) -> None:
        """Parses the job's configuration again, after what is at hand has changed."""
        self._parsed.clear()
        self.current = _parsed(self._job)

    @classmethod
    def of_this_job(cls, cfg: DictConfig) -> "HydraComposer":
        """Returns the composer of the running Hydra job, which has composed `cfg`. Raises UsageError as `__init__`."""
        hydra: Any = HydraConfig.get()
        # Unresolved, because an override may hold an interpolation of its own.
        overrides: Any = OmegaConf.to_container(hydra.overrides, resolve=False)
        return cls(overrides["task"], overrides["hydra"], (cfg, hydra))

    def variant(self, name: str | None, overrides: Sequence[str] = (), plain: bool = False) -> Variant:
        """Composes a variant; see `sdopt.study.designs.Composer`."""
        try:
            overrides = list(map(as_override, overrides))
            overrides = with_own_options(overrides, self._compositions.options("model"))
            require_overrides(overrides)
            overrides = self._joined([self._added(override) for override in overrides])
            run, merged = self._composed(overrides, plain)
        except UsageError as error:
            raise UsageError([f"variant '{name or 'candidate'}': {problem}" for problem in error.problems]) from error
        self._require_shared(name or "candidate", run, overrides)
        changed = {axis: _changed_fields(_chosen(run, axis), self._asis(run, axis)) for axis in run.choices}
        choices = {axis: option + _as_text(changed[axis]) for axis, option in run.choices.items()}
        return Variant(
            name=name or listed(difference(choices, self._default.choices)) or "as composed",
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
            changed={f"{axis}.{name}": value for axis, values in changed.items() for name, value in values.items()},
            config_dirs=self._compositions.own_folders,
            config=run.recorded,
        )

    def chosen(self) -> list[str]:
        """Lists the job's options beyond the defaults; see `sdopt.study.designs.Composer`."""
        changed = difference(self.current.choices, self._default.choices)
        return [as_choice(axis, option) for axis, option in changed.items() if axis in self.current.optimizations]

    def without(self, option: str) -> str:
        """Returns the override that takes an option back; see `sdopt.study.designs.Composer`."""
        group, axes = group_of(key_of(option)), self.axes(option)
        others = [o for axis, o in self.current.choices.items() if group_of(axis) == group and axis not in axes]
        if others:
            return override_of(group, f"[{','.join(others)}]")
        return default_choice(group)

    def axes(self, option: str) -> list[str]:
        """Returns the axes that an option chooses on; see `sdopt.study.designs.Composer`."""
        found = self._compositions.axes(option)
        # Hydra says what is wrong with an option, and lists the others, once a variant is composed of it.
        return [key_of(option)] if found is None else list(found)

    def options(self, group: str) -> list[str]:
        """Lists the options of a group beside its default; see `sdopt.study.designs.Composer`."""
        found = self._compositions.options(group)
        if not found:
            known = ", ".join(sorted(self._groups()))
            raise UsageError(f"study.options: unknown group '{group}'; choose one of {known}")
        named = [override_of(group, option) for option in found]
        return [option for option in named if option != default_choice(group)]

    def _composed(self, overrides: Sequence[str], plain: bool) -> tuple[RunConfig, list[str]]:
        """Composes the job's overrides and `overrides`; returns the result and the overrides of both."""
        groups, chosen, others = self._groups(), dict[str, dict[str, str]](), list[str]()
        for override in overrides:
            group = group_of(key_of(override))
            # Hydra deletes only what is among its defaults: a group without a default is taken out here.
            axes = {} if override == f"~{group}" and group in groups else self._compositions.axes(override)
            if axes is None:
                others.append(override)
            else:
                chosen[group] = axes
        staying = [axis for axes in chosen.values() for axis in axes if "." in axis]
        before = self._without_optimizations() if plain else self._overrides
        if lora := self._lora_of(overrides):
            staying.append(_LORA)
            before = [*before, *(override for override in lora if override not in before)]
        merged = [each for each in merge_overrides(before, overrides, staying) if each.lstrip("~") not in groups]
        key = tuple(merged), plain
        if key not in self._parsed:
            keys = [each for each in others if "." in key_of(each) and group_of(key_of(each)) in groups | chosen.keys()]
            base = self._with_sections([each for each in others if each not in keys])
            made = self._with_options(base, chosen, plain)
            if not all(_set_key(made.cfg, each) for each in [*lora, *keys]):
                made = self._compositions.of(merged)  # Hydra says what is wrong, or knows what is meant
            self._parsed[key] = _parsed(made)
        return self._parsed[key], merged

    def _with_sections(self, overrides: Sequence[str]) -> Composition:
        """Composes the job with overrides that choose no options; Hydra is spared where they only set keys."""
        cfg = copy.deepcopy(self._job.cfg)
        if all(_set_key(cfg, override) for override in overrides):
            return Composition(cfg, self._job.choices)
        composed = self._compositions.of(merge_overrides(self._overrides, overrides))
        return Composition(copy.deepcopy(composed.cfg), composed.choices)

    def _with_options(self, base: Composition, chosen: Mapping[str, dict[str, str]], plain: bool) -> Composition:
        """Puts the nodes of options, by group and axis, in the place of `base`'s own: a fifth of what Hydra takes.

        With `plain`, all other groups have their defaults.
        """
        choices = base.choices
        if plain:
            chosen = {group: _in_group(self._defaults.choices, group) for group in self._groups()} | dict(chosen)
        for group, options in chosen.items():
            node = self._nodes(group, options, {} if plain else _in_group(choices, group))
            _replace(base.cfg, group, node)
            choices = {axis: option for axis, option in choices.items() if group_of(axis) != group} | options
        return Composition(base.cfg, choices)

    def _lora_of(self, overrides: Sequence[str]) -> list[str]:
        """Returns the job's keys of its LoRA, if overrides choose another way to use one: its file stays the same."""
        chosen = [override.partition("=")[2] for override in overrides if key_of(override) == _LORA]
        keys = [override for override in self._overrides if key_of(override).startswith(f"{_LORA}.")]
        return keys if chosen and chosen[-1] != NONE else []

    def _nodes(self, group: str, options: Mapping[str, str], kept: Mapping[str, str]) -> Any:
        """Returns the node of a group with some options, by axis; those that combine keep the keys that the job set."""
        node: Any = OmegaConf.create()
        for axis, option in options.items():
            stays = "." in axis and kept.get(axis) == option
            file = self._job.cfg if stays else self._compositions.option(group, option)
            if file is not None and OmegaConf.is_dict(part := OmegaConf.select(file, axis)):
                OmegaConf.update(node, axis, copy.deepcopy(part), force_add=True)
        return node.get(group)

    def _groups(self) -> set[str]:
        """Returns the groups of the optimizations."""
        return {group_of(axis) for axis in [*self.current.optimizations, *self._default.optimizations]}

    def _without_optimizations(self) -> list[str]:
        kept = [override for override in self._overrides if group_of(key_of(override)) not in self._groups()]
        # Named once more, because a preset may have chosen otherwise.
        return kept + [default_choice(group) for group in sorted(self._groups()) if has_default(group)]

    def _added(self, override: str) -> str:
        """Returns an override with the `+` that Hydra wants for an option of a group without a default."""
        lacks = not has_default(group_of(key_of(override))) and not override.startswith("+")
        return f"+{override}" if lacks and self._compositions.axes(override) is not None else override

    def _joined(self, overrides: Sequence[str]) -> list[str]:
        """Joins options that combine, `memory=a` and `memory=b` as `memory=[a,b]`; of one axis the last one counts."""
        read = [(override, key_of(override), self._compositions.axes(override)) for override in overrides]
        combining = {group for _, group, options in read if any("." in axis for axis in options or ())}
        others = [override for override, group, options in read if group not in combining or options is None]
        joined: dict[str, dict[str, str]] = {}
        for _, group, options in read:
            if group in combining and options is not None:
                # An empty list takes back what was chosen before it.
                joined[group] = joined.get(group, {}) | options if options else {}
        return others + [override_of(group, f"[{','.join(options.values())}]") for group, options in joined.items()]

    def _asis(self, run: RunConfig, axis: str) -> Any:
        """Returns the option of an axis as in its file, to see which of its keys were changed."""
        option = run.choices[axis]
        if option == self._default.choices.get(axis):
            return _chosen(self._default, axis)
        file = self._compositions.option(group_of(axis), option)
        node = None if file is None else OmegaConf.select(file, axis)
        made = build_typed(axis, node, SECTIONS.get(axis, Optimization), []) if OmegaConf.is_dict(node) else None
        return _chosen(run, axis) if made is None else made

    def _require_shared(self, name: str, run: RunConfig, overrides: Sequence[str]) -> None:
        """Raises UsageError if a variant sets a key of the whole study, which would have no effect."""
        job = self.current
        wrong = [key for key in map(key_of, overrides) if group_of(key) in _OF_COMMANDS]
        wrong += [key for key in ("protocol", "tracking", "gate") if getattr(run, key) != getattr(job, key)]
        machine = ("device", "sheet", "emulate_memory")
        wrong += [f"hardware.{key}" for key in machine if getattr(run.hardware, key) != getattr(job.hardware, key)]
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
                [f"variant '{name}': {key} applies to the whole study; set it outside of the variant" for key in wrong]
            )


_ONE_THREAD = threading.RLock()


@contextmanager
def _initialized() -> Iterator[None]:
    """Initializes Hydra, whose state is the process's, in one thread at a time; a program's own use of it stays."""
    with _ONE_THREAD:
        base, job = VersionBase.instance().version_base, JobRuntime().get("name")
        try:
            with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
                yield
        finally:
            VersionBase.instance().version_base = base
            JobRuntime().set("name", job)


@contextmanager
def composer_of(overrides: Sequence[str], config_dir: Path | None = None) -> Iterator[HydraComposer]:
    """Yields a composer outside of any Hydra job. Raises UsageError if the configuration is not valid."""
    with _initialized():
        yield HydraComposer(overrides, _search_path(config_dir))


def load_of(overrides: Sequence[str], config_dir: Path | None) -> dict[str, Any]:
    """Returns the section of a load test that a preset has; {} if it has none. Raises UsageError as `composer_of`."""
    with _initialized():
        return dict(_plain(Compositions(_search_path(config_dir)).of(overrides).cfg, LOAD))


def _search_path(config_dir: Path | None) -> list[str]:
    if config_dir is not None and not config_dir.is_dir():
        raise UsageError(f"config_dir={config_dir}: there is no such folder; name one with groups of your own")
    return [f"hydra.searchpath=[{quoted(f'file://{config_dir.absolute()}')}]"] if config_dir else []


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
    passed = [override for override in overrides if group_of(key_of(override)) not in (*sections, "hydra")]
    if passed:
        known = " and ".join(sections)
        raise UsageError([f"{each}: has no effect on a finished result, only keys of {known} have" for each in passed])


def with_gate(overrides: Sequence[str]) -> list[str]:
    """Returns overrides with the gate `default`, unless they choose one."""
    chosen = any(key_of(override) == "gate" for override in overrides)
    return [*([] if chosen else ["gate=default"]), *overrides]


def _parsed(composed: Composition) -> RunConfig:
    with composition_errors():
        return parse(composed.cfg, composed.choices)


def _in_group(choices: Mapping[str, str], group: str) -> dict[str, str]:
    return {axis: option for axis, option in choices.items() if group_of(axis) == group}


def _replace(cfg: DictConfig, group: str, node: Any) -> None:
    """Replaces the node of a group; with None the configuration has none."""
    with open_dict(cfg):
        if node is None:
            cfg.pop(group, None)
        else:
            cfg[group] = node


def _set_key(cfg: DictConfig, override: str) -> bool:
    """Sets a key that a configuration has; returns whether the override asks for no more than that."""
    parsed = parsed_override(override)
    if parsed.type != OverrideType.CHANGE or parsed.is_sweep_override() or "." not in key_of(override):
        return False
    OmegaConf.set_struct(cfg, True)
    try:
        OmegaConf.update(cfg, key_of(override), parsed.value(), merge=True)
    except OmegaConfBaseException:
        return False
    finally:
        OmegaConf.set_struct(cfg, None)
    return True


def _plain(cfg: DictConfig, group: str) -> Any:
    """Returns a group's node as plain values; {} if it is missing or holds nothing."""
    return (OmegaConf.to_container(cfg, resolve=False) or {}).get(group) or {}  # type: ignore[union-attr]


def _chosen(run: RunConfig, axis: str) -> Any:
    return getattr(run, axis) if axis in WORK_SECTIONS else run.optimizations.get(axis)


def _changed_fields(option: Any, asis: Any) -> dict[str, Any]:
    """Returns the fields in which an option differs from its file, by name."""
    if asis is None or type(option) is not type(asis):
        return {}
    pairs = {field.name: (getattr(option, field.name), getattr(asis, field.name)) for field in fields(option)}
    return {name: value for name, (value, usual) in pairs.items() if value != usual}


def _as_text(changed: Mapping[str, Any]) -> str:
    """Returns changed fields as a choice names them, as in `(mode=max-autotune)`."""
    shown = {name: Path(value).name if isinstance(value, str) else value for name, value in changed.items()}
    return f"({', '.join(f'{name}={value}' for name, value in shown.items())})" if shown else ""
