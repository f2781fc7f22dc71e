"""precision: stores weights of the denoiser in 8 or 4 bits, with TorchAO or SDNQ; memory: those of text encoders."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from sdopt.contract import LATENCY, MEMORY
from sdopt.hardware.cards import BFLOAT16, FP8, INT8, missing
from sdopt.measure.stages import TEXT_ENCODER
from sdopt.options import (
    Context,
    Contract,
    Finding,
    Optimization,
    Proof,
    Stage,
    Trace,
)
from sdopt.options.assumptions import no_lora, plain_weights, unchanged_layers
from sdopt.options.compiler import CudaGraphs, Regional
from sdopt.options.compiler.base import missing_for_triton
from sdopt.options.conflicts import compiles, is_channels_last, records_autograd
from sdopt.options.declarations import Excludes, Extra
from sdopt.options.lora import Hotswap, Loaded
from sdopt.options.precision import overflowing
from sdopt.pipelines.loading import family_of
from sdopt.pipelines.parts import (
    TEXT_ENCODERS,
    Pipeline,
    bytes_of,
    denoiser_of,
    layers_with_weights,
    text_encoders_of,
    unwrapped,
)
from sdopt.schema import OneOf

if TYPE_CHECKING:
    import torch

_PRODUCTS = {
    "int8": ("aten::_int_mm", "sdnq::triton_mm", "sdnq::scaled_mm"),
    "float8_e4m3fn": ("aten::_scaled_mm", "sdnq::triton_mm", "sdnq::scaled_mm"),
    "uint4": (),
    "nf4": (),
    "fp4": (),
}
"""Operators that multiply numbers of a type: PyTorch's, and on a GPU SDNQ's."""


_SDNQ = Extra("sdnq", ("sdnq",))


@dataclass(frozen=True)
class Quantized(Optimization):
    """The base class of options that store weights of the denoiser in few bits, and all others in another type."""

    stage = Stage.QUANTIZE
    assumes = (plain_weights, unchanged_layers)
    contract = Contract.LOSSY
    # Rounding to 8 bits amplifies the small differences between batch sizes.
    fixed_batch = True
    excludes: ClassVar[tuple[Excludes, ...]] = (
        Excludes(
            "memory.layerwise_casting",
            "memory=layerwise_casting would cast the quantized weights: choose one of them",
        ),
        Excludes(
            "lora",
            "quantizes the LoRA too, and another LoRA cannot replace quantized weights: choose lora=fused",
            (Hotswap,),
        ),
    )

    weights: Annotated[str, OneOf(("int8", "float8_e4m3fn"))] = "int8"
    """The type of the quantized weights."""
    others: Literal["float32", "float16", "bfloat16"] = "bfloat16"
    """The type of all other weights, and of the inputs and outputs of layers."""
    activations: bool = True
    """Whether layers quantize inputs too and multiply in 8 bits; otherwise weights are dequantized for each use."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of layers to quantize; of each kind, some layers may be too small."""
        return ("Linear",)

    @property
    @override
    def claims(self) -> frozenset[str]:
        return LATENCY | MEMORY if self.activations else MEMORY

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        reasons = []
        multiplied = (
            ("int8", "float8_e4m3fn") if ctx.device.is_cuda else ("float8_e4m3fn",)
        )
        if self.activations and self.weights in multiplied:
            lacking = missing(ctx.device, INT8 if self.weights == "int8" else FP8)
            reasons += [
                f"{reason}; precision.activations=false quantizes only weights"
                for reason in lacking
            ]
        if self.others == "bfloat16" and ctx.device.is_cuda:
            reasons += [
                f"{reason}; choose precision.others=float16"
                for reason in missing(ctx.device, BFLOAT16)
            ]
        if self.others == "float16":
            reasons += overflowing(ctx, "precision.others=bfloat16 or float32")
        return reasons + records_autograd(ctx, "a quantized weight")

    @override
    def load_kwargs(self) -> dict[str, Any]:
        import torch

        return {"dtype": getattr(torch, self.others)}

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        denoiser = denoiser_of(pipe)
        kinds = {name: type(layer).__name__ for name, layer in denoiser.named_modules()}
        before = _mib(denoiser)
        self._quantize(denoiser)
        mib = [before, _mib(denoiser)]

        def names() -> set[str]:
            network = unwrapped(denoiser_of(pipe))
            return {
                name
                for name, layer in network.named_modules()
                if self._is_quantized(layer)
            }

        expected = names()
        counts = Counter(kinds.values())
        # A transformer has one convolution at most, which cuts the latents into tokens.
        needed = [kind for kind in self.kinds if counts[kind] > 1]

        def proof(trace: Trace) -> Finding:
            network, done = unwrapped(denoiser_of(pipe)), names()
            quantized = Counter(kinds[name] for name in done)
            weighted = {id(layer) for layer in layers_with_weights(network)}
            left: Counter[str] = Counter()
            for name, layer in network.named_modules():
                if name in done or id(layer) not in weighted:
                    continue
                if kinds.get(name) in ("Linear", "Conv2d"):
                    left[kinds[name]] += 1
            ran = {
                name: n
                for name in _PRODUCTS[self.weights]
                if (n := trace.denoiser.operators[name])
            }
            # Compiled products may appear as kernels without an operator; then the stored weights are the evidence.
            multiplied = bool(ran) == self.activations or trace.is_compiled(
                denoiser_of(pipe)
            )
            shown = [
                f"{count} of {count + left[kind]} {kind}"
                for kind, count in sorted(quantized.items())
            ]
            shown += [
                f"0 of {count} {kind}"
                for kind, count in sorted(left.items())
                if kind not in quantized
            ]
            products = ", ".join(
                f"{name.removeprefix('aten::')} ×{count}" for name, count in ran.items()
            )
            products = products or "no product in 8 bits"
            facts = {
                "quantized": quantized,
                "left_alone": left,
                "products": dict(trace.denoiser.product_dtypes),
                "kernels": ran,
                "weights_mib": mib,
                "arithmetic": sorted(trace.denoiser.product_dtypes)
                or [self.weights if self.activations else self.others],
            }
            summary = f"{', '.join(shown)} layers in {self.weights}; {_shrunk(mib)}; {products}"
            complete = done == expected and all(quantized[kind] for kind in needed)
            return Finding(complete and multiplied, summary, facts)

        return proof

    def _quantize(self, denoiser: Any) -> None:
        """Quantizes weights of the denoiser in place, or replaces their layers."""
        raise NotImplementedError

    def _is_quantized(self, layer: torch.nn.Module) -> bool:
        """Returns whether a layer's own weights are quantized."""
        raise NotImplementedError


