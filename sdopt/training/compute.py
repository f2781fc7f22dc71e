"""Chooses a stage's device and precision, and creates its random streams."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from sdopt.errors import UsageError

if TYPE_CHECKING:
    import torch


STREAMS = {"autoencoder": 1, "denoiser": 2, "clip": 3, "tiny_autoencoder": 4, "loras": 5, "few_steps": 6}
"""Number of each stage in the path of a random seed."""


def pick_device(device: str) -> torch.device:
    """Returns the device to train on: `auto`, `cpu` or `cuda`.

    Raises:
        UsageError: `cuda` is chosen and there is no CUDA device.
    """
    import torch

    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise UsageError("device=cuda: there is no CUDA device; choose device=auto or device=cpu")
    return torch.device("cuda" if available and device != "cpu" else "cpu")


def pick_precision(arithmetic: str, device: torch.device) -> str:
    """Returns `fp32` or `bf16`; `auto` is bf16 on hardware with native bf16 products."""
    import torch

    if arithmetic != "auto":
        return arithmetic
    native = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16" if native else "fp32"


def in_precision(arithmetic: str, device: torch.device) -> AbstractContextManager[Any]:
    """Returns a context manager that sets the precision of matrix products and convolutions."""
    import torch

    if pick_precision(arithmetic, device) == "fp32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def on_device(network: Any, device: torch.device) -> Any:
    """Returns a network of diffusers on its device, with attention by plain products.

    The default processor calls a fused kernel whose backward pass is slow on CPUs, especially in bf16.
    """
    import torch
    from diffusers.models.attention_processor import AttnProcessor

    network.to(device, memory_format=torch.channels_last).set_attn_processor(AttnProcessor())
    return network


def describe_hardware(device: torch.device, arithmetic: str) -> str:
    """Returns a description of the machine, the precision and the PyTorch version for a card."""
    import torch

    from sdopt.hardware.probe import describe_cpu

    cpu = f"{torch.get_num_threads()} cores of {describe_cpu()['name']}"
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    return f"{machine}, {pick_precision(arithmetic, device)}, torch {torch.__version__.partition('+')[0]}"


def generator(seed: int, *path: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Returns a random generator that depends only on `seed` and `path` (stage, step), so that runs can resume."""
    import torch

    words = np.random.SeedSequence([seed, *path]).generate_state(2)
    return torch.Generator(device).manual_seed((int(words[0]) << 31) ^ int(words[1]))
