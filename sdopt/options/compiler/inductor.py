"""`torch.compile` with Inductor: of whole modules, of repeated blocks, or once for any shape."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typing_extensions import override

from sdopt.errors import counted
from sdopt.measure import compilation
from sdopt.options import Context, Finding, Proof, Trace
from sdopt.options.attention import Sliced
from sdopt.options.compiler.aot import digest_of, private_folder
from sdopt.options.compiler.base import (
    STAGE_OF,
    Compiler,
    only_replays,
    replace_modules,
    unfit_for_graphs,
    unfit_for_inductor,
    unfit_targets,
)
from sdopt.options.conflicts import keeps_gradients
from sdopt.options.declarations import Excludes
from sdopt.pipelines.loading import head_dimensions_by_level
from sdopt.pipelines.parts import Pipeline, denoiser_of, device_of
from sdopt.schema import OneOf

if TYPE_CHECKING:
    import torch


def records_cuda_graphs(mode: str) -> bool:
    """Returns whether a mode of `torch.compile` records CUDA graphs."""
    return mode in ("reduce-overhead", "max-autotune")


def _arguments(option: Inductor | Regional) -> str:
    """Returns the non-default arguments of `torch.compile` as code, each preceded by a comma."""
    arguments = {
        "mode": option.mode,
        "fullgraph": option.fullgraph,
        "dynamic": option.dynamic,
    }
    usual = {"mode": "default", "fullgraph": False, "dynamic": None}
    return "".join(
        f", {name}={value!r}"
        for name, value in arguments.items()
        if value != usual[name]
    )


def too_many_graphs(ctx: Context, dynamic: bool | None, graphs: int) -> list[str]:
    """Returns the conflict, if any, of more static graphs than TorchDynamo's recompilation limit.

    `graphs` are those of the same code at all shapes; `dynamic` is as in `torch.compile`.
    """
    if dynamic is not False:
        return []
    from torch._dynamo import config

    limit: int = config.recompile_limit
    if graphs <= limit:
        return []
    shapes = len(ctx.shapes)
    more = f"needs {graphs} graphs for {shapes} shapes, but PyTorch compiles at most {limit} and runs others eagerly"
    # With several sizes, `null` compiles a graph for any of them, which `records_any_shape` may refuse.
    return [
        f"{more}: give fewer shapes"
        + ("" if keeps_gradients(ctx) else ", or choose compiler.dynamic=null")
    ]


def records_any_shape(ctx: Context) -> list[str]:
    """Returns the conflict, if any, of a graph for all image sizes with `grad_mode=enabled`."""
    if not keeps_gradients(ctx):
        return []
    # PyTorch 2.13: "cannot determine truth value of Relational" in torch/_inductor/ir.py get_stride_order. With
    # attention=vanilla it compiles for a quarter of an hour, and the backward pass fails.
    fails = "Inductor cannot compile a graph that autograd records for any shape"
    other = "compiler=inductor with compiler.dynamic=false"
    return [f"{fails}: choose grad_mode=no_grad or inference_mode, or {other}"]


_KEPT = "inductor"
"""The folder of kept code."""


@dataclass(frozen=True)
class ByInductor(Compiler):
    """The base of the options that compile with Inductor."""

    keep: bool = field(default=False, kw_only=True)
    """Whether compiled code is kept in `$XDG_CACHE_HOME/sdopt/inductor`, from where later processes load it."""

    @property
    def _keeps(self) -> str:
        return _KEPT if self.keep else ""

    def _start(self, pipe: Pipeline) -> None:
        """Resets the counts of compilations, and prepares the folder of kept code, if the option wants one."""
        compilation.reset()
        if self.keep:
            folder = private_folder(_KEPT) / digest_of(
                denoiser_of(pipe), device_of(pipe), repr(self)
            )
            folder.mkdir(exist_ok=True)
            compilation.keep_in(folder)


@dataclass(frozen=True)
class Inductor(ByInductor):
    """Compiles the denoiser, and optionally text encoders and the VAE's decoder, with `torch.compile` and Inductor."""

    mode: Literal[
        "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
    ] = "default"
    """Mode of `torch.compile`; `reduce-overhead` and `max-autotune` record CUDA graphs."""
    fullgraph: bool = False
    """Whether a graph break raises an error."""
    dynamic: bool | None = None
    """Whether shapes are symbolic; null generalizes a shape on its first change."""
    targets: list[Annotated[str, OneOf(STAGE_OF)]] = field(
        default_factory=lambda: ["denoiser"]
    )
    """The modules to compile; each must prove that its compiled form ran."""

    @property
    @override
    def recording_calls(self) -> int:
        # torch/_inductor/cudagraph_trees.py: a module runs once without a graph, and is recorded in its second run. A
        # text encoder or decoder runs once per call.
        return int(records_cuda_graphs(self.mode))

    @property
    @override
    def diffusers_lines(self) -> tuple[str, ...]:
        places = {"denoiser": "pipe.unet", "decoder": "pipe.vae.decoder"}
        if records_cuda_graphs(self.mode) or not set(self.targets) <= places.keys():
            return ()  # outputs of CUDA graphs must be copied, and SDXL has two text encoders
        lines = [
            f"{places[target]} = torch.compile({places[target]}{_arguments(self)})"
            for target in self.targets
        ]
        return "import torch", *lines

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        reasons = unfit_for_inductor(ctx, self._keeps) + unfit_targets(
            ctx, self.targets
        )
        reasons += too_many_graphs(ctx, self.dynamic, len(self._inputs(ctx)))
        sizes = {shape.size for shape in ctx.shapes}
        # Where only batch sizes differ, the strides of activations in channels_last hold no symbol.
        if self._sees_images and (
            self.dynamic or (self.dynamic is None and len(sizes) > 1)
        ):
            reasons += records_any_shape(ctx)
        if ctx.device.is_cuda and records_cuda_graphs(self.mode):
            reasons += unfit_for_graphs(ctx, self.targets)
        return reasons

    @property
    def _sees_images(self) -> bool:
        """Whether the inputs of a target depend on the image size, as those of a text encoder do not."""
        return "denoiser" in self.targets or "decoder" in self.targets

    def _inputs(self, ctx: Context) -> set[tuple[int | None, int]]:
        """Returns the distinct (image size, batch size) of the targets' inputs; each of them needs a static graph.

        Batch sizes are relative: with `caching=guidance_interval` some steps run half of a batch, which counts as 1,
        and half of one batch may be the whole of another.
        """
        parts = (
            getattr(ctx.chosen.get("caching"), "batch_sizes", 1)
            if "denoiser" in self.targets
            else 1
        )
        shapes: set[tuple[int | None, int]] = set()
        for shape in ctx.shapes:
            size = shape.size if self._sees_images else None
            shapes |= {(size, part * shape.batch_size) for part in range(1, parts + 1)}
        return shapes

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        import torch

        self._start(pipe)
        replays = records_cuda_graphs(self.mode)

        def compiled(module: torch.nn.Module) -> Any:
            graph = torch.compile(
                module, mode=self.mode, fullgraph=self.fullgraph, dynamic=self.dynamic
            )
            if replays:
                _keep_outputs(graph)
            return graph

        replace_modules(pipe, self.targets, compiled)

        def proof(trace: Trace) -> Finding:
            finding = _compiled(trace, self.targets, self.mode, device_of(pipe))
            if not replays or device_of(pipe).type != "cuda":
                return finding
            return _replayed(finding, trace, self.targets)

        return proof


