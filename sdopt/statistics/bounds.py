"""One-sided bounds of quality scores, with the prompt as the unit that is resampled."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from sdopt.record.scores import Score

MINIMUM_PROMPTS = 16
"""With fewer prompts, there are no bounds: a bootstrap of so few is overconfident."""

_RESAMPLES = 9_999


@dataclass(frozen=True)
class Bounds:
    """An estimate with two one-sided bounds, each at the same confidence, and the deviation of what was averaged.

    `low` and `high` are None where there were too few values for bounds. `deviation` is the standard deviation of one
    prompt's value (of one pseudo-value, for a jackknife), so that `deviation / sqrt(n)` is the standard error.
    """

    estimate: float
    low: float | None
    high: float | None
    deviation: float
    n: int
    unit: str = "prompt"

    def needed(self, limit: float, confidence: float, power: float = 0.8) -> int | None:
        """Returns how many values would show, with probability `power`, on which side of `limit` the estimate lies.

        Uses the normal approximation: n = ((z_confidence + z_power) · deviation / (estimate − limit))². Returns None if
        the estimate lies on the limit, or if the deviation is not known.
        """
        distance = abs(self.estimate - limit)
        if distance == 0 or not math.isfinite(self.deviation) or self.deviation == 0:
            return None
        z = float(special.ndtri(confidence) + special.ndtri(power))
        return max(self.n + 1, math.ceil((z * self.deviation / distance) ** 2))


def mean_bounds(values: np.ndarray, confidence: float) -> Bounds:
    """Returns bounds of a mean by the bias-corrected and accelerated bootstrap over prompts (Efron 1987).

    If all values are equal, the bounds equal the mean: the bootstrap would give NaN.
    """
    mean, n = float(values.mean()), int(values.size)
    if n < MINIMUM_PROMPTS:
        return Bounds(mean, None, None, float(values.std(ddof=1)) if n > 1 else math.nan, n)
    if np.ptp(values) == 0:
        return Bounds(mean, mean, mean, 0.0, n)
    from scipy import stats  # takes a second

    found = stats.bootstrap(
        (values,),
        np.mean,
        n_resamples=_RESAMPLES,
        confidence_level=2 * confidence - 1,
        method="BCa",
        rng=np.random.default_rng(0),
    ).confidence_interval
    deviation = float(values.std(ddof=1))
    if not (math.isfinite(found.low) and math.isfinite(found.high)):
        # If a single prompt differs from all others, the acceleration cannot be estimated.
        width = float(special.stdtrit(n - 1, confidence)) * deviation / math.sqrt(n)
        return Bounds(mean, mean - width, mean + width, deviation, n)
    return Bounds(mean, float(found.low), float(found.high), deviation, n)


def jackknife_bounds(estimate: float, leave_one_out: np.ndarray, confidence: float) -> Bounds:
    """Returns bounds of a metric of a whole set from its leave-one-out values: t on Tukey's pseudo-values (1958)."""
    n = int(leave_one_out.size)
    pseudo = pseudo_values(estimate, leave_one_out)
    deviation = float(pseudo.std(ddof=1)) if n > 1 else math.nan
    if n < MINIMUM_PROMPTS:
        return Bounds(estimate, None, None, deviation, n)
    width = float(special.stdtrit(n - 1, confidence)) * deviation / math.sqrt(n)
    return Bounds(estimate, estimate - width, estimate + width, deviation, n)


def prompts_to_exclude(share: float, confidence: float) -> int:
    """Returns how many prompts, none of which exceeds a limit, exclude that more than `share` of all prompts exceed it.

    A share p leaves n prompts untouched with probability (1 − p)ⁿ, so n = log(1 − confidence) / log(1 − p).
    """
    return math.ceil(math.log(1 - confidence) / math.log(1 - share))


def share_bounds(count: int, n: int, confidence: float | None) -> Bounds:
    """Returns bounds of a share of prompts (Clopper and Pearson 1934); without a confidence, the share itself."""
    share = count / n
    if confidence is None:
        return Bounds(share, share, share, math.nan, n)
    low = special.betaincinv(count, n - count + 1, 1 - confidence) if count > 0 else 0.0
    high = special.betaincinv(count + 1, n - count, confidence) if count < n else 1.0
    return Bounds(share, float(low), float(high), math.sqrt(share * (1 - share)), n)


def pseudo_values(estimate: float, leave_one_out: np.ndarray) -> np.ndarray:
    """Returns each prompt's contribution to a metric of a whole set (Tukey 1958), from the leave-one-out values."""
    n = leave_one_out.size
    return n * estimate - (n - 1) * leave_one_out


def subtract(mine: Score, other: Score, sign: float = 1.0) -> Score:
    """Returns the score of the difference mine − other, from per-prompt values or from leave-one-out values."""

    def each(left: Sequence[float | None], right: Sequence[float | None]) -> list[float | None]:
        return [None if a is None or b is None else sign * (a - b) for a, b in zip(left, right, strict=True)]

    estimate = None if mine.estimate is None or other.estimate is None else sign * (mine.estimate - other.estimate)
    return Score(estimate, each(mine.per_prompt, other.per_prompt), each(mine.leave_one_out, other.leave_one_out))
