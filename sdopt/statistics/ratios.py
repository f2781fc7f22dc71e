"""Turns raw times and memory peaks into ratios with intervals.

The process is the unit of replication. Identical processes differ in their memory layout and choice of kernels, which
all calls of one process share. So the rounds of one process show the noise of that process, but not how far another
process would differ. Figures from fewer than `MINIMUM_PROCESSES` processes have no interval.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from sdopt.errors import UsageError
from sdopt.record.comparisons import Comparison, Interval, ShapeRatios
from sdopt.record.records import StudyResult, VariantResult
from sdopt.record.samples import Measurement
from sdopt.schema import Gate, Protocol
from sdopt.statistics.break_even import break_even, uncounted

MINIMUM_PROCESSES = 3
"""Minimum number of processes on each side for an interval: with two, one odd process decides."""

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
        return float(special.stdtrit(self.freedom, (1 + confidence) / 2)) * self.error

    def interval(self, confidence: float) -> Interval:
        """Returns the ratio with a two-sided interval, or without bounds where there is no error."""
        found, width = Interval(self.ratio, n=self.n, unit=self.unit), self.half_width(confidence)
        if width is not None:
            low, high = np.exp(np.clip([self.mean - width, self.mean + width], -_WIDEST, _WIDEST)).tolist()
            found.low, found.high, found.confidence = low, high, confidence
        return found

    def p_value(self, limit: float) -> float | None:
        """Returns the one-sided p value of the claim that the ratio is above `limit`; None where there is no error.

        With a standard error of zero, the estimate counts as the truth: 0 above the limit, 1 at or below it.
        """
        if self.error is None:
            return None
        distance = self.mean - math.log(limit)
        if self.error == 0:
            return 0.0 if distance > 0 and not math.isclose(self.ratio, limit) else 1.0
        return float(special.stdtr(self.freedom, -distance / self.error))

    def inverted(self) -> "LogRatio":
        """Returns the ratio with its two sides exchanged."""
        return replace(self, mean=-self.mean)


def latency(variant: VariantResult, estimator: str, confidence: float) -> Interval | None:
    """Returns the latency of one call in seconds, or None without samples.

    With one process, it is the estimator's value over its rounds. With several, it is the geometric mean of the
    processes' values; from three processes on, with a t interval on the log scale, so that no bound is negative.
    """
    processes = list(variant.samples.values())
    if not processes:
        return None
    estimates = [_ESTIMATORS[estimator](samples) for samples in processes]
    if len(processes) == 1:
        return Interval(estimates[0], n=len(processes[0]))
    return ratio(np.log(estimates), confidence, "process")


def log_images(candidate: VariantResult, reference: VariantResult) -> float:
    """Returns the logarithm of how many images a call of a candidate makes, over those of a call of its reference.

    It turns a ratio of calls into one of images: reference over candidate grows by it.
    """
    return math.log(candidate.config.images_per_call / reference.config.images_per_call)


def log_speedup(candidate: VariantResult, reference: VariantResult) -> LogRatio | None:
    """Returns time of the reference over time of the candidate, per image: a ratio of geometric means over rounds.

    `LogRatio.interval` makes its interval, at `protocol.confidence`: the mean ± Student's t times the error, on the log
    scale. Rounds that are left out do not count.

    The mean log time of each process is one replicate: two independent samples of equal variance (Student). In blocks,
    and across several sessions, a process is compared with the baseline beside it alone, which leaves one ratio for
    each replicate (one sample). With fewer than three processes of each side there is no error, whatever the rounds.
    If processes were added for `protocol.precision`, the error uses only the deviation of the pilot.
    """
    found, pilot = _log_speedup(paired(candidate, reference)), pilot_speedup(candidate, reference)
    if found is None:
        return None
    found = replace(found, mean=found.mean + log_images(candidate, reference))
    if candidate.config.protocol.precision is None or pilot is None or found.n <= pilot.n:
        return found
    error = None if pilot.error is None else pilot.error * math.sqrt(pilot.n / found.n)
    return replace(found, error=error, freedom=pilot.freedom)


def pilot_speedup(candidate: VariantResult, reference: VariantResult) -> LogRatio | None:
    """Returns the speed-up per call of the first `protocol.replicates` processes; None where they have none."""
    first = candidate.config.replicates
    pairs = paired(candidate, reference)
    return _log_speedup({replicate: found for replicate, found in pairs.items() if replicate < first})


def _log_speedup(pairs: Mapping[int, Sequence[tuple[Measurement, Measurement]]]) -> LogRatio | None:
    """Returns the speed-up per call of pairs of processes by replicate; see `log_speedup`."""
    logs = list(logs_by_replicate(pairs).values())
    if not logs:
        return None
    if len(logs) == 1:
        return LogRatio(float(logs[0].mean()), n=int(logs[0].size), unit="round")
    flat = [pair for found in pairs.values() for pair in found]
    if _beside_their_own(flat):
        return _one_sample(np.array([values.mean() for values in logs]), "process")
    in_blocks = any(m.shapes[0].latency_before_s for m, _ in flat)
    sides = [_shared_rounds(m, r, in_blocks) for m, r in flat]
    mine = np.array([times.mean() for times, _ in sides])
    other = np.array([times.mean() for _, times in sides])
    return two_samples(other, mine)


def _shared_rounds(candidate: Measurement, reference: Measurement, in_blocks: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns the log of the times of the rounds that both have: a budget may time one of them in fewer.

    Rounds of one number belong together. In blocks no two processes share one, and the first ones are taken.
    """
    mine, other = log_times(candidate, in_blocks), log_times(reference, in_blocks)
    if in_blocks:
        count = min(mine.size, other.size)
        return mine[:count], other[:count]
    by_round = dict(zip(candidate.shapes[0].deciding_rounds, mine, strict=True))
    beside = dict(zip(reference.shapes[0].deciding_rounds, other, strict=True))
    shared = [number for number in by_round if number in beside]
    return np.array([by_round[number] for number in shared]), np.array([beside[number] for number in shared])


