"""NVIDIA's TensorRT, by way of Torch-TensorRT."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from sdopt.measure import compilation
from sdopt.measure.trace import Trace
from sdopt.optimizations.base import Context, Finding, Proof
from sdopt.optimizations.compiler.base import (
    Compiler,
    StandIn,
    exports,
    replace_modules,
)
from sdopt.optimizations.conflicts import missing_packages

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

_ENGINE = "tensorrt::execute_engine"
"""The operator by which Torch-TensorRT runs an engine."""


@dataclass(frozen=True)
class TensorRt(Compiler):
    """A TensorRT engine of the denoiser, built at the first call of each shape (`MutableTorchTensorRTModule`)."""

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        what = "a TensorRT engine"
        found = ctx.device.needs_cuda(what, (7, 5))
        found += missing_packages(ctx, "tensorrt", "torch_tensorrt")
        return found + exports(ctx, what)

    @override
    def apply(self, pipe: "DiffusionPipeline") -> Proof:
        compilation.reset()
        replace_modules(pipe, ["denoiser"], Engine)

        def proof(trace: Trace) -> Finding:
            runs, calls = trace.denoiser.operators[_ENGINE], trace.denoiser.calls
            # Where TensorRT lacks an operator, the graph is cut into several engines with PyTorch in between.
            facts = {"engines_run": runs, "calls": calls}
            return Finding(runs >= calls > 0, f"{runs} engines run in {calls} calls", facts)

        return proof


class Engine(StandIn):
    """Stands in for a module with its TensorRT engine, which Torch-TensorRT builds anew for another shape."""

    def __init__(self, module: torch.nn.Module) -> None:
        import torch_tensorrt

        super().__init__(module)
        engine: Any = torch_tensorrt.MutableTorchTensorRTModule(module, use_explicit_typing=True)
        # It passes for a module, whose weights would then be listed twice.
        self.__dict__["_engine"] = engine
        self._shapes: set[Any] = set()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the engine; counts the first call of each shape as a compilation."""
        shape = tuple(args[0].shape)
        if shape in self._shapes:
            return self._engine(*args, **kwargs)
        with compilation.compilation():
            result = self._engine(*args, **kwargs)
        self._shapes.add(shape)
        return result
