"""`torch.jit.trace`, as in diffusers' article "Memory and speed"."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from sdopt.measure import compilation
from sdopt.measure.trace import Trace
from sdopt.options.base import Context, Finding, Proof
from sdopt.options.compiler.base import (
    Graph,
    GraphCompiler,
    Tensors,
    exports,
    graphs_in,
    replace_by_graphs,
    tracing,
)

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


@dataclass(frozen=True)
class TorchScript(GraphCompiler):
    """Traces the denoiser with `torch.jit.trace`: one TorchScript graph per input shape.

    PyTorch has deprecated TorchScript in favour of `torch.compile` and `torch.export`. The option exists to compare
    with figures in older articles.
    """

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        return exports(ctx, "a traced graph")

    @override
    def apply(self, pipe: "DiffusionPipeline") -> Proof:
        compilation.reset()
        made = replace_by_graphs(pipe, ["denoiser"], _traced)

        def proof(trace: Trace) -> Finding:
            seen, shapes = trace.denoiser, graphs_in(made["denoiser"])
            runs = seen.operators[_GRAPH]
            facts = {"graphs": shapes, "graphs_run": runs, "calls": seen.calls}
            summary = f"{shapes} traced graph{'s' if shapes != 1 else ''}, run {runs} times in {seen.calls} calls"
            return Finding(runs >= seen.runs > 0 and shapes > 0, summary, facts)

        return proof


_GRAPH = "forward"
"""The profiler's name for a run of a TorchScript graph; Python calls are not recorded as operators."""


_WARM_UP = 3
"""Runs of a graph: the executor profiles types and shapes in the first two, and optimizes the graph for the third."""


def _traced(call: Tensors) -> Graph:
    """Traces a call, and runs the graph until TorchScript's profiling executor has optimized the graph."""
    with torch.no_grad(), tracing():
        traced: Graph = torch.jit.trace(call.eval(), tuple(call.inputs), check_trace=False)
        for _ in range(_WARM_UP):
            traced(*call.inputs)
    return traced
