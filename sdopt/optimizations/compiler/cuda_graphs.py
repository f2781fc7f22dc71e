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
    Tensors,
    graphs_in,
    only_replays,
    replace_by_graphs,
    unfit_for_graphs,
    unfit_targets,
)

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
        found = ctx.device.needs_cuda("a CUDA graph") + unfit_targets(ctx, self.targets)
        return found + unfit_for_graphs(ctx, self.targets)

    @override
    def apply(self, pipe: "DiffusionPipeline") -> Proof:
        compilation.reset()
        capture = Capture()
        made = replace_by_graphs(pipe, self.targets, capture)

        def proof(trace: Trace) -> Finding:
            stages = {target: trace.stages[STAGE_OF[target]] for target in self.targets}
            launches = {target: stage.graph_launches for target, stage in stages.items()}
            captures = sum(map(graphs_in, made.values()))
            shown = ", ".join(f"{target} {count}" for target, count in launches.items())
            facts = {"captures": captures, "graph_launches": sum(launches.values()), "launches": launches}
            return Finding(only_replays(stages.values()), f"{captures} graphs captured; replayed: {shown}", facts)

        return proof


class Capture:
    """Captures calls of modules as CUDA graphs; those of one module share a pool of memory of their own."""

    def __init__(self) -> None:
        self._pools: dict[torch.nn.Module, Any] = {}
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, call: Tensors) -> Graph:
        """Returns a function that copies its inputs into the graph's, replays it, and returns copies of its outputs."""
        if call.module not in self._pools:
            self._pools[call.module] = torch.cuda.graph_pool_handle()
        # One for all: cuBLAS keeps a workspace, of some 30 MiB on Hopper, for each stream that it ever ran on.
        stream = self._stream = self._stream or torch.cuda.Stream()
        # A tensor that sits on the CPU, as a timestep may, would be a constant of the graph.
        held = [given.to(next(call.module.parameters()).device, copy=True) for given in call.inputs]
        stream.wait_stream(torch.cuda.current_stream())
        with _without_autocast_cache():
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UP):
                    call(*held)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pools[call.module], stream=stream):
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
