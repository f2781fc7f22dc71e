"""The space of a search: options of some groups, values of some keys, and which of their combinations can run."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from sdopt.config.composer import HydraComposer
from sdopt.config.groups import default_options, override_of
from sdopt.config.overrides import quoted
from sdopt.config.paths import options_of
from sdopt.config.sections import SECTION_NAMES
from sdopt.contract import Contract
from sdopt.errors import UsageError
from sdopt.hardware.device import Device
from sdopt.record.choices import NONE
from sdopt.search.config import SearchConfig
from sdopt.search.expectation import Expectation
from sdopt.variant import Variant

BASELINE = "baseline"

Point = Mapping[str, Any]
"""A value for each variable that applies."""


Settings = frozenset[tuple[str, Any]]
"""The variables of a point whose values differ from the baseline's, with those values."""

OFF, ON = "off", "on"

_REDRAWING = {"scheduler", "lora", *SECTION_NAMES}
"""Groups and config sections that draw another image, rather than approximate the same one."""


@dataclass(frozen=True)
class Variable:
    """One variable of the search.

    Attributes:
        name: a group (`precision`), an option of a group whose options combine (`memory.vae_tiling`), or a key.
        values: the names of the group's options; `off` and `on`; or the values of the key.
        plain: the baseline's value; None for a key, which may apply to some options only.
    """

    name: str
    values: tuple[Any, ...]
    plain: str | None = None

    @property
    def is_key(self) -> bool:
        """Whether the variable is a key rather than an option."""
        return self.plain is None

    @property
    def combines(self) -> bool:
        """Whether the variable is one option, on or off, of a group whose options combine."""
        return self.plain in (OFF, ON)


