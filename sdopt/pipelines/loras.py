"""Finds the layers of networks that have a LoRA, and gives a pipeline the tensors of a LoRA's file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdopt.errors import UsageError
from sdopt.pipelines.lora_files import (
    header_of_lora,
    padded,
    read_lora,
    scaled_tensors,
    tensors_of,
)
from sdopt.pipelines.parts import Pipeline, denoiser_of, text_encoders_of, unwrapped
from sdopt.pipelines.random_weights import empty_like
from sdopt.pipelines.transformer_loras import (
    Converted,
    converted,
    scales_beside,
    settings_beside,
)

if TYPE_CHECKING:
    import torch


def networks_of_a_lora(pipe: Pipeline) -> list[torch.nn.Module]:
    """Returns the networks that a LoRA can change: denoiser and text encoders, without what compiles them."""
    return [
        unwrapped(network) for network in (denoiser_of(pipe), *text_encoders_of(pipe))
    ]


def lora_layers(*networks: Any) -> list[Any]:
    """Returns the layers of networks that have a LoRA beside their weights."""
    layers: list[Any] = []
    for network in networks:
        layers += filter(has_adapter, unwrapped(network).modules())
    return layers


def has_adapter(layer: torch.nn.Module) -> bool:
    """Returns whether peft keeps something beside a layer's weights."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    # isinstance() would ask all abstract classes of peft below this one, which takes a second for a pipeline.
    return BaseTunerLayer in type(layer).__mro__


def for_transformer(file: Path, pipe: Any) -> Converted:
    """Returns a LoRA by the names of diffusers, for the networks of a pipeline that diffusers loads LoRAs into."""
    parts = {name: getattr(pipe, name, None) for name in pipe._lora_loadable_modules}
    networks = {}
    for name, network in parts.items():
        if network is not None:
            # Layers that have a LoRA already are named otherwise.
            tuned = bool(lora_layers(network))
            networks[name] = empty_like(network) if tuned else unwrapped(network)
    return converted(
        read_lora(file), networks, scales_beside(file, header_of_lora(file).metadata)
    )


def source_for(pipe: Any, file: Path) -> Any:
    """Returns what `load_lora_weights` of a pipeline must get for a LoRA: its tensors, or None for the file itself."""
    if hasattr(pipe, "unet"):
        return tensors_of(file)
    return for_transformer(file, pipe).tensors


def exchangeable(pipe: Any, file: Path, rank: int) -> dict[str, torch.Tensor]:
    """Returns the tensors of a LoRA that another one can take the place of: of one rank, with all scales in them.

    peft exchanges no LoRAs whose ranks or alphas differ between layers, and finds no scale of a layer's own.

    Raises:
        UsageError: not all of it has a place in a transformer.
    """
    if hasattr(pipe, "unet"):
        return padded(scaled_tensors(file), rank)
    read = for_transformer(file, pipe)
    if problems := read.problems():
        raise UsageError([f"{file.name} {problem}" for problem in problems])
    return padded(read.tensors, rank)


def reads_itself(file: Path) -> bool:
    """Returns whether diffusers reads a LoRA as it is, and needs no tensors made of it."""
    names = header_of_lora(file).shapes
    if settings_beside(file) is not None:
        return False  # diffusers does not read them
    if all(re.fullmatch(r"transformer\..+\.lora_[AB]\.weight", name) for name in names):
        return True
    of_unet = all(name.startswith(("unet.", "text_encoder", "lora_")) for name in names)
    of_transformer = any(map(_KOHYA.match, names))
    return of_unet and not of_transformer and tensors_of(file) is None


_KOHYA = re.compile(
    r"lora_(?:unet|transformer)_(?:double|single|joint|transformer|layers|noise|context|final)_"
)
"""How kohya's names of a transformer's layers begin: diffusers knows those of a few widths, and of some pipelines."""
