"""Memory of a variant without running it, from its blueprint (`blueprints`): the networks as options change them, traced.

The trace gives a floor. What lies above it is elastic: cuDNN's workspaces and the allocator's cache grow while there is
room, and shrink when there is none. So two figures are given, *at least* and *likely*.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sdopt.apps.foresight.cpu import device_of
from sdopt.apps.foresight.latency import Costs
from sdopt.errors import UsageError
from sdopt.hardware.cards import CUDA_CONTEXT_GIB
from sdopt.options.base import Optimization
from sdopt.options.memory import PrecomputedEmbeddings
from sdopt.options.offload import GroupOffload, ModelOffload, SequentialOffload
from sdopt.options.quantization import Quantized
from sdopt.options.text_encoder_offload import TextEncoderOffload
from sdopt.pipelines.catalog import architecture_folder
from sdopt.pipelines.loading import family_of, folder_of
from sdopt.pipelines.parts import TEXT_ENCODERS
from sdopt.schema import Sheet
from sdopt.variant import Variant

if TYPE_CHECKING:
    import torch

_SLACK = 1.15
"""What the allocator reserves for the largest stage, as a multiple of what is alive there, where memory is scarce."""

_COPIES, _WORKSPACE, _WORKSPACE_GIB = 0.61, 0.3, 0.4


def decoding_gib(alive: float) -> float:
    """Returns what decoding takes, with the workspaces of its convolutions, where so many GiB are alive in it.

    Convolutions copy what they read and write into another layout, if that is not much: on an H200, SD 1.5 at 512 pixels,
    SDXL and three transformers at 1024 took 1.61 to 1.68 times what was alive; 16 images at once took 1.32 times that.
    """
    return alive + min(_COPIES * alive, _WORKSPACE * alive + _WORKSPACE_GIB)


@dataclass(frozen=True)
class Blueprint:
    """What a variant's pipeline consists of, in GiB, and what its passes cost.

    Attributes:
        weights: of each network as stored: `unet`, `vae`, `text_encoder`, ….
        denoiser: costs of one step.
        decoder: costs of decoding the images of a call.
        layer: the largest layer's weights, which an offloading option holds at a time.
    """

    weights: dict[str, float]
    denoiser: Costs
    decoder: Costs
    layer: float
    host_bytes: float
    """Bytes that offloading moves from the host in a step; 0 without it."""
    call_bytes: float
    """Bytes that it moves once in a call."""
    decodes_in_float32: bool = False
    """Whether the decoder runs in float32, whatever the precision of the denoiser."""
    name: str = "unet"
    """The name of the denoiser among the weights."""
    texts: float | None = None
    """What model offloading holds of the text encoders at once; None is all of them."""
    loading: float = 0.0
    """What is on the device while weights are quantized there."""
    encoding: Costs = field(default_factory=Costs)
    """Costs of encoding the prompts, where they are counted apart."""

    @property
    def is_transformer(self) -> bool:
        """Whether the denoiser is a transformer."""
        return self.name == "transformer"


_DESKTOP_GIB, _MISSED = 0.5, 0.025
"""Memory of a card that a desktop takes at least, and the share of it by which predictions may miss."""

ONLY_ALONE = (
    "nearly all of the card, so only while nothing else, such as a desktop, is on it"
)
"""What is said of a call that fills a card: where another program needs room, it would spill or run out of memory."""


@dataclass(frozen=True)
class Footprint:
    """Memory of a call, in GiB.

    Attributes:
        floor: weights and activations that must be there together, and the CUDA context.
        likely: with the allocator's slack.
        quantizing: whether the most is there before weights are quantized.
    """

    floor: float
    likely: float
    quantizing: bool = False

    def verdict(self, memory_gib: float) -> str:
        """Returns `fits`, `tight` (only if the allocator gives up its slack) or `does not fit`."""
        if self.floor > memory_gib:
            return "does not fit"
        return "fits" if self.likely <= memory_gib else "tight"

    def fills(self, memory_gib: float) -> bool:
        """Returns whether what fits takes nearly all of a card, and so only while nothing else is on it."""
        room = max(_DESKTOP_GIB, _MISSED * memory_gib)
        return memory_gib - room < self.likely <= memory_gib


def dtype_of(precision: Optimization | None) -> torch.dtype:
    """Returns the type that a precision computes in, and stores all weights in that are not quantized."""
    import torch

    own = "others" if isinstance(precision, Quantized) else "weights"
    dtype: torch.dtype = getattr(torch, getattr(precision, own, "float32"))
    return dtype


def steps_of(variant: Variant) -> int:
    """Returns how often a call of a variant runs the denoiser, which its scheduler decides.

    Those of second order run it twice in each step but the last, and PNDM once more than there are steps.
    """
    import diffusers

    family, chosen = family_of(variant.model), variant.scheduler
    steps = max(1, family.steps_of(variant.workload.steps, variant.task.strength))
    try:
        scheduler = getattr(diffusers, chosen.class_name)(**chosen.options)
        scheduler.set_timesteps(steps)
    except (AttributeError, ImportError, TypeError, ValueError):
        return steps  # a package that is not installed here, or options that a call will refuse
    return len(scheduler.timesteps)


def footprint(
    variant: Variant, plan: Blueprint, sheet: Sheet | None = None
) -> Footprint:
    """Returns the memory of a variant's calls, on a card that is beside its host if there is no data sheet."""
    chosen = {type(option) for option in variant.optimizations.values()}
    context = CUDA_CONTEXT_GIB
    if sheet is not None and not device_of(sheet).is_cuda:
        context = 0.0
    if sheet is not None and sheet.shares_host_memory:
        chosen -= _WAITING
    denoiser, decoder = plan.denoiser.peak / 2**30, plan.decoder.peak / 2**30
    network = plan.weights[plan.name] + plan.weights.get("autocast's copies", 0.0)
    vae = plan.weights["vae"]
    texts = sum(size for name, size in plan.weights.items() if name in TEXT_ENCODERS)
    if ModelOffload in chosen:
        held_of_texts = texts if plan.texts is None else plan.texts
        stages = [
            (network, denoiser, 0.0),
            (vae, 0.0, decoder),
            (held_of_texts, 0.0, 0.0),
        ]
    elif SequentialOffload in chosen or GroupOffload in chosen:
        # A stream holds the next layer too.
        held = plan.layer * (2 if GroupOffload in chosen else 1)
        stages = [(held, denoiser, 0.0), (held, 0.0, decoder)]
    elif TextEncoderOffload in chosen:
        encoders = [
            plan.weights[name] for name in TEXT_ENCODERS if name in plan.weights
        ]
        stages = [
            (network + vae, denoiser, decoder),
            (network + vae + max(encoders, default=0.0), 0.0, 0.0),
        ]
    elif PrecomputedEmbeddings in chosen:
        stages = [(network + vae, denoiser, decoder), (network + vae + texts, 0.0, 0.0)]
    else:
        stages = [(network + vae + texts, denoiser, decoder)]
    floor = max(held + max(step, decoding) for held, step, decoding in stages)
    likely = max(
        held + max(step * _SLACK, decoding_gib(decoding))
        for held, step, decoding in stages
    )
    return Footprint(
        max(floor, plan.loading) + context,
        max(likely, plan.loading) + context,
        plan.loading > floor,
    )


_WAITING = {ModelOffload, SequentialOffload, GroupOffload, TextEncoderOffload}
"""Options with which weights wait in the host's memory."""


def folder_for(variant: Variant) -> Path:
    """Returns the folder with the configurations of a model; if it was not fetched, those of its architecture."""
    try:
        return folder_of(variant.model)
    except UsageError:
        known = architecture_folder(variant.model)
        if known is None:
            raise
        return known
