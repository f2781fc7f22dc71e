"""What a gate can judge and a table can show beside quality: ratios of two variants, each a row here."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from sdopt.analysis.timing import memory_floor, memory_ratio, speedup
from sdopt.results.records import Comparison, Interval, StudyResult, VariantResult


@dataclass(frozen=True)
class Measure:
    """A ratio of a candidate and its reference.

    Attributes:
        name: what rules, trackers and tables call it, and the field of a `Comparison` that holds it.
        claim: what an option claims that is to improve it (`Optimization.claims`).
        higher_is_better: the direction.
        ratio: computes it with its interval at a two-sided confidence; None where it was not measured.
        floor: the ratio, at least 1, by which two identical processes differed in a study; None where it is not known.
    """

    name: str
    claim: str
    higher_is_better: bool
    ratio: Callable[[VariantResult, VariantResult, float], Interval | None]
    floor: Callable[[StudyResult, Comparison], float | None]

    @property
    def alternative(self) -> Literal["greater", "less"]:
        """On which side of 1 a gain lies, as tests of significance call it."""
        return "greater" if self.higher_is_better else "less"

    def gain(self, value: float) -> float:
        """Returns a ratio turned so that more than 1 is better."""
        return value if self.higher_is_better else 1 / value

    def recorded(self, comparison: Comparison) -> Interval | None:
        """Returns the interval that a study recorded, at the protocol's confidence."""
        found: Interval | None = getattr(comparison, self.name)
        return found


SPEEDUP = Measure("speedup", "latency", True, speedup, lambda _, comparison: comparison.floor)

MEMORY_RATIO = Measure("memory_ratio", "memory", False, memory_ratio, lambda result, _: memory_floor(result))

MEASURES = {measure.name: measure for measure in (SPEEDUP, MEMORY_RATIO)}
"""By name, in the order in which they are shown."""
