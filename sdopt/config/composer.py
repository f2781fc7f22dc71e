"""Composes variants from the overrides of a command."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from sdopt.config.groups import reject_null_groups
from sdopt.config.messages import in_one_line
from sdopt.config.overrides import group_of, key_of, merge_overrides
from sdopt.config.parse import WORK_SECTIONS, RunConfig, drawn_prompts, parse
from sdopt.config.paths import CONF, CONFIG_NAME
from sdopt.errors import UsageError
from sdopt.pipelines.prompts import resolve_prompts
from sdopt.schema import (
    Gate,
    Tracking,
)
from sdopt.study.designs import as_override, difference
from sdopt.variant import Variant


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
            merged = merge_overrides(self._without_optimizations() if plain else self._overrides, overrides)
            # A preset may have changed keys of an option, and would change them in the baseline's option too.
            reset = self._axes() - {group_of(key_of(override)) for override in overrides} if plain else set()
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
            pictured=drawn_prompts(run),
            config=run.recorded,
        )

    def _axes(self) -> set[str]:
        return {group_of(axis) for axis in [*self.current.optimizations, *self._default.optimizations]}

    def _without_optimizations(self) -> list[str]:
        kept = [override for override in self._overrides if group_of(key_of(override)) not in self._axes()]
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
            raise UsageError(f"{key}: {str(error).splitlines()[0]}" if key else in_one_line(error)) from error

    def _compose(self, overrides: Sequence[str]) -> tuple[DictConfig, dict[str, Any]]:
        reject_null_groups(overrides)
        cfg = compose(CONFIG_NAME, [*overrides, *self._searchpath], return_hydra_config=True)
        choices: Any = OmegaConf.to_container(cfg.hydra.runtime.choices)
        return OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"]), choices

    def chosen(self) -> list[str]:
        changed = difference(self.current.choices, self._default.choices)
        return [f"{axis}={option}" for axis, option in changed.items() if axis in self.current.optimizations]

    def without(self, option: str) -> str:
        axis = key_of(option)
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


@dataclass(frozen=True)
class GateConfig:
    """What judging a result that exists needs."""

    gate: Gate
    tracking: Tracking


def gate_of(overrides: Sequence[str]) -> GateConfig:
    """The gate, `default` where none is chosen, and the tracking section. Raises UsageError."""
    chosen = any(key_of(override) == "gate" for override in overrides)
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        run = HydraComposer([*([] if chosen else ["gate=default"]), *overrides]).current
    return GateConfig(run.gate, run.tracking)


def _chosen(run: RunConfig, axis: str) -> Any:
    return getattr(run, axis) if axis in WORK_SECTIONS else run.optimizations.get(axis)


def _changed_fields(option: Any, asis: Any) -> str:
    if asis is None or type(option) is not type(asis):
        return ""
    names = [field.name for field in fields(option) if getattr(option, field.name) != getattr(asis, field.name)]
    values = {name: getattr(option, name) for name in names}
    shown = {name: Path(value).name if isinstance(value, str) else value for name, value in values.items()}
    return f"({', '.join(f'{name}={value}' for name, value in shown.items())})" if shown else ""