@dataclass(frozen=True)
class Regional(ByInductor):
    """Compiles only the denoiser's repeated blocks (diffusers' `compile_repeated_blocks`).

    One short compilation serves all blocks of a width; layers between the blocks run eagerly.
    """

    mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    """Mode of `torch.compile`, except the modes that would record a CUDA graph for each small block."""
    fullgraph: bool = True
    """Whether a graph break raises an error."""
    dynamic: bool | None = None
    """Whether shapes are symbolic; null generalizes a shape on its first change."""

    @property
    @override
    def diffusers_lines(self) -> tuple[str, ...]:
        return (
            f"pipe.unet.compile_repeated_blocks({_arguments(self).removeprefix(', ')})",
        )

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        # All blocks share their code, which is compiled for each level of the UNet that has some.
        levels = len(head_dimensions_by_level(ctx.model)) or 1
        return unfit_for_inductor(ctx, self._keeps) + too_many_graphs(
            ctx, self.dynamic, levels * len(ctx.shapes)
        )

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        self._start(pipe)
        denoiser = denoiser_of(pipe)
        if not denoiser._repeated_blocks:  # diffusers names none of some transformers
            from sdopt.options.transformer import block_classes

            denoiser._repeated_blocks = block_classes(denoiser)
        denoiser.compile_repeated_blocks(
            mode=self.mode, fullgraph=self.fullgraph, dynamic=self.dynamic
        )

        def proof(trace: Trace) -> Finding:
            blocks = [
                name
                for name, m in denoiser.named_modules()
                if type(m).__name__ in denoiser._repeated_blocks
            ]
            seen = trace.denoiser
            # A step may leave blocks out (`caching=deepcache`), so their runs are not counted. A trace shows each layer
            # that runs eagerly, as those between the blocks do.
            within = tuple(f"{block}." for block in blocks)
            eager = [name for name in seen.ran if name.startswith(within)]
            summary, facts = _regions(trace, ["denoiser"])
            summary += f", for {len(blocks)} blocks in {seen.calls} calls"
            if eager:
                summary += f"; layers of them that ran eagerly: {len(eager)}"
            engaged = seen.compiled_regions > 0 and bool(seen.ran) and not eager
            finding = Finding(
                engaged,
                summary,
                facts | {"blocks": len(blocks), "eager_layers": len(eager)},
            )
            return _by_inductor(finding, self.mode, device_of(pipe))

        return proof


