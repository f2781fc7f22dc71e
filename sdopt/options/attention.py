"""attention: sets the attention implementation of the denoiser, and not of the text encoder and the VAE."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any, ClassVar

from typing_extensions import override

from sdopt.contract import LATENCY, MEMORY, NOTHING
from sdopt.hardware.cards import (
    CUDNN_ATTENTION,
    FLASH_ATTENTION,
    MEM_EFFICIENT_ATTENTION,
    XFORMERS_ATTENTION,
    Feature,
    missing,
)
from sdopt.options import (
    Assumption,
    Context,
    Contract,
    Finding,
    Optimization,
    Proof,
    Stage,
    Trace,
)
from sdopt.options.assumptions import (
    COMMON_PROCESSORS,
    common_attention,
    fused_processors,
    own_weights,
    plain_weights,
    unchanged_layers,
)
from sdopt.options.conflicts import attends_in_float32, leaves_adapters_out
from sdopt.options.declarations import Extra
from sdopt.pipelines.loading import (
    family_of,
    head_dimensions,
    heads_by_level,
    published_denoiser,
)
from sdopt.pipelines.parts import Pipeline, attention_layers, denoiser_of, unwrapped
from sdopt.schema import Model, OneOf, UpToMillion


@dataclass(frozen=True)
class _Backend:
    """A back end of PyTorch's scaled dot-product attention."""

    member: str
    """The member of `torch.nn.attention.SDPBackend`."""
    feature: Feature | None
    """What a card needs for it."""
    names: tuple[str, ...]
    """Parts of the names of its operators, in the form of `Trace.fused_attention`, and of its kernels."""


_BACKENDS = {
    "math": _Backend("MATH", None, ("_dot_product_attention_math",)),
    "flash": _Backend(
        "FLASH_ATTENTION",
        FLASH_ATTENTION,
        ("_dot_product_flash_attention", "flash_fwd", "FlashAttnFwd"),
    ),
    "mem_efficient": _Backend(
        "EFFICIENT_ATTENTION",
        MEM_EFFICIENT_ATTENTION,
        ("_dot_product_efficient_attention", "fmha_cutlass"),
    ),
    "cudnn": _Backend("CUDNN_ATTENTION", CUDNN_ATTENTION, ("cudnn_", "_flash_fprop")),
}

_WIDE_HEADS = {(9, 0)}
"""Compute capabilities on which PyTorch passes heads of more than 128 channels to cuDNN: `check_cudnn_tensor_shapes` in
sdp_utils.cpp. On Blackwell, cuDNN supports only one such pair of sizes: 192 for keys and 128 for values."""


def _setting(processor: str) -> tuple[str, ...]:
    """Returns the code that sets one of diffusers' attention processors."""
    module = "diffusers.models.attention_processor"
    return (
        f"from {module} import {processor}",
        f"pipe.unet.set_attn_processor({processor}())",
    )


def _set(pipe: Pipeline, processor: str) -> Any:
    """Sets one of diffusers' attention processors; returns the denoiser."""
    from diffusers.models import attention_processor

    denoiser = denoiser_of(pipe)
    denoiser.set_attn_processor(getattr(attention_processor, processor)())
    return denoiser


_OTHER_PROCESSORS = "the processor would leave out what else its attention does, such as rotary positions: choose "


class Default(Optimization):
    """The default of diffusers: PyTorch's scaled dot-product attention, with a kernel that PyTorch selects."""

    stage = Stage.ATTENTION
    assumes = (common_attention,)
    # `set_default_attn_processor` sets AttnProcessor on a UNet, which is attention=vanilla.
    diffusers_lines = _setting("AttnProcessor2_0")

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        processors = _processors(denoiser_of(pipe))
        if _replaceable(denoiser_of(pipe)) and processors != ["AttnProcessor2_0"]:
            _set(pipe, "AttnProcessor2_0")
            processors = ["AttnProcessor2_0"]

        def proof(trace: Trace) -> Finding:
            kinds = _processors(unwrapped(denoiser_of(pipe)))
            is_seen = (
                _kernels(trace) or f"{', '.join(kinds)}, no scaled-dot-product kernel"
            )
            # A compiler may have replaced all attention layers by its own, which have no processors.
            engaged = kinds in ([], processors) and not _backends_of(
                unwrapped(denoiser_of(pipe))
            )
            return Finding(
                engaged,
                is_seen,
                {"processors": kinds, "kernels": trace.fused_attention},
            )

        return proof