def _mib(network: torch.nn.Module) -> float:
    """Returns the MiB of a network's parameters as they are stored."""
    return round(bytes_of(network) / 2**20, 3)


def _shrunk(mib: Sequence[float]) -> str:
    """Returns a network's size before and after."""
    before, after = mib
    return f"{before:.1f} → {after:.1f} MiB"


class TorchAo(Quantized):
    """Quantizes linear layers with TorchAO, with one scale per row; convolutions keep their type.

    Layers that embed the timestep keep their type too, because they have fewer rows than an 8-bit product needs, and so
    do LoRA layers whose rank is not a multiple of 8. With `compiler=inductor`, scales are fused into int8 products, as
    TorchAO recommends. Its other recommendation, to tune every kernel by coordinate descent, is not followed: it takes
    many minutes, and what it gains is no gain of 8 bits.
    """

    needs = (Extra("torchao", ("torchao",)),)

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        reasons = super().conflicts(ctx)
        if (
            self.activations
            and self.weights == "float8_e4m3fn"
            and self.others != "bfloat16"
        ):
            reasons.append(
                "row-wise fp8 products return only bfloat16: choose precision.others=bfloat16"
            )
        graphs = ctx.chosen.get("compiler")
        captured = isinstance(graphs, CudaGraphs) and "denoiser" in graphs.targets
        if captured and self.activations and self.weights == "int8":
            # `safe_int_mm` searches the repr of each input for FakeTensor, which copies its values to the host.
            reasons.append(
                "TorchAO's int8 products read inputs on the host unless compiled: choose compiler=inductor"
            )
        if isinstance(graphs, Regional) and not ctx.device.is_cuda:
            # Seen with PyTorch 2.13 and TorchAO 0.18: of a block alone, Inductor generates C++ that g++ refuses, and
            # with weights alone quantized, the graph breaks. The whole denoiser compiles.
            reasons.append(
                "compiler=regional cannot compile TorchAO's layers on a CPU: choose compiler=inductor"
            )
        return reasons

    @override
    def slow_here(self, ctx: Context) -> list[str]:
        if self.weights != "int8" or not self.activations or not ctx.device.is_cuda:
            return []
        if family_of(ctx.model).is_unet or compiles(ctx):
            return []
        # FLUX.1 [dev] on an H100, 28 steps: 6.573 s in bfloat16, 130.5 s in int8, and 3.406 s in int8 compiled
        # (https://github.com/sayakpaul/diffusers-torchao).
        return [
            "without a compiler, expect int8 products to be about 20 times slower: add compiler=inductor"
        ]

    @override
    def context(self, pipe: Pipeline) -> AbstractContextManager[Any]:
        if self.weights != "int8":
            return super().context(pipe)
        from torch._inductor import config

        # In each call, because a setting of Inductor is that of the thread that makes it.
        fused = {"force_fuse_int_mm_with_mul": self.activations}
        patched: AbstractContextManager[Any] = config.patch(fused)
        return patched

    @override
    def _quantize(self, denoiser: Any) -> None:
        from torchao import quantization
        from torchao.quantization import PerRow

        if self.weights == "int8":
            activated, alone = (
                quantization.Int8DynamicActivationInt8WeightConfig,
                quantization.Int8WeightOnlyConfig,
            )
            config = (activated if self.activations else alone)(
                version=2, set_inductor_config=False
            )
        elif self.activations:
            fp8 = quantization.Float8DynamicActivationFloat8WeightConfig
            config = fp8(granularity=PerRow(), set_inductor_config=False)
        else:
            config = quantization.Float8WeightOnlyConfig(set_inductor_config=False)
        quantization.quantize_(denoiser, config, filter_fn=multiplies_in_8_bits)

    @override
    def _is_quantized(self, layer: torch.nn.Module) -> bool:
        from torchao.utils import TorchAOBaseTensor

        return isinstance(getattr(layer, "weight", None), TorchAOBaseTensor)


