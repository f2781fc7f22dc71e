"""Finds disturbed rounds, and selects the rounds that decide: by counted causes, never by the times themselves.

Also estimates how much identical processes differ, and tests whether each had settled when it was timed.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from sdopt.record.records import StudyResult
from sdopt.record.samples import ShapeSamples
from sdopt.statistics.ratios import paired, paired_logs


def worst_by_round(timed: Iterable[ShapeSamples]) -> list[float]:
    """Returns, for each round that all these samples include, its most disturbed call's share (`Call.disturbed`).

    It is 0 if no share is known.
    """
    rounds = zip(*(samples.calls for samples in timed), strict=False)
    return [max((call.disturbed for call in calls if call.disturbed is not None), default=0.0) for calls in rounds]


def another_may_help(worst: Sequence[float], rounds: int, limit: float | None) -> bool:
    """Returns whether an extra round is worth its time: fewer than `rounds` are clean, and the last extra one was.

    A round is clean within the limit of disturbance; without a limit, all are.
    """
    if limit is None or sum(share <= limit for share in worst) >= rounds:
        return False
    extra = worst[rounds:]
    return not extra or extra[-1] <= limit


def rounds_left_out(worst: Sequence[float], rounds: int, limit: float | None) -> list[int]:
    """Returns the indices of the rounds to leave out: all but the `rounds` least disturbed; none without a limit.

    Rounds within the limit count as equally good, so the earliest of them are kept.
    """
    if limit is None:
        return []
    ranked = sorted(range(len(worst)), key=lambda round_index: max(worst[round_index], limit))
    return sorted(ranked[rounds:])


@dataclass(frozen=True)
class RoundCounts:
    """The rounds of a study; in blocks, each call of a block is a round.

    Attributes:
        timed: all rounds whose interference is known.
        disturbed: those with a call from which others took more than `protocol.interference`.
        left_out: those that decide nothing.
        undecided: disturbed ones that decide all the same, because there were too few clean ones.
        waited: the largest share of the processor that a worker waited for.
        stolen: the largest share that the hypervisor took.
        on_gpu: the largest share for which others used the GPU.
    """

    timed: int
    disturbed: int
    left_out: int
    undecided: int
    waited: float
    stolen: float
    on_gpu: float


def count_rounds(result: StudyResult) -> RoundCounts | None:
    """Counts the rounds of a study; None where nothing says what disturbed them, or nothing is to be left out."""
    limit = result.config.protocol.interference
    worst: dict[tuple[object, ...], float] = {}
    left_out = set()
    for variant in result.variants:
        for number, measurement in enumerate(variant.measurements):
            in_blocks = bool(result.sessions) and result.sessions[measurement.session].schedule == "blocks"
            for samples in measurement.shapes:
                for call in samples.calls:
                    if (share := call.disturbed) is not None:
                        key = (measurement.session, call.round, *((variant.name, number) if in_blocks else ()))
                        worst[key] = max(share, worst.get(key, 0.0))
                        if call.left_out:
                            left_out.add(key)
    if limit is None or not worst:
        return None
    disturbed = {key for key, share in worst.items() if share > limit}
    calls = [call for row in result.variants for m in row.measurements for at in m.shapes for call in at.calls]
    found = [call.interference for call in calls if call.interference is not None]
    return RoundCounts(
        timed=len(worst),
        disturbed=len(disturbed),
        left_out=len(left_out),
        undecided=len(disturbed - left_out),
        waited=max(one.waited for one in found),
        stolen=max(one.stolen for one in found),
        on_gpu=max((call.gpu.others or 0.0 for call in calls if call.gpu), default=0.0),
    )


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
        float(paired_logs(mine, other).mean())
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


_EXACT = 33
"""The most times of which the distribution of rising pairs is computed exactly."""


def unsettled(result: StudyResult) -> list[str]:
    """Returns a line for each process whose timed calls still became faster or slower at the main shape.

    Kendall's rank test of the times against their order, two-sided at 5 % over all processes of the study together
    (Bonferroni): with fewer than six rounds it has little power. A trend smaller than the smallest effect that counts
    (`protocol.smallest_speedup`), from the first third of the calls to the last, is not named.
    """
    timed = [
        (variant.name, measurement.replicate + 1, np.array(measurement.shapes[0].deciding_s))
        for variant in result.variants
        if variant.status.timed
        for measurement in variant.measurements
        if len(measurement.shapes[0].deciding_s) > 2
    ]
    least, lines = 1 + result.config.protocol.smallest_speedup, []
    for name, process, times in timed:
        trend, chance = rank_trend(times)
        third = times.size // 3
        first, last = float(np.median(times[:third])), float(np.median(times[-third:]))
        if chance * len(timed) < 0.05 and max(first, last) / min(first, last) >= least:
            way = "slower" if trend > 0 else "faster"
            change = f"from {first:.3g} s to {last:.3g} s over {times.size} calls"
            lines.append(f"process {process} of {name}: its calls still became {way}, {change}")
    return lines


def rank_trend(times: np.ndarray) -> tuple[int, float]:
    """Returns how many more pairs of times rise than fall, and how likely as many are by chance (Mann 1945).

    The distribution is exact where no two times are equal and there are few of them: the number of falling pairs of
    n numbers in random order is a sum of independent uniform numbers from 0 to 0, 0 to 1, …, 0 to n − 1. Else it is
    the normal approximation with equal times taken into account (Kendall 1970).
    """
    n = times.size
    signs = np.sign(times[np.newaxis, :] - times[:, np.newaxis])
    excess = int(np.triu(signs, 1).sum())
    _, counts = np.unique(times, return_counts=True)
    if n <= _EXACT and counts.max() == 1:
        shares = np.ones(1)
        for others in range(1, n):
            shares = np.convolve(shares, np.full(others + 1, 1 / (others + 1)))
        fewer = (n * (n - 1) // 2 - abs(excess)) // 2
        return excess, min(1.0, 2 * float(shares[: fewer + 1].sum()))
    variance = (n * (n - 1) * (2 * n + 5) - (counts * (counts - 1) * (2 * counts + 5)).sum()) / 18
    if variance == 0:  # all times are equal
        return excess, 1.0
    return excess, math.erfc(abs(excess) / math.sqrt(2 * float(variance)))
