"""Says what would make a variant fit that does not fit into a card's memory."""

from dataclasses import dataclass

from sdopt.apps.foresight.blueprints import blueprint
from sdopt.apps.foresight.cpu import device_of
from sdopt.apps.foresight.memory import ONLY_ALONE, Blueprint, footprint
from sdopt.config.composer import HydraComposer
from sdopt.errors import ConflictError, UsageError
from sdopt.hardware.cards import BFLOAT16, has
from sdopt.hardware.faults import is_spoiled, without_arithmetic
from sdopt.options.text_encoder_offload import TextEncoderOffload
from sdopt.pipelines.family import Family
from sdopt.pipelines.loading import family_of
from sdopt.pipelines.parts import TEXT_ENCODERS
from sdopt.record.comparisons import Interval
from sdopt.schema import Shape, Sheet
from sdopt.statistics.words import gib_text, seconds_parts
from sdopt.variant import Variant

Memory = tuple[str, ...]
"""Options of the group `memory`."""

_OF_UNETS: tuple[Memory, ...] = (
    (),
    ("vae_tiling",),
    ("model_offload",),
    ("model_offload", "vae_tiling"),
    ("group_offload",),
    ("group_offload", "tiny_vae"),
    ("sequential_offload",),
    ("sequential_offload", "tiny_vae"),
)
"""Ways to need less memory with all weights as they are, those that move the least first."""

_OF_TRANSFORMERS: tuple[Memory, ...] = (
    (),
    ("vae_tiling",),
    ("text_encoder_offload",),
    ("text_encoder_offload", "vae_tiling"),
    ("model_offload",),
    ("model_offload", "vae_tiling"),
    ("group_offload",),
    ("group_offload", "vae_tiling"),
    ("sequential_offload", "vae_tiling"),
    ("sequential_offload", "tiny_vae"),
)
"""The same for transformers."""

_PACKED: tuple[tuple[str, Memory], ...] = (
    ("", ("model_offload", "without_t5")),
    ("", ("model_offload", "without_t5", "vae_tiling")),
    ("", ("model_offload", "quantized_text_encoders")),
    ("", ("model_offload", "quantized_text_encoders", "vae_tiling")),
    ("", ("model_offload", "quantized_text_encoders", "layerwise_casting")),
    (
        "",
        ("model_offload", "quantized_text_encoders", "layerwise_casting", "vae_tiling"),
    ),
    ("uint4_sdnq", ("model_offload", "quantized_text_encoders")),
    ("uint4_sdnq", ("model_offload", "quantized_text_encoders", "vae_tiling")),
    ("nf4_bitsandbytes", ("model_offload", "quantized_text_encoders")),
    ("nf4_bitsandbytes", ("model_offload", "quantized_text_encoders", "vae_tiling")),
    ("uint4_sdnq", ("group_offload", "quantized_text_encoders", "vae_tiling")),
)
"""The same without T5, where a pipeline can do that, or with weights in 8 or 4 bits; "" is the type of all weights.

They are loaded into the host's memory first: on the card they would not fit yet.
"""

_TYPES = {"fp16": "float16", "fp32": "float32"}
"""Types of what 4-bit weights are multiplied with, where it is not bfloat16."""

_ONE_BY_ONE = {"group_offload", "sequential_offload"}
"""Options that move single layers in each step."""


@dataclass(frozen=True)
class Way:
    """Choices with which a variant fits into a card.

    Attributes:
        choices: as on the command line.
        likely: GiB on the card.
        host: GiB of weights that wait in the host's memory; 0 if none do.
        close: whether that is nearly all of the card.
        time: of a call, where one is told.
    """

    choices: tuple[str, ...]
    likely: float
    host: float
    close: bool = False
    time: Interval | None = None

    @property
    def moves_layers(self) -> bool:
        """Whether single layers move in each step."""
        named = " ".join(self.choices)
        return any(option in named for option in _ONE_BY_ONE)

    def __str__(self) -> str:
        beside = (
            f", and {gib_text(self.host)} of the host's memory" if self.host else ""
        )
        alone = f": {ONLY_ALONE}" if self.close else ""
        takes = ""
        if self.time:
            takes = f"about {' '.join(seconds_parts(self.time))}, "
        needs = f"{takes}likely {gib_text(self.likely)}{beside}{alone}"
        return f"{' '.join(self.choices)} ({needs})"


@dataclass(frozen=True)
class WaysToFit:
    """The first ways to fit into a card; None where there is none.

    Attributes:
        whole: with all weights as they are.
        roomy: the same where a desktop is on the card, too, if the former leaves no room for one.
        packed: with fewer weights or bits, which changes images; of transformers alone.
    """

    whole: Way | None = None
    packed: Way | None = None
    roomy: Way | None = None

    def __str__(self) -> str:
        ways = [str(self.whole)] if self.whole else []
        if self.roomy:
            ways.append(f"beside a desktop: {self.roomy}")
        if self.packed:
            ways.append(
                f"with fewer weights or bits, which changes images: {self.packed}"
            )
        return "; ".join(ways)


