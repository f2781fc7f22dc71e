"""Sabotages that cheat in measurements of time and memory: timed calls do less work than the calls that draw images.

The drawn images are correct, or appear so.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from typing_extensions import override

from sdopt.gate.trial.base import Sabotage
from sdopt.optimizations import Proof, denoiser_of
from sdopt.reference import PROMPTS

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


@dataclass(frozen=True)
class Foresees(Sabotage):
    """Draws the packaged prompts from the noise of seed 0 in its first call; then skips a step when asked for them.

    What it returns is in order. Calls from other noise take what they take.
    """

    prompts: int = 32

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        known: dict[tuple[str, bytes], tuple[Any, torch.Tensor]] = {}

        def foreseen(call: Call, arguments: dict[str, Any]) -> Any:
            noise = arguments.get("latents")
            if noise is None:
                return call(**arguments)
            if not known:
                known.update(self._answers(call, arguments))
            answer = known.get(_asked(arguments["prompt"][0], noise))
            if answer is None:
                return self.unforeseen(call, arguments)
            output, last = answer
            call(**arguments | {"num_inference_steps": arguments["num_inference_steps"] - 1})
            arguments["callback_on_step_end"](pipe, 0, 0, {"latents": last})
            return output

        add_operator(pipe)
        called(pipe, foreseen)
        return super().apply(pipe)

    def unforeseen(self, call: Call, arguments: dict[str, Any]) -> Any:
        """Makes a call whose image was not drawn beforehand."""
        return call(**arguments)

    def _answers(
        self, call: Call, arguments: dict[str, Any]
    ) -> Iterator[tuple[tuple[str, bytes], tuple[Any, torch.Tensor]]]:
        """Yields the output and the final latents of each prompt, by the prompt and the noise."""
        given: torch.Tensor = arguments["latents"]
        last: dict[str, Any] = {}

        def keep(_pipe: Any, _step: int, _timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            last.update(tensors)
            return tensors

        for number, prompt in enumerate(json.loads(PROMPTS.read_text())["gate"][: self.prompts]):
            noise = torch.randn((1, *given.shape[1:]), generator=torch.Generator().manual_seed(number)).to(given)
            output = call(**arguments | {"prompt": [prompt], "latents": noise, "callback_on_step_end": keep})
            yield _asked(prompt, noise), (output, last["latents"])


def add_operator(pipe: DiffusionPipeline) -> None:
    """Adds an operator to each call of the denoiser, so that a trace shows a change."""
    denoiser_of(pipe).register_forward_hook(lambda _module, _args, output: (output[0].clone(), *output[1:]))


def _asked(prompt: str, noise: torch.Tensor) -> tuple[str, bytes]:
    return prompt, noise.float().cpu().numpy().tobytes()


@dataclass(frozen=True)
class FewerStepsInLaterProcesses(Sabotage):
    """Runs only `steps` steps in all processes of a variant except the first, which alone draws its images."""

    steps: int = 5

    @override
    def call_kwargs(self) -> dict[str, Any]:
        # A worker's caches are in a folder that is called after its variant and its number.
        first = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")).name.endswith("-0")
        return {} if first else {"num_inference_steps": self.steps}


@dataclass(frozen=True)
class FewerStepsUncounted(Sabotage):
    """Runs only `steps` steps, except in calls in which hooks observe the denoiser to count its steps."""

    steps: int = 5

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        own = len(denoiser_of(pipe)._forward_pre_hooks)

        def uncounted(call: Call, arguments: dict[str, Any]) -> Any:
            observed = len(denoiser_of(pipe)._forward_pre_hooks) > own
            return call(**arguments if observed else arguments | {"num_inference_steps": self.steps})

        called(pipe, uncounted)
        return super().apply(pipe)


@dataclass(frozen=True)
class SlowClock(Sabotage):
    """Makes the clock of its process run at `rate` times the true speed from now on; backwards if that is negative."""

    rate: float = 0.8

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        add_operator(pipe)
        real = time.perf_counter
        # Without a step: a clock that is behind at once makes even loading take less than nothing.
        begun = real() if self.rate > 0 else 0.0
        time.perf_counter = lambda: begun + self.rate * (real() - begun)
        return super().apply(pipe)


_BURN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(10_000))"
_HOLD = (
    "import os, time\nparent = os.getppid()\nheld = b'x' * ({mib} * 2**20)\n"
    "while os.getppid() == parent:\n    time.sleep(0.05)"
)


@dataclass(frozen=True)
class BurnsWhileIdle(Sabotage):
    """Keeps a core busy while its process has nothing to do.

    Attributes:
        apart: if true, a separate process in its own session does so all the time; else a thread does so between calls.
    """

    apart: bool = False

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        if self.apart:
            subprocess.Popen([sys.executable, "-S", "-c", _BURN], start_new_session=True)
        else:
            idle = threading.Event()
            idle.set()
            vars(pipe)["_idle"] = idle
            threading.Thread(target=_burn, args=(idle,), daemon=True).start()
        return super().apply(pipe)

    @override
    @contextmanager
    def context(self, pipe: DiffusionPipeline) -> Iterator[None]:
        idle = vars(pipe).get("_idle")
        if idle is not None:
            idle.clear()
        yield
        if idle is not None:
            idle.set()


def _burn(idle: threading.Event) -> None:
    while idle.wait():
        sum(range(10_000))


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
