"""DeepSpeed's kernels in diffusers' layers: its attention alone, or its transformer blocks.

The kernels assume the following, as of DeepSpeed 0.19.8. Each assumption is checked here or is a conflict:

- Projections have no bias, the output projection has one, weights are float16, and hidden states are (batch, tokens,
  channels) on CUDA.
- The Triton kernel (`triton_ops.py`) handles heads of up to 128 channels; wider heads use two products and a softmax.
  The kernel reads whole tiles of 64 tokens without a bounds check. Heads are copied in units of 8 channels
  (`transform.cu`).
- The layer with number 0, the first to be constructed, allocates the workspace for its `max_out_tokens`. With little
  free memory, DeepSpeed allocates fewer tokens, down to `min_out_tokens`, and kernels write past the end. Both values
  are equal here, so that DeepSpeed raises an error instead. PyTorch's allocator does not own the workspace.
- `pad_transform` drops the last of an odd number of tokens: see `ByHead`.
- Masks and `cross_attention_kwargs` are ignored; nothing in these pipelines sets them.
- A block reads `norm1`–`norm3` (layer norms with weights), `ff.net[0].proj` (GEGLU), `ff.net[2]`, `attn1` and `attn2`.
- The first layer norm of a block assumes contiguous hidden states (`ds_layer_norm`), which only a channels-last
  convolution produces; DeepSpeed's own wrapper sets that layout. Here a hook makes them contiguous.
- The workspace of blocks is allocated for `max_out_tokens` = 4096: images of up to 512×512.

The blocks are inserted here, as in Lightning's "Serve Stable Diffusion Three Times Faster": `deepspeed.init_inference`
reads `unet.in_channels` and `text_model`, which diffusers and transformers 5 have removed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from sdopt.contract import LATENCY
from sdopt.hardware.cards import Feature
from sdopt.locks import exclusive
from sdopt.measure import compilation
from sdopt.measure.memory import allocating_elsewhere
from sdopt.options import Context, Finding, Proof, Trace
from sdopt.options.assumptions import (
    common_attention,
    plain_weights,
    unchanged_layers,
    ungated_blocks,
)
from sdopt.options.attention import Default, EquivalentAttention
from sdopt.options.base import Need
from sdopt.options.compiler.base import Compiler
from sdopt.options.conflicts import (
    autocast_of,
    latent_side,
    leaves_adapters_out,
    records_autograd,
    weights_of,
)
from sdopt.options.declarations import Excludes, Extra
from sdopt.pipelines.loading import head_dimensions_by_level, part_config
from sdopt.pipelines.parts import Pipeline, denoiser_of

if TYPE_CHECKING:
    import torch

_NEEDS: tuple[Need, ...] = (
    # The Triton kernel takes up to 96 KiB of shared memory. On Turing, which has 64 KiB, it would take 128 KiB.
    Feature("DeepSpeed's attention", (8, 0)),
    Extra("deepspeed", ("deepspeed", "triton", "ninja")),
)

_TILE, _LARGEST_HEAD, _COPIED = 64, 128, 8
_KERNEL, _TRANSPOSITION = "_fwd_kernel", "transform_0213"
"""Prefix of the name of DeepSpeed's attention kernel, and part of the name of the transposition kernel before it."""


class Attention(EquivalentAttention):
    """Replaces diffusers' attention layers by DeepSpeed's, with DeepSpeed's kernels; all other layers stay the same.

    The kernels need float16, and a multiple of 64 latents in each layer. PyTorch compiles some of the kernels with
    nvcc on first use.
    """

    unet_only = "its kernels are for the blocks of UNets alone"

    needs = _NEEDS
    excludes = (
        Excludes(
            "compiler",
            "DeepSpeed's kernels are opaque to a compiler: choose compiler=eager",
        ),
    )

    # Another batch size would free and reallocate the workspace.
    fixed_batch = True
    claims = LATENCY

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        return misfits(ctx)

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        from diffusers.models import attention_processor

        from sdopt.options.compiler.deepspeed_layers import Layer

        denoiser, kind = denoiser_of(pipe), attention_processor.Attention
        names = [
            name for name, layer in denoiser.named_modules() if isinstance(layer, kind)
        ]
        for name in names:
            if missing := [
                what
                for what, lacking in lacks(denoiser.get_submodule(name)).items()
                if lacking
            ]:
                raise ValueError(
                    f"DeepSpeed's attention needs {', '.join(missing)}, which the layer {name} lacks"
                )
        compile_kernels("InferenceBuilder")
        begin_a_model()
        for name in names:
            attention = attention_of(denoiser.get_submodule(name))
            denoiser.set_submodule(name, Layer(attention))

        def proof(trace: Trace) -> Finding:
            replaced = sum(isinstance(layer, Layer) for layer in denoiser.modules())
            kept = sum(isinstance(layer, kind) for layer in denoiser.modules())
            ran = {
                name: n
                for name, n in trace.kernels.items()
                if name.startswith(_KERNEL) or _TRANSPOSITION in name
            }
            facts = {"replaced": replaced, "kept": kept, "kernels": ran}
            summary = f"{replaced} of {replaced + kept} layers replaced; {sum(ran.values())} DeepSpeed kernels ran"
            return Finding(
                replaced == len(names) > 0 and not kept and bool(ran), summary, facts
            )

        return proof


