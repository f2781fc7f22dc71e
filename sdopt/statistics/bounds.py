"""One-sided bounds of quality scores, with the prompt as the unit that is resampled."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy

from sdopt.record.scores import Score

MINIMUM_PROMPTS = 16
"""With fewer prompts, there are no bounds: a bootstrap of so few is overconfident."""

TOO_MANY_PROMPTS = 10_000
"""Above this number, more prompts are not suggested; MLPerf judges a whole model by 5,000 images."""

_RESAMPLES = 9_999

_POWER = 0.8


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

    def needed(self, limit: float, confidence: float) -> int | None:
        """Returns how many values would show, with a probability of 80 %, on which side of `limit` the estimate lies.

        Uses the normal approximation: n = ((z_confidence + z_power) · deviation / (estimate − limit))². Never fewer
        than have bounds at all. Returns None if the estimate lies on the limit, or if the deviation is not known.
        """
        distance = abs(self.estimate - limit)
        has_spread = math.isfinite(self.deviation) and self.deviation != 0
        if not has_spread or distance == 0:
            return None
        z = float(scipy.special.ndtri(confidence) + scipy.special.ndtri(_POWER))
        n = math.ceil((z * self.deviation / distance) ** 2)
        return max(self.n + 1, n, MINIMUM_PROMPTS)


def mean_bounds(values: np.ndarray, confidence: float) -> Bounds:
    """Returns bounds of a mean by the bias-corrected and accelerated bootstrap over prompts (Efron 1987).

    If all values are equal, the bounds equal the mean: the bootstrap would give NaN.
    """
    mean = float(values.mean())
    n = int(values.size)
    deviation = _deviation(values)
    if n < MINIMUM_PROMPTS:
        return Bounds(mean, None, None, deviation, n)
    if np.ptp(values) == 0:
        return Bounds(mean, mean, mean, 0.0, n)
    low, high = _bootstrapped(values, confidence)
    if not math.isfinite(low) or not math.isfinite(high):
        # If a single prompt differs from all others, the acceleration cannot be estimated.
        return _student(mean, deviation, n, confidence)
    return Bounds(mean, low, high, deviation, n)


def _bootstrapped(values: np.ndarray, confidence: float) -> tuple[float, float]:
    from scipy import stats  # takes a second

    bootstrap = stats.bootstrap(
        (values,),
        np.mean,
        n_resamples=_RESAMPLES,
        confidence_level=2 * confidence - 1,
        method="BCa",
        rng=np.random.default_rng(0),
    )
    interval = bootstrap.confidence_interval
    return float(interval.low), float(interval.high)


def _student(mean: float, deviation: float, n: int, confidence: float) -> Bounds:
    quantile = float(scipy.special.stdtrit(n - 1, confidence))
    width = quantile * deviation / math.sqrt(n)
    return Bounds(
        mean,
        mean - width,
        mean + width,
        deviation,
        n,
    )


def _deviation(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if values.size > 1 else math.nan


def jackknife_bounds(
    estimate: float,
    leave_one_out: np.ndarray,
    confidence: float,
) -> Bounds:
    """Returns bounds of a metric of a whole set from its leave-one-out values: t on Tukey's pseudo-values (1958)."""
    n = int(leave_one_out.size)
    deviation = _deviation(pseudo_values(estimate, leave_one_out))
    if n < MINIMUM_PROMPTS:
        return Bounds(estimate, None, None, deviation, n)
    return _student(estimate, deviation, n, confidence)


def pseudo_values(estimate: float, leave_one_out: np.ndarray) -> np.ndarray:
    """Returns each prompt's contribution to a metric of a whole set (Tukey 1958), from the leave-one-out values."""
    n = leave_one_out.size
    return n * estimate - (n - 1) * leave_one_out


def prompts_to_exclude(share: float, confidence: float) -> int:
    """Returns how many prompts, none of which exceeds a limit, exclude that more than `share` of all prompts exceed it.

    A share p leaves n prompts untouched with probability (1 − p)ⁿ, so n = log(1 − confidence) / log(1 − p).
    """
    n = math.log(1 - confidence) / math.log(1 - share)
    return math.ceil(n)


def share_bounds(count: int, n: int, confidence: float | None) -> Bounds:
    """Returns bounds of a share of prompts (Clopper and Pearson 1934); without a confidence, the share itself."""
    share = count / n
    if confidence is None:
        return Bounds(share, share, share, math.nan, n)
    low = 0.0
    high = 1.0
    if count > 0:
        low = float(
            scipy.special.betaincinv(
                count,
                n - count + 1,
                1 - confidence,
            )
        )
    if count < n:
        high = float(
            scipy.special.betaincinv(
                count + 1,
                n - count,
                confidence,
            )
        )
    deviation = math.sqrt(share * (1 - share))
    return Bounds(share, low, high, deviation, n)


def subtract(score: Score, reference: Score, sign: float = 1.0) -> Score:
    """Returns the score of the difference score − reference, from per-prompt or from leave-one-out values."""
    return Score(
        _difference(score.estimate, reference.estimate, sign),
        differences(score.per_prompt, reference.per_prompt, sign),
        differences(score.leave_one_out, reference.leave_one_out, sign),
    )


def differences(
    values: Sequence[float | None],
    references: Sequence[float | None],
    sign: float,
) -> list[float | None]:
    """Returns each value less its reference, times a sign; None where one of them is."""
    pairs = zip(values, references, strict=True)
    return [_difference(value, reference, sign) for value, reference in pairs]


def _difference(
    value: float | None,
    reference: float | None,
    sign: float,
) -> float | None:
    if value is None or reference is None:
        return None
    return sign * (value - reference)
