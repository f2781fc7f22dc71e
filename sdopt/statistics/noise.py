"""Estimates how much identical processes differ, and tests whether each had settled when it was timed."""

import math
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from sdopt.record.records import StudyResult
from sdopt.record.samples import Measurement
from sdopt.statistics.ratios import log_times, paired


@dataclass(frozen=True)
class Noise:
    """Deviations as shares of a call's time (standard deviations of its logarithm); None where too few were timed."""

    schedule: str
    processes: int
    rounds: int
    between_rounds: float | None
    """Deviation between rounds of one process, pooled over all processes."""
    between_processes: float | None
    """Deviation between the means of processes, beyond what their rounds explain."""
    first_round: float | None
    """Time of the first round over the mean of the others, less one."""
    of_ratio: float | None
    """Deviation of the paired ratio of two identical processes, as in a speed-up of one process each."""
    memory: float | None
    """Largest over smallest peak memory, less one; 0 is equal to the byte."""

    @property
    def figures(self) -> dict[str, float]:
        """What is known, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, float | int)}


def noise_of(result: StudyResult) -> Noise | None:
    """Returns the noise of a study of identical variants; None if nothing was timed."""
    timed = [variant for variant in result.variants if variant.status.timed]
    processes = [
        measured for variant in timed for measured in variant.measurements if len(measured.shapes[0].deciding_s) > 1
    ]
    if not processes:
        return None
    logs = [np.log(measured.shapes[0].deciding_s) for measured in processes]
    within = float(np.mean([values.var(ddof=1) for values in logs]))
    peaks = [measured.peak[1] for measured in processes if measured.peak]
    ratios = [
        _mean_log_ratio(mine, other)
        for first, second in combinations(timed, 2)
        for pairs in paired(first, second).values()
        for mine, other in pairs
    ]
    return Noise(
        schedule=result.schedule.kind,
        processes=len(processes),
        rounds=max(len(values) for values in logs),
        between_rounds=math.sqrt(within),
        between_processes=_between(logs, within),
        first_round=math.expm1(float(np.mean([values[0] - values[1:].mean() for values in logs]))),
        of_ratio=float(np.sqrt(np.mean(np.square(ratios)))) if ratios else None,
        memory=max(peaks) / min(peaks) - 1 if peaks else None,
    )


def _between(logs: list[np.ndarray], within: float) -> float | None:
    if len(logs) < 2:
        return None
    variance = float(np.var([values.mean() for values in logs], ddof=1))
    return math.sqrt(max(0.0, variance - within / float(np.mean([values.size for values in logs]))))


def _mean_log_ratio(mine: Measurement, other: Measurement) -> float:
    """Returns the logarithm of a speed-up of one process each; in blocks relative to the baseline around them."""
    in_blocks = bool(mine.shapes[0].latency_before_s or other.shapes[0].latency_before_s)
    times = [log_times(measured, in_blocks) for measured in (mine, other)]
    rounds = min(map(len, times))
    return float((times[1][:rounds] - times[0][:rounds]).mean())


def unsettled(result: StudyResult) -> list[str]:
    """Returns a line for each process whose timed calls still became faster or slower at the main shape.

    Kendall's rank test of the times against their order, two-sided at 5 % over all processes of the study together
    (Bonferroni): with fewer than six rounds it has little power. A trend smaller than the smallest effect that counts
    (`gate.smallest_speedup`), from the first third of the calls to the last, is not named.
    """
    from scipy import stats  # takes a second

    timed = [
        (variant.name, measurement.replicate + 1, np.array(measurement.shapes[0].deciding_s))
        for variant in result.variants
        if variant.status.timed
        for measurement in variant.measurements
        if len(measurement.shapes[0].deciding_s) > 2
    ]
    least, lines = 1 + result.config.gate.smallest_speedup, []
    for name, process, times in timed:
        found = stats.kendalltau(np.arange(times.size), times)
        third = times.size // 3
        first, last = float(np.median(times[:third])), float(np.median(times[-third:]))
        if found.pvalue * len(timed) < 0.05 and max(first, last) / min(first, last) >= least:
            way = "slower" if found.statistic > 0 else "faster"
            change = f"from {first:.3g} s to {last:.3g} s over {times.size} calls"
            lines.append(f"process {process} of {name}: its calls still became {way}, {change}")
    return lines
