"""Tests several claims together."""

from collections.abc import Sequence

PAYS = "it pays"
"""Start of a gate's reason if a gain holds together with all other claims of the study."""

HARM = "harm"
"""Start of a gate's reason if an option harms a measure that it claims to improve."""

NO_BENEFIT = "no benefit"
"""Start of a gate's reason if an option does no harm, and a gain that counts is excluded."""


def holm(p_values: Sequence[float], level: float) -> list[bool]:
    """Returns which claims hold together, so that the chance of any false one is at most `level` (Holm 1979)."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    held = [False] * len(p_values)
    for rank, index in enumerate(order):
        if p_values[index] > level / (len(p_values) - rank):
            break
        held[index] = True
    return held
