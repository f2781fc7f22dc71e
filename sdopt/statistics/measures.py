"""Defines the ratios of two variants that a gate can judge and a table can show, besides quality metrics."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from sdopt.record.comparisons import Comparison, Interval
from sdopt.record.records import StudyResult, VariantResult
from sdopt.schema import Gate, Protocol
from sdopt.statistics.ratios import (
    LogRatio,
    log_memory_ratio,
    log_speedup,
    log_tail,
    peak_memory_gib,
)

LogRatioOf = Callable[[VariantResult, VariantResult], LogRatio | None]


@dataclass(frozen=True)
class Measure:
    """A ratio of a candidate and its reference.

    Attributes:
        name: its name in rules, trackers and tables, and the field of `Comparison`.
        claim: the claim (`Optimization.claims`) of an option that should improve it; "" if options cannot claim it.
        higher_is_better: whether a ratio above 1 is a gain.
        log_ratio: computes the ratio with its error; None if it was not measured.
        floor: returns the ratio, at least 1, by which two identical baselines differed; None if it is not known.
    """

    name: str
    claim: str
    higher_is_better: bool
    log_ratio: LogRatioOf
    floor: Callable[[StudyResult, Comparison], float | None]

    def gain(self, value: float) -> float:
        """Returns a ratio turned so that more than 1 is better."""
        return value if self.higher_is_better else 1 / value

    def recorded(self, comparison: Comparison) -> Interval | None:
        """Returns the interval that a study recorded, at the protocol's confidence."""
        found: Interval | None = getattr(comparison.shapes[0], self.name)
        return found


def _floor(result: StudyResult, log_ratio: LogRatioOf, fully: bool) -> float | None:
    """Returns the ratio, at least 1, by which the two baselines differed; with `fully`, not of an interrupted study."""
    control = result.control
    if control is None or not (control.status.measured if fully else control.status.timed):
        return None
    found = log_ratio(control, result.variant(result.baseline))
    return math.exp(abs(found.mean)) if found else None


SPEEDUP = Measure("speedup", "latency", True, log_speedup, lambda _, comparison: comparison.shapes[0].floor)

MEMORY_RATIO = Measure(
    "memory_ratio", "memory", False, log_memory_ratio, lambda result, _: _floor(result, log_memory_ratio, fully=True)
)

MEASURES = {measure.name: measure for measure in (SPEEDUP, MEMORY_RATIO)}
"""The measures that an option may claim, by name, in the order of display."""

TAIL_RATIO = Measure("tail_ratio", "", False, log_tail, lambda result, _: _floor(result, log_tail, fully=False))

RULED = MEASURES | {TAIL_RATIO.name: TAIL_RATIO}
"""All measures of a ratio, by name: a gate's rules may name them besides quality metrics."""

FIRST_IMAGE = "first_image_s"
"""The seconds from the start of loading to the end of the first call; a gate's rules may limit them."""


def smallest_change(measure: Measure, protocol: Protocol, reference: VariantResult) -> tuple[float, str]:
    """Returns the smallest factor, at least 1, by which a measure must differ to count, and the key that sets it."""
    if measure is not MEMORY_RATIO:
        return 1 + protocol.smallest_speedup, "protocol.smallest_speedup"
    peak = peak_memory_gib(reference)
    share = protocol.smallest_memory_mib / (1024 * peak) if peak else 0.0
    if share > protocol.smallest_memory:
        return 1 + share, "protocol.smallest_memory_mib"
    return 1 + protocol.smallest_memory, "protocol.smallest_memory"


def spared_growth(gate: Gate, reference: VariantResult, result: StudyResult) -> float:
    """Returns the largest factor by which memory may grow without harm, because the device has that much to spare."""
    device, peak, share = result.environment.device, peak_memory_gib(reference), gate.spare_memory
    if share is None:
        share = _SPARE if device.get("type") == "cuda" else 0.0
    return 1 + share * float(device.get("memory_total_gib", 0.0)) / peak if peak else 1.0


_SPARE = 0.02
"""The share of a GPU's memory that is to spare where nothing else is given."""


def with_shape(name: str, shape: str) -> str:
    """Returns the name of a figure at a shape, as `speedup/512x512b1`; without a shape the figure's own."""
    return f"{name}/{shape}" if shape else name


def measure_named(name: str) -> Measure:
    """Returns the measure of a name that may end in a shape's. Raises KeyError."""
    return RULED[name.partition("/")[0]]