class EquivalentAttention(Optimization):
    """The base class of other implementations of the same attention, whose results differ only by rounding."""

    stage = Stage.ATTENTION
    assumes: ClassVar[tuple[Assumption, ...]] = (common_attention,)
    contract = Contract.EQUIVALENT


class Vanilla(EquivalentAttention):
    """diffusers' `AttnProcessor`: two matrix products and a softmax, the "default attention" of older articles."""

    unet_only = f"{_OTHER_PROCESSORS}attention=math"
    diffusers_lines = _setting("AttnProcessor")

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        denoiser = _set(pipe, "AttnProcessor")

        def proof(trace: Trace) -> Finding:
            kinds = _processors(denoiser)
            engaged = kinds == ["AttnProcessor"] and not trace.fused_attention
            return Finding(
                engaged,
                f"{', '.join(kinds)}; {_kernels(trace) or 'no fused kernel'}",
                {"processors": kinds},
            )

        return proof


@dataclass(frozen=True)
class Sdpa(EquivalentAttention):
    """PyTorch's scaled dot-product attention with one back end, and no fallback.

    `ModelMixin.set_attention_backend` has no effect on UNets, whose attention processor ignores it, so
    `torch.nn.attention.sdpa_kernel` selects the back end, and only for the denoiser: the flash and cuDNN kernels do not
    support the VAE's single head of 512 channels.
    """

    assumes = ()  # any processor may call it
    sets_process = True

    backend: Annotated[str, OneOf(_BACKENDS)] = "math"
    """The back end; PyTorch raises an error if the back end does not support the denoiser."""

    @property
    @override
    def claims(self) -> frozenset[str]:
        return NOTHING if self.backend == "math" else LATENCY | MEMORY

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        reasons = []
        feature = _BACKENDS[self.backend].feature
        # PyTorch has a flash kernel for CPUs as well.
        if feature is not None and (ctx.device.is_cuda or self.backend != "flash"):
            reasons += missing(ctx.device, feature)
        if ctx.device.is_cuda and self.backend in ("flash", "cudnn"):
            if attends_in_float32(ctx):
                reasons.append(
                    f"the {self.backend} kernel needs float16 or bfloat16: choose precision=fp16 or bf16"
                )
            reasons += self._too_wide(ctx)
        if ctx.device.is_cuda and self.backend == "flash":
            reasons += self._masked(ctx)
        return reasons

    @override
    def fixed_for(self, model: Model) -> bool:
        return self.backend == "flash" and family_of(model).encoding.masks == "batches"

    def _masked(self, ctx: Context) -> list[str]:
        """Returns the conflict, if any, of a kernel that takes no mask with a model that gives one."""
        family, prompts = family_of(ctx.model), ctx.workload.batch_size
        if family.encoding.masks == "never" or (
            family.encoding.masks == "batches" and prompts == 1
        ):
            return []
        way = (
            "or workload.batch_size=1"
            if family.encoding.masks == "batches"
            else "or math"
        )
        return [
            f"the flash kernel takes no mask, which {family.title} needs here: choose mem_efficient, {way}"
        ]

    def _too_wide(self, ctx: Context) -> list[str]:
        """Returns the conflict, if any, of the kernel with the model's head sizes, as checked in sdp_utils.cpp."""
        largest = 256
        if (
            self.backend == "cudnn"
        ):  # the probed value, or else the card's limit in PyTorch
            limit = 256 if ctx.device.capability in _WIDE_HEADS else 128
            largest = int(ctx.device.attributes.get("cudnn_head_dimension", limit))
        wide = [
            size
            for size in head_dimensions(ctx.model)
            if size > largest or (self.backend == "cudnn" and size % 8)
        ]
        if not wide:
            return []
        supported = f"up to {largest} channels" + (
            ", in multiples of 8" if self.backend == "cudnn" else ""
        )
        sizes = ", ".join(map(str, wide))
        reason = f"the {self.backend} kernel supports heads of {supported} here, and this model has heads of {sizes}"
        return [f"{reason}: choose attention=default or mem_efficient"]

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backend, denoiser = (
            getattr(SDPBackend, _BACKENDS[self.backend].member),
            denoiser_of(pipe),
        )
        forward = denoiser.forward

        def forward_with_backend(*args: Any, **kwargs: Any) -> Any:
            with sdpa_kernel(backend):
                return forward(*args, **kwargs)

        denoiser.forward = forward_with_backend

        def proof(trace: Trace) -> Finding:
            seen = trace.fused_attention
            if self.backend == "math":
                # A compiler decomposes this back end into products; the evidence is then that no fused kernel ran.
                is_seen = bool(seen) or trace.is_compiled(denoiser_of(pipe))
                engaged = all(backend_of(name) == "math" for name in seen) and is_seen
            else:
                engaged = bool(seen) and all(
                    backend_of(name) == self.backend for name in seen
                )
            return Finding(
                engaged,
                _kernels(trace) or "products and softmax, no fused kernel",
                {"kernels": seen},
            )

        return proof


