"""Composes variants from the overrides of a command."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra.core.default_element import ResultDefault
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from sdopt.config.groups import default_choice, has_default, override_of, reject_null_groups
from sdopt.config.loader import loader_of
from sdopt.config.messages import in_one_line
from sdopt.config.overrides import group_of, key_of, merge_overrides, without_plus
from sdopt.config.parse import SECTIONS, WORK_SECTIONS, RunConfig, drawn_negatives, drawn_prompts, parse
from sdopt.config.paths import CONF
from sdopt.config.typed import build_typed
from sdopt.errors import UsageError
from sdopt.optimizations.base import Optimization
from sdopt.pipelines.prompts import resolve_prompts
from sdopt.results.choices import as_choice, as_override, listed
from sdopt.schema import Gate, Tracking
from sdopt.study.designs import difference
from sdopt.variant import Variant

_Composition = tuple[DictConfig, dict[str, Any]]
"""A composed configuration without Hydra's own node, and the option chosen on each axis."""


class HydraComposer:
    """Composes variants inside a running Hydra job, from that job's own overrides.

    Args:
        overrides: the job's overrides.
        hydra_overrides: overrides of Hydra's own keys; a search path among them leads to the user's own groups.

    Raises:
        UsageError: the job's own configuration is not valid.
    """

    def __init__(self, overrides: Sequence[str], hydra_overrides: Sequence[str] = ()) -> None:
        self._loader = loader_of([o for o in hydra_overrides if o.lstrip("+~").startswith("hydra.searchpath")])
        self._overrides = list(overrides)
        # A design composes the same variants again and again.
        self._parsed: dict[tuple[tuple[str, ...], frozenset[str]], RunConfig] = {}
        self._found: dict[str, dict[str, str] | None] = {}
        self._files: dict[tuple[str, str], Any] = {}
        self._combining: frozenset[str] = frozenset()
        self.current = self._parse(self._overrides)
        """The job's own configuration."""
        self._default = self._parse([])
        self._combining = frozenset(axis for axis in self.current.optimizations if "." in axis)

    @classmethod
    def of_this_job(cls) -> "HydraComposer":
        """Returns the composer of the running Hydra job. Raises UsageError if its configuration is not valid."""
        # Unresolved, because an override may hold an interpolation of its own.
        overrides: Any = OmegaConf.to_container(HydraConfig.get().overrides, resolve=False)
        return cls(overrides["task"], overrides["hydra"])

    def variant(self, name: str | None, overrides: Sequence[str] = (), plain: bool = False) -> Variant:
        """Composes a variant; see `sdopt.study.designs.Composer`."""
        try:
            overrides = self._joined([as_override(override) for override in overrides])
            run, merged = self._composed(overrides, plain)
        except UsageError as error:
            raise UsageError([f"variant '{name or 'candidate'}': {problem}" for problem in error.problems]) from error
        self._require_shared(name or "candidate", run)
        choices = {
            axis: option + _changed_fields(_chosen(run, axis), self._asis(run, axis))
            for axis, option in run.choices.items()
        }
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
        found = self._options(option)
        # Hydra says what is wrong with an option, and lists the others, once a variant is composed of it.
        return [key_of(option)] if found is None else list(found)

    def options(self, group: str) -> list[str]:
        """Lists the options of a group beside its default; see `sdopt.study.designs.Composer`."""
        found = self._loader.options(group)
        if not found:
            known = ", ".join(sorted(self._groups()))
            raise UsageError(f"study.options: unknown group '{group}'; choose one of {known}")
        named = [override_of(group, option) for option in found]
        return [option for option in named if option != default_choice(group)]

    def _composed(self, overrides: Sequence[str], plain: bool) -> tuple[RunConfig, list[str]]:
        """Composes the job's overrides and `overrides`; returns the result and the overrides of both."""
        named: dict[str, list[str]] = {}
        for override in overrides:
            named.setdefault(group_of(key_of(override)), []).append(override)
        staying = [axis for override in overrides for axis in self._options(override) or () if "." in axis]
        merged = merge_overrides(self._without_optimizations() if plain else self._overrides, overrides, staying)
        # A preset may have changed keys of an option, and would change them in the default option too.
        reset = {group for group in self._groups() if named.get(group) == [default_choice(group)]}
        # Hydra deletes only what is among its defaults; a group without a default is taken out after composing.
        merged = [override for override in merged if override not in {f"~{group}" for group in reset}]
        return self._parse(merged, reset | (self._groups() - named.keys() if plain else set())), merged

    def _groups(self) -> set[str]:
        """Returns the groups of the optimizations."""
        return {group_of(axis) for axis in [*self.current.optimizations, *self._default.optimizations]}

    def _without_optimizations(self) -> list[str]:
        kept = [override for override in self._overrides if group_of(key_of(override)) not in self._groups()]
        # Named once more, because a preset may have chosen otherwise.
        return kept + [default_choice(group) for group in sorted(self._groups()) if has_default(group)]

    def _joined(self, overrides: Sequence[str]) -> list[str]:
        """Joins options that combine, `memory=a` and `memory=b` as `memory=[a,b]`; of one axis the last one counts."""
        read = [(override, key_of(override), self._options(override)) for override in overrides]
        combining = {group for _, group, options in read if any("." in axis for axis in options or ())}
        others = [override for override, group, options in read if group not in combining or options is None]
        joined: dict[str, dict[str, str]] = {}
        for _, group, options in read:
            if group in combining and options is not None:
                # An empty list takes back what was chosen before it.
                joined[group] = joined.get(group, {}) | options if options else {}
        return others + [override_of(group, f"[{','.join(options.values())}]") for group, options in joined.items()]

    def _options(self, override: str) -> dict[str, str] | None:
        """Returns the options that an override of a group chooses, by axis; None if it is no choice of options."""
        if override not in self._found:
            self._found[override] = None
            if "." not in key_of(override) and "=" in override and not override.startswith("~"):
                with suppress(HydraException, ValueError):
                    self._found[override] = _axes_of(
                        self._loader.merged_files([f"+{without_plus(override)}"], config_name=None)
                    )
        return self._found[override]

    def _asis(self, run: RunConfig, axis: str) -> Any:
        """Returns the option of an axis as in its file, to see which of its keys were changed."""
        option, default = run.choices[axis], self._default.choices.get(axis)
        if option == default:
            return _chosen(self._default, axis)
        if (axis, option) not in self._files:
            self._files[axis, option] = self._file(axis, option)
        found = self._files[axis, option]
        return _chosen(run, axis) if found is None else found

    def _file(self, axis: str, option: str) -> Any:
        """Composes an option's file without overrides; returns None if that fails, as with a mandatory key."""
        try:
            cfg, _ = self._loader.compose([f"+{group_of(axis)}={option}"], config_name=None)
            node, problems = OmegaConf.select(cfg, axis), list[str]()
            return build_typed(axis, node, SECTIONS.get(axis, Optimization), problems)
        except (HydraException, OmegaConfBaseException, ValueError, UsageError):
            return None

    def _parse(self, overrides: Sequence[str], reset: Collection[str] = ()) -> RunConfig:
        """Composes and types overrides, cached; groups in `reset` are as in the defaults, whatever changed them."""
        key = (tuple(overrides), frozenset(reset))
        if key not in self._parsed:
            self._parsed[key] = self._parse_anew(overrides, reset)
        return self._parsed[key]

    def _parse_anew(self, overrides: Sequence[str], reset: Collection[str]) -> RunConfig:
        try:
            cfg, choices = self._compose(overrides)
            if reset:
                cfg, choices = _reset(reset, (cfg, choices), self._defaults)
            # A preset's keys of an option that the job chooses and this variant does not.
            for group, _, name in (axis.partition(".") for axis in self._combining - choices.keys()):
                if cfg.get(group) is not None and name in cfg[group]:
                    with open_dict(cfg):
                        del cfg[group][name]
            return parse(cfg, choices)
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            key = getattr(error, "full_key", None)
            raise UsageError(f"{key}: {str(error).splitlines()[0]}" if key else in_one_line(error)) from error

    @cached_property
    def _defaults(self) -> _Composition:
        return self._compose([])

    def _compose(self, overrides: Sequence[str]) -> _Composition:
        reject_null_groups(overrides)
        cfg, choices = self._loader.compose(overrides)
        if any(_combines(cfg, str(key), choices) for key in cfg):
            choices |= _axes_of(self._loader.merged_files(overrides))
        return cfg, choices

    def _require_shared(self, name: str, run: RunConfig) -> None:
        """Raises UsageError if a variant sets a key of the whole study, which would have no effect."""
        shared = {
            "protocol": run.protocol == self.current.protocol,
            "tracking": run.tracking == self.current.tracking,
            **{
                f"hardware.{key}": getattr(run.hardware, key) == getattr(self.current.hardware, key)
                for key in ("device", "sheet", "emulate_memory")
            },
        }
        shared |= {"quality": run.quality == self.current.quality, "gate": run.gate == self.current.gate}
        mine, others = (side.workload.shapes(side.model) for side in (run, self.current))
        # Rounds time every variant at every shape, and compare them shape by shape.
        shared["a list in workload.size or workload.batch_size"] = mine == others or len(mine) == len(others) == 1
        wrong = [key for key, same in shared.items() if not same]
        if wrong:
            raise UsageError(
                [f"variant '{name}': {key} applies to the whole study; set it outside of the variant" for key in wrong]
            )


