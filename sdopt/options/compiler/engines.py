"""Compilers that make one graph for each input shape, which CUDA launches or another engine runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from typing_extensions import override

from sdopt.errors import counted
from sdopt.hardware.cards import ANY_CARD, Feature
from sdopt.measure import compilation
from sdopt.options import Context, Contract, Finding, Proof, Trace
from sdopt.options.compiler.aot import EAGER_ONLY
from sdopt.options.compiler.base import (
    STAGE_OF,
    ExportingCompiler,
    GraphCompiler,
    only_replays,
    replace_modules,
    tracing,
    unfit_for_graphs,
    unfit_targets,
)
from sdopt.options.conflicts import weights_of
from sdopt.options.declarations import Extra
from sdopt.pipelines.parts import Pipeline
from sdopt.schema import OneOf
from sdopt.scratch import scratch_folder

if TYPE_CHECKING:
    import torch

    from sdopt.options.compiler.graphs import Graph, PerShape, Tensors

# ---- on any device --------------------------------------------------------------------------------------------------

_TRACED = "forward"
"""The profiler's name for a run of a TorchScript graph; Python calls are not recorded as operators."""

_WARM_UP = 3
"""Runs of a graph: the executor profiles types and shapes in the first two, and optimizes the graph for the third."""


class TorchScript(ExportingCompiler):
    """Traces the denoiser with `torch.jit.trace`: one TorchScript graph per input shape.

    PyTorch has deprecated TorchScript in favour of `torch.compile` and `torch.export`. The option exists to compare
    with figures in older articles.
    """

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        from sdopt.options.compiler.graphs import graphs_in, replace_by_graphs

        compilation.reset()
        graphs = replace_by_graphs(pipe, ["denoiser"], _traced)

        def proof(trace: Trace) -> Finding:
            seen, shapes = trace.denoiser, graphs_in(graphs["denoiser"])
            runs = seen.operators[_TRACED]
            facts = {"graphs": shapes, "graphs_run": runs, "calls": seen.calls}
            summary = f"{counted(shapes, 'traced graph')}, run {runs} times in {seen.calls} calls"
            return Finding(runs >= seen.runs > 0 and shapes > 0, summary, facts)

        return proof


def _traced(call: Tensors) -> Graph:
    """Traces a call, and runs the graph until TorchScript's profiling executor has optimized the graph."""
    import torch

    with torch.no_grad(), tracing():
        traced: Graph = torch.jit.trace(
            call.eval(), tuple(call.inputs), check_trace=False
        )
        for _ in range(_WARM_UP):
            traced(*call.inputs)
    return traced


# ---- on CUDA --------------------------------------------------------------------------------------------------------

_RUNS_BEFORE = 3
"""Runs before a capture, in which libraries select kernels and allocate workspaces; PyTorch recommends three."""


@dataclass(frozen=True)
class CudaGraphs(GraphCompiler):
    """Captures whole modules as CUDA graphs: all kernels of a call are launched at once, without Python in between.

    The kernels stay the same. A new input shape, or weights at a new address, cause another capture, which counts as a
    compilation.
    """

    needs = (Feature("a CUDA graph", ANY_CARD),)

    targets: list[Annotated[str, OneOf(STAGE_OF)]] = field(
        default_factory=lambda: list(STAGE_OF)
    )
    """The modules to capture; each must prove that its graph was replayed."""

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        return unfit_targets(ctx, self.targets) + unfit_for_graphs(ctx, self.targets)

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        from sdopt.options.compiler.graphs import graphs_in, replace_by_graphs

        compilation.reset()
        capture = Capture()
        graphs = replace_by_graphs(pipe, self.targets, capture)

        def proof(trace: Trace) -> Finding:
            stages = {target: trace.stages[STAGE_OF[target]] for target in self.targets}
            launches = {
                target: stage.graph_launches for target, stage in stages.items()
            }
            captures = sum(map(graphs_in, graphs.values()))
            shown = ", ".join(f"{target} {count}" for target, count in launches.items())
            facts = {
                "captures": captures,
                "graph_launches": sum(launches.values()),
                "launches": launches,
            }
            return Finding(
                only_replays(stages.values()),
                f"{captures} graphs captured; replayed: {shown}",
                facts,
            )

        return proof


