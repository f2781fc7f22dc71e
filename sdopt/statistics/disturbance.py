"""Finds disturbed rounds, and selects the rounds that decide: by counted causes, never by the times themselves.

Also estimates how much identical processes differ, and tests whether each had settled when it was timed.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from sdopt.record.records import StudyResult, VariantResult
from sdopt.record.samples import Call, Measurement, ShapeSamples
from sdopt.statistics.pairs import flattened, paired, paired_logs


def worst_by_round(timed: Iterable[ShapeSamples]) -> list[float]:
    """Returns, for each round that all these samples include, its most disturbed call's share (`Call.disturbed`).

    It is 0 if no share is known.
    """
    rounds = zip(*(samples.calls for samples in timed), strict=False)
    return [_worst(calls) for calls in rounds]


def _worst(calls: Iterable[Call]) -> float:
    shares = [call.disturbed or 0.0 for call in calls]
    return max(shares, default=0.0)


def another_may_help(
    worst: Sequence[float],
    rounds: int,
    limit: float | None,
) -> bool:
    """Returns whether an extra round is worth its time: fewer than `rounds` are clean, and the last extra one was.

    A round is clean within the limit of disturbance; without a limit, all are.
    """
    if limit is None:
        return False
    clean = sum(share <= limit for share in worst)
    if clean >= rounds:
        return False
    extra = worst[rounds:]
    return not extra or extra[-1] <= limit


def rounds_left_out(
    worst: Sequence[float],
    rounds: int,
    limit: float | None,
) -> list[int]:
    """Returns the indices of the rounds to leave out: all but the `rounds` least disturbed; none without a limit.

    Rounds within the limit count as equally good, so the earliest of them are kept.
    """
    if limit is None:
        return []
    shares = [max(share, limit) for share in worst]
    ranked = sorted(range(len(shares)), key=shares.__getitem__)
    return sorted(ranked[rounds:])


# How a study was disturbed --------------------------------------------------------------------------------------------


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


_Round = tuple[object, ...]
"""What tells rounds apart: the session and the round's number; in blocks also the variant and its process."""


def count_rounds(result: StudyResult) -> RoundCounts | None:
    """Counts the rounds of a study; None where nothing says what disturbed them, or nothing is to be left out."""
    limit = result.config.protocol.interference
    if limit is None:
        return None
    known: set[_Round] = set()
    disturbed: set[_Round] = set()
    left_out: set[_Round] = set()
    waited = stolen = on_gpu = 0.0
    for key, call in _calls_by_round(result):
        if call.interference:
            waited = max(waited, call.interference.waited)
            stolen = max(stolen, call.interference.stolen)
        if call.gpu:
            on_gpu = max(on_gpu, call.gpu.others or 0.0)
        if call.disturbed is None:
            continue
        known.add(key)
        if call.disturbed > limit:
            disturbed.add(key)
        if call.left_out:
            left_out.add(key)
    if not known:
        return None
    return RoundCounts(
        timed=len(known),
        disturbed=len(disturbed),
        left_out=len(left_out),
        undecided=len(disturbed - left_out),
        waited=waited,
        stolen=stolen,
        on_gpu=on_gpu,
    )


def _calls_by_round(result: StudyResult) -> Iterator[tuple[_Round, Call]]:
    for variant in result.variants:
        for number, measurement in enumerate(variant.measurements):
            process: _Round = (measurement.session,)
            if _in_blocks(result, measurement):
                process = (measurement.session, variant.name, number)
            for samples in measurement.shapes:
                for call in samples.calls:
                    yield (*process, call.round), call


def _in_blocks(result: StudyResult, measurement: Measurement) -> bool:
    if not result.sessions:
        return False
    session = result.sessions[measurement.session]
    return session.schedule == "blocks"


# How much identical processes differ ----------------------------------------------------------------------------------