def tracking_of(overrides: Sequence[str]) -> Tracking:
    """Returns the tracking section alone, for commands that measure nothing. Raises UsageError."""
    with composer_of(overrides) as composer:
        return composer.current.tracking


@contextmanager
def composer_of(overrides: Sequence[str], config_dir: Path | None = None) -> Iterator[HydraComposer]:
    """Yields a composer outside of any Hydra job.

    Args:
        overrides: the job's overrides.
        config_dir: a folder of the user's own groups.

    Raises:
        UsageError: the configuration is not valid.
    """
    path = [f"hydra.searchpath=[file://{config_dir.absolute()}]"] if config_dir else []
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        yield HydraComposer(overrides, path)


@dataclass(frozen=True)
class GateConfig:
    """The sections that judging an existing result needs."""

    gate: Gate
    tracking: Tracking


def gate_of(overrides: Sequence[str]) -> GateConfig:
    """Returns the chosen gate (`default` if none is chosen) and the tracking section. Raises UsageError."""
    chosen = any(key_of(override) == "gate" for override in overrides)
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        run = HydraComposer([*([] if chosen else ["gate=default"]), *overrides]).current
    return GateConfig(run.gate, run.tracking)


def _axes_of(merged: Sequence[ResultDefault]) -> dict[str, str]:
    """Returns the option of each axis, derived from the files that Hydra merges and where it puts them.

    The choices that Hydra lists omit the options of a group that was chosen as a list.
    """
    found: dict[str, str] = {}
    for file in merged:
        group, _, option = str(file.config_path).rpartition("/")
        # A file that another option of its group builds on is part of that option.
        if group_of(group) in ("", "hydra") or not file.package or str(file.parent).startswith(f"{group}/"):
            continue
        if found.setdefault(file.package, option) != option:
            raise UsageError(f"{group}=[{found[file.package]},{option}]: both set {file.package}; choose one of them")
    for axis, option in found.items():
        group, _, name = axis.rpartition(".")
        if group in found:
            whole = found[group]
            raise UsageError(
                f"{group}=[{whole},{option}]: {group}/{whole}.yaml sets {group} itself; to combine it with {name}, "
                f"begin the file with `# @package {group}.{whole}`"
            )
    return found


