"""Intel's OpenVINO, for CPUs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from sdopt.contract import Contract
from sdopt.measure import compilation
from sdopt.measure.trace import Trace
from sdopt.options.base import Context, Finding, Proof
from sdopt.options.compiler.base import (
    Graph,
    GraphCompiler,
    PerShape,
    Tensors,
    leaves_pytorch,
    ran_outside,
    replace_by_graphs,
    tracing,
    unfit_targets,
)
from sdopt.options.conflicts import missing_packages
from sdopt.schema import bounded

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


@dataclass(frozen=True)
class OpenVino(GraphCompiler):
    """Runs the denoiser, and optionally the VAE's decoder, as OpenVINO models, converted at each shape's first call."""

    precision: str = bounded("f32", choices=("f32", "bf16", "f16"))
    """OpenVINO's type of arithmetic; OpenVINO's own default is bfloat16 on processors that support it."""
    targets: list[str] = field(default_factory=lambda: ["denoiser"], metadata={"choices": ("denoiser", "decoder")})
    """The modules to convert; each must prove that its model ran."""

    @property
    @override
    def contract(self) -> Contract:
        return Contract.EQUIVALENT if self.precision == "f32" else Contract.LOSSY

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        found = missing_packages(ctx, "openvino", "openvino") + leaves_pytorch(ctx, "an OpenVINO model")
        found += unfit_targets(ctx, self.targets)
        if ctx.device.is_cuda:
            found.append(f"OpenVINO runs on a CPU, and the device is {ctx.device.name}: choose hardware=cpu")
        return found

    @override
    def apply(self, pipe: "DiffusionPipeline") -> Proof:
        compilation.reset()
        types: set[str] = set()
        made = replace_by_graphs(pipe, self.targets, lambda call: self._converted(call, types))
        return lambda trace: self._found(trace, made, types)

    def _found(self, trace: Trace, made: Mapping[str, Sequence[PerShape]], types: set[str]) -> Finding:
        found = ran_outside(trace, made)
        # OpenVINO takes another type if the processor lacks the one that it is asked for.
        summary = f"{found.summary}; computed in {', '.join(sorted(types))}"
        return Finding(found.engaged and types == {self.precision}, summary, {**found.facts, "types": sorted(types)})

    def _converted(self, call: Tensors, types: set[str]) -> Graph:
        import openvino

        shapes = [tuple(given.shape) for given in call.inputs]
        with torch.no_grad(), tracing():
            model = openvino.convert_model(call.eval(), example_input=tuple(call.inputs), input=shapes)
            call(*call.inputs)  # records the structure of the output
        options = {"INFERENCE_PRECISION_HINT": self.precision, "INFERENCE_NUM_THREADS": torch.get_num_threads()}
        compiled = openvino.Core().compile_model(model, "CPU", options)
        types.add(compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name())
        request = compiled.create_infer_request()

        def run(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
            results = request.infer([tensor.detach().numpy() for tensor in tensors])
            return [torch.from_numpy(result) for result in results.values()]

        return run
