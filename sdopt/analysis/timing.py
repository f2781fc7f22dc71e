"""Turns raw times and memory peaks into ratios with intervals."""

import math
from collections.abc import Callable, Collection, Sequence

import numpy as np
from scipy import stats

from sdopt.results.records import Comparison, Interval, Measurement, StudyResult, VariantResult
from sdopt.schema import WORK

MINIMUM_PROCESSES = 3
"""Below this many processes no interval of a time is given: with one degree of freedom it would say nothing."""

MINIMUM_ROUNDS = 6
"""Below this many rounds no interval is given: a t interval on so few, skewed timings covers less than it says."""

_WIDEST = 700.0
"""Largest logarithm of a bound: the exponential of a little more is no float."""

_ESTIMATORS: dict[str, Callable[[Sequence[float]], float]] = {
    "median": lambda samples: float(np.median(samples)),
    "mean": lambda samples: float(np.mean(samples)),
    "last": lambda samples: float(samples[-1]),
    "min": lambda samples: float(np.min(samples)),
}


def latency(variant: VariantResult, estimator: str, confidence: float) -> Interval | None:
    """Latency of one call in seconds; of several processes the geometric mean of what the estimator says of each.

    The interval of a median over one process is the distribution-free one (scipy's `quantile_test`); over three or more
    processes it is a t interval of the logarithms of their estimates, so that no bound is negative. Two processes have
    none, nor has a mean, minimum or last sample of one process.
    """
    processes = list(variant.samples.values())
    if not processes:
        return None
    estimates = [_ESTIMATORS[estimator](samples) for samples in processes]
    if len(processes) > 1:
        interval = ratio(np.log(estimates), confidence, "process")
        if len(processes) >= MINIMUM_PROCESSES:
            return interval
        return Interval(interval.estimate, n=interval.n, unit=interval.unit)
    interval = Interval(estimates[0], n=len(processes[0]))
    if estimator == "median" and len(processes[0]) >= MINIMUM_ROUNDS:
        bounds = stats.quantile_test(processes[0], p=0.5).confidence_interval(confidence)
        if math.isfinite(bounds.low) and math.isfinite(bounds.high):
            interval.low, interval.high, interval.confidence = float(bounds.low), float(bounds.high), confidence
    return interval


def speedup(candidate: VariantResult, reference: VariantResult, confidence: float) -> Interval | None:
    """Time of the reference over time of the candidate: a geometric mean, with a t interval on the log scale.

    With one process each, ratios are paired by round and the rounds are the replicates; what two processes of the same
    variant differ by is then not in the interval, but in the A/A floor beside it. With more, the mean of each process
    is one replicate (two independent samples, equal variances), because rounds of one process are not independent.
    """
    pairs = paired(candidate, reference)
    logs = [np.concatenate([_paired_logs(mine, other) for mine, other in found]) for found in pairs.values()]
    if not logs:
        return None
    if len(logs) == 1:
        return ratio(logs[0], confidence, "round")
    flat = [pair for found in pairs.values() for pair in found]
    if len({mine.session for mine, _ in flat}) > 1:
        # Between sessions the machine may have changed, for both sides alike: what is left is one ratio per replicate.
        return ratio(np.array([values.mean() for values in logs]), confidence, "process")
    in_blocks = any(m.latency_before_s or r.latency_before_s for m, r in flat)
    mine = np.array([log_times(m, in_blocks).mean() for m, _ in flat])
    other = np.array([log_times(r, in_blocks).mean() for _, r in flat])
    return _two_samples(other, mine, confidence)


def paired(
    candidate: VariantResult, reference: VariantResult, sittings: Collection[int] | None = None
) -> dict[int, list[tuple[Measurement, Measurement]]]:
    """By replicate, the measurements of two variants that share a sitting and have rounds that can be paired.

    Args:
        sittings: leaves out all others.
    """
    found: dict[int, list[tuple[Measurement, Measurement]]] = {}
    others = {(measurement.replicate, measurement.session): measurement for measurement in reference.measurements}
    for mine in candidate.measurements:
        other = others.get((mine.replicate, mine.session))
        if other and _paired_logs(mine, other).size and (sittings is None or mine.session in sittings):
            found.setdefault(mine.replicate, []).append((mine, other))
    return found