def logs_by_replicate(pairs: Mapping[int, Sequence[tuple[Measurement, Measurement]]]) -> dict[int, np.ndarray]:
    """Returns log(reference / candidate) by round, of each replicate, over all its sessions."""
    return {
        replicate: np.concatenate([paired_logs(mine, other) for mine, other in found])
        for replicate, found in pairs.items()
    }


def _beside_their_own(pairs: Sequence[tuple[Measurement, Measurement]]) -> bool:
    """Returns whether processes can only be compared with the baseline next to them: in blocks, and across sessions."""
    several = len({mine.session for mine, _ in pairs}) > 1
    in_blocks = any(m.shapes[0].latency_before_s or r.shapes[0].latency_before_s for m, r in pairs)
    both = all(m.shapes[0].latency_before_s and r.shapes[0].latency_before_s for m, r in pairs)
    return several or (in_blocks and not both)


def log_tail(candidate: VariantResult, reference: VariantResult) -> LogRatio | None:
    """Returns the largest call of the candidate over that of the reference, per image: of means over processes.

    The largest of a process's calls is one value, and the process the replicate, as for the speed-up: the chance of a
    false alarm is that of Student's t, however the calls of one process are distributed and however few they are. Both
    sides have as many calls, because the largest of more calls is larger. A call that is slow in some processes and
    not in others widens the interval, so that it cannot be overlooked.
    """
    pairs = paired(candidate, reference)
    flat = [pair for found in pairs.values() for pair in found]
    if not flat:
        return None
    in_blocks = any(m.shapes[0].latency_before_s or r.shapes[0].latency_before_s for m, r in flat)

    sides = [_shared_rounds(m, r, in_blocks) for m, r in flat]
    mine = np.array([times.max() for times, _ in sides]) - log_images(candidate, reference)
    other = np.array([times.max() for _, times in sides])
    return _one_sample(mine - other, "process") if _beside_their_own(flat) else two_samples(mine, other)


def paired(
    candidate: VariantResult, reference: VariantResult, sessions: Collection[int] | None = None
) -> dict[int, list[tuple[Measurement, Measurement]]]:
    """Returns, by replicate, the measurements of two variants that share a session and have rounds to pair.

    With `sessions`, all sessions of other numbers are left out.
    """
    found: dict[int, list[tuple[Measurement, Measurement]]] = {}
    others = {(measurement.replicate, measurement.session): measurement for measurement in reference.measurements}
    for mine in candidate.measurements:
        other = others.get((mine.replicate, mine.session))
        if other and paired_logs(mine, other).size and (sessions is None or mine.session in sessions):
            found.setdefault(mine.replicate, []).append((mine, other))
    return found


def paired_rounds(candidate: VariantResult, reference: VariantResult, replicate: int) -> int:
    """Returns how many rounds of a replicate were timed for both variants in the same session."""
    return logs_by_replicate(paired(candidate, reference)).get(replicate, np.zeros(0)).size


def log_memory_ratio(candidate: VariantResult, reference: VariantResult) -> LogRatio | None:
    """Returns peak memory of the candidate over that of the reference: a ratio of geometric means over processes.

    CUDA's peaks are the same in every process. Their error is 0, so that any difference is certain, and the smallest
    effect that counts decides.
    """
    mine, other = candidate.peaks_gib, reference.peaks_gib
    if not mine or not other or min(mine + other) <= 0:
        return None
    return two_samples(np.log(mine), np.log(other))


