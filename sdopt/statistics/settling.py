"""Finds variants that are shown to be faster or slower before all rounds are timed, so that none is spent on them.

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
    edges = [edge for edge in result.comparisons if edge.candidate == candidate.name]
    needed = any(edge.reference == candidate.name for edge in result.comparisons)
    return (
        bool(edges)
        and not needed
        and all(
            _differs(result.at(shape_index), candidate.name, edge.reference)
            for edge in edges
            for shape_index in range(len(result.shapes))
        )
    )


def _differs(result: StudyResult, candidate: str, reference: str) -> bool:
    sides = result.variant(candidate), result.variant(reference)
    found, control = log_speedup(*sides), result.control
    if found is None or found.error is None or control is None:
        return False
    interval = found.interval(1 - (1 - result.confidence) / _EARLY)
    by_chance = floor(control, result.variant(result.baseline))
    smallest, _ = smallest_change(SPEEDUP, result.config.protocol, sides[1])
    assert interval.low is not None
    assert interval.high is not None
    clear = interval.low > smallest or interval.high < 1 / smallest
    return clear and by_chance is not None and exceeds(interval.estimate, by_chance)