@dataclass(frozen=True)
class Sliced(EquivalentAttention):
    """Computes attention for a few heads at a time (`enable_attention_slicing`), without a fused kernel."""

    unet_only = (
        "diffusers slices the attention of UNets alone: choose attention=mem_efficient"
    )
    claims = MEMORY

    slice_size: UpToMillion | None = None
    """Number of (batch × head) rows per slice; null is half of the heads (`auto` in diffusers)."""

    @property
    @override
    def diffusers_lines(self) -> tuple[str, ...]:
        size = "auto" if self.slice_size is None else self.slice_size
        return (f"pipe.unet.set_attention_slice({size!r})",)

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        heads = min(heads_by_level(ctx.model).values(), default=None)
        if heads == 1 and self.slice_size is None:
            return [
                "a layer of this model has only one head, which cannot be halved: choose attention=sliced_max"
            ]
        if self.slice_size is None or heads is None or self.slice_size <= heads:
            return []
        reasons = f"attention.slice_size={self.slice_size}: a layer of this model has only {heads} heads"
        return [f"{reasons}; choose at most {heads}, or null"]

    @override
    def broken(self, pipe: Pipeline) -> list[str]:
        denoiser = unwrapped(denoiser_of(pipe))
        if hasattr(denoiser, "set_attention_slice"):
            return super().broken(pipe)
        return [
            f"diffusers cannot compute the attention of a {type(denoiser).__name__} in slices: choose another"
        ]

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        denoiser = denoiser_of(pipe)
        denoiser.set_attention_slice(
            "auto" if self.slice_size is None else self.slice_size
        )

        def proof(trace: Trace) -> Finding:
            kinds = _processors(denoiser)
            sliced = [kind for kind in kinds if "Sliced" in kind]
            # A replayed graph shows only kernels, with as many softmaxes as products.
            softmaxes = sum(
                count
                for name, count in trace.kernels.items()
                if "softmax" in name.lower()
            )
            products = trace.denoiser.operators["aten::baddbmm"] or softmaxes
            # There is one product per slice: with only one per attention layer, nothing was sliced.
            calls = trace.attention_calls or len(denoiser.attn_processors) * max(
                trace.denoiser.runs, 1
            )
            engaged = kinds == sliced and bool(kinds) and products > calls
            facts = {
                "processors": kinds,
                "score_products": products,
                "attention_calls": calls,
            }
            return Finding(
                engaged,
                f"{', '.join(kinds)}; {products} score products in {calls} calls",
                facts,
            )

        return proof


