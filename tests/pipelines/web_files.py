"""Transformers written as the web has them: by the names of the original programs, in 8 bits, in blocks of bits."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from sdopt.pipelines.originals import Place, places_in

Tensors = dict[str, torch.Tensor]

PREFIX = "model.diffusion_model."


def original(network: Any) -> Tensors:
    """Returns the tensors of a transformer of diffusers as the original program names and joins them."""
    tensors = dict(network.state_dict())
    places = places_in(network)
    by_modules: dict[str, tuple[str, Place]] = {}
    for name, place in places.items():
        aliased = ".processor." in name
        if not aliased and place.modules != (name,):
            by_modules |= dict.fromkeys(place.modules, (name, place))
    taken, found = set(), {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        if name in taken:
            continue
        whole, suffix = (name, "") if name in by_modules else (module, f".{leaf}")
        if whole not in by_modules:
            found[name.replace(".weight", ".scale") if ".norms." in name else name] = (
                tensor
            )
            continue
        named, place = by_modules[whole]
        keys = [f"{each}{suffix}" for each in place.modules]
        joined = torch.cat([tensors[key] for key in keys]) if len(keys) > 1 else tensor
        if place.swapped:
            joined = torch.cat([*joined.chunk(2)][::-1])
        taken.update(keys)
        normed = named.endswith(("query_norm", "key_norm"))
        found[named + (".scale" if normed else suffix)] = joined
    return found


def save(tensors: Tensors, path: Path, prefix: str = "") -> Path:
    """Writes tensors as a safetensors file."""
    save_file(
        {
            f"{prefix}{name}": tensor.contiguous().clone()
            for name, tensor in tensors.items()
        },
        path,
    )
    return path


def scaled(
    tensors: Tensors, end: str = ".scale_weight", rows: bool = False
) -> tuple[Tensors, Tensors]:
    """Returns tensors whose matrices are in 8 bits with scales, and the weights that they mean."""
    found, meant = {}, dict(tensors)
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or not name.endswith(".weight"):
            found[name] = tensor
            continue
        scale = tensor.abs().amax(1) / 448 if rows else tensor.abs().max() / 448
        spread = scale[:, None] if rows else scale
        bits = (tensor / spread).to(torch.float8_e4m3fn)
        found |= {name: bits, name.removesuffix(".weight") + end: scale}
        meant[name] = bits.float() * spread
    return found, meant


SCALES_AT = {
    "Q2_K": (80, 1.5),
    "Q3_K": (108, None),
    "Q4_K": (0, 7.5),
    "Q5_K": (0, 15.5),
    "Q6_K": (208, None),
}
"""Where a K-quant block has its float16 scale; and, of those with a second one for its minimum, their mean ratio."""


def k_blocks(shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Returns random blocks of a kind that the gguf package reads, but does not write, for weights of about 0.05."""
    import gguf

    quantized = gguf.GGMLQuantizationType[kind]
    size, width = gguf.GGML_QUANT_SIZES[quantized]
    count = shape[0] * shape[1] // size
    blocks = np.random.default_rng(0).integers(0, 256, (count, width), dtype=np.uint8)
    place, minimum = SCALES_AT[kind]

    def scale_by(scale: float) -> None:
        scales = [scale] if minimum is None else [scale, scale * minimum]
        data = np.array(scales, np.float16).view(np.uint8)
        blocks[:, place : place + len(data)] = data

    scale_by(1.0)
    scale_by(0.05 / float(gguf.quants.dequantize(blocks, quantized).std()))
    return blocks.reshape(shape[0], -1)


def gguf_file(
    tensors: Tensors,
    path: Path,
    kind: str,
    plain: Iterable[str] = (),
    title: str = "",
    architecture: str = "flux",
) -> Tensors:
    """Writes a GGUF file, and returns the weights that it means; those that have no whole blocks stay in float32."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    if title:
        writer.add_name(title)
    meant, quantized = {}, gguf.GGMLQuantizationType[kind]
    block = gguf.GGML_QUANT_SIZES[quantized][0]
    for name, tensor in tensors.items():
        values = tensor.float().numpy()
        if tensor.ndim == 2 and tensor.shape[1] % block == 0 and name not in plain:
            blocks = (
                k_blocks(values.shape, kind)
                if kind in SCALES_AT
                else gguf.quants.quantize(values, quantized)
            )
            writer.add_tensor(name, blocks, raw_dtype=quantized)
            meant[name] = torch.from_numpy(
                gguf.quants.dequantize(blocks, quantized).copy()
            )
        else:
            writer.add_tensor(name, values)
            meant[name] = tensor.float()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant
