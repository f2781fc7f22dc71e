"""Tests several claims together."""

from collections.abc import Sequence

PAYS = "it pays"
"""How a gate's reason begins where a gain holds together with all other claims of the study."""

HARM = "harm"
"""How a gate's reason begins where an option harms what it claims to better."""

NO_BENEFIT = "no benefit"
"""How a gate's reason begins where an option does no harm, and a gain that counts is excluded."""


def holm(p_values: Sequence[float], level: float) -> list[bool]:
    """Says which of several claims hold together: the chance of any false one is at most `level` (Holm 1979)."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    held = [False] * len(p_values)
    for rank, index in enumerate(order):
        if p_values[index] > level / (len(p_values) - rank):
            break
        held[index] = True
    return held