def noise_of(result: StudyResult) -> dict[str, float]:
    """Returns how much the processes of a study of identical variants differ, by name; {} if nothing was timed.

    - `processes`, `rounds`: how many were timed.
    - `between_rounds`: standard deviation of the log time between rounds of one process, pooled over all processes.
    - `between_processes`: that between the means of processes, beyond what their rounds explain.
    - `first_round`: time of the first round over the mean of the others, less one.
    - `of_ratio`: deviation of the paired ratio of two identical processes, as in a speed-up of one process each.
    - `memory`: largest over smallest peak memory, less one; 0 is equal to the byte.

    What too few processes were timed for is left out.
    """
    timed = [variant for variant in result.variants if variant.status.timed]
    logs: list[np.ndarray] = []
    peaks: list[float] = []
    for variant in timed:
        for measurement in variant.measurements:
            times = measurement.main.deciding_s
            if len(times) < 2:
                continue
            logs.append(np.log(times))
            if measurement.peak:
                _, gib = measurement.peak
                peaks.append(gib)
    if not logs:
        return {}
    within = _mean([times.var(ddof=1) for times in logs])
    excess = [times[0] - times[1:].mean() for times in logs]
    noise: dict[str, float] = {
        "processes": len(logs),
        "rounds": max(times.size for times in logs),
        "between_rounds": math.sqrt(within),
        "first_round": math.expm1(_mean(excess)),
    }
    if len(logs) > 1:
        noise["between_processes"] = _between(logs, within)
    squares = _squares_of_ratios(timed)
    if squares:
        noise["of_ratio"] = math.sqrt(_mean(squares))
    if peaks:
        noise["memory"] = max(peaks) / min(peaks) - 1
    return noise


def _squares_of_ratios(variants: Sequence[VariantResult]) -> list[float]:
    """Returns the square of the logarithm of the paired ratio of each two processes of different variants."""
    squares: list[float] = []
    for first, second in combinations(variants, 2):
        for pair in flattened(paired(first, second)):
            ratio = paired_logs(*pair).mean()
            squares.append(ratio**2)
    return squares


def _between(logs: Sequence[np.ndarray], within: float) -> float:
    rounds = _mean([times.size for times in logs])
    means = [times.mean() for times in logs]
    of_means = float(np.var(means, ddof=1))
    variance = of_means - within / rounds
    return math.sqrt(max(0.0, variance))


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


# Processes that had not settled ---------------------------------------------------------------------------------------

_EXACT = 33
"""The most times of which the distribution of rising pairs is computed exactly."""


def unsettled(result: StudyResult) -> list[str]:
    """Returns a line for each process whose timed calls still became faster or slower at the main shape.

    Kendall's rank test of the times against their order, two-sided at 5 % over all processes of the study together
    (Bonferroni): with fewer than six rounds it has little power. A trend smaller than the smallest effect that counts
    (`protocol.smallest_speedup`), from the first third of the calls to the last, is not named.
    """
    timed: list[tuple[str, np.ndarray]] = []
    for variant in result.variants:
        if not variant.status.timed:
            continue
        for measurement in variant.measurements:
            times = np.array(measurement.main.deciding_s)
            if times.size > 2:
                process = f"process {measurement.replicate + 1} of {variant.name}"
                timed.append((process, times))
    smallest = 1 + result.config.protocol.smallest_speedup
    lines = []
    for process, times in timed:
        trend, chance = rank_trend(times)
        third = times.size // 3
        first = float(np.median(times[:third]))
        last = float(np.median(times[-third:]))
        change = max(first, last) / min(first, last)
        if chance * len(timed) >= 0.05 or change < smallest:
            continue
        way = "slower" if trend > 0 else "faster"
        span = f"from {first:.3g} s to {last:.3g} s over {times.size} calls"
        lines.append(f"{process}: its calls still became {way}, {span}")
    return lines


def rank_trend(times: np.ndarray) -> tuple[int, float]:
    """Returns how many more pairs of times rise than fall, and how likely as many are by chance (Mann 1945).

    The distribution is exact where no two times are equal and there are few of them: the number of falling pairs of
    n numbers in random order is a sum of independent uniform numbers from 0 to 0, 0 to 1, …, 0 to n − 1. Else it is
    the normal approximation with equal times taken into account (Kendall 1970).
    """
    n = times.size
    falls = np.sign(np.subtract.outer(times, times))
    excess = -int(np.triu(falls, 1).sum())
    _, ties = np.unique(times, return_counts=True)
    if n <= _EXACT and ties.max() == 1:
        return excess, _exact_chance(n, excess)
    variance = (_variance(n) - sum(map(_variance, ties))) / 18
    if variance == 0:  # all times are equal
        return excess, 1.0
    deviations = abs(excess) / math.sqrt(2 * variance)
    return excess, math.erfc(deviations)


def _exact_chance(n: int, excess: int) -> float:
    shares = np.ones(1)
    for size in range(2, n + 1):
        uniform = np.full(size, 1 / size)
        shares = np.convolve(shares, uniform)
    pairs = n * (n - 1) // 2
    fewer = (pairs - abs(excess)) // 2
    as_few = shares[: fewer + 1].sum()
    return min(1.0, 2 * float(as_few))


def _variance(size: int) -> int:
    """Returns 18 times the variance of the excess of rising pairs among so many numbers."""
    return size * (size - 1) * (2 * size + 5)
