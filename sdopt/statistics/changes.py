"""Tells what differs between the traces of two variants: what shows that an option changed anything."""

from sdopt.record.choices import difference
from sdopt.record.records import StudyResult, VariantResult


def changes_of(
    result: StudyResult,
    candidate: VariantResult,
    reference: VariantResult,
) -> list[str] | None:
    """Returns what differs between the traces of two variants, in words; None where one of them has none.

    Omits differences that also occur between the two identical baselines. Of calls that another program made, the
    change is that program's own word.
    """
    if result.is_imported:
        return [f"{candidate.name}, as whoever made it says"]
    trace = traced(candidate)
    reference_trace = traced(reference)
    if not trace or not reference_trace:
        return None
    changes = []
    for name in sorted(_differing(trace, reference_trace) - _chance(result)):
        before = reference_trace.get(name, 0)
        after = trace.get(name, 0)
        changes.append(f"{name} {before:g} → {after:g}")
    return changes


def _chance(result: StudyResult) -> set[str]:
    """Returns what differs between the two identical baselines."""
    if result.control is None:
        return set()
    baseline = traced(result.baseline_variant)
    control = traced(result.control)
    return _differing(baseline, control) if baseline and control else set()


def traced_active(variant: VariantResult, baseline: VariantResult) -> bool:
    """Returns whether a variant has options beyond the baseline's, and traces of its calls show each as active."""
    added = (
        difference(variant.choices, baseline.choices).keys() & variant.promises.keys()
    )
    active: set[str] = set()
    idle: set[str] = set()
    for measurement in variant.measurements:
        for samples in measurement.shapes:
            for evidence in samples.evidence:
                axes = active if evidence.engaged else idle
                axes.add(evidence.axis)
    return bool(added) and added <= active - idle


def traced(variant: VariantResult) -> dict[str, float]:
    """Returns what ran in the traced call of a variant, with the graphs that its first call compiled."""
    for measurement in variant.measurements:
        samples = measurement.main
        if samples.traced and samples.graphs:
            return samples.traced | {"compiled graphs": float(samples.graphs)}
        if samples.traced:
            return samples.traced
    return {}


def _differing(trace: dict[str, float], other: dict[str, float]) -> set[str]:
    names = trace.keys() | other.keys()
    return {name for name in names if trace.get(name, 0) != other.get(name, 0)}
