"""How the weights of a pipeline with a transformer are stored, and where: what their memory is, network by network."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sdopt.options.quantization import multiplies_in_8_bits
from sdopt.pipelines.catalog import parts_in
from sdopt.pipelines.families import family_of_folder
from sdopt.pipelines.family import Family

if TYPE_CHECKING:
    import torch

BITS = {
    "int8": 8.1,
    "fp8": 8.1,
    "int8_tokens": 8.1,
    "fp8_tokens": 8.1,
    "cast8": 8.0,
    "nf4": 4.5,
    "nf4_double": 4.13,
    "int4": 4.5,
    "uint4": 4.9,
    "fp6": 6.1,
    "fp4": 4.1,
    "q8": 8.5,
    "q6": 6.6,
    "q5_1": 6.0,
    "q5": 5.6,
    "q4_1": 5.0,
    "q4": 4.6,
    "q3": 3.5,
    "q2": 2.7,
}
"""Bits of a stored weight with its share of the scales; `…_tokens` are layers that read a row for each token alone.

`nf4_double` has its scales in 8 bits, as Dettmers et al. (2023, QLoRA) quantize them in section 3.
"""

GGUF = ("q8", "q6", "q5_1", "q5", "q4_1", "q4", "q3", "q2")
"""Those of GGUF files, as files of FLUX.1 are large."""

Outputs = Literal["", "whole", "float32"]

_UNCAST = re.compile(r"pos_embed|patch_embed|norm|^proj_in$|^proj_out$")
"""Layers that diffusers' layerwise casting leaves alone, by a part of their names."""


@dataclass(frozen=True)
class Storage:
    """How the weights of a call are stored.

    Attributes:
        denoiser: the form of its linear layers, one of `BITS`; "" is that of all others.
        texts: the same of the text encoders.
        quantized_texts: which of these, from 1; () is all.
        without: text encoders that are not there.
        offload: `model` if each network waits in host memory.
        loads_whole: whether all weights are on the device before they are quantized.
        fused: whether projections are there twice, fused and alone.
        outputs: how the second layers of T5 are stored beside quantized ones: as those, `whole` as all others, or in
            `float32`, as bitsandbytes leaves them.
    """

    denoiser: str = ""
    texts: str = ""
    quantized_texts: tuple[int, ...] = ()
    without: tuple[str, ...] = ()
    offload: str = ""
    loads_whole: bool = False
    fused: bool = False
    outputs: Outputs = ""


def weights_in(folder: Path, storage: Storage, dtype: torch.dtype) -> dict[str, float]:
    """Returns the GiB of each network of a folder's pipeline."""
    from sdopt.apps.foresight.trace import network

    family, weights = family_of_folder(folder), {}
    for number, name in enumerate(("vae", family.denoiser, *family.encoders), -1):
        if name not in parts_in(folder) or name in storage.without:
            continue
        form = storage.denoiser if name == family.denoiser else ""
        if name in family.encoders and (
            not storage.quantized_texts or number in storage.quantized_texts
        ):
            form = storage.texts
        weights[name] = gib_of(network(folder, name), dtype, form, storage)
    return weights


def gib_of(network: Any, dtype: torch.dtype, form: str, storage: Storage) -> float:
    """Returns the GiB of a network with its linear layers in some form; shared weights count once."""
    import torch

    size = dtype.itemsize
    linear = _linear_weights(network, form)
    total, seen = 0.0, set[int]()
    for name, weight in network.named_parameters():
        if id(weight) in seen:
            continue
        seen.add(id(weight))
        full = _is_output_of_t5(network, name)
        bits = (
            BITS[form]
            if name in linear and not (full and storage.outputs)
            else 8.0 * size
        )
        # transformers keeps these in float32 where all others are float16, which they would overflow.
        if full and (
            (form and storage.outputs == "float32")
            or (not form and dtype == torch.float16)
        ):
            bits = 32.0
        copies = (
            2
            if storage.fused and re.search(r"(to_|add_)[qkv](_proj)?\.weight$", name)
            else 1
        )
        total += copies * weight.numel() * bits / 8
    stored = network.state_dict().keys()
    for name, buffer in network.named_buffers():  # such as the positions of SD 3
        if name in stored:
            total += buffer.numel() * size
    return total / 2**30


def _linear_weights(network: Any, form: str) -> set[str]:
    """Returns the names of the weights that are stored in a form."""
    import torch

    if not form:
        return set()
    kinds: Any = (
        (torch.nn.Linear, torch.nn.Conv2d) if form == "uint4" else torch.nn.Linear
    )
    names = set()
    for name, layer in network.named_modules():
        left_alone = form == "cast8" and _UNCAST.search(name) is not None
        left_alone = left_alone or (
            form.endswith("_tokens") and not multiplies_in_8_bits(layer, name)
        )
        if isinstance(layer, kinds) and not left_alone:
            names.add(f"{name}.weight")
    return names


def _is_output_of_t5(network: Any, name: str) -> bool:
    return type(network).__name__ == "T5EncoderModel" and name.endswith(".wo.weight")


def encoder_stage(family: Family, weights: dict[str, float], both: bool) -> float:
    """Returns the GiB of the text encoders that model offloading keeps on the device together.

    Each moves the one before it away when it runs. The first has none before it, so the last one of the prompt is still
    there when the first of the other branch runs, and until the last runs again.

    Args:
        family: of the pipeline.
        weights: of each network in GiB.
        both: whether both branches are encoded.
    """
    sizes = [weights[name] for name in family.encoders if name in weights]
    if not sizes:
        return 0.0
    return sizes[-1] + max(sizes[:-1], default=0.0) if both else max(sizes)
