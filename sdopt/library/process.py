"""Settings of the whole process that an option may leave behind: what changed, and how to put it back."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.backends import cuda, cudnn

from sdopt.options.attention_backends import default_backend, set_default_backend
from sdopt.scratch import CACHES, named_caches

_Switch = tuple[Callable[[], Any], Callable[[Any], Any]]
"""Reads a setting, and writes it."""


def _flags(owner: Any, what: str, *names: str) -> dict[str, _Switch]:
    return {
        f"{what} {name}": (partial(getattr, owner, name), partial(setattr, owner, name))
        for name in names
    }


def _folder_of_kernels(variable: str) -> _Switch:
    """Returns how the variable with a folder of compiled kernels is read and written; None is PyTorch's own choice."""

    def write(folder: str | None) -> None:
        if folder is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = folder

    return lambda: named_caches().get(variable), write


_SWITCHES: dict[str, _Switch] = {
    "deterministic algorithms": (
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
    "precision of float32 products": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
    "default type": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (torch.get_default_device, torch.set_default_device),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    **_flags(cudnn, "cuDNN's", "enabled", "benchmark", "deterministic", "allow_tf32"),
    **_flags(
        cuda.matmul,
        "cuBLAS's",
        *(f"allow_{kind}_reduced_precision_reduction" for kind in ("fp16", "bf16")),
    ),
    "SDPA's flash kernel": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    "SDPA's mem_efficient kernel": (
        cuda.mem_efficient_sdp_enabled,
        cuda.enable_mem_efficient_sdp,
    ),
    "SDPA's math kernel": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    "SDPA's cudnn kernel": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    "attention backend of diffusers": (default_backend, set_default_backend),
    **{variable: _folder_of_kernels(variable) for variable in CACHES},
}


@dataclass
class ProcessChanges:
    """Settings of the process that options have changed and not put back, by name: before, and as they left them."""

    found: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Notes what changes in the block."""
        before = {name: read() for name, (read, _) in _SWITCHES.items()}
        try:
            yield
        finally:
            for name, (read, _) in _SWITCHES.items():
                if (now := read()) != before[name]:
                    self.found[name] = self.found.get(name, (before[name],))[0], now

    def lines(self) -> list[str]:
        """Returns a line for each setting that options left changed."""
        return [
            f"{name}: {before} before, {now} now"
            for name, (before, now) in self.found.items()
        ]

    def put_back(self, others: Iterable["ProcessChanges"] = ()) -> None:
        """Puts all settings back, except those that the program, or another pipeline, has changed since.

        `others` are the changes of other pipelines: what they found changed, they will put back as it was before.
        """
        for name, (before, now) in self.found.items():
            read, write = _SWITCHES[name]
            later = [other.found for other in others if other.began_from(name, now)]
            for found in later:
                found[name] = before, found[name][1]
            if not later and read() == now:
                write(before)
        self.found.clear()

    def began_from(self, name: str, value: Any) -> bool:
        """Returns whether a setting was changed that had a value before."""
        return name in self.found and self.found[name][0] == value
