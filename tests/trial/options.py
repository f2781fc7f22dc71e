"""Options that a study times: honest mistakes, each with a promise that it breaks, and honest options beside them.

Each has a yaml in `conf/trial/`. A mistake of one's own is a class like these in a module of one's own, and a yaml in
the folder that `--config-dir` names.
"""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Annotated, Any, ClassVar

import torch
from diffusers import DiffusionPipeline
from diffusers.models.attention import FeedForward

from sdopt.options import Contract, Finding, Optimization, Proof, Stage, denoiser_of
from sdopt.pipelines.parts import denoiser_name
from sdopt.schema import OneOf

Call = Callable[..., Any]


@dataclass(frozen=True)
class Mistake(Optimization):
    """Base class of all options of the trial: a promise, the claim that goes with it, and what should catch it.

    Its evidence is that it was applied: most mistakes do take effect.
    """

    stage: ClassVar[Stage] = Stage.COMPONENTS
    kind: ClassVar[str] = "of one's own"
    """What goes wrong, as a heading."""
    promise: Annotated[str, OneOf(Contract)] = "exact"
    claim: str = ""
    caught_by: str = ""
    """Rules of which at least one should not pass it, by metric or name, separated by bars."""

    @property
    def contract(self) -> Contract:
        return Contract(self.promise)

    @property
    def claims(self) -> frozenset[str]:
        return frozenset({self.claim} if self.claim else ())

    def apply(self, pipe: DiffusionPipeline) -> Proof:
        return lambda trace: Finding(True, "applied")


def handle_calls(
    pipe: DiffusionPipeline, answer: Callable[[Call, dict[str, Any]], Any]
) -> None:
    """Makes `answer` handle the calls of a pipeline; replaces its class, in which Python looks up `__call__`."""
    own = type(pipe)

    def call(**arguments: Any) -> Any:
        return own.__call__(pipe, **arguments)

    pipe.__class__ = type(
        own.__name__,
        (own,),
        {"__call__": lambda _self, **arguments: answer(call, arguments)},
    )


@dataclass(frozen=True)
class AroundCalls(Mistake):
    """Base class of mistakes that handle each call of the pipeline."""

    def answer(self, call: Call, arguments: dict[str, Any], number: int) -> Any:
        """Makes the pipeline's own call, the `number`th in its process from 1 on, and returns its output."""
        raise NotImplementedError

    def apply(self, pipe: DiffusionPipeline) -> Proof:
        made = 0

        def counted(call: Call, arguments: dict[str, Any]) -> Any:
            nonlocal made
            made += 1
            return self.answer(call, arguments, made)

        handle_calls(pipe, counted)
        return super().apply(pipe)


# --------------------------------------------------------------------------------------------------------------- honest


@dataclass(frozen=True)
class Neutral(Mistake):
    """Copies the denoiser's output: one operator more, and nothing else."""

    kind: ClassVar[str] = "honest"

    def apply(self, pipe: DiffusionPipeline) -> Proof:
        denoiser_of(pipe).register_forward_hook(
            lambda _module, _args, output: (output[0].clone(), *output[1:])
        )
        return super().apply(pipe)


@dataclass(frozen=True)
class Detour(Mistake):
    """Computes products that nobody needs in each step: an option beside it that does not is honestly faster."""

    kind: ClassVar[str] = "honest"
    products: int = 2

    def apply(self, pipe: DiffusionPipeline) -> Proof:
        ones = torch.ones(512, 512)

        def detour(_module: Any, _args: Any, _output: Any) -> None:
            for _ in range(self.products):
                torch.mm(ones, ones)

        denoiser_of(pipe).register_forward_hook(detour)
        return super().apply(pipe)


@dataclass(frozen=True)
class Reordered(Mistake):
    """Sums products in another order: those of attention, of queries and keys that are permuted alike in each head.

    In a transformer that rotates queries and keys by their positions, it is the hidden units of its feed-forward
    layers that are permuted. The mathematics is the same, and so is the time.
    """

    kind: ClassVar[str] = "honest"
    promise: Annotated[str, OneOf(Contract)] = "equivalent"

    def apply(self, pipe: DiffusionPipeline) -> Proof:
        random = torch.Generator().manual_seed(0)
        transformer = denoiser_name(pipe) == "transformer"
        for module in denoiser_of(pipe).modules():
            if transformer and isinstance(module, FeedForward):
                first, last = module.net[0].proj, module.net[2]
                order = torch.randperm(last.in_features, generator=random).to(
                    last.weight.device
                )
                first.weight.data, first.bias.data = (
                    first.weight.data[order],
                    first.bias.data[order],
                )
                last.weight.data = last.weight.data[:, order]
            elif (
                not transformer and hasattr(module, "to_q") and hasattr(module, "heads")
            ):
                width = module.to_q.out_features // module.heads
                order = torch.cat(
                    [
                        head * width + torch.randperm(width, generator=random)
                        for head in range(module.heads)
                    ]
                )
                for layer in (module.to_q, module.to_k):
                    layer.weight.data = layer.weight.data[order.to(layer.weight.device)]
                    if layer.bias is not None:
                        layer.bias.data = layer.bias.data[order.to(layer.weight.device)]
        return super().apply(pipe)


# ----------------------------------------------------------------------------------------------------------- no effect


@dataclass(frozen=True)
class OnlyAttached(Mistake):
    """Hangs a hook on the denoiser, and shows as evidence that it hangs there; the hook changes nothing."""

    kind: ClassVar[str] = "no effect"

    def apply(self, pipe: DiffusionPipeline) -> Proof:
        denoiser_of(pipe).register_forward_hook(lambda _module, _args, _output: None)
        return lambda trace: Finding(True, "a hook is attached to the denoiser")


@dataclass(frozen=True)
class FallsBack(AroundCalls):
    """Computes in bfloat16, and silently falls back to the model's type after `calls` calls of a process."""

    kind: ClassVar[str] = "no effect"
    calls: int = 8

    def answer(self, call: Call, arguments: dict[str, Any], number: int) -> Any:
        device = "cuda" if torch.cuda.is_initialized() else "cpu"
        with torch.autocast(device, torch.bfloat16, enabled=number <= self.calls):
            return call(**arguments)


# ----------------------------------------------------------------------------------------------- what calls depend on


@dataclass(frozen=True)
class FewerSteps(AroundCalls):
    """Runs only `steps` steps in the first `calls` calls of a process, or in all: it means to warm up."""

    kind: ClassVar[str] = "calls that differ"
    steps: int = 5
    calls: int | None = None

    def answer(self, call: Call, arguments: dict[str, Any], number: int) -> Any:
        fewer = self.calls is None or number <= self.calls
        return call(
            **arguments | ({"num_inference_steps": self.steps} if fewer else {})
        )


@dataclass(frozen=True)
class KeepsState(Mistake):
    """Takes the first step of a call from the last one of the call before: a cache that is not reset."""

    kind: ClassVar[str] = "calls that differ"

    def apply(self, pipe: DiffusionPipeline) -> Proof:
        denoiser = denoiser_of(pipe)
        forward, kept, before = denoiser.forward, None, -1.0

        def cached(*arguments: Any, **options: Any) -> Any:
            nonlocal kept, before
            call = signature(forward).bind(*arguments, **options).arguments
            timestep = float(torch.as_tensor(call["timestep"]).flatten()[0])
            begins, before = timestep > before, timestep
            sample = next(iter(call.values()))
            if not begins or kept is None or kept[0].shape != sample.shape:
                kept = forward(*arguments, **options)
            return kept

        denoiser.forward = cached
        return super().apply(pipe)


@dataclass(frozen=True)
class Remembers(Mistake):
    """Returns the images of an earlier call if a prompt is repeated, from whatever noise."""

    kind: ClassVar[str] = "calls that differ"

    def apply(self, pipe: DiffusionPipeline) -> Proof:
        answers: dict[str, tuple[Any, dict[str, Any]]] = {}

        def remembered(call: Call, arguments: dict[str, Any]) -> Any:
            asked, tell = (
                repr(arguments["prompt"]),
                arguments.pop("callback_on_step_end"),
            )
            if asked not in answers:
                last: dict[str, Any] = {}

                def keep(
                    _pipe: Any, _step: int, _timestep: Any, tensors: dict[str, Any]
                ) -> dict[str, Any]:
                    last.update(tensors)
                    return tensors

                answers[asked] = call(**arguments, callback_on_step_end=keep), last
            found, last = answers[asked]
            tell(pipe, 0, 0, last)
            return found

        handle_calls(pipe, remembered)
        return super().apply(pipe)