@dataclass(frozen=True)
class InductorDynamic(ByInductor):
    """Compiles the denoiser once for any image size and batch size, with `torch.compile` and Inductor.

    The proof includes a call with another size and batch size, which must not trigger a recompilation. PyTorch treats a
    batch size of 1 as a constant: without guidance, batches of 1 and larger batches are compiled separately.
    """

    fixed_batch = False
    unet_only = (
        "what shows that it compiles no other shape anew widens a UNet's latents: choose compiler=inductor with "
        "compiler.dynamic=true"
    )
    excludes = (
        Excludes(
            "attention",
            "there are as many slices as the batch needs, so each batch size would be compiled anew: "
            "choose compiler=inductor, or another attention than sliced",
            (Sliced,),
        ),
    )

    mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    """Mode of `torch.compile`, except the modes that would record a CUDA graph for each shape."""

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        return unfit_for_inductor(ctx, self._keeps) + records_any_shape(ctx)

    @override
    def context(self, pipe: Pipeline) -> AbstractContextManager[Any]:
        import torch
        import torch.fx.experimental._config

        # By default, sizes that are equal in the first call must stay equal, which would exclude non-square images.
        settings: Any = torch.fx.experimental._config
        patched: AbstractContextManager[Any] = settings.patch(use_duck_shape=False)
        return patched

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        import torch

        self._start(pipe)

        def compiled(module: torch.nn.Module) -> Any:
            return torch.compile(module, mode=self.mode, dynamic=True)

        replace_modules(pipe, ["denoiser"], compiled)

        def proof(trace: Trace) -> Finding:
            finding = _compiled(trace, ["denoiser"], self.mode, device_of(pipe))
            if not finding.engaged:
                return finding
            before = compilation.compiled_so_far()[1]
            shapes = _call_in_another_shape(denoiser_of(pipe), trace)
            anew = compilation.compiled_so_far()[1] - before
            return finding.also(
                f"{shapes[0]} and then {shapes[1]}: {anew} recompilations",
                not anew,
                compiled_anew=anew,
            )

        return proof


def _call_in_another_shape(denoiser: Any, trace: Trace) -> list[tuple[int, ...]]:
    """Calls the denoiser again with one more sample and a wider image; returns the original and the new shape.

    A single sample, as a step without guidance has, stays one: PyTorch compiles it apart from larger batches.
    The second call happens inside a pipeline call, since TorchDynamo also specializes on surrounding contexts such as
    autocast or inference mode. The latents grow by eight columns, so that their width can be halved three times.
    """
    import torch
    from torch.utils._pytree import tree_map_only

    shapes: list[tuple[int, ...]] = []

    def call_again(module: Any, args: Any, kwargs: Any, _output: Any) -> None:
        hook.remove()
        sample, rows = args[0], args[0].shape[0]

        def repeated(tensor: torch.Tensor) -> torch.Tensor:
            return (
                torch.cat([tensor, tensor[:1]])
                if tensor.dim() and 1 < rows == tensor.shape[0]
                else tensor
            )

        wider = torch.cat([sample, sample[..., :8]], dim=-1)
        args, kwargs = tree_map_only(
            torch.Tensor, repeated, ((wider, *args[1:]), kwargs)
        )
        shapes.extend([tuple(sample.shape), tuple(args[0].shape)])
        module(*args, **kwargs)

    hook = denoiser.register_forward_hook(call_again, with_kwargs=True)
    trace.call_again()
    return shapes


