"""Chooses a stage's device and precision, and creates its random streams."""

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


def describe_hardware(device: torch.device, arithmetic: str) -> str:
    """Returns a description of the machine, the precision and the PyTorch version for a card."""
    import torch

    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    else:
        # On Linux, `platform.processor()` is empty or generic.
        listing = Path("/proc/cpuinfo")
        model = re.search(r"model name\s*:\s*(.+)", listing.read_text(encoding="utf-8")) if listing.exists() else None
        machine = f"{torch.get_num_threads()} cores of {model[1] if model else platform.processor()}"
    return f"{machine}, {pick_precision(arithmetic, device)}, torch {torch.__version__.partition('+')[0]}"


def generator(seed: int, *path: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Returns a random generator that depends only on `seed` and `path` (stage, step), so that runs can resume."""
    import torch

    words = np.random.SeedSequence([seed, *path]).generate_state(2)
    return torch.Generator(device).manual_seed((int(words[0]) << 31) ^ int(words[1]))