class Capture:
    """Captures calls of modules as CUDA graphs; the graphs of each module share a memory pool."""

    def __init__(self) -> None:
        self._pools: dict[torch.nn.Module, Any] = {}
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, call: Tensors) -> Graph:
        """Returns a function that copies its inputs to the graph's, replays the graph, and returns copied outputs."""
        import torch

        if call.module not in self._pools:
            self._pools[call.module] = torch.cuda.graph_pool_handle()
        # One stream for all captures: cuBLAS keeps a workspace (about 30 MiB on Hopper) for each stream it ran on.
        stream = self._stream = self._stream or torch.cuda.Stream()
        # A tensor on the CPU, such as a timestep, would become a constant of the graph.
        held = [
            tensor.to(next(call.module.parameters()).device, copy=True)
            for tensor in call.inputs
        ]
        stream.wait_stream(torch.cuda.current_stream())
        with _without_autocast_cache():
            with torch.cuda.stream(stream):
                for _ in range(_RUNS_BEFORE):
                    call(*held)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pools[call.module], stream=stream):
                results = call(*held)

        def replay(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
            for buffer, tensor in zip(held, tensors, strict=True):
                buffer.copy_(tensor)
            graph.replay()
            # The next replay overwrites the outputs, while multistep schedulers still hold the previous ones.
            return [result.clone() for result in results]

        return replay


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Disables autocast's cache, so that casts are part of the graph: cached casts are freed when autocast exits."""
    import torch

    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


_BLADE_ENGINE, _TENSORRT_ENGINE = "DiscEngine", "tensorrt::execute_engine"
"""Part of the name of the operator that runs a subgraph compiled by BladeDISC, and the one that runs TensorRT's."""


@dataclass(frozen=True)
class Blade(ExportingCompiler):
    """Runs BladeDISC's `torch_blade.optimize` on text encoder, denoiser and decoder, as in Alibaba's PAI-Blade article.

    Alibaba's packages are for Python 3.6 to 3.8 and CUDA 10.0 to 11.3, so sdopt needs a build from source.
    """

    unet_only = "it was made for UNets, before there were such models"

    needs = (Feature("BladeDISC's graph", ANY_CARD),)

    targets: list[Annotated[str, OneOf(STAGE_OF)]] = field(
        default_factory=lambda: list(STAGE_OF)
    )
    """The modules to compile; each must prove that its compiled form ran."""

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        reasons = super().conflicts(ctx)
        if not ctx.device.is_here or find_spec("torch_blade") is None:
            reasons.append(
                "PAI-Blade has no public package for PyTorch 2.11 or later: build torch_blade "
                "from https://github.com/alibaba/BladeDISC, or choose compiler=inductor_dynamic, which also compiles "
                "once for any size"
            )
        return reasons + unfit_targets(ctx, self.targets)

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        from sdopt.options.compiler.graphs import replace_by_graphs

        compilation.reset()
        replace_by_graphs(pipe, self.targets, _optimized)

        def proof(trace: Trace) -> Finding:
            stages = {
                target: trace.stages[STAGE_OF[target]].operators
                for target in self.targets
            }
            runs = {}
            for target, seen in stages.items():
                of_engine = (n for name, n in seen.items() if _BLADE_ENGINE in name)
                runs[target] = sum(of_engine)
            shown = ", ".join(f"{target} {count}" for target, count in runs.items())
            return Finding(
                all(runs.values()), f"engines run: {shown}", {"engines_run": runs}
            )

        return proof


def _optimized(call: Tensors) -> Graph:
    import torch
    import torch_blade

    with torch.no_grad(), tracing():
        graph = torch_blade.optimize(
            call.eval(), allow_tracing=True, model_inputs=tuple(call.inputs)
        )

    def run(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        with torch.no_grad():
            outputs = graph(*tensors)
        return outputs if isinstance(outputs, tuple | list) else [outputs]

    return run


class TensorRt(ExportingCompiler):
    """Runs the denoiser as a TensorRT engine, built at the first call of each shape (`MutableTorchTensorRTModule`)."""

    needs = (
        Feature("a TensorRT engine", (7, 5)),
        Extra("tensorrt", ("torch_tensorrt",)),
    )

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        from sdopt.options.compiler.graphs import TensorRtEngine

        compilation.reset()
        replace_modules(pipe, ["denoiser"], TensorRtEngine)

        def proof(trace: Trace) -> Finding:
            runs, calls = (
                trace.denoiser.operators[_TENSORRT_ENGINE],
                trace.denoiser.calls,
            )
            # If TensorRT lacks an operator, the graph is split into several engines, with PyTorch in between.
            facts = {"engines_run": runs, "calls": calls}
            return Finding(
                runs >= calls > 0, f"{runs} engines run in {calls} calls", facts
            )

        return proof


# ---- outside of PyTorch, on a CPU -----------------------------------------------------------------------------------


class CpuEngine(ExportingCompiler):
    """The base class of engines that compute modules on a CPU with a copy of the weights."""

    what: ClassVar[str]

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        reasons = super().conflicts(ctx)
        if weights_of(ctx) == "bfloat16":
            reasons.append(
                f"{self.what} receives its inputs through NumPy, which has no bfloat16: choose precision=fp32"
            )
        if ctx.device.is_cuda:
            reasons.append(
                f"{self.what} runs on a CPU, and the device is {ctx.device.name}: choose hardware=cpu"
            )
        return reasons

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        from sdopt.options.compiler.graphs import replace_by_graphs

        compilation.reset()
        types: set[str] = set()
        targets = getattr(self, "targets", ["denoiser"])
        graphs = replace_by_graphs(
            pipe, targets, lambda call: self._exported(call, types)
        )
        return lambda trace: self._found(trace, graphs, types)

    def _exported(self, call: Tensors, types: set[str]) -> Graph:
        """Exports a call, and opens it in the engine; adds the type that the engine computes in, if it says so."""
        raise NotImplementedError

    def _found(
        self, trace: Trace, made: Mapping[str, Sequence[PerShape]], types: set[str]
    ) -> Finding:
        """Checks whether the engine computed the targets: PyTorch then runs no matrix products in the denoiser.

        A convolution of the VAE's stays before its decoder, where the operators of eager decoders tell.
        """
        seen = {target: trace.stages[STAGE_OF[target]] for target in made}
        from sdopt.options.compiler.graphs import graphs_in

        counts = {target: graphs_in(stand_ins) for target, stand_ins in made.items()}
        graphs, calls = (
            sum(counts.values()),
            sum(stage.calls for stage in seen.values()),
        )
        eager_products = 0
        for target, stage in seen.items():
            if target == "denoiser":
                eager_products += sum(stage.product_dtypes.values())
            else:
                eager = (*EAGER_ONLY, "aten::relu")
                eager_products += sum(stage.operators[name] for name in eager)
        facts = {
            "graphs": graphs,
            "calls": calls,
            "operators_by_pytorch": eager_products,
        }
        summary = f"{counted(graphs, 'graph')} for {calls} calls, {eager_products} operators by PyTorch"
        ran = all(counts[target] and seen[target].calls for target in made)
        return Finding(ran and not eager_products, summary, facts)


class OnnxRuntime(CpuEngine):
    """Runs the denoiser in an ONNX Runtime session on a CPU, exported at the first call of each shape."""

    needs = (Extra("onnxruntime", ("onnxruntime", "onnxscript")),)
    what = "an ONNX Runtime session"

    @override
    def _exported(self, call: Tensors, types: set[str]) -> Graph:
        import onnxruntime
        import torch

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        # The exported file is deleted once the session is open.
        with scratch_folder("onnx") as folder, torch.no_grad(), tracing():
            path = str(folder / "denoiser.onnx")
            torch.onnx.export(
                call.eval(),
                tuple(call.inputs),
                path,
                dynamo=True,
                external_data=True,
                verbose=False,
            )
            session = onnxruntime.InferenceSession(
                path, options, providers=["CPUExecutionProvider"]
            )
            call(*call.inputs)  # records the structure of the output
        names = [given.name for given in session.get_inputs()]

        def run(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
            feeds = {
                name: tensor.detach().numpy()
                for name, tensor in zip(names, tensors, strict=True)
            }
            return [torch.from_numpy(result) for result in session.run(None, feeds)]

        return run


@dataclass(frozen=True)
class OpenVino(CpuEngine):
    """Runs the denoiser, and optionally the VAE's decoder, as OpenVINO models, converted at each shape's first call."""

    needs = (Extra("openvino", ("openvino",)),)
    what = "an OpenVINO model"

    precision: Literal["f32", "bf16", "f16"] = "f32"
    """OpenVINO's type of arithmetic; OpenVINO's own default is bfloat16 on processors that support it."""
    targets: list[Literal["denoiser", "decoder"]] = field(
        default_factory=lambda: ["denoiser"]
    )
    """The modules to convert; each must prove that its model ran."""

    @property
    @override
    def contract(self) -> Contract:
        return Contract.EQUIVALENT if self.precision == "f32" else Contract.LOSSY

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        return super().conflicts(ctx) + unfit_targets(ctx, self.targets)

    @override
    def _found(
        self, trace: Trace, made: Mapping[str, Sequence[PerShape]], types: set[str]
    ) -> Finding:
        finding = super()._found(trace, made, types)
        # OpenVINO takes another type if the processor lacks the one that it is asked for.
        return finding.also(
            f"computed in {', '.join(sorted(types))}",
            types == {self.precision},
            types=sorted(types),
        )

    @override
    def _exported(self, call: Tensors, types: set[str]) -> Graph:
        import openvino
        import torch

        shapes = [tuple(given.shape) for given in call.inputs]
        with torch.no_grad(), tracing():
            model = openvino.convert_model(
                call.eval(), example_input=tuple(call.inputs), input=shapes
            )
            call(*call.inputs)  # records the structure of the output
        options = {
            "INFERENCE_PRECISION_HINT": self.precision,
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        }
        compiled = openvino.Core().compile_model(model, "CPU", options)
        types.add(compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name())
        request = compiled.create_infer_request()

        def run(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
            results = request.infer([tensor.detach().numpy() for tensor in tensors])
            return [torch.from_numpy(result) for result in results.values()]

        return run
