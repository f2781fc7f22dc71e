"""Sabotages outside the timed region: work between calls, memory outside the process, changed process settings."""

import gc
import os
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from typing_extensions import override

from sdopt.gate.trial.base import Sabotage
from sdopt.gate.trial.measuring import Call, Called
from sdopt.optimizations import Proof, denoiser_of

TITLE = "beside what is timed"


@dataclass(frozen=True)
class ResetsPeak(Sabotage):
    """Holds `mib` MiB during each call, and resets the counters of peak memory at its end."""

    mib: int = 256

    @override
    @contextmanager
    def context(self, pipe: DiffusionPipeline) -> Iterator[None]:
        held = torch.ones(self.mib * 2**18)
        yield
        del held
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()


@dataclass(frozen=True)
class MemoryInFile(Sabotage):
    """Holds `mib` MiB in an open file in `/dev/shm`, which no process maps."""

    mib: int = 256

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        file = vars(pipe)["_file"] = tempfile.TemporaryFile(dir="/dev/shm")  # noqa: SIM115 (it stays open)
        file.write(b"x" * (self.mib * 2**20))
        file.flush()
        return super().apply(pipe)


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
class WorksAfterwards(Called):
    """Works for `seconds` seconds once the images of a call are no longer referenced."""

    seconds: float = 0.3

    @override
    def answer(self, call: Call, arguments: dict[str, Any]) -> Any:
        output = call(**arguments)
        with suppress(TypeError):  # a list, as in the traced call, cannot be referenced weakly
            weakref.finalize(output.images, time.sleep, self.seconds)
        return output


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


@dataclass(frozen=True)
class NoCollection(Sabotage):
    """Turns off Python's garbage collection, for the whole program."""

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        gc.disable()
        return super().apply(pipe)