@dataclass(frozen=True)
class Combination:
    """A combination that can run: its difference from the baseline, as tables show it, and as overrides."""

    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Space:
    """All combinations of some variables.

    Attributes:
        variables: groups first, keys after them.
        left_out: one line for each option that cannot run here even alone, with all its reasons.
        composer: composes the baseline and each combination.
        device: the device that they run on.
        expectation: which options promise most, and so come first.
    """

    variables: tuple[Variable, ...]
    left_out: tuple[str, ...]
    composer: HydraComposer
    device: Device
    expectation: Expectation = field(default_factory=Expectation, compare=False)
    _composed: dict[tuple[str, ...], Variant | UsageError] = field(
        default_factory=dict, init=False, compare=False
    )

    @classmethod
    def of(
        cls,
        config: SearchConfig,
        composer: HydraComposer,
        device: Device,
        config_dir: Path | None = None,
        expectation: Expectation | None = None,
    ) -> "Space":
        """Returns the space that a configuration describes. Raises UsageError if none of its options can run here."""
        expected = expectation or Expectation()
        whole = cls(
            (*_groups(config, composer, config_dir), *_keys(config)),
            (),
            composer,
            device,
            expected,
        )
        groups = [variable for variable in whole.variables if not variable.is_key]
        baseline = {variable.name: variable.plain for variable in groups}
        kept, reasons = [], list[str]()
        for variable in groups:
            alone = {
                value: whole.candidate(baseline | {variable.name: value})
                for value in variable.values
            }
            if config.objectives == ["latency"]:
                for value, found in alone.items():
                    alone[value] = whole.always_slow(baseline, variable, value) or found
            reasons += [
                "; ".join(found) for found in alone.values() if isinstance(found, list)
            ]
            fit = tuple(
                value for value, found in alone.items() if not isinstance(found, list)
            )
            if fit not in ((), (variable.plain,)):
                kept.append(replace(variable, values=fit))
        if not kept and config.groups:
            raise UsageError(
                [
                    "search.groups: no option of them can run here",
                    *dict.fromkeys(reasons),
                ]
            )
        return cls(
            (*kept, *_keys(config)),
            tuple(dict.fromkeys(reasons)),
            composer,
            device,
            expected,
        )

    def applies(self, variable: Variable, point: Point) -> bool:
        """Returns whether a variable applies at a point: an option always does, a key only if an option has it."""
        if not variable.is_key or variable.name.partition(".")[0] in SECTION_NAMES:
            return True
        options = {
            name: value for name, value in point.items() if not self._named(name).is_key
        }
        composed = self._variant(self.overrides(options))
        if isinstance(composed, UsageError):
            return False
        found = composed.optimizations.items()
        return any(
            variable.name.startswith(f"{axis}.")
            and hasattr(option, variable.name[len(axis) + 1 :])
            for axis, option in found
        )

    def candidate(self, point: Point) -> Combination | list[str] | None:
        """Returns the candidate of a point, the reasons why it cannot run, or None if it is the baseline itself."""
        overrides = self.overrides(point)
        composed, baseline = self._variant(overrides), self._variant([])
        if isinstance(composed, UsageError):
            return composed.problems
        if reasons := composed.conflicts(self.device):
            return reasons
        assert isinstance(baseline, Variant)
        if (composed.choices, composed.work, composed.hardware) == (
            baseline.choices,
            baseline.work,
            baseline.hardware,
        ):
            return None
        return Combination(
            re.sub(
                "['\"]", "", ", ".join(override.lstrip("+") for override in overrides)
            ),
            tuple(overrides),
        )

    def slow_here(self, found: Combination | list[str] | None) -> list[str]:
        """Returns why a candidate is expected to be slower than the baseline on this device; [] if it is not."""
        composed = (
            self._variant(list(found.overrides))
            if isinstance(found, Combination)
            else None
        )
        return composed.slow_here(self.device) if isinstance(composed, Variant) else []

    def always_slow(self, baseline: Point, variable: Variable, value: str) -> list[str]:
        """Returns why an option is expected to be slower than the baseline, also beside each other one; [] if not."""
        point = {**baseline, variable.name: value}
        reasons = self.slow_here(self.candidate(point))
        if not reasons:
            return []
        for other in self.variables:
            if other == variable or other.is_key:
                continue
            for choice in other.values:
                beside = self.candidate(point | {other.name: choice})
                if isinstance(beside, Combination) and not self.slow_here(beside):
                    return []
        return reasons

    def candidates(self, points: Iterable[Point]) -> list[Combination]:
        """Returns the candidates of those points that have one."""
        return [
            found
            for found in map(self.candidate, points)
            if isinstance(found, Combination)
        ]

    def settings(self, point: Point) -> Settings:
        """Returns the settings of a point that differ from the baseline's."""
        return frozenset(
            (name, value)
            for name, value in point.items()
            if (variable := self._named(name)).is_key or value != variable.plain
        )

    @staticmethod
    def inherits(whole: Settings, part: Settings) -> bool:
        """Returns whether a combination spoils its images because a part of it does.

        Errors of approximations add up. But a scheduler, a LoRA or a key such as `workload.steps` draws another image
        by design, and may repair the rest: few steps alone spoil the images, few steps with a LoRA for them do not.
        """
        return part < whole and not any(
            name.partition(".")[0] in _REDRAWING for name, _ in whole - part
        )

    def contract(self, candidate: Combination) -> Contract:
        """Returns the contract that a candidate promises for its images."""
        composed = self._variant(candidate.overrides)
        return composed.contract if isinstance(composed, Variant) else Contract.LOSSY

    def variants(self, candidates: Sequence[Combination]) -> list[Variant]:
        """Returns the baseline and some candidates, composed."""
        named = {BASELINE: ()} | {each.name: each.overrides for each in candidates}
        composed = (
            (name, self._variant(overrides)) for name, overrides in named.items()
        )
        return [
            replace(variant, name=name)
            for name, variant in composed
            if isinstance(variant, Variant)
        ]

    def points(self) -> Iterator[dict[str, Any]]:
        """Yields every point, with the keys that apply to it."""
        groups = [variable for variable in self.variables if not variable.is_key]
        for values in product(*(variable.values for variable in groups)):
            chosen: dict[str, Any] = dict(
                zip((variable.name for variable in groups), values, strict=True)
            )
            keys = [
                variable
                for variable in self.variables
                if variable.is_key and self.applies(variable, chosen)
            ]
            for settings in product(*(key.values for key in keys)):
                yield chosen | dict(
                    zip((key.name for key in keys), settings, strict=True)
                )

    def alone(self) -> Iterator[dict[str, Any]]:
        """Yields the points that differ from the baseline in one option.

        Those that promise the largest speed-up come first, those that compile last: compiling may take minutes.
        """
        groups = [variable for variable in self.variables if not variable.is_key]
        plain = {
            variable.name: variable.plain
            if variable.plain in variable.values
            else variable.values[0]
            for variable in groups
        }
        points = []
        for variable in groups:
            for value in variable.values:
                if value != plain[variable.name]:
                    points.append(plain | {variable.name: value})
        points.sort(key=lambda point: -self.expected_speedup(point))
        yield from sorted(points, key=self.compiles)

    def expected_speedup(self, point: Point) -> float:
        """Returns the speed-up to expect of a point by earlier measurements; 1 where nothing is known of it."""
        composed, baseline = self._variant(self.overrides(point)), self._variant([])
        if isinstance(composed, UsageError) or isinstance(baseline, UsageError):
            return 1.0
        return self.expectation.speedup(composed.choices, baseline.choices)

    def compiles(self, point: Point) -> bool:
        """Returns whether a point compiles, and not as the baseline does: that may take minutes."""
        return self._compilers(point) not in ({}, self._compilers({}))

    def _compilers(self, point: Point) -> dict[str, str | None]:
        """Returns the compilers of a point, by axis; {} if it runs eagerly, or cannot be composed."""
        composed = self._variant(self.overrides(point))
        if isinstance(composed, UsageError):
            return {}
        axes = [
            axis for axis, option in composed.optimizations.items() if option.compiles
        ]
        return {axis: composed.choices.get(axis) for axis in axes}

    def overrides(self, point: Point) -> list[str]:
        """Returns the overrides that turn the baseline into a point, as on a command line."""
        combined: dict[str, list[str]] = {}
        varied, chosen, keys = {variable.name for variable in self.variables}, [], []
        for name, value in point.items():
            variable, (group, _, option) = self._named(name), name.partition(".")
            if variable.is_key:
                keys.append(f"{name}={_written(value)}")
            elif variable.combines:
                # The options of the group that the baseline has and the search does not vary stay.
                kept = [
                    axis.partition(".")[2]
                    for axis in self._chosen_in(group)
                    if axis not in varied
                ]
                combined.setdefault(group, kept)
                combined[group] += [option] if value == ON else []
            elif value != variable.plain:
                chosen.append(override_of(name, value))
        lists = []
        for group, options in combined.items():
            of_baseline = {axis.partition(".")[2] for axis in self._chosen_in(group)}
            if set(options) != of_baseline:
                lists.append(f"{group}=[{','.join(options)}]")
        # Keys come last, after the options that they belong to.
        return [*chosen, *lists, *keys]

    def _named(self, name: str) -> Variable:
        return next(variable for variable in self.variables if variable.name == name)

    def _chosen_in(self, group: str) -> list[str]:
        return [
            axis
            for axis in self.composer.current.choices
            if axis.startswith(f"{group}.")
        ]

    def _variant(self, overrides: Sequence[str]) -> Variant | UsageError:
        key = tuple(overrides)
        if key not in self._composed:
            try:
                self._composed[key] = self.composer.variant(
                    "candidate", list(overrides)
                )
            except UsageError as error:
                self._composed[key] = error
        return self._composed[key]


def _written(value: Any) -> str:
    """Returns a value in Hydra's grammar."""
    if isinstance(value, str):
        return value if re.fullmatch(r"[\w./-]+", value) else quoted(value)
    return "null" if value is None else str(value).lower()


def _groups(
    config: SearchConfig, composer: HydraComposer, config_dir: Path | None
) -> Iterator[Variable]:
    for group in config.groups:
        options = tuple(
            (config.options or {}).get(group) or options_of(group, config_dir)
        )
        chosen = composer.current.choices
        if isinstance(default_options().get(group), list):
            names = [f"{group}.{option}" for option in options]
            yield from (
                Variable(name, (OFF, ON), ON if name in chosen else OFF)
                for name in names
            )
        else:
            yield Variable(group, options, chosen.get(group, NONE))


def _keys(config: SearchConfig) -> Iterator[Variable]:
    return (Variable(key, tuple(values)) for key, values in (config.keys or {}).items())
