"""NVIDIA TensorRT, through Torch-TensorRT."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from sdopt.measure import compilation
from sdopt.measure.trace import Trace
from sdopt.options.base import Context, Finding, Proof
from sdopt.options.compiler.base import (
    GraphCompiler,
    StandIn,
    exports,
    replace_modules,
)
from sdopt.options.conflicts import missing_packages

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

_ENGINE = "tensorrt::execute_engine"
"""The operator that runs a Torch-TensorRT engine."""


@dataclass(frozen=True)
class TensorRt(GraphCompiler):
    """Runs the denoiser as a TensorRT engine, built at the first call of each shape (`MutableTorchTensorRTModule`)."""

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
            # If TensorRT lacks an operator, the graph is split into several engines, with PyTorch in between.
            facts = {"engines_run": runs, "calls": calls}
            return Finding(runs >= calls > 0, f"{runs} engines run in {calls} calls", facts)

        return proof


class Engine(StandIn):
    """Replaces a module by its TensorRT engine, which Torch-TensorRT rebuilds for each new shape."""

    def __init__(self, module: torch.nn.Module) -> None:
        import torch_tensorrt

        super().__init__(module)
        engine: Any = torch_tensorrt.MutableTorchTensorRTModule(module, use_explicit_typing=True)
        # The engine is a module; as a submodule it would list all weights twice.
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
