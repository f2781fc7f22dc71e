"""Tests claims of a gain, one by one and together."""

import math
from collections.abc import Callable, Sequence
from typing import Literal

from scipy import optimize

from sdopt.results.records import Interval


def p_value(ratio: Callable[[float], Interval | None], alternative: Literal["greater", "less"]) -> float | None:
    """One-sided p value that a ratio is no more (or no less) than 1: half of what its interval leaves out at 1.

    Args:
        ratio: the interval at a two-sided confidence.
        alternative: on which side of 1 the ratio is claimed to lie.

    Returns:
        At least 1e-12, beyond which no interval is asked for; None where there is no interval.
    """

    def distance(confidence: float, claimed: bool) -> float:
        found = ratio(confidence)
        if found is None or found.low is None or found.high is None:
            return math.nan
        return math.log(found.low if (alternative == "greater") == claimed else found.high)

    sign = 1.0 if alternative == "greater" else -1.0
    narrow, wide = 1e-9, 1 - 2e-12
    # Where the estimate itself lies on the other side of 1, it is the far bound that reaches 1.
    claimed = sign * distance(narrow, True) > 0
    toward = sign if claimed else -sign
    ends = [toward * distance(confidence, claimed) for confidence in (narrow, wide)]
    if not all(map(math.isfinite, ends)):
        return None
    confidence = wide if ends[1] > 0 else optimize.brentq(lambda c: distance(c, claimed), narrow, wide)
    tail = (1 - float(confidence)) / 2
    return tail if claimed else 1 - tail


def holm(p_values: Sequence[float], level: float) -> list[bool]:
    """Which of several claims hold together at `level` (Holm 1979)."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    held = [False] * len(p_values)
    for rank, index in enumerate(order):
        if p_values[index] > level / (len(p_values) - rank):
            break
        held[index] = True
    return held
