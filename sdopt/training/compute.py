"""Where and in which precision a stage computes, and its random streams."""

from __future__ import annotations

import platform
import re
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sdopt.errors import UsageError

if TYPE_CHECKING:
    import torch


def pick_device(device: str) -> torch.device:
    """Returns the device to train on: `auto`, `cpu` or `cuda`.

    Raises:
        UsageError: CUDA is asked for and missing.
    """
    import torch

    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise UsageError("device=cuda: there is no CUDA device; choose device=auto or device=cpu")
    return torch.device("cuda" if available and device != "cpu" else "cpu")


def pick_precision(arithmetic: str, device: torch.device) -> str:
    """Returns `fp32` or `bf16`: for `auto`, bf16 if the hardware multiplies it natively."""
    import torch

    if arithmetic != "auto":
        return arithmetic
    native = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16" if native else "fp32"


def in_precision(arithmetic: str, device: torch.device) -> AbstractContextManager[Any]:
    """Returns a context in which matrix products and convolutions run in the chosen precision."""
    import torch

    if pick_precision(arithmetic, device) == "fp32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def describe_hardware(device: torch.device, arithmetic: str) -> str:
    """Returns the machine, the precision and PyTorch's version in words, for a card."""
    import torch

    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    else:
        # Linux leaves `platform.processor()` empty or generic.
        listing = Path("/proc/cpuinfo")
        model = re.search(r"model name\s*:\s*(.+)", listing.read_text()) if listing.exists() else None
        machine = f"{torch.get_num_threads()} cores of {model[1] if model else platform.processor()}"
    return f"{machine}, {pick_precision(arithmetic, device)}, torch {torch.__version__.partition('+')[0]}"


def generator(seed: int, *path: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Returns a random stream that depends only on `seed` and `path` (stage, step): a resumed run repeats it."""
    import torch

    words = np.random.SeedSequence([seed, *path]).generate_state(2)
    return torch.Generator(device).manual_seed((int(words[0]) << 31) ^ int(words[1]))
