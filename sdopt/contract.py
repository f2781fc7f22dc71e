"""Defines what an option may promise about its images."""

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


def weakest(
    contracts: Iterable[Contract], default: Contract = Contract.EXACT
) -> Contract:
    """Returns the weakest of some contracts: all that they promise together."""
    return max(contracts, key=list(Contract).index, default=default)