class Xformers(EquivalentAttention):
    """xFormers' memory-efficient attention, with an operator that xFormers selects."""

    claims = LATENCY | MEMORY
    unet_only = f"{_OTHER_PROCESSORS}attention=dispatched attention.backend=xformers"
    diffusers_lines = _setting("XFormersAttnProcessor")
    needs = (
        XFORMERS_ATTENTION,
        Extra("xformers", ("xformers",)),
    )

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        reasons = []
        if not self.unmet(ctx) and ctx.device.attributes.get("xformers") is False:
            solution = "install a matching build (https://github.com/facebookresearch/xformers#installing-xformers)"
            reasons.append(
                f"this build of xFormers is for another version of PyTorch or CUDA: {solution}"
            )
        if (
            ctx.device.is_cuda
            and (ctx.device.capability or (0, 0)) > (9, 0)
            and attends_in_float32(ctx)
        ):
            reasons.append(
                "xFormers has no float32 operator for this card: choose precision=fp16 or bf16"
            )
        return reasons

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        # `enable_xformers_memory_efficient_attention` first runs a test in float32, which not every card supports.
        denoiser = _set(pipe, "XFormersAttnProcessor")

        def proof(trace: Trace) -> Finding:
            kinds, operators = _processors(denoiser), trace.denoiser.operators
            ran = {
                name: n
                for name, n in operators.items()
                if name.startswith(_XFORMERS_OPERATORS)
            }
            if not ran and trace.graph_launches:
                ran = trace.fused_attention  # a replayed graph shows only kernels
            # PyTorch's own attention uses the same operators, but inside one of these.
            fallen_back = any(
                name.startswith("aten::_scaled_dot_product") for name in operators
            )
            engaged = (
                kinds == ["XFormersAttnProcessor"] and bool(ran) and not fallen_back
            )
            is_seen = (
                ", ".join(f"{name} ×{count}" for name, count in sorted(ran.items()))
                or "no operator of xFormers"
            )
            return Finding(engaged, is_seen, {"processors": kinds, "operators": ran})

        return proof


_XFORMERS_OPERATORS = (
    "xformers",
    "aten::_efficient_attention_forward",
    "aten::_flash_attention_forward",
)
"""Prefixes of the operators that `xformers.ops.memory_efficient_attention` runs: its own, or PyTorch's if PyTorch has
the same kernel (see `OPERATOR` in xformers/ops/fmha)."""


class FusedProjections(EquivalentAttention):
    """Fuses the projections of query, key and value, and of the text's key and value (`fuse_qkv_projections`)."""

    assumes = (
        common_attention,
        fused_processors,
        unchanged_layers,
        plain_weights,
        own_weights,
    )
    claims = LATENCY
    keeps_structure = True
    diffusers_lines = ("pipe.unet.fuse_qkv_projections()",)

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        return [*leaves_adapters_out(ctx), *_unfusable(published_denoiser(ctx.model))]

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        denoiser = denoiser_of(pipe)
        replaceable = _replaceable(denoiser)
        own_projections = {
            name for name, layer in denoiser.named_modules() if hasattr(layer, "to_q")
        }
        denoiser.fuse_qkv_projections()
        _share_weights(denoiser)

        def proof(trace: Trace) -> Finding:
            kinds, ran = _processors(denoiser), trace.denoiser.ran
            fused = trace.denoiser.runs_of(".to_qkv", ".to_kv")
            apart = trace.denoiser.runs_of(".to_k", ".to_v")
            if replaceable:
                every = fused == trace.attention_calls and not apart
                engaged = kinds == ["FusedAttnProcessor2_0"] and (not ran or every)
            else:
                # Some layers of transformers have no such projections; of those that are joint, no part runs.
                joint = {
                    name.rpartition(".")[0]
                    for name in ran
                    if name.endswith((".to_qkv", ".to_kv"))
                }
                parts = product(joint, ("to_q", "to_k", "to_v"))
                apart = sum(ran[f"{layer}.{part}"] for layer, part in parts)
                fused = sum(ran[f"{layer}.to_qkv"] for layer in joint & own_projections)
                engaged = not ran or (fused > 0 and not apart)
            facts = {
                "processors": kinds,
                "fused_products": fused,
                "products_apart": apart,
            }
            return Finding(
                engaged,
                f"{', '.join(kinds)}; {fused} fused products, {apart} unfused",
                facts,
            )

        return proof


