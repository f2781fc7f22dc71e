"""Describes cards: the features that options need, data sheets by device, and the peak rates of a run's types."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from sdopt.errors import ConflictError, UsageError
from sdopt.hardware.device import Device
from sdopt.schema import Hardware, Sheet

CUDA_CONTEXT_GIB = 0.6
"""Memory of a process on a card before its first tensor, for cards on which NVML does not report it."""


@dataclass(frozen=True)
class Feature:
    """Something that runs on CUDA devices from a compute capability on."""

    what: str
    capability: tuple[int, int]


ANY_CARD = (0, 0)
"""The compute capability of what any CUDA device has."""

# Below these capabilities the libraries refuse to run, or only emulate: PyTorch's sdp_utils.cpp (attention) and
# torch/utils/_triton.py (Triton); NVIDIA's table of features by compute capability (types).
TRITON = Feature("Inductor's Triton back end", (7, 0))

MEM_EFFICIENT_ATTENTION = Feature("the mem_efficient kernel", (5, 0))

XFORMERS_ATTENTION = Feature("xFormers' attention", (5, 0))

FLASH_ATTENTION = Feature("the flash kernel", (8, 0))

CUDNN_ATTENTION = Feature("the cudnn kernel", (8, 0))

TF32 = Feature("TensorFloat-32", (8, 0))

CPU_BFLOAT16 = "bfloat16"
"""The attribute of a CPU that says whether oneDNN computes bfloat16 with its vector instructions."""

BFLOAT16 = Feature("bfloat16 arithmetic", (8, 0))

INT8 = Feature("8-bit integer products", (7, 5))

FP8 = Feature("float8 arithmetic", (8, 9))


def missing(device: Device, feature: Feature) -> list[str]:
    """Returns the conflict of a feature with a device, if any."""
    return device.needs_cuda(feature.what, feature.capability)


def has(device: Device, feature: Feature) -> bool:
    """Returns whether a device has a feature."""
    return not missing(device, feature)


def sheet_of(
    device_name: str, sheets: Iterable[Sheet], memory_gib: float | None = None
) -> Sheet | None:
    """Returns the data sheet with the name that the driver gives a device; None if no sheet has exactly that name.

    Cards of one model differ by form factor, and slices of a card (MIG) by size: a name that is nearly the same is
    another card. Of cards that share a name, the memory tells which one it is; without it, the first one counts.
    """
    named = [sheet for sheet in sheets if _is(device_name, sheet)]
    if memory_gib is not None:
        named.sort(key=lambda sheet: abs(sheet.memory_gib - memory_gib))
    return named[0] if named else None


def _is(device_name: str, sheet: Sheet) -> bool:
    return plain_name(device_name) in map(plain_name, sheet.device_names)


def plain_name(name: str) -> str:
    """Returns the name of a device as the driver writes it, in lower case and without the maker NVIDIA."""
    return re.sub(r"^nvidia ", "", name.strip().lower())


def planned_device(sheet: Sheet) -> Device:
    """Returns the device that a data sheet describes, to plan for a card that is not in this machine."""
    return Device(
        # PyTorch calls AMD's cards `cuda` too; they have no compute capability.
        type="cuda" if sheet.capability or sheet.architecture else "cpu",
        name=sheet.name,
        capability=sheet.capability,
        memory_total_gib=sheet.memory_gib,
        memory_free_gib=sheet.memory_gib,
    )


def emulated(device: Device, hardware: Hardware) -> Device:
    """Returns the device as options must see it: with `emulate_memory`, limited to what the sheet's card can do."""
    sheet = hardware.sheet
    if (
        not hardware.emulate_memory
        or sheet is None
        or sheet.capability is None
        or device.capability is None
    ):
        return device
    if sheet.capability >= device.capability:
        return replace(device, name=sheet.name)
    # What cuDNN was probed to take is the real card's; without it, the capability decides.
    attributes = {
        key: value
        for key, value in device.attributes.items()
        if key != "cudnn_head_dimension"
    }
    return replace(
        device, name=sheet.name, capability=sheet.capability, attributes=attributes
    )


def require_sheet(hardware: Hardware) -> None:
    """Raises UsageError if memory is to be emulated, but no card is named."""
    if hardware.emulate_memory and hardware.sheet is None:
        raise UsageError(
            "hardware.emulate_memory=true: choose the card whose memory to emulate, as in hardware=a10"
        )


def require_card(hardware: Hardware, device: Device) -> None:
    """Raises ConflictError if the chosen data sheet is another card's, to which times would be attributed."""
    sheet = hardware.sheet
    if sheet is None:
        return
    if not hardware.emulate_memory:
        if not _is(device.name, sheet):
            raise ConflictError(
                f"hardware: the data sheet is for {sheet.name}, but this runs on {device.name}, whose times differ; "
                f"choose hardware=auto, hardware.emulate_memory=true (tests what fits in the memory of {sheet.name}) "
                "or dry_run=true (shows what would run on it)"
            )
        return
    if not device.is_cuda:
        raise ConflictError(
            f"hardware.emulate_memory=true: needs a CUDA device, whose allocator it caps; this runs on {device.name}"
        )
    if sheet.memory_gib > device.memory_total_gib:
        raise ConflictError(
            f"hardware.emulate_memory=true: {sheet.name} has {sheet.memory_gib:g} GiB, and {device.name} only "
            f"{device.memory_total_gib:.1f}: choose a smaller card"
        )


RATES = {
    "float32": "fp32",
    "tf32": "tf32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8",
    "int8": "int8",
}
"""The rate of a data sheet for products of a type."""


def peak_of(sheet: Sheet, types: Iterable[str]) -> tuple[str, float] | None:
    """Returns the peak rate of products of these types, by name and in TFLOP/s; None if it is unknown.

    For several types, it is the rate of the fastest, so that an achieved rate cannot exceed it.
    """
    kinds = {RATES[kind] for kind in types if kind in RATES}
    rates = {kind: rate for kind in kinds if (rate := sheet.peak(kind)) is not None}
    if not rates or rates.keys() != kinds:
        return None
    return max(rates.items(), key=lambda item: (item[1], item[0]))


def arithmetic(products: Mapping[str, int], wanted: str, tf32: bool) -> list[str]:
    """Returns the types in which matrix products ran.

    Args:
        products: number of products by the floating type of the inputs; empty if compiled kernels hide it.
        wanted: the type that the configuration asks for, which counts if `products` is empty.
        tf32: whether float32 products, or some of them, may be rounded to TF32.
    """
    types = set(products) or {wanted}
    return sorted(types | ({"tf32"} if tf32 and "float32" in types else set()))
