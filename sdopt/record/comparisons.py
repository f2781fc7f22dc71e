"""Records how two variants compare: ratios with intervals, break-even, effects."""

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from sdopt.record.scores import Score

Positive = Annotated[float, Field(gt=0)]
"""A ratio or a time."""


@dataclass
class Interval:
    """An estimate with a two-sided confidence interval; without bounds where there were too few samples for one."""

    estimate: Positive
    low: Positive | None = None
    high: Positive | None = None
    confidence: float | None = None
    n: int = 0
    unit: str = "round"
    """What was replicated: `round` (within one process) or `process`."""


@dataclass
class BreakEven:
    """Start-up cost of a candidate, and the number of images after which its faster calls have repaid it.

    `images` is None if its calls are no faster than the reference's, so that the cost is never repaid; also if the two
    differ by no more than the A/A floor, so that nothing is known. The bounds come from the speed-up's; without
    `confidence` there are none. `images_high` is None if the interval includes no gain.
    """

    first_image_s: float
    """Loading and the first call, with what is compiled, quantized or captured in them."""
    extra_s: float
    """By how much the start-up is longer than the reference's: loading and the first call at each of `shapes`."""
    call_s: float
    """Time of one call of the reference."""
    images: float | None
    images_low: float | None = None
    images_high: float | None = None
    confidence: float | None = None
    shapes: int = 1
    """Number of shapes whose first calls count in `extra_s`; `images` are those of the main shape."""
    within_floor: bool = False
    """Whether the calls of the two differ by no more than the A/A floor."""

    @property
    def is_slower(self) -> bool:
        """Whether the start-up takes longer by more than one call of the reference."""
        return self.extra_s > self.call_s

    @property
    def is_open(self) -> bool:
        """Whether the calls were not faster, and no interval shows that they are not."""
        return self.images is None and (
            self.confidence is None or self.images_low is not None
        )


@dataclass
class ShapeRatios:
    """How two variants compare at one shape.

    `speedup` is time of the reference over time of the candidate; `memory_ratio` is memory of the candidate over that
    of the reference, and `tail_ratio` the largest call of a process over that of the reference's. `floor` is the ratio
    by which the speed of two identical workers differed: a claim must exceed it.
    """

    speedup: Interval | None = None
    memory_ratio: Interval | None = None
    tail_ratio: Interval | None = None
    floor: Positive | None = None


@dataclass
class Comparison:
    """A comparison of the study: a candidate, its reference, and the option to which the difference is credited."""

    candidate: str
    reference: str
    credit: str
    shapes: list[ShapeRatios] = field(default_factory=lambda: [ShapeRatios()])
    """Its ratios at each shape, in the order of `RecordedConfig.shapes`."""
    break_even: BreakEven | None = None
    note: str = ""
    quality: dict[str, Score] = field(default_factory=dict)
    """Distances between the paired images of both sides."""

    def at(self, shape_index: int) -> "Comparison":
        """Returns the ratios at one shape as a comparison: scores and break-even belong to the first alone."""
        if not shape_index:
            return self
        return Comparison(
            self.candidate,
            self.reference,
            self.credit,
            [self.shapes[shape_index]],
            note=self.note,
        )


@dataclass
class Effect:
    """Of a factorial study: one option's main effect, or the interaction of two, as ratios.

    `aliased_with` names the effects that the measured variants cannot tell it apart from; it has no figure then.
    """

    options: tuple[str, ...]
    speedup: Interval | None = None
    memory_ratio: Interval | None = None
    aliased_with: list[str] = field(default_factory=list)