def _unfusable(config: Mapping[str, Any]) -> list[str]:
    """Returns why diffusers cannot fuse the projections of a denoiser, or would change its images, from its code."""
    if config.get("_class_name", "UNet2DConditionModel") == "UNet2DConditionModel":
        return []
    import diffusers

    cls: Any = getattr(diffusers, config["_class_name"])
    fuse = getattr(cls, "fuse_qkv_projections", None)
    if fuse is None:
        return [f"diffusers cannot fuse the projections of a {cls.__name__}"]
    if config.get("dual_attention_layers"):
        return [f"diffusers cannot fuse the second attention of this {cls.__name__}"]
    processors = [
        fuse.__globals__[name]
        for name in fuse.__code__.co_names
        if name.startswith("Fused")
    ]
    if config.get("qk_norm") and any(
        "norm_q" not in processor.__call__.__code__.co_names for processor in processors
    ):
        return [
            f"diffusers' {processors[0].__name__} leaves out the norm of queries and keys: images would change"
        ]
    return []


def _share_weights(denoiser: Any) -> None:
    """Makes the weights that were joined parts of the joint ones.

    What later changes one, as a LoRA that is fused, changes both; and they take the memory of one.
    """
    for layer in denoiser.modules():
        for joint, names in (
            ("to_qkv", ("to_q", "to_k", "to_v")),
            ("to_kv", ("to_k", "to_v")),
        ):
            if (joined := getattr(layer, joint, None)) is None:
                continue
            parts = [getattr(layer, name) for name in names]
            sizes = [part.out_features for part in parts]
            for kind in ("weight", "bias"):
                if getattr(joined, kind) is not None:
                    for part, values in zip(
                        parts, getattr(joined, kind).data.split(sizes), strict=True
                    ):
                        getattr(part, kind).data = values


def backend_of(name: str) -> str | None:
    """Returns the back end of a PyTorch operator, or of a kernel in a replayed graph; None for any other name."""
    # Checks cuDNN first, whose kernel names may also contain the algorithm, as in sdpa_sm90_flash_fprop.
    for kind in reversed(_BACKENDS):
        if any(part in name for part in _BACKENDS[kind].names):
            return kind
    return None


def _processors(denoiser: Any) -> list[str]:
    return sorted(
        {type(layer.processor).__name__ for layer in attention_layers(denoiser)}
    )


def _replaceable(denoiser: Any) -> bool:
    """Returns whether any of diffusers' processors of a UNet computes the attention of a denoiser.

    Those of most transformers do more: they rotate positions, and attend to text and image at once.
    """
    return all(kind in COMMON_PROCESSORS for kind in _processors(denoiser))


def _backends_of(denoiser: Any) -> list[str]:
    """Returns the backends that diffusers' dispatcher was told for the layers of a denoiser."""
    kinds = {
        getattr(layer.processor, "_attention_backend", None)
        for layer in attention_layers(denoiser)
    }
    return sorted(str(getattr(kind, "value", kind)) for kind in kinds - {None})


def _kernels(trace: Trace) -> str:
    return ", ".join(
        f"{name.strip('_')[:60]} ×{count}"
        for name, count in trace.fused_attention.items()
    )
