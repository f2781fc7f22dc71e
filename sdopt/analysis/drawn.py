"""Computes the speed-up in calls that draw images, which shows whether a gain in timed calls can be believed."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sdopt.analysis.ratios import LogRatio
from sdopt.results.records import StudyResult, VariantResult

_Part = tuple[float, int]
"""A variance, with its degrees of freedom."""


def log_drawn_speedup(result: StudyResult, candidate: VariantResult, reference: VariantResult) -> LogRatio | None:
    """Returns the speed-up in calls of the quality pass that were made while no other process worked; None without any.

    They are of one process of each variant; how far processes differ is known from the timed calls. Each is compared
    with the baseline's call beside it, so that drift affects both. In blocks no process of the baseline is there: the
    calls of one variant then share the state of the machine at their moment, so their median has the error of a single
    call, whatever their number.
    """
    sides = reference, candidate
    between = [_between(side) for side in sides]
    apart = [side for side in sides if side.name != result.baseline]
    beside = [logs for side in apart if (logs := _beside_baseline(side)).size]
    if beside and len(beside) == len(apart):
        signs = [1 if side is reference else -1 for side in apart]
        mean = sum(sign * float(logs.mean()) for sign, logs in zip(signs, beside, strict=True))
        parts = [(float(logs.var(ddof=1)) / logs.size, logs.size - 1) if logs.size > 1 else (0.0, 0) for logs in beside]
        return _with_error(LogRatio(mean, n=min(logs.size for logs in beside), unit="call"), [*between, *parts])
    drawn = [[seconds for measurement in side.measurements for seconds in measurement.drawn_s] for side in sides]
    if not all(drawn):
        return None
    mean = float(np.log(np.median(drawn[0])) - np.log(np.median(drawn[1])))
    single = [_within(side) for side in sides]
    return _with_error(LogRatio(mean, n=min(map(len, drawn)), unit="call"), [*between, *single])


def _beside_baseline(variant: VariantResult) -> np.ndarray:
    """Returns, for each drawn call that has one, log(its time / that of the baseline's call beside it)."""
    pairs = [
        pair
        for measurement in variant.measurements
        if len(measurement.drawn_beside_s) == len(measurement.drawn_s)
        for pair in zip(measurement.drawn_s, measurement.drawn_beside_s, strict=True)
    ]
    return np.log([mine / other for mine, other in pairs])


def _logs(variant: VariantResult) -> list[np.ndarray]:
    """Returns the logarithms of the timed calls of each process."""
    return [np.log(measurement.deciding_s) for measurement in variant.measurements if measurement.deciding_s]


def _between(variant: VariantResult) -> _Part:
    """Returns the variance of the means of processes."""
    means = [values.mean() for values in _logs(variant)]
    return (float(np.var(means, ddof=1)), len(means) - 1) if len(means) > 1 else (0.0, 0)


def _within(variant: VariantResult) -> _Part:
    """Returns the variance that one call adds to the mean of its process."""
    logs = _logs(variant)
    freedom = sum(values.size - 1 for values in logs)
    if not freedom:
        return 0.0, 0
    within = sum(float(np.square(values - values.mean()).sum()) for values in logs) / freedom
    return within * freedom / (freedom + len(logs)), freedom


def _with_error(found: LogRatio, parts: Sequence[_Part]) -> LogRatio:
    """Adds the error whose square is the sum of some variances (Satterthwaite 1946); none if one is unknown."""
    if not all(freedom for _, freedom in parts):
        return found
    variance, squares = sum(part for part, _ in parts), sum(part**2 / freedom for part, freedom in parts)
    return replace(found, error=math.sqrt(variance), freedom=variance**2 / squares if squares else 1.0)
