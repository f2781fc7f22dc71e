"""Says what would make a variant fit that does not fit into a card's memory."""

from sdopt.apps.foresight.memory import blueprint, footprint
from sdopt.config.composer import HydraComposer
from sdopt.errors import ConflictError, UsageError
from sdopt.hardware.cards import BFLOAT16, has, planned_device
from sdopt.hardware.faults import faults_of
from sdopt.schema import Shape, Sheet
from sdopt.statistics.words import gib_text

_LADDER: tuple[list[str], ...] = (
    [],
    ["memory=[vae_tiling]"],
    ["memory=[model_offload,vae_tiling]"],
    ["memory=[sequential_offload]"],
)
"""Ways to need less memory, the fastest first."""


def what_fits(composer: HydraComposer, name: str, sheet: Sheet, shape: Shape) -> str:
    """Returns the first choices with which the composed variant fits into a card; "" if none of them does."""
    device = planned_device(sheet)
    half = _half_type(sheet, "float16" in composer.variant(None).number_types)
    for memory in _LADDER:
        choices = [f"precision={half}", *memory]
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


def _half_type(sheet: Sheet, wanted: bool) -> str:
    """Returns the precision to choose on a card; `wanted` says that float16 was chosen."""
    if has(planned_device(sheet), BFLOAT16) and not wanted:
        return "bf16"
    return "fp32" if faults_of(sheet.name, sheet, ["float16"]) else "fp16"
