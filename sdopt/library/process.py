"""Settings of the whole process that an option may leave behind: what changed, and how to put it back."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

_Switch = tuple[Callable[[], Any], Callable[[Any], Any]]
"""Reads a setting, and writes it."""


def _attribute(owner: Any, name: str) -> _Switch:
    return partial(getattr, owner, name), partial(setattr, owner, name)


def _flushes_denormals() -> bool:
    """PyTorch can set this, and not say it."""
    return bool((torch.tensor([1e-310], dtype=torch.float64) * 1.0 == 0).item())


def _switches() -> dict[str, _Switch]:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    found: dict[str, _Switch] = {
        "deterministic algorithms": (
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
        ),
        "flushing of denormal numbers": (_flushes_denormals, torch.set_flush_denormal),
        "precision of float32 products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        "number of threads": (torch.get_num_threads, torch.set_num_threads),
        "default type": (torch.get_default_dtype, torch.set_default_dtype),
        "default device": (torch.get_default_device, torch.set_default_device),
        "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
        "detection of anomalies": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
        "autocast's cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    }
    for kind in ("cpu", "cuda"):
        found[f"autocast on {kind}"] = (
            partial(torch.is_autocast_enabled, kind),
            partial(torch.set_autocast_enabled, kind),
        )
        found[f"type of autocast on {kind}"] = (
            partial(torch.get_autocast_dtype, kind),
            partial(torch.set_autocast_dtype, kind),
        )
    for name in ("enabled", "benchmark", "benchmark_limit", "deterministic", "allow_tf32"):
        found[f"cuDNN's {name}"] = _attribute(cudnn, name)
    for name in ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"):
        found[f"cuBLAS's {name}"] = _attribute(cuda.matmul, name)
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        found[f"SDPA's {name} kernel"] = getattr(cuda, f"{name}_sdp_enabled"), getattr(cuda, f"enable_{name}_sdp")
    return found


_SWITCHES = _switches()

_GENERATORS: dict[str, _Switch] = {
    "PyTorch's global generator": (torch.get_rng_state, torch.set_rng_state),
    "NumPy's global generator": (np.random.get_state, np.random.set_state),
    "Python's global generator": (random.getstate, random.setstate),
}


@dataclass
class ProcessChanges:
    """Settings of the process that options have changed and not put back, by name: before, and as they left them."""

    found: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    generators: dict[str, Any] = field(default_factory=dict)
    """The state before of each global generator that an option seeded, or drew numbers from."""

    @contextmanager
    def noted(self, applying: bool = False) -> Iterator[None]:
        """Notes what changes in the block.

        Args:
            applying: whether options are applied in it. A pipeline's call may draw from the global generators.
        """
        before = {name: read() for name, (read, _) in _SWITCHES.items()}
        states = {name: read() for name, (read, _) in _GENERATORS.items()} if applying else {}
        seed = torch.initial_seed()
        try:
            yield
        finally:
            for name, (read, _) in _SWITCHES.items():
                if (now := read()) != before[name]:
                    self.found[name] = self.found.get(name, (before[name],))[0], now
            for name, state in states.items():
                read, write = _GENERATORS[name]
                if _same(read(), state):
                    continue
                if name.startswith("PyTorch") and torch.initial_seed() == seed:
                    write(state)  # numbers that peft draws and then replaces
                else:
                    self.generators.setdefault(name, state)

    def lines(self) -> list[str]:
        """Returns a line for each setting that options left changed."""
        return [
            *(f"{name}: {before} before, {now} now" for name, (before, now) in self.found.items()),
            *(f"{name}: seeded" for name in self.generators),
        ]

    def put_back(self) -> None:
        """Puts all settings back, except those that the program has changed since."""
        for name, (before, now) in self.found.items():
            read, write = _SWITCHES[name]
            if read() == now:
                write(before)
        for name, state in self.generators.items():
            _GENERATORS[name][1](state)
        self.found.clear()
        self.generators.clear()


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)
