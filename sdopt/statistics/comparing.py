"""Fills in the comparisons of a study from its raw samples: ratios, the A/A floor, and the start-up cost."""

from sdopt.record.comparisons import BreakEven, Interval, ShapeRatios
from sdopt.record.records import StudyResult, VariantResult
from sdopt.statistics.break_even import break_even, uncounted
from sdopt.statistics.pairs import flattened, paired
from sdopt.statistics.ratios import (
    LogRatio,
    exceeds,
    floor,
    latency,
    log_memory_ratio,
    log_speedup,
    log_tail,
)


def ratios_between(
    result: StudyResult,
    candidate: VariantResult,
    reference: VariantResult,
) -> ShapeRatios:
    """Returns how two variants of a study that were timed compare at its main shape."""

    def interval(log: LogRatio | None) -> Interval | None:
        return log.interval(result.confidence) if log else None

    ratios = ShapeRatios(
        speedup=interval(log_speedup(candidate, reference)),
        memory_ratio=interval(log_memory_ratio(candidate, reference)),
        tail_ratio=interval(log_tail(candidate, reference)),
    )
    control = _timed_control(result)
    if control is not None and ratios.speedup is not None:
        processes = flattened(paired(candidate, reference))
        sessions = {measurement.session for measurement, _ in processes}
        ratios.floor = floor(control, result.baseline_variant, sessions)
    return ratios


def _timed_control(result: StudyResult) -> VariantResult | None:
    """Returns the repeated baseline, unless it or the baseline failed."""
    control = result.control
    baseline = result.baseline_variant
    if control is None or not (control.status.timed and baseline.status.timed):
        return None
    return control


def compare(result: StudyResult) -> None:
    """Fills in every comparison of a study from its raw samples, and the A/A floor."""
    control = _timed_control(result)
    result.floor = floor(control, result.baseline_variant) if control else None
    for comparison in result.comparisons:
        candidate, reference = result.sides(comparison)
        comparison.break_even = None
        untimed = [one for one in (candidate, reference) if not one.status.timed]
        if untimed:
            comparison.shapes = [ShapeRatios() for _ in comparison.shapes]
            comparison.note = "; ".join(f"{one.name}: {one.status}" for one in untimed)
            continue
        shapes = range(len(comparison.shapes))
        comparison.shapes = [
            ratios_between(result.at(shape), candidate.at(shape), reference.at(shape))
            for shape in shapes
        ]
        main = comparison.shapes[0]
        comparison.break_even = _break_even(result, candidate, reference, main)
        comparison.note = "; ".join(_notes(candidate, reference, main))


def _break_even(
    result: StudyResult,
    candidate: VariantResult,
    reference: VariantResult,
    ratios: ShapeRatios,
) -> BreakEven | None:
    call = latency(reference, result.config.protocol.estimator, result.confidence)
    level = break_even(candidate, reference, call, ratios.speedup)
    if level is None or ratios.speedup is None:
        return level
    differs = ratios.floor is not None and exceeds(
        ratios.speedup.estimate, ratios.floor
    )
    return level if differs else uncounted(level)


def _notes(
    candidate: VariantResult,
    reference: VariantResult,
    ratios: ShapeRatios,
) -> list[str]:
    """Returns what a reader of a comparison has to know of it."""
    notes = list(filter(None, [candidate.other_work(reference)]))
    given_up = candidate.given_up or reference.given_up
    if ratios.speedup is None and not given_up:
        notes.append("no session timed a round of both variants")
    return notes
