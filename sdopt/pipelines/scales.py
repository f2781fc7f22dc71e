"""Weights of 8 bits in files of the web: which scale belongs to which weight, and what cannot be read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdopt.pipelines.weights import Header

if TYPE_CHECKING:
    import torch

_SCALE = (".scale_weight", ".weight_scale")
"""Ends of the names of a weight's scale: in ComfyUI's files of 2024, and in its later ones and those of the makers."""

_FORMAT = ".comfy_quant"
"""The end of the name of a tensor that holds JSON: how the weight beside it is stored."""

_BESIDE = (".scale_input", ".input_scale", _FORMAT)
"""Ends of the names of what is of use only where activations are quantized, too."""

MARKER = "scaled_fp8"
"""A tensor without use, by which ComfyUI knows that weights have scales."""

_FLOAT8 = ("F8_E4M3", "F8_E5M2")

_FLOATS = ("F64", "F32", "F16", "BF16")

_READ = ("float8_e4m3fn", "float8_e4m3fn_rowwise", "float8_e5m2")
"""Formats that are numbers of 8 bits times a scale, as ComfyUI names them."""

_HARMLESS = ("format", "full_precision_matrix_mult", "orig_dtype")
"""What may be said of a format without changing the weights. Others, such as `convrot`, turn them first."""

_Format = dict[str, Any]
"""What a file says of how a layer is stored; `_UNREADABLE` if that is no object."""

_Scales = Mapping[str, str]
"""The name of the scale of each weight that has one."""

_IN_HEADER = "_quantization_metadata"

UNREAD = "what its header names"
"""Stands for all layers where a header says something of them that cannot be read."""

_UNREADABLE = {"format": "unreadable"}


def formats_in(file: Path, header: Header) -> dict[str, _Format]:
    """Returns how a file says that its layers are stored, by their names in it.

    ComfyUI writes so into tensors beside the weights, and makers of models into the header.
    """
    from safetensors import safe_open

    formats: dict[str, _Format] = {}
    if said := header.metadata.get(_IN_HEADER):
        layers = _object_in(said).get("layers")
        if not isinstance(layers, dict):
            layers = {UNREAD: None}
        for layer, described in layers.items():
            formats[layer] = _as_object(described)
    named = [name for name in header.shapes if name.endswith(_FORMAT)]
    if not named:
        return formats
    with safe_open(file, "np") as opened:
        for name in named:
            text = opened.get_tensor(name).tobytes()
            formats[name.removesuffix(_FORMAT)] = _object_in(text)
    return formats


def _object_in(text: str | bytes) -> _Format:
    try:
        return _as_object(json.loads(text))
    except ValueError:
        return _UNREADABLE


def _as_object(said: Any) -> _Format:
    """Returns an object of JSON; what cannot be read says so as its format, and is refused by that."""
    return said if isinstance(said, dict) else _UNREADABLE


def scales_of(
    header: Header,
    formats: Mapping[str, _Format],
) -> tuple[dict[str, str], list[str]]:
    """Returns the name of the scale of each scaled weight of a network, and what cannot be read, one line at most.

    A weight is its numbers of 8 bits times its scale: one number, or one for each row. Where nothing speaks of scales,
    numbers of 8 bits are the weights themselves.

    Args:
        header: of the network's tensors.
        formats: how the file says that some of its layers are stored.
    """
    if line := header.other_format:
        return {}, [f"{line}: {_WAY}"]
    scales: dict[str, str] = {}
    for name in header.shapes:
        for end in _SCALE:
            if not name.endswith(end):
                continue
            weight = f"{name.removesuffix(end)}.weight"
            if weight in scales:
                return {}, [f"holds two scales of {weight}: {_WAY}"]
            scales[weight] = name
    marked = bool(scales or formats) or any(map(_is_marker, header.shapes))
    wrong = (
        _unknown(formats) or _unread(header, scales, marked) or _unfit(header, scales)
    )
    return scales, wrong


def is_beside(name: str) -> bool:
    """Returns whether a tensor is no weight, but belongs to one."""
    return name.endswith((*_SCALE, *_BESIDE)) or _is_marker(name)


def _is_marker(name: str) -> bool:
    return name.rpartition(".")[2] == MARKER


def _unknown(formats: Mapping[str, _Format]) -> list[str]:
    """Returns which layer is stored in a way that is not read."""
    for layer, said in formats.items():
        words = [str(said.get("format"))]
        for key, value in said.items():
            if value and key not in _HARMLESS:
                words.append(key)
        if words[0] not in _READ or len(words) > 1:
            what = " with ".join(words)
            return [
                f"says that {layer} is stored as {what}, which sdopt does not read: {_WAY}"
            ]
    return []


def _unread(header: Header, scales: _Scales, marked: bool) -> list[str]:
    """Returns which matrix cannot be read by its type, or lacks its scale in a file that speaks of scales."""
    for name, kind in header.types.items():
        if is_beside(name) or len(header.shapes[name]) < 2:
            continue
        is_number = kind in (*_FLOATS, *_FLOAT8)
        if not is_number and not name.endswith("position_ids"):
            return [
                f"holds {name} in {kind}, which means nothing without its scales: {_WAY}"
            ]
        if marked and kind in _FLOAT8 and name not in scales:
            return [
                f"speaks of scales, but holds none for {name}, whose 8 bits mean nothing without it: {_WAY}"
            ]
    return []


def _unfit(header: Header, scales: _Scales) -> list[str]:
    """Returns which scale belongs to no weight, or to blocks of one."""
    for weight, scale in scales.items():
        kind = header.types[scale]
        shape = header.shapes[scale]
        weight_shape = header.shapes.get(weight)
        if weight_shape is None:
            return [f"holds {scale}, and no {weight}"]
        rows, *rest = (*shape, 1)
        single = rows == 1
        by_rows = shape[:1] == weight_shape[:1]
        blocks = any(size != 1 for size in rest)
        if kind not in _FLOATS or blocks or not (single or by_rows):
            what = f"{scale} of shape {shape} in {kind}"
            return [f"holds {what}, as scales of blocks or columns have: {_WAY}"]
    return []


_WAY = "give the model in 16 bits, in float8, or as GGUF"


def multiplied(
    tensors: Mapping[str, torch.Tensor],
    scales: _Scales,
) -> dict[str, torch.Tensor]:
    """Returns the weights alone: those with a scale times it, in float32, so that they are rounded once."""
    import torch

    weights = {}
    for name, tensor in tensors.items():
        if is_beside(name):
            continue
        weights[name] = tensor
        if name in scales:
            scale = tensors[scales[name]].to(torch.float32)
            shape: list[int] = []
            if scale.numel() > 1:
                rest = [1] * (tensor.ndim - 1)
                shape = [-1, *rest]
            weights[name] = tensor.to(torch.float32) * scale.reshape(shape)
    return weights
