"""Says what would make a variant fit that does not fit into a card's memory."""

from collections.abc import Sequence

from sdopt.apps.foresight.memory import Blueprint, Footprint, blueprint, footprint
from sdopt.config.composer import HydraComposer
from sdopt.errors import ConflictError, UsageError
from sdopt.hardware.cards import BFLOAT16, has, planned_device
from sdopt.hardware.faults import faults_of
from sdopt.pipelines.loading import family_of
from sdopt.schema import Shape, Sheet
from sdopt.statistics.words import gib_text
from sdopt.variant import Variant

_LADDER: tuple[list[str], ...] = (
    [],
    ["memory=[vae_tiling]"],
    ["memory=[model_offload]"],
    ["memory=[model_offload,vae_tiling]"],
    ["memory=[group_offload]"],
    ["memory=[group_offload,tiny_vae]"],
    ["memory=[sequential_offload]"],
    ["memory=[sequential_offload,tiny_vae]"],
)
"""Ways to need less memory, the fastest first."""

_TILES = "memory.vae_tiling.tile_size=512"

_UINT4 = "memory.quantized_text_encoders.weights=uint4"

_WHOLE: tuple[list[str], ...] = (
    [],
    ["memory=[vae_tiling]", _TILES],
    ["memory=[model_offload]"],
    ["memory=[model_offload,vae_tiling]", _TILES],
    ["memory=[group_offload]"],
    [
        "memory=[group_offload,vae_tiling]",
        _TILES,
        "memory.group_offload.use_stream=false",
    ],
    ["memory=[sequential_offload,vae_tiling]", _TILES],
    ["memory=[sequential_offload,tiny_vae]"],
)
"""The same for transformers, whose autoencoders have tiles of the whole image: with all weights as they are."""

_IN_FEWER_BITS: tuple[list[str], ...] = (
    ["memory=[model_offload,without_t5]"],
    ["memory=[model_offload,without_t5,vae_tiling]", _TILES],
    ["memory=[model_offload,quantized_text_encoders]"],
    ["memory=[model_offload,quantized_text_encoders,vae_tiling]", _TILES],
    ["memory=[model_offload,quantized_text_encoders,layerwise_casting]"],
    [
        "memory=[model_offload,quantized_text_encoders,layerwise_casting,vae_tiling]",
        _TILES,
    ],
    ["precision=uint4_sdnq", "memory=[model_offload,quantized_text_encoders]", _UINT4],
    [
        "precision=uint4_sdnq",
        "memory=[model_offload,quantized_text_encoders,vae_tiling]",
        _UINT4,
        _TILES,
    ],
    [
        "precision=uint4_sdnq",
        "memory=[model_offload,quantized_text_encoders,tiny_vae]",
        _UINT4,
    ],
)
"""The same without T5, where a pipeline can do that, or with weights in 8 or 4 bits.

They are loaded into the host's memory first: on the card they would not fit yet.
"""


Needed = dict[tuple[str, ...], tuple[Variant, Blueprint] | None]
"""By choices, the variant and what its networks need; None where it cannot be composed."""


def what_fits(
    composer: HydraComposer, name: str, sheet: Sheet, shape: Shape, known: Needed
) -> str:
    """Returns the first choices with which the composed variant fits into a card; "" if none of them does.

    What is `known` of choices from other cards is not counted again.
    """
    composed = composer.variant(None)
    half = _half_type(sheet, "float16" in composed.number_types)
    if family_of(composed.model).is_unet:
        found = _first(
            composer,
            sheet,
            shape,
            [[f"precision={half}", *rung] for rung in _LADDER],
            known,
        )
        return f"what fits {name}: {found}" if found else ""
    whole = _first(
        composer, sheet, shape, [[f"precision={half}", *rung] for rung in _WHOLE], known
    )
    packed = [
        rung if "precision=" in rung[0] else [f"precision={half}", *rung]
        for rung in _IN_FEWER_BITS
    ]
    fewer = _first(composer, sheet, shape, packed, known)
    ways = [
        whole,
        f"with fewer weights or bits, which changes images: {fewer}" if fewer else "",
    ]
    # What moves networks whole is fast enough: fewer bits are of use where single layers would move.
    if whole and "group_offload" not in whole and "sequential_offload" not in whole:
        ways = ways[:1]
    return f"what fits {name}: {'; '.join(filter(None, ways))}" if any(ways) else ""


def _first(
    composer: HydraComposer,
    sheet: Sheet,
    shape: Shape,
    rungs: Sequence[list[str]],
    known: Needed,
) -> str:
    """Returns the first of some choices that fit, in words; "" if none does."""
    device = planned_device(sheet)
    for choices in rungs:
        key = tuple(choices)
        if key not in known:
            known[key] = _counted(composer, choices, shape)
        counted = known[key]
        if counted is None or counted[0].conflicts(device):
            continue
        variant, plan = counted
        needed = footprint(variant, plan, device.is_cuda)
        if needed.verdict(sheet.memory_gib) == "fits":
            return f"{' '.join(choices)} ({_needs(variant, plan, needed)})"
    return ""


def _counted(
    composer: HydraComposer, choices: list[str], shape: Shape
) -> tuple[Variant, Blueprint] | None:
    try:
        variant = composer.variant(None, choices)
        return variant, blueprint(variant, shape)
    except (UsageError, ConflictError):
        return None


def _needs(variant: Variant, plan: Blueprint, needed: Footprint) -> str:
    """Returns what a call needs, on the card and beside it."""
    host = (
        sum(plan.weights.values())
        if any(option.loads_on_host for _, option in variant.applied)
        else 0.0
    )
    beside = (
        f", and {gib_text(host)} of the host's memory"
        if host and plan.is_transformer
        else ""
    )
    return f"likely {gib_text(needed.likely)}{beside}"


def _half_type(sheet: Sheet, wanted: bool) -> str:
    """Returns the precision to choose on a card; `wanted` says that float16 was chosen."""
    if has(planned_device(sheet), BFLOAT16) and not wanted:
        return "bf16"
    return "fp32" if faults_of(sheet.name, sheet, ["float16"]) else "fp16"