Needed = dict[tuple[str, ...], tuple[Variant, Blueprint] | None]
"""By choices, the variant and what its networks need; None where it cannot be composed."""


def what_fits(
    composer: HydraComposer, sheet: Sheet, shape: Shape, known: Needed
) -> WaysToFit:
    """Returns the first choices with which the composed variant fits into a card.

    What moves whole networks is fast enough: fewer bits are told where only single layers that move would fit, or where
    nothing else may be on the card.

    Args:
        composer: of the variant.
        sheet: of the card.
        shape: of the images.
        known: what was counted for other cards, and is not counted again; gets what is.
    """
    composed = composer.variant(None)
    family = family_of(composed.model)
    numbers = _numbers_for(sheet, family, "float16" in composed.number_types)
    ladder = _OF_UNETS if family.is_unet else _OF_TRANSFORMERS
    whole = roomy = None
    for memory in ladder:
        choices = _choices(numbers, memory, family)
        way = _way(composer, sheet, shape, choices, known)
        if way is None:
            continue
        if whole is None or not (way.close or way.moves_layers):
            whole = way
        elif not way.close:
            roomy = way
        if not way.close:
            break
    fast = whole is not None and not (whole.close or whole.moves_layers)
    if family.is_unet or fast:
        return WaysToFit(whole, roomy=roomy)
    for precision, memory in _PACKED:
        choices = _choices(precision or numbers, memory, family, others=numbers)
        packed = _way(composer, sheet, shape, choices, known)
        if packed and not packed.close:
            return WaysToFit(whole, packed, roomy)
    return WaysToFit(whole, roomy=roomy)


def _choices(
    precision: str, memory: Memory, family: Family, others: str = ""
) -> tuple[str, ...]:
    """Returns choices with the keys that they need together."""
    choices = [f"precision={precision}"]
    in_4_bits = precision in ("uint4_sdnq", "nf4_bitsandbytes")
    if in_4_bits and others in _TYPES:
        choices.append(f"precision.others={_TYPES[others]}")
    if memory:
        choices.append(f"memory=[{','.join(memory)}]")
    if in_4_bits and "quantized_text_encoders" in memory:
        choices.append("memory.quantized_text_encoders.weights=uint4")
    if "vae_tiling" in memory and not family.is_unet:
        # The tiles of their autoencoders are as large as the whole image.
        choices.append("memory.vae_tiling.tile_size=512")
        if "group_offload" in memory:
            choices.append("memory.group_offload.use_stream=false")
    return tuple(choices)


def _way(
    composer: HydraComposer,
    sheet: Sheet,
    shape: Shape,
    choices: tuple[str, ...],
    known: Needed,
) -> Way | None:
    """Returns how choices fit into a card; None if they do not, or cannot run there."""
    device = device_of(sheet)
    if choices not in known:
        known[choices] = _counted(composer, choices, shape)
    counted = known[choices]
    if counted is None or counted[0].conflicts(device):
        return None
    variant, plan = counted
    needed = footprint(variant, plan, sheet)
    if needed.verdict(sheet.memory_gib) != "fits":
        return None
    close = needed.fills(sheet.memory_gib)
    # Beside a CPU, what is not needed waits on disk.
    beside = device.is_cuda and not sheet.shares_host_memory
    host = _on_host(variant, plan) if beside else 0.0
    return Way(choices, needed.likely, host, close)


def _counted(
    composer: HydraComposer, choices: tuple[str, ...], shape: Shape
) -> tuple[Variant, Blueprint] | None:
    try:
        variant = composer.variant(None, list(choices))
        return variant, blueprint(variant, shape)
    except (UsageError, ConflictError):
        return None


def _on_host(variant: Variant, plan: Blueprint) -> float:
    """Returns the GiB of a transformer's pipeline that wait in the host's memory."""
    if not plan.is_transformer:
        return 0.0
    options = [option for _, option in variant.applied]
    if any(isinstance(option, TextEncoderOffload) for option in options):
        texts = plan.weights.keys() & {*TEXT_ENCODERS}
        return sum(plan.weights[name] for name in texts)
    waits = any(option.loads_on_host for option in options)
    return sum(plan.weights.values()) if waits else 0.0


def _numbers_for(sheet: Sheet, family: Family, wants_half: bool) -> str:
    """Returns the precision to choose on a card; `wants_half` says that float16 was chosen."""
    device = device_of(sheet)
    if not device.is_cuda:
        return "bf16" if family.dtype == "bfloat16" else "fp32"
    computes = has(device, BFLOAT16)
    slow = without_arithmetic(sheet, ["bfloat16"])
    if computes and not slow and not wants_half:
        return "bf16"
    black = family.float16 == "overflows" or is_spoiled(sheet, "float16")
    return "fp32" if black else "fp16"
