"""What offloading adds to a call: weights cross the link between host and card, at a rate that hosts differ in."""

from collections.abc import Collection
from dataclasses import dataclass

from sdopt.options.base import Optimization
from sdopt.options.offload import GroupOffload, ModelOffload, SequentialOffload
from sdopt.options.text_encoder_offload import TextEncoderOffload
from sdopt.schema import Sheet

Shares = tuple[float, float]

_NETWORKS: Shares = (0.014, 0.08)
"""Least and most share of the link's peak at which whole networks reach the card, which first frees itself of another.

Hosts copy from memory that is not pinned. Published runs of FLUX.1 and SD 3 on three cards reached 0.013 to 0.066.
"""

_LAYERS: Shares = (0.04, 0.11)
"""The same for single layers, one after the other, with a new allocation for each: FLUX.1 on an L20 reached 0.067."""

_STREAM: Shares = (0.4, 0.9)
"""The same from pinned memory in a stream of its own, which copies while the card computes."""

_PCIE_GB_S = 16
"""Rate of a link where a data sheet has none."""


@dataclass(frozen=True)
class Transfer:
    """Seconds that moving weights takes in a call.

    Attributes:
        least, most: on a fast host, and on a slow one.
        beside: whether the card computes meanwhile.
    """

    least: float
    most: float
    beside: bool

    def with_calls(self, low: float, high: float) -> tuple[float, float]:
        """Returns the interval of a call that takes `low` to `high` seconds without it."""
        return (
            max(low, self.least) if self.beside else low + self.least
        ), high + self.most


def transfer_of(
    options: Collection[Optimization],
    each_step: float,
    once: float,
    steps: int,
    sheet: Sheet,
) -> Transfer | None:
    """Returns what the offloading among some options moves; None without any.

    Args:
        options: of the variant.
        each_step: bytes that move in each step.
        once: bytes that move once in a call.
        steps: of the call.
        sheet: of the card.
    """
    kinds = {type(option): option for option in options}
    networks = {ModelOffload, TextEncoderOffload} & kinds.keys()
    if not networks | ({SequentialOffload, GroupOffload} & kinds.keys()):
        return None
    group = kinds.get(GroupOffload)
    beside = isinstance(group, GroupOffload) and group.use_stream is not False
    shares = _STREAM if beside else _NETWORKS if networks else _LAYERS
    at_peak = (each_step * steps + once) / ((sheet.pcie_gb_s or _PCIE_GB_S) * 1e9)
    return Transfer(at_peak / shares[1], at_peak / shares[0], beside)
