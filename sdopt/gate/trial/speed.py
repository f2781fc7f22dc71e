"""Harm to time and memory by plain means: these are timed, as variants of the trial's study."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DiffusionPipeline
from typing_extensions import override

from sdopt.gate.trial.base import Sabotage

TITLE = "time and memory"


@dataclass(frozen=True)
class NoOp(Sabotage):
    """Changes nothing, and claims a gain."""


@dataclass(frozen=True)
class FewerSteps(Sabotage):
    """A share of the steps, under the same name."""

    steps: int = 5

    @override
    def call_kwargs(self) -> dict[str, Any]:
        return {"num_inference_steps": self.steps}


@dataclass(frozen=True)
class Slower(Sabotage):
    """Waits for a share of a call's time before it returns."""

    seconds: float = 0.05

    @override
    @contextmanager
    def context(self, pipe: DiffusionPipeline) -> Iterator[None]:
        yield
        time.sleep(self.seconds)


@dataclass(frozen=True)
class RarelySlow(Sabotage):
    """One call of so many takes longer, which a median does not see."""

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
    """Holds so many MiB during each call."""

    mib: int = 256

    @override
    @contextmanager
    def context(self, pipe: DiffusionPipeline) -> Iterator[None]:
        held = torch.ones(self.mib * 2**20 // 4)
        yield
        del held
