"""CUDA graphs captured by sdopt, as in Lightning's article "Serve Stable Diffusion Three Times Faster"."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from typing_extensions import override

from sdopt.measure import compilation
from sdopt.measure.trace import Trace
from sdopt.options.base import Context, Finding, Proof
from sdopt.options.compiler.base import (
    STAGE_OF,
    TARGETS,
    Graph,
    GraphCompiler,
    Tensors,
    graphs_in,
    only_replays,
    replace_by_graphs,
    unfit_for_graphs,
    unfit_targets,
)
from sdopt.pipelines.parts import Pipeline

_WARM_UP = 3
"""Runs before a capture, in which libraries select kernels and allocate workspaces; PyTorch recommends three."""


@dataclass(frozen=True)
class CudaGraphs(GraphCompiler):
    """Captures whole modules as CUDA graphs: all kernels of a call are launched at once, without Python in between.

    The kernels stay the same. A new input shape, or weights at a new address, cause another capture, which counts as a
    compilation.
    """

    targets: list[str] = field(default_factory=lambda: list(STAGE_OF), metadata=TARGETS)
    """The modules to capture; each must prove that its graph was replayed."""

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        found = ctx.device.needs_cuda("a CUDA graph") + unfit_targets(ctx, self.targets)
        return found + unfit_for_graphs(ctx, self.targets)

    @override
    def apply(self, pipe: Pipeline) -> Proof:
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
    """Captures calls of modules as CUDA graphs; the graphs of each module share a memory pool."""

    def __init__(self) -> None:
        self._pools: dict[torch.nn.Module, Any] = {}
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, call: Tensors) -> Graph:
        """Returns a function that copies its inputs to the graph's, replays the graph, and returns copied outputs."""
        if call.module not in self._pools:
            self._pools[call.module] = torch.cuda.graph_pool_handle()
        # One stream for all captures: cuBLAS keeps a workspace (about 30 MiB on Hopper) for each stream it ran on.
        stream = self._stream = self._stream or torch.cuda.Stream()
        # A tensor on the CPU, such as a timestep, would become a constant of the graph.
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
            # The next replay overwrites the outputs, while multistep schedulers still hold the previous ones.
            return [result.clone() for result in results]

        return replay


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Disables autocast's cache, so that casts are part of the graph: cached casts are freed when autocast exits."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
