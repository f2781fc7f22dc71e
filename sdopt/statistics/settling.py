"""Names candidates that are shown to be faster or slower before all rounds are timed, so that none is spent on them.

Looking after each round finds a difference by chance more often than looking once, so that an early look asks for more:
a quarter of the error of the interval that tables show. `tests/study/test_budget.py` simulates the error of the whole.
"""

from sdopt.record.records import StudyResult, VariantResult
from sdopt.statistics.measures import SPEEDUP, smallest_change
from sdopt.statistics.ratios import exceeds, floor, log_speedup

_EARLY = 4
"""By what the error of an interval is divided in a look before the last round."""


def is_settled(result: StudyResult, candidate: VariantResult) -> bool:
    """Returns whether a candidate is faster or slower than each reference, at every shape, by more than chance."""
    references = []
    for edge in result.comparisons:
        if edge.reference == candidate.name:
            return False
        if edge.candidate == candidate.name:
            references.append(edge.reference)
    for shape_index in range(len(result.shapes)):
        at_shape = result.at(shape_index)
        for reference in references:
            if not _differs(at_shape, candidate.name, reference):
                return False
    return bool(references)


def _differs(result: StudyResult, candidate_name: str, reference_name: str) -> bool:
    candidate = result.variant(candidate_name)
    reference = result.variant(reference_name)
    speedup = log_speedup(candidate, reference)
    control = result.control
    if speedup is None or control is None:
        return False
    interval = speedup.interval(1 - (1 - result.confidence) / _EARLY)
    if interval.low is None or interval.high is None:
        return False
    smallest, _ = smallest_change(SPEEDUP, result.config.protocol, reference)
    if interval.low <= smallest and interval.high >= 1 / smallest:
        return False
    by_chance = floor(control, result.baseline_variant)
    return by_chance is not None and exceeds(interval.estimate, by_chance)
