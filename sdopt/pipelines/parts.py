"""Finds the parts of a pipeline by what they do: code says *denoiser*, not `pipe.unet`."""

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


def denoiser_of(pipe: "DiffusionPipeline") -> Any:
    """The model that is called once a step: a UNet or a transformer, compiled or not."""
    return getattr(pipe, denoiser_name(pipe))


def denoiser_name(pipe: "DiffusionPipeline") -> str:
    return "unet" if hasattr(pipe, "unet") else "transformer"


def unwrapped(module: torch.nn.Module) -> Any:
    """The module itself, where `torch.compile` has wrapped it."""
    return getattr(module, "_orig_mod", module)


def text_encoders_of(pipe: "DiffusionPipeline") -> list[torch.nn.Module]:
    names = ("text_encoder", "text_encoder_2", "text_encoder_3")
    return [encoder for name in names if (encoder := getattr(pipe, name, None)) is not None]
