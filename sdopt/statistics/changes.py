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
    first, again = (traced(row) if row else {} for row in (result.variant(result.baseline), result.control))
    chance = _differing(first, again) if first and again else set()
    names = sorted(_differing(mine, other) - chance)
    return [f"{name} {other.get(name, 0):g} → {mine.get(name, 0):g}" for name in names]


def traced_active(variant: VariantResult, baseline: VariantResult) -> bool:
    """Returns whether a variant has options beyond the baseline's, and traces of its calls show each as active."""
    added = difference(variant.choices, baseline.choices).keys() & variant.promises.keys()
    shapes = [shape for measurement in variant.measurements for shape in measurement.shapes]
    evidence = [item for shape in shapes for item in shape.evidence]
    shown = {item.axis for item in evidence} - {item.axis for item in evidence if not item.engaged}
    return bool(added) and added <= shown


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
