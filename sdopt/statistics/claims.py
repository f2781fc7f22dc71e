"""Tests several claims together."""

from collections.abc import Sequence


def holm(p_values: Sequence[float], level: float) -> list[bool]:
    """Returns which claims hold together, so that the chance of any false one is at most `level` (Holm 1979)."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    held = [False] * len(p_values)
    for rank, index in enumerate(order):
        if p_values[index] > level / (len(p_values) - rank):
            break
        held[index] = True
    return held