def multiplies_in_8_bits(layer: torch.nn.Module, name: str) -> bool:
    """Returns whether cuBLAS supports an 8-bit product for a layer; TorchAO would compute others on the host."""
    import torch

    lowered = name.lower()
    if not isinstance(layer, torch.nn.Linear) or any(
        part in lowered for part in _FEW_ROWS
    ):
        return False
    return layer.in_features % 8 == 0 and layer.out_features % 8 == 0


_FEW_ROWS = ("embed", "time_emb_proj", "time_step", "norm", "mod", "adaln", "guidance")
"""Parts of the names of layers that read a row for each sample, not for each token: of time, of scales and shifts."""


@dataclass(frozen=True)
class Sdnq(Quantized):
    """Quantizes linear layers and convolutions with SDNQ; in 8 bits with one scale per output channel.

    SDNQ does not quantize layers with fewer than 32 channels or 16,384 weights. SDNQ's own compilation is disabled:
    `compiler=inductor` compiles its layers with the rest of the denoiser.
    """

    needs = (_SDNQ,)
    excludes = (
        Excludes(
            "lora",
            "SDNQ replaces the layers that a LoRA wraps: choose lora=fused or precision=int8_torchao",
            (Loaded,),
        ),
    )

    weights: Literal["int8", "float8_e4m3fn", "uint4"] = "int8"
    """The type of the quantized weights; `uint4` has a scale for each group of weights."""
    convolutions: bool = True
    """Whether to quantize convolutions too."""
    svd_rank: Annotated[int, Field(ge=1, le=512)] | None = None
    """Rank of a part of each weight that keeps its type, and holds what rounding would change most (SVDQuant, Li et al.
    2024); null is no such part."""

    @property
    @override
    def kinds(self) -> tuple[str, ...]:
        return ("Linear", "Conv2d") if self.convolutions else ("Linear",)

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        reasons = super().conflicts(ctx)
        if self.weights == "uint4" and self.activations:
            reasons.append(
                "4-bit weights are dequantized for each use: set precision.activations=false"
            )
        if self.convolutions and is_channels_last(ctx):
            reasons.append(
                "SDNQ stores convolutions as matrices, without a layout: choose layout=contiguous"
            )
        # SDNQ uses Triton for its products if it is installed.
        if (
            self.activations
            and ctx.device.is_cuda
            and ctx.device.is_here
            and find_spec("triton") is not None
        ):
            reasons += missing_for_triton("SDNQ on CUDA")
        return reasons

    @override
    def comes_after(self, pipe: Pipeline) -> Mapping[str, str]:
        return {
            "load_lora_weights": "precision: SDNQ has replaced the layers that a LoRA wraps: fuse it before"
        }

    @override
    def _quantize(self, denoiser: Any) -> None:
        import torch

        _quantize_by_sdnq(
            denoiser,
            weights_dtype=self.weights,
            use_svd=self.svd_rank is not None,
            svd_rank=self.svd_rank or 1,
            quant_conv=self.convolutions,
            use_quantized_matmul=self.activations,
            use_quantized_matmul_conv=self.activations and self.convolutions,
            torch_dtype=getattr(torch, self.others),
        )

    @override
    def _is_quantized(self, layer: torch.nn.Module) -> bool:
        return _is_quantized_by_sdnq(layer)


