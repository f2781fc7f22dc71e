"""Says what would make a variant fit that does not fit into a card's memory."""

from collections.abc import Iterator, Sequence

from sdopt.config.composer import HydraComposer
from sdopt.errors import ConflictError, UsageError
from sdopt.foresight.memory import blueprint, footprint
from sdopt.hardware.cards import BFLOAT16, has, planned_device
from sdopt.hardware.faults import faults_of
from sdopt.schema import Shape, Sheet
from sdopt.statistics.words import gib_text

_LADDER = ([], ["memory=[vae_tiling]"], ["memory=[model_offload,vae_tiling]"], ["memory=[sequential_offload]"])
"""Ways to need less memory, the fastest first."""


def what_fits(composer: HydraComposer, name: str, sheet: Sheet, shape: Shape) -> str:
    """Returns the first choices with which the composed variant fits into a card; "" if none of them does."""
    device = planned_device(sheet)
    for choices in _choices(sheet):
        try:
            variant = composer.variant(None, choices)
            if variant.conflicts(device):
                continue
            needed = footprint(variant, blueprint(variant, shape), device.is_cuda)
        except (UsageError, ConflictError):
            continue
        if needed.verdict(sheet.memory_gib) == "fits":
            return f"what fits {name}: {' '.join(choices)} (likely {gib_text(needed.likely)})"
    return ""


def _choices(sheet: Sheet) -> Iterator[Sequence[str]]:
    half = "bf16" if has(planned_device(sheet), BFLOAT16) else "fp16"
    if faults_of(sheet.name, sheet, ["float16"]) and half == "fp16":
        half = "fp32"
    for memory in _LADDER:
        yield [f"precision={half}", *memory]