@dataclass(frozen=True)
class OwnNoise(AroundCalls):
    """Ignores the seeds where it is given no noise."""

    kind: ClassVar[str] = "calls that differ"

    def answer(self, call: Call, arguments: dict[str, Any], number: int) -> Any:
        if arguments.get("latents") is None:
            arguments["generator"] = [
                torch.Generator().manual_seed(0) for _ in arguments["generator"]
            ]
        return call(**arguments)


@dataclass(frozen=True)
class ChangesNoise(AroundCalls):
    """Writes into the noise that the caller passes."""

    kind: ClassVar[str] = "calls that differ"

    def answer(self, call: Call, arguments: dict[str, Any], number: int) -> Any:
        output = call(**arguments)
        if "latents" in arguments:
            arguments["latents"].mul_(0.97)
        return output


@dataclass(frozen=True)
class BlackImage(AroundCalls):
    """Makes the first image of every `every`-th call black."""

    kind: ClassVar[str] = "a few images of many"
    promise: Annotated[str, OneOf(Contract)] = "lossy"
    every: int = 3

    def answer(self, call: Call, arguments: dict[str, Any], number: int) -> Any:
        output = call(**arguments)
        if number % self.every == 0:
            output.images[0] = 0.0
        return output


# ----------------------------------------------------------------------------------------------------------------- time


@dataclass(frozen=True)
class Slow(Mistake):
    """Makes every `every`-th call `seconds` seconds longer; a median does not show it unless that is each."""

    kind: ClassVar[str] = "time"
    every: int = 1
    seconds: float = 0.05

    @contextmanager
    def context(self, pipe: DiffusionPipeline) -> Iterator[None]:
        yield
        pipe.slow_calls = getattr(pipe, "slow_calls", 0) + 1
        if pipe.slow_calls % self.every == 0:
            time.sleep(self.seconds)


@dataclass(frozen=True)
class CollectsGarbage(Mistake):
    """Collects Python's garbage in each call, as some offloading does: that takes as long as the program is large."""

    kind: ClassVar[str] = "time"

    @contextmanager
    def context(self, pipe: DiffusionPipeline) -> Iterator[None]:
        yield
        gc.collect()


@dataclass(frozen=True)
class MoreThreads(Neutral):
    """Computes with as many threads as there are cores, whatever the run grants it."""

    kind: ClassVar[str] = "time"

    @contextmanager
    def context(self, pipe: DiffusionPipeline) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(os.cpu_count() or 1)
        yield
        torch.set_num_threads(before)


# --------------------------------------------------------------------------------------------------------------- memory


@dataclass(frozen=True)
class MemoryInChild(Mistake):
    """Holds `mib` MiB in a process that it starts, as a pool of compilers does."""

    kind: ClassVar[str] = "memory"
    mib: int = 256

    def apply(self, pipe: DiffusionPipeline) -> Proof:
        hold = "import os, time\nparent, held = os.getppid(), b'x' * {size}\nwhile os.getppid() == parent: time.sleep(0.1)"
        subprocess.Popen(
            [sys.executable, "-S", "-c", hold.format(size=self.mib * 2**20)]
        )
        return super().apply(pipe)


@dataclass(frozen=True)
class Grows(AroundCalls):
    """Keeps `mib` MiB more after every call."""

    kind: ClassVar[str] = "memory"
    mib: float = 4

    def answer(self, call: Call, arguments: dict[str, Any], number: int) -> Any:
        for key in self.keys(arguments, number):
            if key not in _KEPT:
                _KEPT[key] = torch.ones(round(self.mib * 2**18))
        return call(**arguments)

    def keys(self, arguments: dict[str, Any], number: int) -> list[Any]:
        """Returns what a call keeps memory for."""
        return [number]


@dataclass(frozen=True)
class GrowsByPrompt(Grows):
    """Keeps `mib` MiB of each new prompt: a cache of text embeddings without a bound."""

    mib: float = 0.25

    def keys(self, arguments: dict[str, Any], number: int) -> list[Any]:
        return list(arguments["prompt"])


_KEPT: dict[Any, torch.Tensor] = {}
"""What an option keeps from call to call, in its worker."""
