"""DeepSpeed's transformer blocks, put in by hand, as in Lightning's "Serve Stable Diffusion Three Times Faster".

`deepspeed.init_inference` cannot do it: its wrapper of the UNet reads `unet.in_channels`, which diffusers has removed,
and that of the text encoder reads `text_model`, which transformers 5 has removed. The blocks themselves still fit.
What they take for granted, as of DeepSpeed 0.19.8, is checked in `require_fitting` or is a conflict:

- A block reads `norm1`–`norm3` (layer norms with weights), `ff.net[0].proj` (GEGLU), `ff.net[2]`, `attn1` and `attn2`.
- Attention takes projections without bias, an output with one, float16 alone, and hidden states (batch, tokens,
  channels) on CUDA.
- Its Triton kernel serves heads of up to 128 channels and reads 64 tokens at a time without looking at the end.
- The workspace is sized by the first layer, for `max_out_tokens` = 4096: images of up to 512×512.
- Attention masks and `cross_attention_kwargs` are accepted and dropped; nothing in these pipelines sets them.
"""

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from sdopt.measure import compilation
from sdopt.measure.trace import Trace
from sdopt.optimizations.base import Context, Finding, Proof
from sdopt.optimizations.compiler.base import Compiler, records_autograd
from sdopt.optimizations.compiler.toolchain import missing_package
from sdopt.pipelines.loading import part_config
from sdopt.pipelines.parts import denoiser_of

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

_TOKENS = 4096
"""What DeepSpeed's own injection gives as `max_out_tokens`."""

_LARGEST_HEAD, _TOKENS_AT_A_TIME = 128, 64
"""Of the Triton kernel; wider heads are computed with two products and a softmax."""

_KERNELS = ("fused_gate_activation", "fused_ln", "opt_bias_add")
"""Parts of the names of DeepSpeed's kernels in each block."""


@dataclass(frozen=True)
class DeepSpeed(Compiler):
    """DeepSpeed's fused transformer blocks instead of the denoiser's, with the same weights; float16 on CUDA.

    Two of the three layer norms of a block are PyTorch's since DeepSpeed has written them as fallbacks.
    """

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        what = "DeepSpeed's block"
        found = ctx.device.needs_cuda(what, (6, 0))
        found += missing_package(ctx, "deepspeed", "deepspeed") + missing_package(ctx, "triton", "deepspeed")
        if ctx.device.is_here and not shutil.which("nvcc"):
            found.append(
                "DeepSpeed compiles its kernels when they are first used: put nvcc of the CUDA toolkit on PATH"
            )
        precision = ctx.chosen.get("precision")
        if getattr(precision, "weights", None) != "float16" or getattr(precision, "autocast", None):
            found.append(f"{what} computes in float16 alone: choose precision=fp16")
        attention = ctx.chosen.get("attention")
        if attention is not None and type(attention).__name__ != "Default":
            found.append(f"{what} brings its own attention: choose attention=default")
        if ctx.shapes > 1:
            found.append("DeepSpeed sizes its workspace in the first call: give one workload.size and batch_size")
        return found + _misfits(ctx) + records_autograd(ctx, what)

    @override
    def apply(self, pipe: "DiffusionPipeline") -> Proof:
        compilation.reset()
        denoiser = denoiser_of(pipe)
        kept = len(_blocks(denoiser))
        replace_blocks(denoiser)

        def proof(trace: Trace) -> Finding:
            left = len(_blocks(denoiser_of(pipe)))
            seen = {word: sum(n for name, n in trace.kernels.items() if word in name) for word in _KERNELS}
            facts = {"blocks": kept, "blocks_left": left, "kernels": seen}
            shown = ", ".join(f"{word} ×{count}" for word, count in seen.items())
            return Finding(not left and all(seen.values()), f"{kept - left} of {kept} blocks replaced; {shown}", facts)

        return proof