def misfits(ctx: Context) -> list[str]:
    """Returns the conflicts of DeepSpeed's attention with tools, other options and layer sizes."""
    what = "DeepSpeed's attention"
    reasons = []
    if ctx.device.is_cuda and ctx.device.is_here and not _has_nvcc():
        reasons.append(
            "DeepSpeed compiles its kernels with nvcc: install the CUDA toolkit, and set CUDA_HOME"
        )
    if weights_of(ctx) != "float16" or autocast_of(ctx):
        reasons.append(f"{what} computes only in float16: choose precision=fp16")
    reasons += records_autograd(ctx, what) + leaves_adapters_out(ctx)
    if (part_config(ctx.model, "unet") or {}).get("upcast_attention"):
        reasons.append(
            "this model computes its attention in float32, which DeepSpeed's kernels cannot"
        )
    if len(ctx.shapes) > 1:
        reasons.append(
            "DeepSpeed allocates its workspace for one shape: give one workload.size and batch_size"
        )
    return reasons + _beyond_tiles(ctx)


def _has_nvcc() -> bool:
    """Returns whether PyTorch finds nvcc (`torch.utils.cpp_extension`)."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None and shutil.which("nvcc"):
        return True
    return Path(home or "/usr/local/cuda", "bin", "nvcc").is_file()


def _beyond_tiles(ctx: Context) -> list[str]:
    """Returns the conflicts of layers whose latents do not fill whole tiles, or whose heads would be truncated."""
    side, wrong, reasons = latent_side(ctx), [], []
    # Token merging reduces the number of tokens.
    left_of: Callable[[int, int], int] = getattr(
        ctx.chosen.get("caching"), "left_of", lambda latents, level: latents
    )
    what = "DeepSpeed's attention takes"
    for level, channels in head_dimensions_by_level(ctx.model).items():
        # A downsampling convolution halves the side and rounds up.
        latents = (-(-side // 2**level)) ** 2
        if channels > _LARGEST_HEAD:
            continue
        if channels % _COPIED:
            reasons.append(
                f"{what} heads of a multiple of {_COPIED} channels, and this model has heads of {channels}"
            )
        if latents % _TILE:
            wrong.append(str(latents))
        elif (left := left_of(latents, level)) % _TILE:
            reasons.append(
                f"{what} multiples of {_TILE} latents, and caching leaves {left} of {latents} in some layers"
            )
    if wrong:
        sizes = f"layers of {', '.join(wrong)} latents"
        reasons.append(
            f"{what} multiples of {_TILE} latents, and this size has {sizes}: set workload.size"
        )
    return reasons


def lacks(layer: Any) -> dict[str, bool]:
    """Returns, for each requirement of DeepSpeed's attention, whether a diffusers layer violates it."""
    norms = (
        "group_norm",
        "spatial_norm",
        "norm_q",
        "norm_k",
        "norm_cross",
        "add_k_proj",
    )
    return {
        "projections without bias": any(
            getattr(layer, f"to_{name}").bias is not None for name in "qkv"
        ),
        "an output with bias": layer.to_out[0].bias is None,
        "nothing but projections": any(
            getattr(layer, name, None) is not None for name in norms
        )
        or layer.residual_connection
        or layer.rescale_output_factor != 1,
    }