def paired_rounds(candidate: VariantResult, reference: VariantResult, replicate: int) -> int:
    """How many rounds of a replicate were timed of both in the same sitting."""
    return sum(_paired_logs(*pair).size for pair in paired(candidate, reference).get(replicate, []))


def memory_ratio(candidate: VariantResult, reference: VariantResult, confidence: float) -> Interval | None:
    """Peak memory of the candidate over that of the reference; an interval needs several processes of each."""
    mine, other = _peaks(candidate), _peaks(reference)
    if not mine or not other or min(mine + other) <= 0:
        return None
    if min(len(mine), len(other)) < 2:
        return Interval(float(np.exp(np.mean(np.log(mine)) - np.mean(np.log(other)))), n=1, unit="process")
    return _two_samples(np.log(mine), np.log(other), confidence)


def floor(control: VariantResult, baseline: VariantResult, sittings: Collection[int] | None = None) -> float | None:
    """The largest ratio, at least 1, between a process of the control and one of the baseline, which are identical.

    Args:
        sittings: only processes of these.
    """
    found = paired(control, baseline, sittings).values()
    logs = [float(np.concatenate([_paired_logs(*pair) for pair in pairs]).mean()) for pairs in found]
    return math.exp(max(map(abs, logs))) if logs else None


def memory_floor(result: StudyResult) -> float | None:
    """The ratio, at least 1, by which the peak memory of the two baselines differed."""
    control = next((variant for variant in result.variants if variant.role == "control"), None)
    if control is None or not control.status.measured:
        return None
    mine, other = _peaks(control), _peaks(result.variant(result.baseline))
    if not mine or not other or min(mine + other) <= 0:
        return None
    return max(max(a / b, b / a) for a, b in zip(mine, other, strict=False))


def compare(result: StudyResult) -> None:
    """Fills in every comparison of a study from its raw samples, and the A/A floor."""
    control = next(variant for variant in result.variants if variant.role == "control")
    baseline = result.variant(result.baseline)
    # A control that failed says nothing of the floor.
    known = control.status.timed and baseline.status.timed
    result.floor = floor(control, baseline) if known else None
    for comparison in result.comparisons:
        _compare(comparison, result)
        if known and comparison.speedup is not None:
            pairs = paired(result.variant(comparison.candidate), result.variant(comparison.reference)).values()
            comparison.floor = floor(control, baseline, {mine.session for found in pairs for mine, _ in found})


def _compare(comparison: Comparison, result: StudyResult) -> None:
    candidate, reference = result.variant(comparison.candidate), result.variant(comparison.reference)
    comparison.speedup = comparison.memory_ratio = comparison.floor = None
    unmeasured = [variant for variant in (candidate, reference) if not variant.status.timed]
    if unmeasured:
        comparison.note = "; ".join(f"{variant.name}: {variant.status}" for variant in unmeasured)
        return
    comparison.speedup = speedup(candidate, reference, result.confidence)
    comparison.memory_ratio = memory_ratio(candidate, reference, result.confidence)
    differing = candidate.config.differing(reference.config, (*WORK, "hardware"))
    notes = [f"not the same work: {', '.join(differing)}"] if differing else []
    if comparison.speedup is None:
        notes.append("no round was timed of both in the same session")
    comparison.note = "; ".join(notes)


def exceeds(ratio: float, floor: float) -> bool:
    """Whether a ratio is farther from 1 than two identical workers were, by more than rounding."""
    distance, chance = abs(math.log(ratio)), math.log(floor)
    return distance > chance and not math.isclose(distance, chance, rel_tol=1e-9)


def log_times(measurement: Measurement, in_blocks: bool) -> np.ndarray:
    """Log of the times by round; in blocks, relative to the baseline just before and just after.

    Of a block that broke off before the baseline was measured again there are none.
    """
    times = np.log(measurement.latency_s)
    if measurement.latency_before_s:
        before, after = np.log(measurement.latency_before_s), np.log(measurement.latency_after_s)
        rounds = min(times.size, before.size, after.size)
        return times[:rounds] - (before[:rounds] + after[:rounds]) / 2
    # In blocks only the baseline has no baseline around it: relative to itself it is 1.
    return np.zeros(times.size) if in_blocks else times


