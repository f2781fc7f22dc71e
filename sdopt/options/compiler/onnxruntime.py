"""ONNX Runtime, for CPUs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from sdopt.measure import compilation
from sdopt.options.base import Context, Proof
from sdopt.options.compiler.base import (
    Graph,
    GraphCompiler,
    Tensors,
    leaves_pytorch,
    ran_outside,
    replace_by_graphs,
    tracing,
)
from sdopt.options.conflicts import missing_packages
from sdopt.scratch import scratch_folder

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


@dataclass(frozen=True)
class OnnxRuntime(GraphCompiler):
    """Runs the denoiser in an ONNX Runtime session on a CPU, exported at the first call of each shape."""

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        found = missing_packages(ctx, "onnxruntime", "onnxruntime", "onnxscript")
        found += leaves_pytorch(ctx, "an ONNX Runtime session")
        if ctx.device.is_cuda:
            found.append(f"the session runs on a CPU, and the device is {ctx.device.name}: choose hardware=cpu")
        return found

    @override
    def apply(self, pipe: "DiffusionPipeline") -> Proof:
        compilation.reset()
        made = replace_by_graphs(pipe, ["denoiser"], _exported)
        return lambda trace: ran_outside(trace, made)


def _exported(call: Tensors) -> Graph:
    """Exports a call and opens a session; the exported file is deleted once the session is open."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    with scratch_folder("onnx") as folder, torch.no_grad(), tracing():
        path = str(folder / "denoiser.onnx")
        torch.onnx.export(call.eval(), tuple(call.inputs), path, dynamo=True, external_data=True, verbose=False)
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        call(*call.inputs)  # records the structure of the output
    names = [given.name for given in session.get_inputs()]

    def run(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        given = {name: tensor.detach().numpy() for name, tensor in zip(names, tensors, strict=True)}
        return [torch.from_numpy(result) for result in session.run(None, given)]

    return run