def peak_memory_gib(variant: VariantResult) -> float | None:
    """Returns the geometric mean of the processes' peak memory, or None where it was not measured."""
    peaks = variant.peaks_gib
    return math.exp(float(np.mean(np.log(peaks)))) if peaks and min(peaks) > 0 else None


def floor(control: VariantResult, baseline: VariantResult, sessions: Collection[int] | None = None) -> float | None:
    """Returns the ratio, at least 1, by which the control and the baseline, which are identical, differed.

    Both are geometric means, over `sessions` if they are given, of as many processes as a speed-up uses. The worst pair
    would be a wrong measure: it grows with their number, while the error of a speed-up shrinks.
    """
    logs = [float(values.mean()) for values in logs_by_replicate(paired(control, baseline, sessions)).values()]
    return math.exp(abs(float(np.mean(logs)))) if logs else None


def ratios_between(result: StudyResult, candidate: VariantResult, reference: VariantResult) -> ShapeRatios:
    """Returns how two variants of a study that were timed compare at its main shape."""
    logs = log_speedup(candidate, reference), log_memory_ratio(candidate, reference), log_tail(candidate, reference)
    speed, memory, tail = (log.interval(result.confidence) if log else None for log in logs)
    found = ShapeRatios(speed, memory, tail)
    baseline, control = _two_baselines(result)
    if control is not None and speed is not None:
        sessions = {mine.session for pairs in paired(candidate, reference).values() for mine, _ in pairs}
        found.floor = floor(control, baseline, sessions)
    return found


def _two_baselines(result: StudyResult) -> tuple[VariantResult, VariantResult | None]:
    """Returns the baseline, and the repeated baseline unless one of the two failed."""
    baseline, control = result.variant(result.baseline), result.control
    timed = control is not None and control.status.timed and baseline.status.timed
    return baseline, control if timed else None


def compare(result: StudyResult) -> None:
    """Fills in every comparison of a study from its raw samples, and the A/A floor."""
    baseline, control = _two_baselines(result)
    result.floor = floor(control, baseline) if control else None
    for comparison in result.comparisons:
        candidate, reference = result.variant(comparison.candidate), result.variant(comparison.reference)
        compared = candidate.status.timed and reference.status.timed
        for number in range(len(comparison.shapes)):
            sides = result.at(number), candidate.at(number), reference.at(number)
            comparison.shapes[number] = ratios_between(*sides) if compared else ShapeRatios()
        _explain(comparison, result)


def _explain(comparison: Comparison, result: StudyResult) -> None:
    """Fills in a comparison's start-up cost and its notes for the reader."""
    candidate, reference = map(result.variant, (comparison.candidate, comparison.reference))
    comparison.break_even = None
    unmeasured = [variant for variant in (candidate, reference) if not variant.status.timed]
    if unmeasured:
        comparison.note = "; ".join(f"{variant.name}: {variant.status}" for variant in unmeasured)
        return
    speed, floor = comparison.shapes[0].speedup, comparison.shapes[0].floor
    call = latency(reference, result.config.protocol.estimator, result.confidence)
    found = break_even(candidate, reference, call, speed)
    close = speed is not None and (floor is None or not exceeds(speed.estimate, floor))
    comparison.break_even = uncounted(found) if found and close else found
    work = candidate.other_work(reference)
    notes = [f"not the same work: {', '.join(work)}"] if work else []
    if speed is None and not (candidate.given_up or reference.given_up):
        notes.append("no session timed a round of both variants")
    comparison.note = "; ".join(notes)


def exceeds(ratio: float, floor: float) -> bool:
    """Returns whether a ratio is farther from 1 than that of two identical workers, by more than rounding."""
    distance, chance = abs(math.log(ratio)), math.log(floor)
    return distance > chance and not math.isclose(distance, chance, rel_tol=1e-9)


def log_times(measurement: Measurement, in_blocks: bool) -> np.ndarray:
    """Returns the log of the times of the rounds that decide; in blocks, relative to the baseline before and after.

    A block that broke off before the baseline was measured again gives none.
    """
    times: np.ndarray = np.log(measurement.shapes[0].deciding_s)
    if measurement.shapes[0].latency_before_s:
        before, after = np.log(measurement.shapes[0].latency_before_s), np.log(measurement.shapes[0].latency_after_s)
        rounds = min(times.size, before.size, after.size)
        return times[:rounds] - (before[:rounds] + after[:rounds]) / 2
    # In blocks, only the baseline itself has no baseline before and after it; its ratio to itself is 1.
    return np.zeros(times.size) if in_blocks else times


def ratio(logs: np.ndarray, confidence: float, unit: str) -> Interval:
    """Returns a geometric mean with a t interval on the log scale, from three processes on; of rounds without one."""
    return _one_sample(logs, unit).interval(confidence)


