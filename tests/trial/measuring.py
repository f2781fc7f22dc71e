"""Sabotages that cheat in measurements of time and memory: timed calls do less work than the calls that draw images.

The drawn images are correct, or appear so.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from typing_extensions import override

from sdopt.optimizations import Proof
from tests.trial.base import Sabotage

TITLE = "what is timed and what is drawn"

Call = Callable[..., Any]


def called(pipe: DiffusionPipeline, answer: Callable[[Call, dict[str, Any]], Any]) -> None:
    """Makes `answer` handle the calls of the pipeline; replaces its class, in which Python looks up `__call__`."""
    own = type(pipe)

    def call(**arguments: Any) -> Any:
        return own.__call__(pipe, **arguments)

    pipe.__class__ = type(own.__name__, (own,), {"__call__": lambda _self, **arguments: answer(call, arguments)})


@dataclass(frozen=True)
class Called(Sabotage):
    """Base class of sabotages that handle the calls of the pipeline, and keep no state."""

    def answer(self, call: Call, arguments: dict[str, Any]) -> Any:
        """Makes a call, and returns its output."""
        raise NotImplementedError

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        called(pipe, self.answer)
        return super().apply(pipe)


class _Later:
    """Images that are computed only when they are read."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self._draw = draw

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._draw().images, dtype=dtype)

    def __len__(self) -> int:
        return len(self.__array__())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__array__())


@dataclass(frozen=True)
class LazyResult(Called):
    """Returns from a call at once, and draws the images when they are read."""

    @override
    def answer(self, call: Call, arguments: dict[str, Any]) -> Any:
        return type("Output", (), {"images": _Later(lambda: call(**arguments))})()


@dataclass(frozen=True)
class AtFirst(Sabotage):
    """Cheats only in the first `calls` calls of a process, which include the timed ones."""

    calls: int = 8

    def cheat(self, call: Call, arguments: dict[str, Any]) -> Any:
        """Makes one of the first calls, and returns its output."""
        raise NotImplementedError

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        made = 0

        def counted(call: Call, arguments: dict[str, Any]) -> Any:
            nonlocal made
            made += 1
            return self.cheat(call, arguments) if made <= self.calls else call(**arguments)

        called(pipe, counted)
        return super().apply(pipe)


@dataclass(frozen=True)
class FewerStepsAtFirst(AtFirst):
    """Runs only `steps` steps in the first calls of a process."""

    steps: int = 5

    @override
    def cheat(self, call: Call, arguments: dict[str, Any]) -> Any:
        return call(**arguments | {"num_inference_steps": self.steps})


@dataclass(frozen=True)
class LessPreciseAtFirst(AtFirst):
    """Computes in bfloat16 in the first calls of a process, which hardly changes their images."""

    @override
    def cheat(self, call: Call, arguments: dict[str, Any]) -> Any:
        with torch.autocast(arguments["latents"].device.type, torch.bfloat16):
            return call(**arguments)


@dataclass(frozen=True)
class Remembers(Sabotage):
    """Returns the images of an earlier call if a prompt is repeated."""

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        answers: dict[str, tuple[Any, dict[str, Any]]] = {}

        def remembered(call: Call, arguments: dict[str, Any]) -> Any:
            asked, tell = repr(arguments["prompt"]), arguments.pop("callback_on_step_end")
            if asked not in answers:
                last: dict[str, Any] = {}

                def keep(_pipe: Any, _step: int, _timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
                    last.update(tensors)
                    return tensors

                answers[asked] = call(**arguments, callback_on_step_end=keep), last
            found, last = answers[asked]
            tell(pipe, 0, 0, last)
            return found

        called(pipe, remembered)
        return super().apply(pipe)


_HOLD = (
    "import os, time\nparent = os.getppid()\nheld = b'x' * ({mib} * 2**20)\n"
    "while os.getppid() == parent:\n    time.sleep(0.05)"
)


@dataclass(frozen=True)
class MemoryInChild(Sabotage):
    """Holds `mib` MiB in a process that it starts."""

    mib: int = 256

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        subprocess.Popen([sys.executable, "-S", "-c", _HOLD.format(mib=self.mib)], start_new_session=True)
        return super().apply(pipe)


@dataclass(frozen=True)
class Grows(Sabotage):
    """Keeps `mib` MiB more after every `every`-th call."""

    mib: int = 4
    every: int = 1

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        kept: list[torch.Tensor] = []
        calls = 0

        def keeping(call: Call, arguments: dict[str, Any]) -> Any:
            nonlocal calls
            calls += 1
            if calls % self.every == 0:
                kept.append(torch.ones(self.mib * 2**18))
            return call(**arguments)

        called(pipe, keeping)
        return super().apply(pipe)
