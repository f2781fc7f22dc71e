"""`torch.compile` with Inductor: on whole modules, on the blocks that repeat, or for any shape at once."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.fx.experimental._config
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from sdopt.measure import compilation
from sdopt.measure.trace import Trace
from sdopt.optimizations.base import Context, Finding, Proof
from sdopt.optimizations.compiler.base import (
    STAGE_OF,
    TARGETS,
    Compiler,
    only_replays,
    regions_in,
    replace_modules,
    unfit_for_graphs,
    unfit_targets,
)
from sdopt.optimizations.compiler.toolchain import missing_for_inductor
from sdopt.pipelines.parts import denoiser_of, device_of
from sdopt.schema import bounded

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def records_cuda_graphs(mode: str) -> bool:
    """Returns whether a mode of `torch.compile` records CUDA graphs."""
    return mode in ("reduce-overhead", "max-autotune")


def _arguments(option: "Inductor | Regional") -> str:
    """Returns the arguments of `torch.compile` that are not its defaults, each after a comma."""
    given = {"mode": option.mode, "fullgraph": option.fullgraph, "dynamic": option.dynamic}
    usual = {"mode": "default", "fullgraph": False, "dynamic": None}
    return "".join(f", {name}={value!r}" for name, value in given.items() if value != usual[name])


def too_many_shapes(ctx: Context, dynamic: bool | None) -> list[str]:
    """Returns the conflict, if any, of graphs for one shape each with more shapes than TorchDynamo compiles."""
    if dynamic is not False or ctx.shapes == 1:
        return []
    from torch._dynamo import config

    limit: int = config.recompile_limit
    if ctx.shapes <= limit:
        return []
    more = f"compiles a graph for each of {ctx.shapes} shapes, and PyTorch runs eagerly what comes after {limit}"
    return [f"{more}: choose compiler.dynamic=null, or compiler=inductor_dynamic"]


@dataclass(frozen=True)
class Inductor(Compiler):
    """`torch.compile` with Inductor on the denoiser and, if they are named, on text encoders and the VAE's decoder.

    `dynamic`: null lets the compiler generalise a shape when it first changes.
    """

    mode: str = bounded("default", choices=MODES)
    """As in `torch.compile`; `reduce-overhead` and `max-autotune` record CUDA graphs."""
    fullgraph: bool = False
    """Whether a graph break is an error."""
    dynamic: bool | None = None
    """Whether shapes are symbols; null generalises a shape when it first changes."""
    targets: list[str] = field(default_factory=lambda: ["denoiser"], metadata=TARGETS)
    """What is compiled; each must show that it ran compiled."""

    @property
    @override
    def diffusers_lines(self) -> tuple[str, ...]:
        places = {"denoiser": "pipe.unet", "decoder": "pipe.vae.decoder"}
        if records_cuda_graphs(self.mode) or not set(self.targets) <= places.keys():
            return ()  # their outputs have to be copied; SDXL has two text encoders
        found = [f"{places[target]} = torch.compile({places[target]}{_arguments(self)})" for target in self.targets]
        return "import torch", *found

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        found = missing_for_inductor(ctx) + unfit_targets(ctx, self.targets) + too_many_shapes(ctx, self.dynamic)
        if ctx.device.is_cuda and records_cuda_graphs(self.mode):
            found += unfit_for_graphs(ctx, self.targets)
        return found

    @override
    def apply(self, pipe: "DiffusionPipeline") -> Proof:
        compilation.reset()
        replays = records_cuda_graphs(self.mode)

        def compiled(module: torch.nn.Module) -> Any:
            made = torch.compile(module, mode=self.mode, fullgraph=self.fullgraph, dynamic=self.dynamic)
            if replays:
                _keep_outputs(made)
            return made

        replace_modules(pipe, self.targets, compiled)

        def proof(trace: Trace) -> Finding:
            regions = {target: regions_in(trace.stages[STAGE_OF[target]]) for target in self.targets}
            found = _compiled(regions, self.mode, device_of(pipe))
            if not replays or device_of(pipe).type != "cuda":
                return found
            return _replayed(found, trace, self.targets)

        return proof


@dataclass(frozen=True)
class Regional(Compiler):
    """Compiles the denoiser's repeated blocks instead of the whole (diffusers' `compile_repeated_blocks`).

    One compilation serves all blocks of a width: it is short, and what lies between the blocks runs eagerly.
    """

    mode: str = bounded("default", choices=("default", "max-autotune-no-cudagraphs"))
    """As in `torch.compile`; no mode that records a CUDA graph for each of many small blocks."""
    fullgraph: bool = True
    """Whether a graph break is an error."""
    dynamic: bool | None = None
    """Whether shapes are symbols; null generalises a shape when it first changes."""

    @property
    @override
    def diffusers_lines(self) -> tuple[str, ...]:
        return (f"pipe.unet.compile_repeated_blocks({_arguments(self).removeprefix(', ')})",)

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        return missing_for_inductor(ctx) + too_many_shapes(ctx, self.dynamic)

    @override
    def apply(self, pipe: "DiffusionPipeline") -> Proof:
        compilation.reset()
        denoiser = denoiser_of(pipe)
        denoiser.compile_repeated_blocks(mode=self.mode, fullgraph=self.fullgraph, dynamic=self.dynamic)

        def proof(trace: Trace) -> Finding:
            blocks = [m for m in denoiser.modules() if type(m).__name__ in denoiser._repeated_blocks]
            regions, calls = regions_in(trace.denoiser), trace.denoiser.calls
            found = _compiled({"denoiser": regions}, self.mode, device_of(pipe))
            # Past its limit of recompilations Dynamo runs a block eagerly, and says so only in a log.
            everywhere = regions >= len(blocks) * calls > 0
            summary = f"{found.summary}, for {len(blocks)} blocks in {calls} calls"
            return Finding(found.engaged and everywhere, summary, found.facts | {"blocks": len(blocks)})

        return proof


@dataclass(frozen=True)
class InductorDynamic(Compiler):
    """`torch.compile` with Inductor on the denoiser once, for images of any size in batches of any number.

    The evidence includes a call in another size and batch, after which nothing may have been compiled anew. PyTorch
    takes one sample for a constant: without guidance, batches of one and of more are two compilations.
    """

    fixed_batch: ClassVar[bool] = False

    mode: str = bounded("default", choices=("default", "max-autotune-no-cudagraphs"))
    """As in `torch.compile`; a mode that records CUDA graphs would record one for each shape."""

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        return missing_for_inductor(ctx)

    @override
    def context(self, pipe: "DiffusionPipeline") -> AbstractContextManager[Any]:
        # By default, sizes that are equal in the first call must stay equal: a square image would keep out all others.
        settings: Any = torch.fx.experimental._config
        patched: AbstractContextManager[Any] = settings.patch(use_duck_shape=False)
        return patched

    @override
    def apply(self, pipe: "DiffusionPipeline") -> Proof:
        compilation.reset()

        def compiled(module: torch.nn.Module) -> Any:
            return torch.compile(module, mode=self.mode, dynamic=True)

        replace_modules(pipe, ["denoiser"], compiled)

        def proof(trace: Trace) -> Finding:
            found = _compiled({"denoiser": regions_in(trace.denoiser)}, self.mode, device_of(pipe))
            if not found.engaged:
                return found
            before = compilation.compiled_so_far()[1]
            shapes = _call_in_another_shape(denoiser_of(pipe), trace)
            recompiled = compilation.compiled_so_far()[1] - before
            summary = f"{found.summary}; {shapes[0]} and then {shapes[1]}: {recompiled} compiled anew"
            return Finding(found.engaged and not recompiled, summary, found.facts | {"compiled_anew": recompiled})

        return proof


def _call_in_another_shape(denoiser: Any, trace: Trace) -> list[tuple[int, ...]]:
    """Calls the denoiser with another sample and a wider image as well as in a call's own shape; returns both shapes.

    That is within a call of the pipeline: what options put around it, such as autocast or inference mode, is a part of
    what TorchDynamo compiles for. The latents grow by eight columns, which three halvings of their width divide evenly.
    """
    shapes: list[tuple[int, ...]] = []

    def call_again(module: Any, args: Any, kwargs: Any, _output: Any) -> None:
        hook.remove()
        sample, rows = args[0], args[0].shape[0]

        def repeated(tensor: torch.Tensor) -> torch.Tensor:
            return torch.cat([tensor, tensor[:1]]) if tensor.dim() and tensor.shape[0] == rows else tensor

        wider = torch.cat([sample, sample[..., :8]], dim=-1)
        args, kwargs = tree_map_only(torch.Tensor, repeated, ((wider, *args[1:]), kwargs))
        shapes.extend([tuple(sample.shape), tuple(args[0].shape)])
        module(*args, **kwargs)

    hook = denoiser.register_forward_hook(call_again, with_kwargs=True)
    trace.call_again()
    return shapes


def _compiled(regions: Mapping[str, int], mode: str, device: torch.device) -> Finding:
    """Judges whether regions that TorchDynamo compiled ran in each target, from their number.

    The summary adds what the mode leaves out on the device.
    """
    from torch._dynamo.utils import counters
    from torch._inductor import utils as inductor_utils

    facts: dict[str, Any] = {
        "graphs": counters["stats"]["unique_graphs"],
        "graph_breaks": sum(counters["graph_break"].values()),
        "compiled_regions_run": sum(regions.values()),
    }
    graphs = f"{facts['graphs']} graph{'s' if facts['graphs'] != 1 else ''}, {facts['graph_breaks']} breaks"
    shown = ", ".join(f"{target} {count}" for target, count in regions.items()) if len(regions) > 1 else ""
    summary = f"{graphs}; {facts['compiled_regions_run']} compiled regions run{shown and f' ({shown})'}"
    if len(regions) > 1:
        facts["regions"] = dict(regions)
    if mode.startswith("max-autotune") and device.type == "cuda" and not inductor_utils.is_big_gpu(device):
        facts["templates"] = False
        summary += "; Inductor tried none of Triton's products, as on all cards of fewer than 68 multiprocessors"
    return Finding(facts["graphs"] > 0 and all(regions.values()), summary, facts)


def _replayed(found: Finding, trace: Trace, chosen: list[str]) -> Finding:
    """Adds to a finding whether each call of each target replayed CUDA graphs, and none was skipped."""
    from torch._dynamo.utils import counters

    stages = {target: trace.stages[STAGE_OF[target]] for target in chosen}
    launches = {target: stage.graph_launches for target, stage in stages.items()}
    captures = sum(stage.graph_captures for stage in stages.values())
    skips = counters["inductor"]["cudagraph_skips"]
    facts = {"graph_launches": sum(launches.values()), "launches": launches, "cudagraph_skips": skips}
    summary = f"{found.summary}; {facts['graph_launches']} CUDA graphs replayed, {skips} skipped"
    if captures:
        facts["recorded_anew"] = captures
        summary += f", {captures} recorded anew in the traced call"
    # Counted as skips are neither graphs without an operator to record, nor those that are recorded in each call.
    engaged = found.engaged and only_replays(stages.values()) and not skips
    return Finding(engaged, summary, found.facts | facts)


def _keep_outputs(compiled: Any) -> None:
    """With CUDA graphs a replay overwrites the last output, which multistep schedulers still hold: hand out copies."""

    def begin(*_: Any) -> None:
        torch.compiler.cudagraph_mark_step_begin()

    def copied(_module: Any, _inputs: Any, output: Any) -> Any:
        return tree_map_only(torch.Tensor, torch.clone, output)

    compiled.register_forward_pre_hook(begin)
    compiled.register_forward_hook(copied)