def _compiled(
    trace: Trace, targets: Sequence[str], mode: str, device: torch.device
) -> Finding:
    """Checks whether each call of each target ran regions compiled by TorchDynamo.

    Beyond its recompilation limit, TorchDynamo runs a call eagerly and reports that only in a log.
    """
    summary, facts = _regions(trace, targets)
    stages = {target: trace.stages[STAGE_OF[target]] for target in targets}
    fewer = [
        target
        for target, stage in stages.items()
        if not stage.compiled_regions >= stage.runs > 0
    ]
    if fewer and facts["compiled_regions_run"]:
        names = ", ".join(
            f"{stages[target].calls} calls of the {target.replace('_', ' ')}"
            for target in fewer
        )
        summary += f", which are not all of {names}"
    return _by_inductor(Finding(not fewer, summary, facts), mode, device)


def _regions(trace: Trace, targets: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Returns a summary of the graphs and of the regions compiled by TorchDynamo that targets ran, and the facts."""
    from torch._dynamo.utils import counters

    regions = {
        target: trace.stages[STAGE_OF[target]].compiled_regions for target in targets
    }
    facts: dict[str, Any] = {
        "graphs": counters["stats"]["unique_graphs"],
        "graph_breaks": sum(counters["graph_break"].values()),
        "compiled_regions_run": sum(regions.values()),
    }
    graphs = f"{counted(facts['graphs'], 'graph')}, {facts['graph_breaks']} breaks"
    if not facts["graphs"]:
        # TorchDynamo keeps graphs by the code of a module's class: another pipeline of this process compiled them.
        graphs = "graphs that this process compiled before"
    summary = f"{graphs}; {facts['compiled_regions_run']} compiled regions run"
    if len(regions) > 1:
        facts["regions"] = dict(regions)
        summary += (
            f" ({', '.join(f'{target} {count}' for target, count in regions.items())})"
        )
    return summary, facts


def _by_inductor(found: Finding, mode: str, device: torch.device) -> Finding:
    """Extends a finding with what Inductor read from the folder of kept code or wrote to it: there must be some.

    Says too if Inductor tried no Triton templates on this device, although the mode asks for them.
    """
    from torch._inductor import utils as inductor_utils

    if compilation.is_kept() and found.facts.get("graphs"):
        written, read = compilation.kept_so_far()
        line = f"of the kept code {read} read, {written} written"
        found = found.also(
            line, bool(written or read), kept_read=read, kept_written=written
        )
    if (
        mode.startswith("max-autotune")
        and device.type == "cuda"
        and not inductor_utils.is_big_gpu(device)
    ):
        none = "Inductor tried no Triton templates for products, as on all cards with fewer than 68 SMs"
        found = found.also(none, templates=False)
    return found


def _replayed(found: Finding, trace: Trace, chosen: list[str]) -> Finding:
    """Extends a finding with whether each call of each target replayed CUDA graphs, without skips."""
    from torch._dynamo.utils import counters

    stages = {target: trace.stages[STAGE_OF[target]] for target in chosen}
    launches = {target: stage.graph_launches for target, stage in stages.items()}
    captures = sum(stage.graph_captures for stage in stages.values())
    skips = counters["inductor"]["cudagraph_skips"]
    facts = {
        "graph_launches": sum(launches.values()),
        "launches": launches,
        "cudagraph_skips": skips,
    }
    summary = f"{facts['graph_launches']} CUDA graphs replayed, {skips} skipped"
    if captures:
        facts["recorded_anew"] = captures
        summary += f", {captures} recorded again in the traced call"
    # Skips include neither graphs without operators nor graphs that are recorded in each call.
    return found.also(summary, only_replays(stages.values()) and not skips, **facts)


def _keep_outputs(compiled: Any) -> None:
    """Makes a module return copies: a CUDA graph replay overwrites outputs that multistep schedulers still hold."""
    import torch
    from torch.utils._pytree import tree_map_only

    def begin(*_: Any) -> None:
        torch.compiler.cudagraph_mark_step_begin()

    def copied(_module: Any, _inputs: Any, output: Any) -> Any:
        return tree_map_only(torch.Tensor, torch.clone, output)

    compiled.register_forward_pre_hook(begin)
    compiled.register_forward_hook(copied)