def ratio(logs: np.ndarray, confidence: float, unit: str) -> Interval:
    """A geometric mean with a t interval on the log scale, where there are enough replicates for one."""
    interval = Interval(float(np.exp(logs.mean())), n=int(logs.size), unit=unit)
    if logs.size >= (MINIMUM_ROUNDS if unit == "round" else 2):
        low, high = logs.mean(), logs.mean()
        if logs.std() > 0:
            low, high = stats.t.interval(confidence, logs.size - 1, loc=logs.mean(), scale=stats.sem(logs))
        low, high = np.exp(np.clip([low, high], -_WIDEST, _WIDEST)).tolist()
        interval.low, interval.high, interval.confidence = low, high, confidence
    return interval


def _two_samples(logs: np.ndarray, reference: np.ndarray, confidence: float) -> Interval:
    """The ratio of two geometric means, a process each sample, with Student's interval for equal variances."""
    n, m = logs.size, reference.size
    difference = float(logs.mean() - reference.mean())
    pooled = ((n - 1) * logs.var(ddof=1) + (m - 1) * reference.var(ddof=1)) / (n + m - 2)
    width = float(stats.t.ppf((1 + confidence) / 2, n + m - 2) * math.sqrt(pooled * (1 / n + 1 / m)))
    # Of two processes at a high confidence the interval is wider than a float.
    low, high = np.exp(np.clip([difference - width, difference + width], -_WIDEST, _WIDEST)).tolist()
    return Interval(math.exp(difference), low, high, confidence, min(n, m), "process")


def relative_logs(variant: VariantResult, baseline: VariantResult, replicate: int) -> np.ndarray:
    """Log of the times of one replicate by round, relative to the baseline of the same round and sitting."""
    pairs = paired(variant, baseline).get(replicate, [])
    return np.concatenate([np.zeros(0), *(-_paired_logs(*pair) for pair in pairs)])


def _paired_logs(candidate: Measurement, reference: Measurement) -> np.ndarray:
    """log(reference / candidate) by round."""
    in_blocks = bool(candidate.latency_before_s or reference.latency_before_s)
    mine, other = log_times(candidate, in_blocks), log_times(reference, in_blocks)
    rounds = min(mine.size, other.size)
    return other[:rounds] - mine[:rounds]


def _peaks(variant: VariantResult) -> list[float]:
    return [m.memory.headline[1] for m in variant.measurements if m.memory and m.memory.headline]


def speedup_drift(
    later: tuple[VariantResult, VariantResult], earlier: tuple[VariantResult, VariantResult], confidence: float
) -> Interval | None:
    """A later speed-up over an earlier one, each of a variant over its own baseline.

    The two runs share no rounds: Welch's interval for the difference of two means of log ratios, whose replicates are
    the rounds of one process, or the processes where there are several.
    """
    samples = [_log_ratios(*pair) for pair in (later, earlier)]
    if any(not values.size for values in samples):
        return None
    mine, other = samples
    difference = float(mine.mean() - other.mean())
    interval = Interval(math.exp(difference), n=min(mine.size, other.size))
    least = 2 if all(len(pair[0].measurements) > 1 for pair in (later, earlier)) else MINIMUM_ROUNDS
    if interval.n >= least:
        found = stats.ttest_ind(mine, other, equal_var=False).confidence_interval(confidence)
        if math.isfinite(found.low) and math.isfinite(found.high):
            interval.low, interval.high = math.exp(found.low), math.exp(found.high)
            interval.confidence = confidence
    return interval


def _log_ratios(candidate: VariantResult, reference: VariantResult) -> np.ndarray:
    """log(reference / candidate), by round of one process, or by process."""
    pairs = zip(candidate.measurements, reference.measurements, strict=False)
    logs = [values for mine, other in pairs if (values := _paired_logs(mine, other)).size]
    if len(logs) == 1:
        return logs[0]
    return np.array([values.mean() for values in logs])
