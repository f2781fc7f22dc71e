"""Decides from a few warm calls whether a variant is clearly slower than the baseline, so that timing it can end.

The claim is one-sided and needs no interval: the faster of the last two calls is held against the slowest call of the
baseline before, between and after them, and what processes may differ by is taken off. `tests/statistics/
test_giving_up.py` simulates how often that is wrong.
"""

import math
from collections.abc import Sequence

from sdopt.record.records import VariantResult

BETWEEN_PROCESSES = 1.2
"""Factor that is taken off the bound: two processes of one variant, of which each makes all its calls, differ by less.
Standard deviations of up to 5 % were measured."""

STEADY = 0.9
"""A call that takes less than this share of the one before it shows that the variant still becomes faster."""

_AROUND = 3
"""Calls of the baseline around the last two of the variant: before, between and after them."""

MOST_CALLS = 5
"""Calls after which a variant that still becomes faster is timed like all others."""


def times_slower(trial_s: Sequence[float], beside_s: Sequence[float]) -> float | None:
    """Returns how many times as long as the baseline's a variant's calls take at least; None if that is not shown.

    Args:
        trial_s: warm calls of the variant, in seconds, in their order.
        beside_s: calls of the baseline around them, in seconds.
    """
    if len(trial_s) < 2 or len(beside_s) < 2:
        return None
    *_, before, last = trial_s
    if last < STEADY * before:
        return None
    slowest = max(beside_s[-_AROUND:])
    return min(before, last) / slowest / BETWEEN_PROCESSES


def needs_call(
    trial_s: Sequence[float],
    beside_s: Sequence[float],
    limit: float,
) -> bool:
    """Returns whether another call of the variant may show that it is more than `limit` times slower."""
    if not trial_s:
        return True
    if len(trial_s) >= MOST_CALLS:
        return False
    fastest = min(beside_s[-_AROUND:])
    if trial_s[-1] <= limit * BETWEEN_PROCESSES * fastest:
        return False
    bound = times_slower(trial_s, beside_s)
    return bound is None or bound <= limit


def at_least_slower(variant: VariantResult) -> float | None:
    """Returns how many times as long as the baseline's the calls of a variant take at least, at every shape.

    None unless its timing ended early for that.
    """
    if not variant.given_up:
        return None
    tried = next(m for m in variant.measurements if m.main.trial_s)
    bounds = []
    for samples in tried.shapes:
        bound = times_slower(samples.trial_s, samples.trial_beside_s)
        if bound is not None:
            bounds.append(bound)
    return min(bounds, default=None)


def bound_text(times: float) -> str:
    """Returns a bound rounded down, as in `7.4×`."""
    rounded = math.floor(10 * times) / 10
    return f"{rounded:.1f}×"
