"""What offloading adds to a call: weights cross the link between host and card, at a rate that hosts differ in."""

from collections.abc import Collection, Mapping

from sdopt.options.base import Optimization
from sdopt.options.offload import GroupOffload, ModelOffload, SequentialOffload
from sdopt.options.text_encoder_offload import TextEncoderOffload
from sdopt.pipelines.parts import TEXT_ENCODERS
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


def moved_gib(
    options: Collection[Optimization],
    weights: Mapping[str, float],
    denoiser: str,
    passes: int,
) -> tuple[float, float]:
    """Returns the GiB that options move from the host in each step, and once in a call; 0 without any.

    Args:
        options: of the variant.
        weights: GiB of each network.
        denoiser: its name among them.
        passes: how often a step runs it.
    """
    kinds = {type(option) for option in options}
    whole = sum(weights.values())
    each_step = once = 0.0
    if {SequentialOffload, GroupOffload} & kinds:
        each_step = passes * weights[denoiser]
        once = whole - weights[denoiser]
    elif ModelOffload in kinds:
        once = whole
    if TextEncoderOffload in kinds:
        once = sum(weights.get(name, 0.0) for name in TEXT_ENCODERS)
    return each_step, once


def transfer_s(
    options: Collection[Optimization],
    each_step: float,
    once: float,
    steps: int,
    sheet: Sheet,
) -> tuple[float, float]:
    """Returns the seconds in which options move weights in a call, on a fast host and on a slow one; 0 without any.

    Args:
        options: of the variant.
        each_step: bytes that move in each step.
        once: bytes that move once in a call.
        steps: of the call.
        sheet: of the card.
    """
    kinds = {type(option) for option in options}
    networks = {ModelOffload, TextEncoderOffload} & kinds
    if not networks | ({SequentialOffload, GroupOffload} & kinds):
        return 0.0, 0.0
    shares = _NETWORKS if networks else _LAYERS
    if streams(options):
        shares = _STREAM
    at_peak = (each_step * steps + once) / ((sheet.pcie_gb_s or _PCIE_GB_S) * 1e9)
    return at_peak / shares[1], at_peak / shares[0]


def streams(options: Collection[Optimization]) -> bool:
    """Returns whether weights move in a stream of its own, while the card computes."""
    return any(
        isinstance(option, GroupOffload) and option.use_stream is not False
        for option in options
    )