@dataclass(frozen=True)
class QuantizedTextEncoders(Optimization):
    """Stores the linear layers of the text encoders in 8 or 4 bits with SDNQ, and dequantizes them for each use."""

    stage = Stage.QUANTIZE
    assumes = (no_lora,)
    contract = Contract.LOSSY
    claims = MEMORY

    needs = (_SDNQ,)
    excludes = (
        Excludes(
            "memory.precomputed_embeddings",
            "memory=precomputed_embeddings removes the text encoders: choose one of them",
        ),
        Excludes(
            "lora",
            "SDNQ replaces the layers that a LoRA wraps: choose lora=fused",
            (Loaded, Hotswap),
        ),
    )

    weights: Literal["int8", "uint4"] = "int8"
    """The type of the quantized weights; `uint4` has a scale for each group of weights."""
    encoders: list[int] = field(default_factory=list)
    """Which text encoders, in the order of the pipeline's: `[3]` is T5 of Stable Diffusion 3; an empty list is all."""

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        reasons = []
        family = family_of(ctx.model)
        has = len(family.encoders)
        if wrong := [number for number in self.encoders if not 1 <= number <= has]:
            encoders = f"{has} text encoders" if has > 1 else "one text encoder"
            reasons.append(
                f"memory.quantized_text_encoders.encoders={wrong}: {family.title} has {encoders}"
            )
        if (
            "memory.without_t5" in ctx.chosen
            and family.optional
            and self.encoders == [has]
        ):
            reasons.append(
                "memory=without_t5 leaves out the one text encoder to quantize: choose one of them"
            )
        if "text_encoder" in getattr(ctx.chosen.get("compiler"), "targets", ()):
            reasons.append(
                "cannot be in a graph: choose compiler.targets=[denoiser,decoder]"
            )
        return reasons + records_autograd(ctx, "a quantized weight")

    @override
    def comes_after(self, pipe: Pipeline) -> Mapping[str, str]:
        replaced = (
            "memory: SDNQ has replaced layers of the text encoders that a LoRA wraps"
        )
        return {"load_lora_weights": f"{replaced}: fuse it before"}

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        import torch

        mib = {}
        for name in self._chosen(pipe):
            encoder = getattr(pipe, name)
            before = _mib(encoder)
            _quantize_by_sdnq(
                encoder,
                weights_dtype=self.weights,
                torch_dtype=next(encoder.parameters()).dtype,
            )
            mib[name] = [before, _mib(encoder)]

        def quantized() -> dict[str, int]:
            """Counts the quantized layers of each text encoder."""
            encoders = {name: getattr(pipe, name) for name in _encoders_in(pipe)}
            return {
                name: sum(map(_is_quantized_by_sdnq, encoder.modules()))
                for name, encoder in encoders.items()
            }

        expected = quantized()

        def proof(trace: Trace) -> Finding:
            done, calls = quantized(), trace.stages[TEXT_ENCODER].calls
            modules = (encoder.modules() for encoder in text_encoders_of(pipe))
            layers = [*chain.from_iterable(modules)]
            left = sum(
                isinstance(layer, torch.nn.Linear) and not _is_quantized_by_sdnq(layer)
                for layer in layers
            )
            count = sum(done.values())
            where = ", ".join(
                f"{number} of {name}" for name, number in done.items() if number
            )
            summary = f"{count} of {count + left} linear layers in {self.weights}"
            if len(done) > 1:
                summary += f" ({where or 'none'})"
            everywhere = all(done.get(name) for name in self._chosen(pipe))
            facts = {
                "quantized": count,
                "left_alone": left,
                "calls": calls,
                "by_encoder": done,
                "weights_mib": mib,
            }
            sizes = ", ".join(f"{name} {_shrunk(sides)}" for name, sides in mib.items())
            return Finding(
                done == expected and everywhere and calls > 0,
                f"{summary}; {sizes}; text encoders ran {calls} times",
                facts,
            )

        return proof

    def _chosen(self, pipe: Pipeline) -> list[str]:
        """Returns the attributes of the text encoders that are quantized; a model may have been saved without one."""
        names = {
            number: name
            for number, name in enumerate(TEXT_ENCODERS, 1)
            if name in _encoders_in(pipe)
        }
        return [
            name for number, name in names.items() if number in (self.encoders or names)
        ]


