"""Tells what differs between the traces of two variants: what shows that an option changed anything."""

from sdopt.record.choices import difference
from sdopt.record.records import StudyResult, VariantResult


def changes_of(result: StudyResult, candidate: VariantResult, reference: VariantResult) -> list[str] | None:
    """Returns what differs between the traces of two variants, in words; None where one of them has none.

    Omits differences that also occur between the two identical baselines. Of calls that another program made, the
    change is that program's own word.
    """
    if result.is_imported:
        return [f"{candidate.name}, as whoever made it says"]
    mine, other = traced(candidate), traced(reference)
    if not mine or not other:
        return None
    names = sorted(_differing(mine, other) - _chance(result))
    return [f"{name} {other.get(name, 0):g} → {mine.get(name, 0):g}" for name in names]


def _chance(result: StudyResult) -> set[str]:
    """Returns what differs between the two identical baselines."""
    first = traced(result.variant(result.baseline))
    again = traced(result.control) if result.control else {}
    return _differing(first, again) if first and again else set()


def traced_active(variant: VariantResult, baseline: VariantResult) -> bool:
    """Returns whether a variant has options beyond the baseline's, and traces of its calls show each as active."""
    added = difference(variant.choices, baseline.choices).keys() & variant.promises.keys()
    active: set[str] = set()
    idle: set[str] = set()
    for measurement in variant.measurements:
        for samples in measurement.shapes:
            for item in samples.evidence:
                (active if item.engaged else idle).add(item.axis)
    return bool(added) and added <= active - idle


def traced(variant: VariantResult) -> dict[str, float]:
    """Returns what ran in the traced call of a variant, with the graphs that its first call compiled."""
    for measurement in variant.measurements:
        samples = measurement.shapes[0]
        if samples.traced and samples.graphs:
            return samples.traced | {"compiled graphs": float(samples.graphs)}
        if samples.traced:
            return samples.traced
    return {}


def _differing(mine: dict[str, float], other: dict[str, float]) -> set[str]:
    return {name for name in mine.keys() | other.keys() if mine.get(name, 0) != other.get(name, 0)}
