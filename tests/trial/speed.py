"""Sabotages that harm time or memory by simple means; they are timed, as variants of the trial's study."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DiffusionPipeline
from typing_extensions import override

from tests.trial.base import Sabotage

TITLE = "time and memory"


@dataclass(frozen=True)
class NoOp(Sabotage):
    """Changes nothing, but claims a gain."""


@dataclass(frozen=True)
class FewerSteps(Sabotage):
    """Runs only `steps` steps, without saying so."""

    steps: int = 5

    @override
    def call_kwargs(self) -> dict[str, Any]:
        return {"num_inference_steps": self.steps}


@dataclass(frozen=True)
class Slower(Sabotage):
    """Waits for `seconds` seconds at the end of each call."""

    seconds: float = 0.05

    @override
    @contextmanager
    def context(self, pipe: DiffusionPipeline) -> Iterator[None]:
        yield
        time.sleep(self.seconds)


@dataclass(frozen=True)
class RarelySlow(Sabotage):
    """Makes every `every`-th call `seconds` seconds longer, which a median does not show."""

    every: int = 3
    seconds: float = 0.5

    @override
    @contextmanager
    def context(self, pipe: DiffusionPipeline) -> Iterator[None]:
        yield
        pipe.sabotaged_calls = getattr(pipe, "sabotaged_calls", 0) + 1
        if pipe.sabotaged_calls % self.every == 0:
            time.sleep(self.seconds)


@dataclass(frozen=True)
class MemoryHog(Sabotage):
    """Holds `mib` MiB during each call."""

    mib: int = 256

    @override
    @contextmanager
    def context(self, pipe: DiffusionPipeline) -> Iterator[None]:
        held = torch.ones(self.mib * 2**20 // 4)
        yield
        del held