def _encoders_in(pipe: Pipeline) -> list[str]:
    """Returns the attributes of the text encoders that a pipeline has."""
    return [name for name in TEXT_ENCODERS if getattr(pipe, name, None) is not None]


def _quantize_by_sdnq(network: Any, weights_dtype: str, **arguments: Any) -> None:
    """Quantizes a network in place: with a scale for each output channel, in 4 bits for each group of weights."""
    import torch

    # SDNQ reads these variables on import. The axis `compiler` alone controls compilation.
    os.environ |= {"SDNQ_USE_TORCH_COMPILE": "0", "SDNQ_USE_OPENVINO_MM": "0"}
    from sdnq import sdnq_post_load_quant

    if torch.cuda.is_available() and find_spec("triton") is not None:
        _give_triton_memory()
    # PyTorch's `svd_lowrank` starts from random numbers: each process is to have the same weights.
    with torch.random.fork_rng():
        torch.manual_seed(0)
        group_size = 0 if weights_dtype == "uint4" else -1
        sdnq_post_load_quant(
            network, weights_dtype=weights_dtype, group_size=group_size, **arguments
        )


def _is_quantized_by_sdnq(layer: torch.nn.Module) -> bool:
    return hasattr(layer, "sdnq_dequantizer")


def _give_triton_memory() -> None:
    """Sets Triton's allocator for memory that kernels request at launch, as Inductor does before a launch.

    From Hopper on, SDNQ's products store tensor descriptors in such memory, and Triton raises an error without an
    allocator.
    """
    import torch

    triton = import_module("triton")
    if hasattr(triton, "set_allocator"):
        triton.set_allocator(
            lambda size, _align, _stream: torch.empty(
                size, dtype=torch.int8, device="cuda"
            )
        )
