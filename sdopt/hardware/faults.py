"""Knows faults of cards that make images wrong without a word, or cost a user hours; each with public reports of it.

A fault belongs to a die: all cards with it have it, whatever their names.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

from sdopt.schema import Sheet


@dataclass(frozen=True)
class Fault:
    """A known fault of a die.

    Attributes:
        chips: the dies.
        names: a pattern of the names of cards with these dies, for those that have no data sheet.
        types: the number types in which it shows; () if in all.
        spoils: whether images are wrong, and not only slow, or absent with an error.
        says: what happens, and what to do.
        sources: public reports.
    """

    chips: tuple[str, ...]
    names: str
    types: tuple[str, ...]
    says: str
    sources: tuple[str, ...]
    spoils: bool = False


FAULTS = (
    Fault(
        ("TU116", "TU117"),
        r"\bGTX 16[35]0|\bGTX 1660|\bMX[45]50|\bCMP 30HX|\bT(?:400|500|550|600|1000|1200|2000)\b",
        ("float16",),
        "float16 gives black or NaN images on cards with this die (GTX 16 and others without tensor cores): choose "
        "precision=fp32; environment=[cudnn_benchmark] avoids it on some",
        (
            "https://github.com/pytorch/pytorch/issues/58123",
            "https://github.com/pytorch/pytorch/issues/77955",
            "https://github.com/huggingface/diffusers/issues/2153",
            "https://github.com/AUTOMATIC1111/stable-diffusion-webui/pull/4407",
            "https://github.com/easydiffusion/easydiffusion/issues/755",
        ),
        spoils=True,
    ),
    Fault(
        ("GP102", "GP104", "GP106", "GP107", "GP108"),
        r"\bGTX 10[3-8]0|\bTesla P(?:4|40)\b|\bTITAN X[p ]|\bQuadro P\d",
        ("float16",),
        "float16 saves memory and no time on this die, which computes in it at 1/64 of its rate",
        (
            "https://github.com/turboderp-org/exllamav2/issues/40",
            "https://github.com/ggml-org/llama.cpp/issues/1837",
        ),
    ),
    Fault(
        ("Navi 10", "Navi 14"),
        r"\bRX 5[3-7]\d0|\bW5[57]00",
        ("float16",),
        "float16 gives blank images or noise on this die: choose precision=fp32",
        (
            "https://github.com/vladmandic/sdnext/issues/3475",
            "https://github.com/xuhuisheng/rocm-build/issues/36",
        ),
        spoils=True,
    ),
    Fault(
        ("Navi 22", "Navi 23"),
        r"\bRX 6[67][05]0",
        (),
        "builds of PyTorch without kernels for this die (gfx1031, gfx1032) hang or crash: set "
        "HSA_OVERRIDE_GFX_VERSION=10.3.0 there",
        ("https://github.com/ROCm/legacy-rocm-build/issues/4546",),
    ),
    Fault(
        ("Navi 21", "Navi 22", "Navi 23", "Navi 24"),
        r"\bRX 6[4-9]\d0|\bW6[4-9]00|\b6[68]0M\b",
        ("bfloat16",),
        "bfloat16 takes about twice the time of float16 on this die, which has no instructions for it: choose "
        "precision=fp16, or precision=fp32 for a model that overflows in it",
        (
            "https://github.com/Comfy-Org/ComfyUI/issues/15006",
            "https://github.com/Comfy-Org/ComfyUI/issues/2096",
            "https://github.com/lodestone-rock/ComfyUI_FluxMod/issues/32",
        ),
    ),
    Fault(
        ("Navi 32", "Navi 33"),
        r"\bRX 7[678]00",
        (),
        "builds of PyTorch without kernels for this die (gfx1101, gfx1102) hang or crash: set "
        "HSA_OVERRIDE_GFX_VERSION=11.0.0 there",
        (
            "https://github.com/AUTOMATIC1111/stable-diffusion-webui/issues/13534",
            "https://github.com/AUTOMATIC1111/stable-diffusion-webui/issues/15434",
        ),
    ),
    Fault(
        ("Strix Halo",),
        r"\b80[56]0S\b",
        (),
        "builds of PyTorch without kernels for this die (gfx1151) fail in their first call: set "
        "HSA_OVERRIDE_GFX_VERSION=11.0.0 there",
        ("https://github.com/pytorch/pytorch/issues/164346",),
    ),
)
"""Faults that a library does not report."""


def faults_of(
    device_name: str, sheet: Sheet | None, types: Collection[str] | None = None
) -> list[str]:
    """Returns the known faults of a card in words.

    Args:
        device_name: its name in the driver.
        sheet: its data sheet, if there is one.
        types: the number types that a variant computes in; None for any.
    """
    faults = []
    for fault in FAULTS:
        has_chip = sheet is not None and sheet.chip in fault.chips
        if not has_chip and not (
            sheet is None and re.search(fault.names, device_name, re.IGNORECASE)
        ):
            continue
        if not fault.types or types is None or {*fault.types} & {*types}:
            faults.append(fault.says)
    return faults


def is_spoiled(sheet: Sheet, number_type: str) -> bool:
    """Returns whether images that a card computes in a number type are wrong without a word."""
    return any(
        fault.spoils and sheet.chip in fault.chips and number_type in fault.types
        for fault in FAULTS
    )


def without_arithmetic(sheet: Sheet, types: Collection[str]) -> str:
    """Returns why nothing is known of the time that a card takes in some number types; "" if something is."""
    slow = sheet.architecture == "rdna2" and "bfloat16" in types
    return "the card has no instructions for bfloat16" if slow else ""


_BLACKWELL = (10, 0)

_FIRST_FOR_BLACKWELL = (2, 7)
"""https://github.com/pytorch/pytorch/issues/150733, https://github.com/lllyasviel/Fooocus/issues/3862"""

_THOR = 11
"""The major compute capability of Jetson Thor, for which kernels of other Blackwells do not run."""

_FIRST_FOR_THOR = (2, 9)
"""https://github.com/dusty-nv/jetson-containers/issues/1373, https://github.com/OpenRAL/openral/pull/167"""

_LEAVES_OUT = {(7, 0): (2, 8), (7, 5): (2, 11)}
"""By compute capability that is still whole: the PyTorch since which only builds for CUDA 12.6 have the older ones.

https://github.com/easydiffusion/torchruntime/issues/22, https://github.com/pytorch/pytorch/issues/172352
"""


def without_kernels(sheet: Sheet, torch: tuple[int, int]) -> str:
    """Returns why no build of a PyTorch (major, minor) runs on a card; "" if one does, or nobody knows."""
    capability = sheet.capability
    if capability is None or capability < _BLACKWELL:
        return ""
    first = _FIRST_FOR_THOR if capability[0] == _THOR else _FIRST_FOR_BLACKWELL
    if torch >= first:
        return ""
    return f"PyTorch {_version(torch)} has no kernels for this card: {_version(first)} is the first"


def builds_of(sheet: Sheet, torch: tuple[int, int]) -> str:
    """Returns which builds of a PyTorch (major, minor) alone run on a card; "" if the usual ones do."""
    capability = sheet.capability
    if capability is None:
        return ""
    cuda = "13" if capability[0] == _THOR else ""
    for whole, since in _LEAVES_OUT.items():
        if capability < whole and torch >= since:
            cuda = "12.6"
    if not cuda:
        return ""
    return f"of PyTorch {_version(torch)}, only builds for CUDA {cuda} have kernels for this card"


def _version(parts: tuple[int, int]) -> str:
    return f"{parts[0]}.{parts[1]}"
