"""Turns raw times and memory peaks into ratios with intervals.

The process is the unit of replication. Identical processes differ in their memory layout and choice of kernels, which
all calls of one process share. So the rounds of one process show the noise of that process, but not how far another
process would differ. Figures from fewer than `MINIMUM_PROCESSES` processes have no interval.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy

from sdopt.record.comparisons import Interval
from sdopt.record.records import VariantResult
from sdopt.statistics.pairs import (
    Pair,
    Pairs,
    any_in_block,
    flattened,
    log_images,
    logs_by_replicate,
    means_by_replicate,
    only_beside_each_other,
    paired,
    shared_log_times,
)

MINIMUM_PROCESSES = 3
"""Minimum number of processes on each side for an interval: with two, one odd process decides."""


def needed_processes(imported: bool) -> str:
    """Returns what an interval needs at least: the key that sets it, or what a table of `imported` times calls it."""
    if imported:
        return f"times of {MINIMUM_PROCESSES} replicates"
    return f"protocol.replicates={MINIMUM_PROCESSES}"


_WIDEST = 700.0
"""Largest logarithm of a bound: the exponential of a slightly larger one overflows a float."""

_ESTIMATORS: dict[str, Callable[[Sequence[float]], float]] = {
    "median": lambda samples: float(np.median(samples)),
    "mean": lambda samples: float(np.mean(samples)),
    "last": lambda samples: float(samples[-1]),
    "min": lambda samples: float(np.min(samples)),
}


@dataclass(frozen=True)
class LogRatio:
    """A ratio of two geometric means on the log scale, and how well it is known (Student's t distribution).

    Attributes:
        mean: logarithm of the ratio.
        error: standard error of `mean`; None where there were too few processes for one.
        freedom: degrees of freedom of `error`.
        n: replicates of the side that has fewer.
        unit: what was replicated: `round`, `process` or `call`.
    """

    mean: float
    error: float | None = None
    freedom: float = 0.0
    n: int = 1
    unit: str = "process"

    @property
    def ratio(self) -> float:
        """The ratio itself."""
        return math.exp(self.mean)

    def half_width(self, confidence: float) -> float | None:
        """Returns half the width of the two-sided interval of `mean`; None where there is no error."""
        if not self.error:
            return self.error
        quantile = scipy.special.stdtrit(self.freedom, (1 + confidence) / 2)
        return float(quantile) * self.error

    def interval(self, confidence: float) -> Interval:
        """Returns the ratio with a two-sided interval, or without bounds where there is no error."""
        interval = Interval(self.ratio, n=self.n, unit=self.unit)
        width = self.half_width(confidence)
        if width is None:
            return interval
        bounds = np.clip(
            [self.mean - width, self.mean + width],
            -_WIDEST,
            _WIDEST,
        )
        interval.low, interval.high = np.exp(bounds).tolist()
        interval.confidence = confidence
        return interval

    def p_value(self, limit: float) -> float | None:
        """Returns the one-sided p value of the claim that the ratio is above `limit`; None where there is no error.

        With a standard error of zero, the estimate counts as the truth: 0 above the limit, 1 at or below it.
        """
        if self.error is None:
            return None
        distance = self.mean - math.log(limit)
        if self.error:
            return float(scipy.special.stdtr(self.freedom, -distance / self.error))
        above = distance > 0 and not math.isclose(self.ratio, limit)
        return 0.0 if above else 1.0

    def inverted(self) -> "LogRatio":
        """Returns the ratio with its two sides exchanged."""
        return replace(self, mean=-self.mean)


# Ratios of samples ----------------------------------------------------------------------------------------------------


def ratio(logs: np.ndarray, confidence: float, unit: str) -> Interval:
    """Returns a geometric mean with a t interval on the log scale, from three processes on; of rounds without one."""
    return _one_sample(logs, unit).interval(confidence)


def _one_sample(logs: np.ndarray, unit: str = "process") -> LogRatio:
    n = int(logs.size)
    mean = float(logs.mean())
    if unit == "round" or n < MINIMUM_PROCESSES:
        return LogRatio(mean, n=n, unit=unit)
    error = float(logs.std(ddof=1)) / math.sqrt(n)
    return LogRatio(mean, error, n - 1, n, unit)


def two_samples(logs: np.ndarray, reference: np.ndarray) -> LogRatio:
    """Returns the difference of two means with Student's error for equal variances; each value is a process."""
    n = int(logs.size)
    m = int(reference.size)
    fewer = min(n, m)
    difference = float(logs.mean() - reference.mean())
    if fewer < MINIMUM_PROCESSES:
        return LogRatio(difference, n=fewer)
    freedom = n + m - 2
    pooled = ((n - 1) * logs.var(ddof=1) + (m - 1) * reference.var(ddof=1)) / freedom
    error = math.sqrt(pooled * (1 / n + 1 / m))
    return LogRatio(difference, error, freedom, fewer)


def _welch(logs: np.ndarray, reference: np.ndarray) -> LogRatio:
    """Returns the difference of two means with Welch's error for unequal variances; each value is a process."""
    difference = float(logs.mean() - reference.mean())
    fewer = int(min(logs.size, reference.size))
    if fewer < MINIMUM_PROCESSES:
        return LogRatio(difference, n=fewer)
    shares = np.array(
        [values.var(ddof=1) / values.size for values in (logs, reference)]
    )
    total = float(shares.sum())
    if not total:
        return LogRatio(difference, 0.0, 1.0, fewer)
    freedom = total**2 / float(np.sum(shares**2 / [logs.size - 1, reference.size - 1]))
    return LogRatio(difference, math.sqrt(total), freedom, fewer)


# Latency and speed-ups ------------------------------------------------------------------------------------------------


def latency(
    variant: VariantResult,
    estimator: str,
    confidence: float,
) -> Interval | None:
    """Returns the latency of one call in seconds, or None without samples.

    With one process, it is the estimator's value over its rounds. With several, it is the geometric mean of the
    processes' values; from three processes on, with a t interval on the log scale, so that no bound is negative.
    """
    processes = list(variant.samples.values())
    if not processes:
        return None
    estimate = _ESTIMATORS[estimator]
    if len(processes) == 1:
        samples = processes[0]
        return Interval(estimate(samples), n=len(samples))
    estimates = [estimate(samples) for samples in processes]
    return ratio(np.log(estimates), confidence, "process")


def log_speedup(candidate: VariantResult, reference: VariantResult) -> LogRatio | None:
    """Returns time of the reference over time of the candidate, per image: a ratio of geometric means over rounds.

    `LogRatio.interval` makes its interval, at `protocol.confidence`: the mean ± Student's t times the error, on the log
    scale. Rounds that are left out do not count.

    The mean log time of each process is one replicate: two independent samples of equal variance (Student). In blocks,
    and across several sessions, a process is compared with the baseline beside it alone, which leaves one ratio for
    each replicate (one sample). With fewer than three processes of each side there is no error, whatever the rounds.
    If processes were added for `protocol.precision`, the error uses only the deviation of the pilot.
    """
    speedup = _log_speedup(paired(candidate, reference))
    if speedup is None:
        return None
    speedup = replace(speedup, mean=speedup.mean + log_images(candidate, reference))
    pilot = pilot_speedup(candidate, reference)
    precision = candidate.config.protocol.precision
    if precision is None or pilot is None or speedup.n <= pilot.n:
        return speedup
    error = pilot.error
    if error is not None:
        error *= math.sqrt(pilot.n / speedup.n)
    return replace(speedup, error=error, freedom=pilot.freedom)


def pilot_speedup(
    candidate: VariantResult,
    reference: VariantResult,
) -> LogRatio | None:
    """Returns the speed-up per call of the first `protocol.replicates` processes; None where they have none."""
    replicates = candidate.config.replicates
    pairs = paired(candidate, reference)
    pilot = {
        replicate: pairs[replicate] for replicate in pairs if replicate < replicates
    }
    return _log_speedup(pilot)


def _log_speedup(pairs: Pairs) -> LogRatio | None:
    """Returns the speed-up per call of pairs of processes by replicate; see `log_speedup`."""
    if not pairs:
        return None
    if len(pairs) == 1:
        [rounds] = logs_by_replicate(pairs).values()
        return LogRatio(
            float(rounds.mean()),
            n=int(rounds.size),
            unit="round",
        )
    processes = flattened(pairs)
    if only_beside_each_other(processes):
        return _one_sample(means_by_replicate(pairs))
    times, reference_times = _by_process(processes, np.mean)
    return two_samples(reference_times, times)


def log_tail(candidate: VariantResult, reference: VariantResult) -> LogRatio | None:
    """Returns the largest call of the candidate over that of the reference, per image: of means over processes.

    The largest of a process's calls is one value, and the process the replicate, as for the speed-up: the chance of a
    false alarm is that of Student's t, however the calls of one process are distributed and however few they are. Both
    sides have as many calls, because the largest of more calls is larger. A call that is slow in some processes and
    not in others widens the interval, so that it cannot be overlooked.
    """
    processes = flattened(paired(candidate, reference))
    if not processes:
        return None
    largest, reference_largest = _by_process(processes, np.max)
    largest = largest - log_images(candidate, reference)
    if only_beside_each_other(processes):
        return _one_sample(largest - reference_largest)
    return two_samples(largest, reference_largest)


def _by_process(
    pairs: Sequence[Pair],
    reduce: Callable[[np.ndarray], float],
) -> tuple[np.ndarray, np.ndarray]:
    """Returns one value of the log times of each process: of the candidate's, and of the reference's."""
    in_blocks = any_in_block(pairs)
    values = []
    reference_values = []
    for candidate, reference in pairs:
        times, reference_times = shared_log_times(candidate, reference, in_blocks)
        values.append(reduce(times))
        reference_values.append(reduce(reference_times))
    return np.array(values), np.array(reference_values)


def speedup_drift(
    later: tuple[VariantResult, VariantResult],
    earlier: tuple[VariantResult, VariantResult],
) -> LogRatio | None:
    """Returns a later speed-up over an earlier one, each of a variant over its own baseline, and per image.

    The two runs share no rounds: Welch's error for the difference of two means of log ratios, one for each replicate
    that the variant shares with its baseline. There is none where a run has fewer than three.
    """
    speedups = means_by_replicate(paired(*later)) + log_images(*later)
    earlier_speedups = means_by_replicate(paired(*earlier)) + log_images(*earlier)
    if not speedups.size or not earlier_speedups.size:
        return None
    return _welch(speedups, earlier_speedups)


def floor(
    control: VariantResult,
    baseline: VariantResult,
    sessions: Collection[int] | None = None,
) -> float | None:
    """Returns the ratio, at least 1, by which the control and the baseline, which are identical, differed.

    Both are geometric means, over `sessions` if they are given, of as many processes as a speed-up uses. The worst pair
    would be a wrong measure: it grows with their number, while the error of a speed-up shrinks.
    """
    logs = means_by_replicate(paired(control, baseline, sessions))
    return math.exp(abs(float(np.mean(logs)))) if logs.size else None


def exceeds(ratio: float, floor: float) -> bool:
    """Returns whether a ratio is farther from 1 than that of two identical workers, by more than rounding."""
    distance = abs(math.log(ratio))
    chance = math.log(floor)
    return distance > chance and not math.isclose(distance, chance, rel_tol=1e-9)


# Memory ---------------------------------------------------------------------------------------------------------------


def log_memory_ratio(
    candidate: VariantResult,
    reference: VariantResult,
) -> LogRatio | None:
    """Returns peak memory of the candidate over that of the reference: a ratio of geometric means over processes.

    CUDA's peaks are the same in every process. Their error is 0, so that any difference is certain, and the smallest
    effect that counts decides.
    """
    peaks = candidate.peaks_gib
    reference_peaks = reference.peaks_gib
    if not peaks or not reference_peaks or min(peaks + reference_peaks) <= 0:
        return None
    return two_samples(np.log(peaks), np.log(reference_peaks))


def peak_memory_gib(variant: VariantResult) -> float | None:
    """Returns the geometric mean of the processes' peak memory, or None where it was not measured."""
    peaks = variant.peaks_gib
    if not peaks or min(peaks) <= 0:
        return None
    return math.exp(float(np.mean(np.log(peaks))))
