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
    the error of a single call, whatever their number. Otherwise such calls are compared only within one session.
    """
    sides = reference, candidate
    process = _between(result, sides)
    apart = [side for side in sides if side.name != result.baseline]
    beside = [logs for side in apart if (logs := _beside_baseline(side)).size]
    if beside and len(beside) == len(apart):
        signs = [1 if side is reference else -1 for side in apart]
        mean = sum(sign * float(logs.mean()) for sign, logs in zip(signs, beside, strict=True))
        # What the partners, drawn at random, have in common is no part of the deviation of the pairs.
        shared = 1 + 1 / max(1, _partners(result))
        pairs = [(float(logs.var(ddof=1)) / logs.size, logs.size - 1) if logs.size > 1 else (0.0, 0) for logs in beside]
        found = LogRatio(mean, n=min(logs.size for logs in beside), unit="call")
        return _with_error(found, [(len(apart) * shared * process[0], process[1]), *pairs])
    sessions = [{measurement.session for measurement in side.measurements if measurement.drawn_s} for side in sides]
    if result.schedule.kind != "blocks" and not sessions[0] & sessions[1]:
        return None
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


def _partners(result: StudyResult) -> int:
    """Returns how many processes of the baseline and the control there were beside others that drew, at least.

    The first process of each draws before the others do, and is then no partner.
    """
    names = {result.baseline} | ({result.control.name} if result.control else set())
    rows = [row for row in result.variants if row.name in names]
    return sum(
        1 for row in rows for measurement in row.measurements if measurement.replicate and measurement.deciding_s
    )


def _logs(variant: VariantResult) -> list[np.ndarray]:
    """Returns the logarithms of the timed calls of each process."""
    return [logs for session in _by_session(variant).values() for logs in session]


def _by_session(variant: VariantResult) -> dict[int, list[np.ndarray]]:
    """Returns the logarithms of the timed calls of each process, by session: between sessions the machine changes."""
    found: dict[int, list[np.ndarray]] = {}
    for measurement in variant.measurements:
        if measurement.deciding_s:
            found.setdefault(measurement.session, []).append(np.log(measurement.deciding_s))
    return found


def _between(result: StudyResult, sides: Sequence[VariantResult]) -> _Part:
    """Returns the variance of the means of processes, pooled over two variants, the baseline and the A/A control."""
    names = {side.name for side in sides} | {result.baseline} | ({result.control.name} if result.control else set())
    sessions = [logs for row in result.variants if row.name in names for logs in _by_session(row).values()]
    means = [np.array([values.mean() for values in session]) for session in sessions]
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
