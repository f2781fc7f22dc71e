"""`torch.jit.trace`, as diffusers' article "Memory and speed" used it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from sdopt.measure import compilation
from sdopt.measure.trace import Trace
from sdopt.optimizations.base import Context, Finding, Proof
from sdopt.optimizations.compiler.base import (
    Compiler,
    Graph,
    Tensors,
    exports,
    graphs_in,
    replace_by_graphs,
    tracing,
)

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


@dataclass(frozen=True)
class TorchScript(Compiler):
    """`torch.jit.trace` on the denoiser: one TorchScript graph for each shape of its inputs.

    PyTorch has deprecated TorchScript in favour of `torch.compile` and `torch.export`. The option is here for the
    figures that older articles give of it.
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
            return Finding(runs >= seen.calls > 0 and shapes > 0, summary, facts)

        return proof


_GRAPH = "forward"
"""What TorchScript calls a run of a graph in a profile; Python's own calls are no operators there."""


_WARM_UP = 3
"""Runs of a graph: in the first two the executor notes types and shapes, in the third it runs what it made of them."""


def _traced(call: Tensors) -> Graph:
    """Traces a call, and runs the graph until TorchScript's profiling executor has optimized it."""
    with torch.no_grad(), tracing():
        traced: Graph = torch.jit.trace(call.eval(), tuple(call.inputs), check_trace=False)
        for _ in range(_WARM_UP):
            traced(*call.inputs)
    return traced
