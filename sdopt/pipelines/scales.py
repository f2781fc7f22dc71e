"""Weights of 8 bits in files of the web: which scale belongs to which weight, and what cannot be read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sdopt.pipelines.weights import Header

if TYPE_CHECKING:
    import torch

_SCALE = (".scale_weight", ".weight_scale")
"""Ends of the names of a weight's scale: in ComfyUI's files of 2024, and in its later ones and those of the makers."""

_BESIDE = (".scale_input", ".input_scale", ".comfy_quant")
"""Ends of the names of what is of use only where activations are quantized, too."""

_MARKER = "scaled_fp8"
"""A tensor without use, by which ComfyUI knows that weights have scales."""

_FLOAT8 = ("F8_E4M3", "F8_E5M2")

_PLAIN = ("F64", "F32", "F16", "BF16", *_FLOAT8)

_OTHERS = {
    ".weight_scale_2": "weights of 4 bits in blocks (nvfp4)",
    ".absmax": "weights of 4 bits by bitsandbytes",
    ".wscales": "weights of 4 bits by SVDQuant (nunchaku)",
    ".qzeros": "weights in packed integers",
}
"""Formats that are not read, by the end of a name."""


def scales_of(header: Header) -> tuple[dict[str, str], set[str], list[str]]:
    """Returns for each scaled weight the name of its scale, the names of what is no weight, and what is wrong.

    A weight is its numbers of 8 bits times its scale: one number, or one for each row. Without any scale in the file,
    numbers of 8 bits are the weights themselves.
    """
    scales: dict[str, str] = {}
    for name in header.shapes:
        if other := next(
            (what for end, what in _OTHERS.items() if name.endswith(end)), None
        ):
            return (
                {},
                set(),
                [f"holds {other}, such as {name}, which sdopt does not read: {_WAY}"],
            )
        if end := next((end for end in _SCALE if name.endswith(end)), None):
            scales[f"{name.removesuffix(end)}.weight"] = name
    beside = {name for name in header.shapes if _is_beside(name)}
    return scales, beside, _unread(header, scales, beside) or _unfit(header, scales)


def _is_beside(name: str) -> bool:
    """Returns whether a tensor is no weight, but belongs to one."""
    return name.endswith((*_SCALE, *_BESIDE)) or _is_marker(name)


def _is_marker(name: str) -> bool:
    return name.rpartition(".")[2] == _MARKER


def _unread(header: Header, scales: Mapping[str, str], beside: set[str]) -> list[str]:
    """Returns which matrix cannot be read by its type, or lacks its scale in a file that has scales."""
    marked = bool(scales) or any(map(_is_marker, beside))
    for name, kind in header.types.items():
        if name in beside or len(header.shapes[name]) < 2:
            continue
        if kind not in _PLAIN:
            return [
                f"holds {name} in {kind}, which means nothing without its scales: {_WAY}"
            ]
        if marked and kind in _FLOAT8 and name not in scales:
            return [
                f"holds scales, but none for {name}, whose 8 bits mean nothing without it: {_WAY}"
            ]
    return []


def _unfit(header: Header, scales: Mapping[str, str]) -> list[str]:
    """Returns which scale belongs to no weight, or to blocks of one."""
    for weight, scale in scales.items():
        shape = header.shapes.get(weight)
        if shape is None:
            return [f"holds {scale}, and no {weight}"]
        columns = len(header.shapes[scale]) > 1 and header.shapes[scale][0] == 1
        numbers = math.prod(header.shapes[scale])
        if numbers != 1 and (numbers != shape[0] or columns):
            return [
                f"holds {scale} of shape {header.shapes[scale]}, as scales of blocks or columns have: {_WAY}"
            ]
    return []


_WAY = "give the model in 16 bits, in float8, or as GGUF"


def multiplied(
    tensors: Mapping[str, torch.Tensor], scales: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """Returns the weights alone: those with a scale times it, in float32, so that they are rounded once."""
    import torch

    found = {}
    for name, tensor in tensors.items():
        if _is_beside(name):
            continue
        if name in scales:
            scale = tensors[scales[name]].to(torch.float32)
            rows = (
                scale.reshape(-1, *[1] * (tensor.ndim - 1))
                if scale.numel() > 1
                else scale.reshape(())
            )
            found[name] = tensor.to(torch.float32) * rows
        else:
            found[name] = tensor
    return found
