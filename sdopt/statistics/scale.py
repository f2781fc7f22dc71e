"""The one scale of verdicts: on speed and on images, beside a gate's `Verdict`; every report has these words."""

from collections.abc import Iterable
from enum import StrEnum

from sdopt.statistics.measures import Ratio


class Speed(StrEnum):
    """What the measurements show of a speed-up."""

    FASTER = "faster"
    CLOSE = "too close to call"
    """Its interval includes no change, or changes too small to count, or two baselines differed by as much."""
    FEW = "not enough runs"
    """It has no interval: too few processes."""
    SLOWER = "slower"


class Images(StrEnum):
    """What is known of the images, the worst first; only a gate judges whether a difference matters."""

    WORSE = "worse"
    NOT_JUDGED = "not judged"
    WITHIN = "within tolerance"
    EQUAL = "equal"


def worst_of(images: Iterable[Images]) -> Images | None:
    """Returns what several comparisons, or several steps, show together; None without any."""
    return min(images, key=list(Images).index, default=None)


def speed_of(ratio: Ratio, claimed: bool = False) -> Speed:
    """Returns what one speed-up shows; `claimed` is whether a gate has found the claim of this gain to hold."""
    if claimed:
        return Speed.FASTER
    if ratio.interval.low is None or ratio.floor is None:
        return Speed.FEW
    return {1: Speed.FASTER, 0: Speed.CLOSE, -1: Speed.SLOWER}[ratio.gain]


def speed_over(speeds: Iterable[Speed]) -> Speed | None:
    """Returns what the speed-ups at all shapes of a study show together; None without any.

    What is slower at one shape is slower; what is faster has to be so at one shape, and slower at none.
    """
    distinct = set(speeds)
    order = (Speed.SLOWER, Speed.FEW, Speed.FASTER, Speed.CLOSE)
    return next((speed for speed in order if speed in distinct), None)