def compile_kernels(*builders: str) -> None:
    """Compiles those DeepSpeed kernels that are not compiled yet, in one process at a time.

    PyTorch's lock is a file that outlives a process killed during compilation, so that all later processes would wait
    forever. The lock here is released when its process ends, so a leftover file can be deleted.
    """
    import torch
    from torch.utils.cpp_extension import _get_build_directory

    # DeepSpeed cannot parse an architecture such as 9.0a, which container images for Hopper set.
    if torch.cuda.is_available():
        os.environ["TORCH_CUDA_ARCH_LIST"] = ".".join(
            map(str, torch.cuda.get_device_capability())
        )
    for builder in _builders(builders):
        with exclusive(f"deepspeed {builder.name}"):
            Path(_get_build_directory(builder.name, verbose=False), "lock").unlink(
                missing_ok=True
            )
            builder.load()


def _builders(names: tuple[str, ...]) -> list[Any]:
    from deepspeed.ops import op_builder

    return [getattr(op_builder, name)() for name in names]


def begin_a_model() -> None:
    """Makes the next layer to be constructed allocate the shared workspace; that layer must also run first."""
    _classes()[0].layer_id = 0


def attention_of(layer: Any, tokens: int = 1) -> Any:
    """Returns DeepSpeed's attention with the weights of a diffusers layer.

    Self-attention computes query, key and value in one product.
    The workspace, if this layer allocates it, holds `tokens`, which may be set before a call.
    """
    import torch

    from sdopt.options.compiler.deepspeed_layers import ByHead

    kind, configure = _classes()
    weight, is_first = layer.to_q.weight, kind.layer_id == 0
    layer_of_deepspeed = kind(
        configure(
            hidden_size=weight.shape[1],
            heads=layer.heads,
            dtype=weight.dtype,
            triangular_masking=False,
            max_out_tokens=tokens,
            min_out_tokens=tokens,
        )
    )
    layer_of_deepspeed.pad_transform_func = ByHead()
    if is_first:
        layer_of_deepspeed.allocate_workspace = _counted(
            layer_of_deepspeed.allocate_workspace
        )
    # DeepSpeed multiplies from the right, so the weights are transposed.
    weights = {f"attn_{name}w": getattr(layer, f"to_{name}").weight.T for name in "qkv"}
    if not layer.is_cross_attention:
        weights = {"attn_qkvw": torch.cat([*weights.values()], dim=1)}
    for name in ("attn_qkvw", "attn_qw", "attn_kw", "attn_vw"):
        setattr(
            layer_of_deepspeed,
            name,
            _frozen(weights[name]) if name in weights else None,
        )
    layer_of_deepspeed.attn_qkvb = None
    layer_of_deepspeed.attn_ow = _frozen(layer.to_out[0].weight.T)
    layer_of_deepspeed.attn_ob = _frozen(layer.to_out[0].bias)
    return layer_of_deepspeed


def _counted(allocate: Callable[[torch.Size], None]) -> Callable[[torch.Size], None]:
    """Wraps the workspace's allocation, which each call requests and the batch size determines, to count its memory."""
    sizes: set[torch.Size] = set()

    def counted(size: torch.Size) -> None:
        if size in sizes:
            return allocate(size)
        sizes.add(size)
        with allocating_elsewhere():
            return allocate(size)

    return counted


def _classes() -> tuple[Any, Any]:
    """Returns the classes of DeepSpeed's attention and of its configuration."""
    from deepspeed.ops.transformer import DeepSpeedInferenceConfig
    from deepspeed.ops.transformer.inference.diffusers_attention import (
        DeepSpeedDiffusersAttention,
    )

    return DeepSpeedDiffusersAttention, DeepSpeedInferenceConfig


def _frozen(weight: torch.Tensor) -> torch.nn.Parameter:
    import torch

    return torch.nn.Parameter(weight.detach().contiguous(), requires_grad=False)


# ---- whole transformer blocks ----------------------------------------------------------------------------------------

_TOKENS = 4096
"""The `max_out_tokens` of DeepSpeed's own injection."""

_BLOCK_KERNELS = ("fused_gate_activation", "fused_ln", "opt_bias_add")
"""Parts of the names of DeepSpeed's kernels in each block."""