def _one_sample(logs: np.ndarray, unit: str) -> LogRatio:
    n, mean = int(logs.size), float(logs.mean())
    if unit == "round" or n < MINIMUM_PROCESSES:
        return LogRatio(mean, n=n, unit=unit)
    return LogRatio(mean, float(logs.std(ddof=1)) / math.sqrt(n), n - 1, n, unit)


def two_samples(logs: np.ndarray, reference: np.ndarray) -> LogRatio:
    """Returns the difference of two means with Student's error for equal variances; each value is a process."""
    n, m = int(logs.size), int(reference.size)
    difference = float(logs.mean() - reference.mean())
    if min(n, m) < MINIMUM_PROCESSES:
        return LogRatio(difference, n=min(n, m))
    pooled = ((n - 1) * logs.var(ddof=1) + (m - 1) * reference.var(ddof=1)) / (n + m - 2)
    return LogRatio(difference, math.sqrt(pooled * (1 / n + 1 / m)), n + m - 2, min(n, m))


def paired_logs(candidate: Measurement, reference: Measurement) -> np.ndarray:
    """Returns log(reference / candidate) by round."""
    in_blocks = bool(candidate.shapes[0].latency_before_s or reference.shapes[0].latency_before_s)
    mine, other = _shared_rounds(candidate, reference, in_blocks)
    gained: np.ndarray = other - mine
    return gained


def speedup_drift(
    later: tuple[VariantResult, VariantResult], earlier: tuple[VariantResult, VariantResult]
) -> LogRatio | None:
    """Returns a later speed-up over an earlier one, each of a variant over its own baseline, and per image.

    The two runs share no rounds: Welch's error for the difference of two means of log ratios, one for each replicate
    that the variant shares with its baseline. There is none where a run has fewer than three.
    """
    mine, other = (
        np.array([values.mean() for values in logs_by_replicate(paired(*sides)).values()]) + log_images(*sides)
        for sides in (later, earlier)
    )
    if not mine.size or not other.size:
        return None
    found = LogRatio(float(mine.mean() - other.mean()), n=int(min(mine.size, other.size)))
    if found.n >= MINIMUM_PROCESSES:
        shares = np.array([values.var(ddof=1) / values.size for values in (mine, other)])
        total = float(shares.sum())
        freedom = total**2 / float(np.sum(shares**2 / [mine.size - 1, other.size - 1])) if total else 1.0
        found = replace(found, error=math.sqrt(total), freedom=freedom)
    return found


def require_precision(protocol: Protocol, gate: Gate) -> None:
    """Raises UsageError if no number of processes could reach the precision."""
    problems = []
    pilot = gate.replicates if protocol.replicates is None else protocol.replicates
    if protocol.precision is not None and pilot < MINIMUM_PROCESSES:
        problems.append(
            f"protocol.precision={protocol.precision:g}: needs protocol.replicates={MINIMUM_PROCESSES} or more, not "
            f"{pilot}: their deviation decides how many processes are added"
        )
    if problems:
        raise UsageError(problems)


def processes_needed(result: StudyResult) -> dict[str, int]:
    """Returns by candidate how many processes its speed-ups need for an interval as narrow as `protocol.precision`.

    Candidates without an interval are left out. To measure until an interval is narrow enough means to stop when it
    happens to look narrow, and such intervals miss the truth too often. So sdopt uses Stein's two stages (1945): the
    deviation among the first `protocol.replicates` processes, the pilot, fixes the number of processes, and the
    interval around the mean of all processes uses that same deviation. The coverage is then as stated, whatever the
    deviation, because deviation and mean of normal samples are independent.
    """
    precision, found = result.config.protocol.precision, dict[str, int]()
    if precision is None:
        return found
    for edge in result.comparisons:
        candidate, reference = result.variant(edge.candidate), result.variant(edge.reference)
        if candidate.role == "control":
            continue
        for shape_index in range(len(result.shapes)):
            pilot = pilot_speedup(candidate.at(shape_index), reference.at(shape_index))
            if pilot is not None and (width := pilot.half_width(result.confidence)) is not None:
                needed = math.ceil(pilot.n * (width / math.log1p(precision)) ** 2)
                found[candidate.name] = max(needed, pilot.n, found.get(candidate.name, 0))
    return found


def kept_going(result: StudyResult) -> Mapping[str, tuple[int, int]]:
    """Returns how many processes each candidate has and needs, for those that needed more than the pilot had."""
    if result.precision is None:
        return {}
    return {
        name: (len(result.variant(name).samples), needed)
        for name, needed in result.precision.needed.items()
        if needed > result.config.replicates
    }
