"""Defines the ratios of two variants that a gate can judge and a table can show, besides quality metrics."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from sdopt.record.comparisons import Comparison, Interval
from sdopt.record.records import StudyResult, VariantResult
from sdopt.schema import Gate, Protocol
from sdopt.statistics.ratios import (
    LogRatio,
    exceeds,
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
        interval: Interval | None = getattr(comparison.shapes[0], self.name)
        return interval


@dataclass(frozen=True)
class Ratio:
    """How a candidate compares with its reference in one measure.

    Attributes:
        measure: the measure.
        interval: the ratio, with its bounds.
        floor: the ratio, at least 1, by which two identical baselines differed; None if it is not known.
        smallest: the smallest factor, at least 1, that counts.
        key: the key of the configuration that sets `smallest`.
    """

    measure: Measure
    interval: Interval
    floor: float | None
    smallest: float = 1.0
    key: str = ""

    @property
    def within_floor(self) -> bool:
        """Whether the ratio is no larger than the difference between two identical baselines, or that is not known."""
        return self.floor is None or not exceeds(self.interval.estimate, self.floor)

    @property
    def gain(self) -> int:
        """1 if the whole interval shows a gain that counts and the floor does not explain, -1 for such a harm, else 0.

        Without an interval or a floor nothing is shown.
        """
        low, high = self.gain_bounds
        if low is None or high is None or self.within_floor:
            return 0
        if low > self.smallest:
            return 1
        return -1 if high < 1 / self.smallest else 0

    @property
    def gain_bounds(self) -> tuple[float | None, float | None]:
        """The bounds, turned so that more than 1 is better; None without an interval."""
        low = self.interval.low
        high = self.interval.high
        if low is None or high is None or self.measure.higher_is_better:
            return low, high
        return self.measure.gain(high), self.measure.gain(low)

    @property
    def excludes_gain(self) -> bool:
        """Whether the whole interval lies below a gain that counts; False without an interval or a floor."""
        _, high = self.gain_bounds
        return high is not None and self.floor is not None and high < self.smallest

    @property
    def text(self) -> str:
        """The ratio with its bounds."""
        return ratio_text(self.interval)


def ratio_text(interval: Interval) -> str:
    """Returns a ratio with its bounds."""
    return f"{interval.estimate:.2f}× {bounds_text(interval)}".rstrip()


def bounds_text(interval: Interval) -> str:
    """Returns the bounds of a ratio; "" without any."""
    has_bounds = interval.low is not None and interval.high is not None
    return f"[{interval.low:.2f}, {interval.high:.2f}]" if has_bounds else ""


def _floor(result: StudyResult, log_ratio: LogRatioOf, fully: bool) -> float | None:
    """Returns the ratio, at least 1, by which the two baselines differed; with `fully`, not of an interrupted study."""
    control = result.control
    if control is None or not (
        control.status.measured if fully else control.status.timed
    ):
        return None
    ratio = log_ratio(control, result.baseline_variant)
    return math.exp(abs(ratio.mean)) if ratio else None


SPEEDUP = Measure(
    "speedup",
    "latency",
    True,
    log_speedup,
    lambda _, comparison: comparison.shapes[0].floor,
)

MEMORY_RATIO = Measure(
    "memory_ratio",
    "memory",
    False,
    log_memory_ratio,
    lambda result, _: _floor(result, log_memory_ratio, fully=True),
)

MEASURES = {measure.name: measure for measure in (SPEEDUP, MEMORY_RATIO)}
"""The measures that an option may claim, by name, in the order of display."""

TAIL_RATIO = Measure(
    "tail_ratio",
    "",
    False,
    log_tail,
    lambda result, _: _floor(result, log_tail, fully=False),
)

RULED = MEASURES | {TAIL_RATIO.name: TAIL_RATIO}
"""All measures of a ratio, by name: a gate's rules may name them besides quality metrics."""

FIRST_IMAGE = "first_image_s"
"""The seconds from the start of loading to the end of the first call; a gate's rules may limit them."""


def is_of_images(metric: str) -> bool:
    """Returns whether a rule's or a ruling's metric is one of images: no ratio at some shape, and no time."""
    return metric.partition("/")[0] not in ("", FIRST_IMAGE, *RULED)


def smallest_change(
    measure: Measure, protocol: Protocol, reference: VariantResult
) -> tuple[float, str]:
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
    device = result.environment.device
    peak = peak_memory_gib(reference)
    if not peak:
        return 1.0
    share = gate.spare_memory
    if share is None:
        share = _SPARE if device.get("type") == "cuda" else 0.0
    total = float(device.get("memory_total_gib", 0.0))
    return 1 + share * total / peak


_SPARE = 0.02
"""The share of a GPU's memory that is to spare where nothing else is given."""


def with_shape(name: str, shape: str) -> str:
    """Returns the name of a figure at a shape, as `speedup/512x512b1`; without a shape the figure's own."""
    return f"{name}/{shape}" if shape else name


def measure_named(name: str) -> Measure:
    """Returns the measure of a name that may end in a shape's. Raises KeyError."""
    return RULED[name.partition("/")[0]]