class DeepSpeed(Compiler):
    """Replaces the denoiser's transformer blocks by DeepSpeed's fused blocks, with the same weights; float16 on CUDA.

    Two of the three layer norms of a block run in PyTorch, because DeepSpeed implements them as fallbacks.
    """

    unet_only = "its kernels are for the blocks of UNets alone"

    assumes = (
        common_attention,
        ungated_blocks,
        plain_weights,
        unchanged_layers,
    )
    keeps_structure = True
    needs = _NEEDS
    excludes = (
        Excludes(
            "attention",
            "DeepSpeed's block has its own attention: choose attention=default",
            unless=(Default,),
        ),
    )

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        return misfits(ctx) + _beyond_blocks(ctx)

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        compilation.reset()
        denoiser = denoiser_of(pipe)
        kept = len(_blocks(denoiser))
        replace_blocks(denoiser)

        def proof(trace: Trace) -> Finding:
            left = len(_blocks(denoiser_of(pipe)))
            seen = dict.fromkeys(_BLOCK_KERNELS, 0)
            for word in seen:
                seen[word] = sum(n for name, n in trace.kernels.items() if word in name)
            facts = {"blocks": kept, "blocks_left": left, "kernels": seen}
            shown = ", ".join(f"{word} ×{count}" for word, count in seen.items())
            return Finding(
                not left and all(seen.values()),
                f"{kept - left} of {kept} blocks replaced; {shown}",
                facts,
            )

        return proof


def _beyond_blocks(ctx: Context) -> list[str]:
    """Returns the conflicts of DeepSpeed's blocks with the model and the image size."""
    if (part_config(ctx.model, "unet") or {}).get("addition_embed_type"):
        return [
            "DeepSpeed's blocks are tested only with Stable Diffusion 1.x and 2.x: not with SDXL"
        ]
    if latent_side(ctx) ** 2 > _TOKENS:
        return [
            f"DeepSpeed's workspace holds {_TOKENS} tokens: images of up to 512 pixels, as in workload.size=512"
        ]
    return []


def _blocks(denoiser: torch.nn.Module) -> list[tuple[torch.nn.Module, str, Any]]:
    """Returns (owner, attribute, block) of each diffusers transformer block in a denoiser."""
    blocks = []
    for owner in denoiser.modules():
        for name, child in owner.named_children():
            if type(child).__name__ == "BasicTransformerBlock":
                blocks.append((owner, name, child))
    return blocks


def replace_blocks(denoiser: torch.nn.Module) -> None:
    """Replaces each transformer block by DeepSpeed's, with the same weights. Raises ValueError if a block differs."""
    from deepspeed.ops.transformer.inference.diffusers_2d_transformer import (
        Diffusers2DTransformerConfig,
    )
    from deepspeed.ops.transformer.inference.diffusers_transformer_block import (
        DeepSpeedDiffusersTransformerBlock,
    )

    blocks = _blocks(denoiser)
    for _, name, block in blocks:
        require_fitting(name, block)
    compile_kernels("InferenceBuilder", "SpatialInferenceBuilder")
    begin_a_model()
    for owner, name, block in blocks:
        block.attn1, block.attn2 = (
            attention_of(block.attn1, _TOKENS),
            attention_of(block.attn2, _TOKENS),
        )
        replacement = DeepSpeedDiffusersTransformerBlock(
            block, Diffusers2DTransformerConfig(int8_quantization=False)
        )
        replacement.register_forward_pre_hook(
            lambda _block, args: (args[0].contiguous(), *args[1:])
        )
        setattr(owner, name, replacement)


def require_fitting(name: str, block: Any) -> None:
    """Raises ValueError if a diffusers transformer block violates an assumption of DeepSpeed's block."""
    import torch

    first, second = lacks(block.attn1), lacks(block.attn2)
    wrong = {
        "norms with weights": any(
            norm.weight is None for norm in (block.norm1, block.norm2, block.norm3)
        ),
        "a GEGLU": type(block.ff.net[0]).__name__ != "GEGLU",
        **{what: is_lacking or second[what] for what, is_lacking in first.items()},
        "attention to itself first": block.only_cross_attention,
        "float16 weights": any(
            weight.dtype != torch.float16 for weight in block.parameters()
        ),
    }
    missing = [what for what, lacks_it in wrong.items() if lacks_it]
    if missing:
        raise ValueError(
            f"DeepSpeed's block needs {', '.join(missing)}, which the block {name} lacks"
        )
