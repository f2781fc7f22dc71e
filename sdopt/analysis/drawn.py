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
    with the call beside it of some process of the baseline, so that drift affects both. In blocks no process of the
    baseline is there: the calls of one variant then share the state of the machine at their moment, so their median has
    the error of a single call, whatever their number.
    """
    sides = reference, candidate
    process = _between(result, sides)
    apart = [side for side in sides if side.name != result.baseline]
    beside = [logs for side in apart if (logs := _beside_baseline(side)).size]
    if beside and len(beside) == len(apart):
        signs = [1 if side is reference else -1 for side in apart]
        mean = sum(sign * float(logs.mean()) for sign, logs in zip(signs, beside, strict=True))
        pairs = [(float(logs.var(ddof=1)) / logs.size, logs.size - 1) if logs.size > 1 else (0.0, 0) for logs in beside]
        found = LogRatio(mean, n=min(logs.size for logs in beside), unit="call")
        return _with_error(found, [(len(apart) * process[0], process[1]), *pairs])
    drawn = [[seconds for measurement in side.measurements for seconds in measurement.drawn_s] for side in sides]
    if not all(drawn):
        return None
    mean = float(np.log(np.median(drawn[0])) - np.log(np.median(drawn[1])))
    found = LogRatio(mean, n=min(map(len, drawn)), unit="call")
    return _with_error(found, [(2 * process[0], process[1]), *(_within(side) for side in sides)])


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


def _between(result: StudyResult, sides: Sequence[VariantResult]) -> _Part:
    """Returns the variance of the means of processes, pooled over two variants, the baseline and the A/A control."""
    names = {side.name for side in sides} | {result.baseline} | ({result.control.name} if result.control else set())
    means = [np.array([values.mean() for values in _logs(row)]) for row in result.variants if row.name in names]
    freedom = sum(max(0, values.size - 1) for values in means)
    squares = sum(float(np.square(values - values.mean()).sum()) for values in means if values.size)
    return (squares / freedom, freedom) if freedom else (0.0, 0)


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
