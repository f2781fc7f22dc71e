"""The space of a search: options of some groups, values of some keys, and which of their combinations can run."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from sdopt.config.composer import HydraComposer
from sdopt.config.groups import default_options, override_of
from sdopt.config.paths import options_of
from sdopt.config.sections import SECTION_NAMES
from sdopt.contract import Contract
from sdopt.errors import UsageError
from sdopt.hardware.device import Device
from sdopt.record.choices import NONE, quoted
from sdopt.search.config import SearchConfig
from sdopt.search.expectation import speedup_of
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
        expected: the speed-ups to expect of single options, by choice: what promises most comes first.
    """

    variables: tuple[Variable, ...]
    left_out: tuple[str, ...]
    composer: HydraComposer
    device: Device
    expected: Mapping[str, float] = field(default_factory=dict, compare=False)
    _composed: dict[tuple[str, ...], Variant | UsageError] = field(
        default_factory=dict, compare=False
    )

    @classmethod
    def of(
        cls,
        config: SearchConfig,
        composer: HydraComposer,
        device: Device,
        config_dir: Path | None = None,
    ) -> "Space":
        """Returns the space that a configuration describes.

        Raises:
            UsageError: the baseline cannot run here, or none of the options can.
        """
        groups = list(_groups(config, composer, config_dir))
        keys = list(_keys(config))
        whole = cls((*groups, *keys), (), composer, device)
        of_baseline = whole.candidate({})
        if isinstance(of_baseline, list):  # else each option repeated them
            raise UsageError(of_baseline)
        baseline = {variable.name: variable.plain for variable in groups}
        fastest = config.objectives == ["latency"]
        variables = []
        reasons: list[str] = []
        for variable in groups:
            fit = []
            for value in variable.values:
                combination = whole.candidate(baseline | {variable.name: value})
                if fastest:
                    combination = (
                        whole.always_slow(baseline, variable, value) or combination
                    )
                if isinstance(combination, list):
                    reasons.append("; ".join(combination))
                else:
                    fit.append(value)
            if fit not in ([], [variable.plain]):
                variables.append(replace(variable, values=tuple(fit)))
        if not variables and config.groups:
            raise UsageError(
                [
                    "search.groups: no option of them can run here",
                    *dict.fromkeys(reasons),
                ]
            )
        left_out = tuple(dict.fromkeys(reasons))
        return replace(whole, variables=(*variables, *keys), left_out=left_out)

    @property
    def options(self) -> list[Variable]:
        """The variables that are options, and no keys."""
        return [variable for variable in self.variables if not variable.is_key]

    @property
    def most(self) -> int:
        """How many combinations there are at most: some cannot run, and keys apply to some options alone."""
        return math.prod(len(variable.values) for variable in self.variables) - 1

    def applies(self, variable: Variable, point: Point) -> bool:
        """Returns whether a variable applies at a point: an option always does, a key only if an option has it."""
        if not variable.is_key:
            return True
        section, _, _ = variable.name.partition(".")
        if section in SECTION_NAMES:
            return True
        options = {}
        for name, value in point.items():
            if not self._named(name).is_key:
                options[name] = value
        composed = self._variant(self.overrides(options))
        if isinstance(composed, UsageError):
            return False
        axis, _, key = variable.name.rpartition(".")
        option = composed.optimizations.get(axis)
        return option is not None and hasattr(option, key)

    def candidate(self, point: Point) -> Combination | list[str] | None:
        """Returns the candidate of a point, the reasons why it cannot run, or None if it is the baseline itself."""
        overrides = self.overrides(point)
        composed = self._variant(overrides)
        baseline = self._variant([])
        if isinstance(composed, UsageError):
            return composed.problems
        if reasons := composed.conflicts(self.device):
            return reasons
        assert isinstance(baseline, Variant)
        if composed.config == baseline.config:
            return None
        words = ", ".join(override.lstrip("+") for override in overrides)
        name = re.sub("['\"]", "", words)
        return Combination(name, tuple(overrides))

    def slow_here(self, found: Combination | list[str] | None) -> list[str]:
        """Returns why a candidate is expected to be slower than the baseline on this device; [] if it is not."""
        if not isinstance(found, Combination):
            return []
        composed = self._variant(found.overrides)
        if isinstance(composed, UsageError):
            return []
        return composed.slow_here(self.device)

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
        combinations = map(self.candidate, points)
        return [one for one in combinations if isinstance(one, Combination)]

    def settings(self, point: Point) -> Settings:
        """Returns the settings of a point that differ from the baseline's."""
        changed = set()
        for name, value in point.items():
            variable = self._named(name)
            if variable.is_key or value != variable.plain:
                changed.add((name, value))
        return frozenset(changed)

    @staticmethod
    def inherits(whole: Settings, part: Settings) -> bool:
        """Returns whether a combination spoils its images because a part of it does.

        Errors of approximations add up. But a scheduler, a LoRA or a key such as `workload.steps` draws another image
        by design, and may repair the rest: few steps alone spoil the images, few steps with a LoRA for them do not.
        """
        if not part < whole:
            return False
        more = {name.partition(".")[0] for name, _ in whole - part}
        return not more & _REDRAWING

    def contract(self, candidate: Combination) -> Contract:
        """Returns the contract that a candidate promises for its images."""
        composed = self._variant(candidate.overrides)
        return composed.contract if isinstance(composed, Variant) else Contract.LOSSY

    def variants(self, candidates: Sequence[Combination]) -> list[Variant]:
        """Returns the baseline and some candidates, composed."""
        variants = []
        for candidate in [Combination(BASELINE, ()), *candidates]:
            variant = self._variant(candidate.overrides)
            if isinstance(variant, Variant):
                variants.append(replace(variant, name=candidate.name))
        return variants

    def points(self) -> Iterator[dict[str, Any]]:
        """Yields every point, with the keys that apply to it."""
        keys = [variable for variable in self.variables if variable.is_key]
        for chosen in _points_of(self.options):
            applying = [key for key in keys if self.applies(key, chosen)]
            for settings in _points_of(applying):
                yield chosen | settings

    def alone(self) -> Iterator[dict[str, Any]]:
        """Yields the points that differ from the baseline in one option.

        Those that promise the largest speed-up come first, those that compile last: compiling may take minutes.
        """
        plain = {}
        for variable in self.options:
            plain[variable.name] = variable.plain
            if variable.plain not in variable.values:
                plain[variable.name] = variable.values[0]
        points = []
        for variable in self.options:
            for value in variable.values:
                if value != plain[variable.name]:
                    points.append(plain | {variable.name: value})
        points.sort(key=lambda point: -self.expected_speedup(point))
        yield from sorted(points, key=self.compiles)

    def expected_speedup(self, point: Point) -> float:
        """Returns the speed-up to expect of a point by earlier measurements; 1 where nothing is known of it."""
        composed = self._variant(self.overrides(point))
        baseline = self._variant([])
        if isinstance(composed, UsageError) or isinstance(baseline, UsageError):
            return 1.0
        return speedup_of(composed.choices, baseline.choices, self.expected)

    def compiles(self, point: Point) -> bool:
        """Returns whether a point compiles, and not as the baseline does: that may take minutes."""
        compilers = self._compilers(point)
        of_baseline = self._compilers({})
        return compilers not in ({}, of_baseline)

    def _compilers(self, point: Point) -> dict[str, str | None]:
        """Returns the compilers of a point, by axis; {} if it runs eagerly, or cannot be composed."""
        composed = self._variant(self.overrides(point))
        if isinstance(composed, UsageError):
            return {}
        compilers = {}
        for axis, option in composed.optimizations.items():
            if option.compiles:
                compilers[axis] = composed.choices.get(axis)
        return compilers

    def overrides(self, point: Point) -> list[str]:
        """Returns the overrides that turn the baseline into a point, as on a command line."""
        combined: dict[str, list[str]] = {}
        varied = {variable.name for variable in self.variables}
        chosen = []
        keys = []
        for name, value in point.items():
            variable = self._named(name)
            group, _, option = name.partition(".")
            if variable.is_key:
                keys.append(f"{name}={_written(value)}")
            elif variable.combines:
                # The options of the group that the baseline has and the search does not vary stay.
                overrides_of_keys = [
                    axis.partition(".")[2]
                    for axis in self._chosen_in(group)
                    if axis not in varied
                ]
                options = combined.setdefault(group, overrides_of_keys)
                if value == ON:
                    options.append(option)
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


def _points_of(variables: Sequence[Variable]) -> Iterator[dict[str, Any]]:
    """Yields each choice of a value for each variable."""
    names = [variable.name for variable in variables]
    for values in product(*(variable.values for variable in variables)):
        yield dict(zip(names, values, strict=True))


def _written(value: Any) -> str:
    """Returns a value in Hydra's grammar."""
    if isinstance(value, str):
        return value if re.fullmatch(r"[\w./-]+", value) else quoted(value)
    return "null" if value is None else str(value).lower()


def _groups(
    config: SearchConfig,
    composer: HydraComposer,
    config_dir: Path | None,
) -> Iterator[Variable]:
    for group in config.groups:
        named = config.options or {}
        options = named.get(group) or options_of(group, config_dir)
        chosen = composer.current.choices
        if isinstance(default_options().get(group), list):
            for name in (f"{group}.{option}" for option in options):
                yield Variable(name, (OFF, ON), ON if name in chosen else OFF)
        else:
            yield Variable(group, tuple(options), chosen.get(group, NONE))


def _keys(config: SearchConfig) -> Iterator[Variable]:
    keys = config.keys or {}
    return (Variable(key, tuple(values)) for key, values in keys.items())