def _misfits(ctx: Context) -> list[str]:
    """Returns what of the model and the size of its images DeepSpeed's attention cannot take."""
    config = part_config(ctx.model, "unet")
    if config is None:
        return []
    if config.get("addition_embed_type"):
        return ["DeepSpeed's blocks are tried with Stable Diffusion 1.x and 2.x alone: not with SDXL"]
    tokens = ((ctx.workload.size or ctx.model.size) // 8) ** 2
    if tokens > _TOKENS:
        return [f"DeepSpeed's workspace holds {_TOKENS} tokens: images of up to 512 pixels, as in workload.size=512"]
    heads = config["attention_head_dim"]
    heads = heads if isinstance(heads, list) else [heads] * len(config["block_out_channels"])
    for level, (width, count) in enumerate(zip(config["block_out_channels"], heads, strict=True)):
        here = tokens // 4**level
        if width // count <= _LARGEST_HEAD and here % _TOKENS_AT_A_TIME:
            read = f"DeepSpeed's attention kernel reads {_TOKENS_AT_A_TIME} tokens at a time"
            return [f"{read}, and a layer of this model has {here}: choose workload.size=512"]
    return []


def _blocks(denoiser: torch.nn.Module) -> list[tuple[torch.nn.Module, str, Any]]:
    """Returns the transformer blocks of diffusers in a denoiser, each with its owner and its name there."""
    return [
        (owner, name, child)
        for owner in denoiser.modules()
        for name, child in owner.named_children()
        if type(child).__name__ == "BasicTransformerBlock"
    ]


def replace_blocks(denoiser: torch.nn.Module) -> None:
    """Replaces each transformer block by DeepSpeed's with the same weights. Raises ValueError if one does not fit."""
    from deepspeed.ops.transformer.inference import diffusers_attention
    from deepspeed.ops.transformer.inference.diffusers_2d_transformer import Diffusers2DTransformerConfig
    from deepspeed.ops.transformer.inference.diffusers_transformer_block import DeepSpeedDiffusersTransformerBlock

    # The layer of number 0 allocates the workspace: it must be the first that runs, and there are all levels below it.
    diffusers_attention.DeepSpeedDiffusersAttention.layer_id = 0
    blocks = _blocks(denoiser)
    for _, name, block in blocks:
        require_fitting(name, block)
    for owner, name, block in blocks:
        block.attn1, block.attn2 = attention_of(block.attn1), attention_of(block.attn2)
        replacement = DeepSpeedDiffusersTransformerBlock(block, Diffusers2DTransformerConfig(int8_quantization=False))
        setattr(owner, name, replacement)


def require_fitting(name: str, block: Any) -> None:
    """Raises ValueError if a transformer block of diffusers is not what DeepSpeed's takes it for."""
    attentions = [block.attn1, block.attn2]
    wrong = {
        "norms with weights": any(norm.weight is None for norm in (block.norm1, block.norm2, block.norm3)),
        "a GEGLU": type(block.ff.net[0]).__name__ != "GEGLU",
        "projections without bias": any(
            getattr(each, part).bias is not None for each in attentions for part in ("to_q", "to_k", "to_v")
        ),
        "an output with bias": any(each.to_out[0].bias is None for each in attentions),
        "attention to itself first": block.only_cross_attention,
        "float16 weights": any(weight.dtype != torch.float16 for weight in block.parameters()),
    }
    missing = [what for what, found in wrong.items() if found]
    if missing:
        raise ValueError(f"DeepSpeed's block needs {', '.join(missing)}, and the block {name} has none")


def attention_of(attention: Any) -> Any:
    """Returns DeepSpeed's attention with the weights of diffusers': to itself, with one product for all three."""
    from deepspeed.ops.transformer.inference.config import DeepSpeedInferenceConfig
    from deepspeed.ops.transformer.inference.diffusers_attention import DeepSpeedDiffusersAttention

    query, key, value = (getattr(attention, name).weight.data for name in ("to_q", "to_k", "to_v"))
    config = DeepSpeedInferenceConfig(
        hidden_size=query.shape[1],
        heads=attention.heads,
        dtype=torch.float16,
        triangular_masking=False,
        max_out_tokens=_TOKENS,
    )
    made = DeepSpeedDiffusersAttention(config)
    made.attn_qkvb = None
    if key.shape[1] == query.shape[1]:
        made.attn_qkvw.data = torch.cat([query, key, value]).t().contiguous()
    else:
        made.attn_qkvw = None
        made.attn_qw.data, made.attn_kw.data, made.attn_vw.data = (
            weight.t().contiguous() for weight in (query, key, value)
        )
    made.attn_ow.data = attention.to_out[0].weight.data.t().contiguous()
    made.attn_ob.data = attention.to_out[0].bias.data.clone()
    return made
