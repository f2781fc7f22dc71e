"""Finds the parts of a pipeline by what they do: code says *denoiser*, not `pipe.unet`."""

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


def denoiser_of(pipe: "DiffusionPipeline") -> Any:
    """Returns the model that is called once per step: a UNet or a transformer, compiled or not."""
    return getattr(pipe, denoiser_name(pipe))


def denoiser_name(pipe: "DiffusionPipeline") -> str:
    """Returns the attribute of a pipeline that holds its denoiser."""
    return "unet" if hasattr(pipe, "unet") else "transformer"


def unwrapped(module: torch.nn.Module) -> Any:
    """Returns the module that `torch.compile` wrapped, or the module itself."""
    return getattr(module, "_orig_mod", module)


def text_encoders_of(pipe: "DiffusionPipeline") -> list[torch.nn.Module]:
    """Returns the text encoders of a pipeline, in their order."""
    names = ("text_encoder", "text_encoder_2", "text_encoder_3")
    return [encoder for name in names if (encoder := getattr(pipe, name, None)) is not None]