def _combines(cfg: DictConfig, key: str, choices: Mapping[str, Any]) -> bool:
    """Returns whether a group was chosen as a list, or by an option that sets a key within it."""
    if key in SECTIONS or OmegaConf.is_missing(cfg, key) or not OmegaConf.is_dict(cfg[key]):
        return False
    return key not in choices or "_target_" not in cfg[key]


def _reset(groups: Collection[str], composed: _Composition, default: _Composition) -> _Composition:
    """Returns a composition with some groups, and the choices in them, as they are in the default one."""
    (cfg, choices), (default_cfg, default_choices) = composed, default
    with open_dict(cfg):
        for group in groups:
            if group in default_cfg:
                cfg[group] = default_cfg[group]
            else:
                cfg.pop(group, None)
    kept = {axis: option for axis, option in choices.items() if group_of(axis) not in groups}
    return cfg, kept | {axis: option for axis, option in default_choices.items() if group_of(axis) in groups}


def _chosen(run: RunConfig, axis: str) -> Any:
    return getattr(run, axis) if axis in WORK_SECTIONS else run.optimizations.get(axis)


def _changed_fields(option: Any, asis: Any) -> str:
    """Returns the fields in which an option differs from its file, as in `(mode=max-autotune)`."""
    if asis is None or type(option) is not type(asis):
        return ""
    names = [field.name for field in fields(option) if getattr(option, field.name) != getattr(asis, field.name)]
    values = {name: getattr(option, name) for name in names}
    shown = {name: Path(value).name if isinstance(value, str) else value for name, value in values.items()}
    return f"({', '.join(f'{name}={value}' for name, value in shown.items())})" if shown else ""
