"""Compares the operations of two variants, as counted by sdopt's own trace of a call.

An option that claims a gain must have changed something that can cause one: kernels, operators, types, calls, graphs or
memory. The option's own report does not count.
"""

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


def traced(variant: VariantResult) -> dict[str, float]:
    """Returns what ran in the traced call of a variant, with the graphs that its first call compiled."""
    found = next((measurement for measurement in variant.measurements if measurement.shapes[0].traced), None)
    if found is None:
        return {}
    return found.shapes[0].traced | (
        {"compiled graphs": float(found.shapes[0].graphs)} if found.shapes[0].graphs else {}
    )


def _differing(mine: dict[str, float], other: dict[str, float]) -> set[str]:
    return {name for name in mine.keys() | other.keys() if mine.get(name, 0) != other.get(name, 0)}
