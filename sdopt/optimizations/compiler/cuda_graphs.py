"""CUDA graphs captured by hand, as Lightning's article "Serve Stable Diffusion Three Times Faster" does it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from sdopt.measure import compilation
from sdopt.measure.trace import Trace
from sdopt.optimizations.base import Context, Finding, Proof
from sdopt.optimizations.compiler.base import (
    STAGE_OF,
    TARGETS,
    Compiler,
    Graph,
    PerShape,
    Tensors,
    replace_modules,
    unfit_targets,
)
from sdopt.optimizations.conflicts import records_autograd
from sdopt.pipelines.loading import part_config

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

_WARM_UP = 3
"""Runs before a capture, in which libraries choose kernels and allocate workspaces: PyTorch's manual says three."""


@dataclass(frozen=True)
class CudaGraphs(Compiler):
    """CUDA graphs of whole modules: every kernel of a call is launched at once, without Python in between.

    The kernels are the same as without. A new shape of inputs, or weights at another address, is captured anew; such a
    capture counts as a compilation.
    """

    targets: list[str] = field(default_factory=lambda: list(STAGE_OF), metadata=TARGETS)
    """What is captured; each must show that it was replayed."""

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        what = "a CUDA graph"
        found = ctx.device.needs_cuda(what) + unfit_targets(ctx, self.targets)
        found += records_autograd(ctx, what)
        vae = part_config(ctx.model, "vae") or {}
        if "decoder" in self.targets and vae.get("force_upcast") and _weights(ctx) == "float16":
            found.append(
                "this model's VAE is cast to float32 in each call and back, which moves its weights: choose "
                "compiler.targets=[text_encoder,denoiser], or precision=bf16"
            )
        return found

    @override
    def apply(self, pipe: "DiffusionPipeline") -> Proof:
        compilation.reset()
        made = replace_modules(pipe, self.targets, lambda module: PerShape(module, Capture()))

        def proof(trace: Trace) -> Finding:
            stages = {target: trace.stages[STAGE_OF[target]] for target in self.targets}
            launches = {target: stage.graph_launches for target, stage in stages.items()}
            captures = sum(len(stand_in.graphs) for stand_ins in made.values() for stand_in in stand_ins)
            shown = ", ".join(f"{target} {count}" for target, count in launches.items())
            engaged = all(launches[target] >= stages[target].calls > 0 for target in self.targets)
            facts = {"captures": captures, "graph_launches": sum(launches.values()), "launches": launches}
            return Finding(engaged, f"{captures} graphs captured; replayed: {shown}", facts)

        return proof


class Capture:
    """Captures calls of one module as CUDA graphs, which share a pool of memory of their own."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, call: Tensors) -> Graph:
        """Returns a function that copies its inputs into the graph's, replays it, and returns copies of its outputs."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # A tensor that sits on the CPU, as a timestep may, would be a constant of the graph.
        held = [given.to(next(call.module.parameters()).device, copy=True) for given in call.inputs]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with _without_autocast_cache():
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UP):
                    call(*held)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                results = call(*held)

        def replay(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
            for own, given in zip(held, tensors, strict=True):
                own.copy_(given)
            graph.replay()
            # The next replay overwrites them, and multistep schedulers still hold the last.
            return [result.clone() for result in results]

        return replay


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Lets autocast cast weights within the graph: casts that it keeps are freed when its block ends."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _weights(ctx: Context) -> str | None:
    return getattr(ctx.chosen.get("precision"), "weights", None)
