"""Defines what an option may promise about its images, and what it may be for."""

from collections.abc import Iterable
from enum import StrEnum


class Contract(StrEnum):
    """The promise of an optimization about its images, compared with those of the reference; the strictest first."""

    EXACT = "exact"
    """Images are identical bit by bit."""
    EQUIVALENT = "equivalent"
    """The mathematics is the same, in another order: images differ by rounding."""
    LOSSY = "lossy"
    """The computation is approximated."""


NOTHING, LATENCY, MEMORY = (
    frozenset[str](),
    frozenset({"latency"}),
    frozenset({"memory"}),
)
"""What an option may claim to be for: it shortens calls, or takes less memory; both are `LATENCY | MEMORY`."""


def weakest(
    contracts: Iterable[Contract], default: Contract = Contract.EXACT
) -> Contract:
    """Returns the weakest of some contracts: all that they promise together."""
    return max(contracts, key=list(Contract).index, default=default)
