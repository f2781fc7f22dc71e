"""Sabotages outside the timed region: work between calls, memory outside the process, changed process settings."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DiffusionPipeline
from typing_extensions import override

from sdopt.optimizations import Proof, denoiser_of
from tests.trial.base import Sabotage
from tests.trial.measuring import Call, Called

TITLE = "beside what is timed"


@dataclass(frozen=True)
class MoreThreads(Sabotage):
    """Computes with as many threads as there are cores, whatever the run sets, and runs one more operator."""

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        denoiser_of(pipe).register_forward_hook(lambda _module, _args, output: (output[0].clone(), *output[1:]))
        return super().apply(pipe)

    @override
    @contextmanager
    def context(self, pipe: DiffusionPipeline) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(os.cpu_count() or 1)
        yield
        torch.set_num_threads(before)


@dataclass(frozen=True)
class OwnNoise(Called):
    """Ignores the seed in calls without given noise; timed and drawn calls always pass noise."""

    @override
    def answer(self, call: Call, arguments: dict[str, Any]) -> Any:
        if arguments.get("latents") is None:
            arguments["generator"] = [torch.Generator().manual_seed(0) for _ in arguments["generator"]]
        return call(**arguments)


@dataclass(frozen=True)
class ChangesNoise(Called):
    """Writes into the noise that the caller passes."""

    @override
    def answer(self, call: Call, arguments: dict[str, Any]) -> Any:
        output = call(**arguments)
        arguments["latents"].mul_(0.97)
        return output
