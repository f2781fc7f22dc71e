"""Alibaba's PAI-Blade, in its open-source version BladeDISC."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

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
    exports,
    replace_by_graphs,
    tracing,
    unfit_targets,
)

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

_ENGINE = "DiscEngine"
"""Part of the name of the operator that runs a subgraph compiled by BladeDISC."""


@dataclass(frozen=True)
class Blade(GraphCompiler):
    """Runs BladeDISC's `torch_blade.optimize` on text encoder, denoiser and decoder, as in Alibaba's PAI-Blade article.

    Alibaba's packages are for Python 3.6 to 3.8 and CUDA 10.0 to 11.3, so sdopt needs a build from source.
    """

    fixed_batch: ClassVar[bool] = True

    targets: list[str] = field(default_factory=lambda: list(STAGE_OF), metadata=TARGETS)
    """The modules to compile; each must prove that its compiled form ran."""

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        what = "BladeDISC's graph"
        found = ctx.device.needs_cuda(what)
        if not ctx.device.is_here or find_spec("torch_blade") is None:
            found.append(
                "PAI-Blade has no public package for PyTorch 2.11 or later: build torch_blade "
                "from https://github.com/alibaba/BladeDISC, or choose compiler=inductor_dynamic, which also compiles "
                "once for any size"
            )
        return found + unfit_targets(ctx, self.targets) + exports(ctx, what)

    @override
    def apply(self, pipe: "DiffusionPipeline") -> Proof:
        compilation.reset()
        replace_by_graphs(pipe, self.targets, _optimized)

        def proof(trace: Trace) -> Finding:
            stages = {target: trace.stages[STAGE_OF[target]].operators for target in self.targets}
            runs = {target: sum(n for name, n in seen.items() if _ENGINE in name) for target, seen in stages.items()}
            shown = ", ".join(f"{target} {count}" for target, count in runs.items())
            return Finding(all(runs.values()), f"engines run: {shown}", {"engines_run": runs})

        return proof


def _optimized(call: Tensors) -> Graph:
    import torch_blade

    with torch.no_grad(), tracing():
        graph = torch_blade.optimize(call.eval(), allow_tracing=True, model_inputs=tuple(call.inputs))

    def run(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        with torch.no_grad():
            found = graph(*tensors)
        return found if isinstance(found, tuple | list) else [found]

    return run
