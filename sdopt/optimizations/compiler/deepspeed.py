"""DeepSpeed's transformer blocks, put in by hand, as in Lightning's "Serve Stable Diffusion Three Times Faster".

`deepspeed.init_inference` cannot do it: its wrapper of the UNet reads `unet.in_channels`, which diffusers has removed,
and that of the text encoder reads `text_model`, which transformers 5 has removed. The blocks themselves still fit.
What they take for granted, as of DeepSpeed 0.19.8, is checked in `require_fitting` or is a conflict:

- A block reads `norm1`–`norm3` (layer norms with weights), `ff.net[0].proj` (GEGLU), `ff.net[2]`, `attn1` and `attn2`.
- Its first layer norm reads hidden states as if they were contiguous (`ds_layer_norm`), which they are after a
  convolution in channels-last alone: DeepSpeed's own wrapper sets that layout. Here they are made so.
- The workspace is made for `max_out_tokens` = 4096: images of up to 512×512.
- What its attention takes stands in `sdopt.optimizations.deepspeed`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from sdopt.measure import compilation
from sdopt.measure.trace import Trace
from sdopt.optimizations.base import Context, Finding, Proof
from sdopt.optimizations.compiler.base import Compiler
from sdopt.optimizations.deepspeed import attention_of, begin_a_model, compile_kernels, lacks, misfits
from sdopt.pipelines.loading import part_config
from sdopt.pipelines.parts import denoiser_of

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

_TOKENS = 4096
"""What DeepSpeed's own injection gives as `max_out_tokens`."""

_KERNELS = ("fused_gate_activation", "fused_ln", "opt_bias_add")
"""Parts of the names of DeepSpeed's kernels in each block."""


@dataclass(frozen=True)
class DeepSpeed(Compiler):
    """DeepSpeed's fused transformer blocks instead of the denoiser's, with the same weights; float16 on CUDA.

    Two of the three layer norms of a block are PyTorch's since DeepSpeed has written them as fallbacks.
    """

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        found = misfits(ctx) + _beyond_blocks(ctx)
        attention = ctx.chosen.get("attention")
        if attention is not None and type(attention).__name__ != "Default":
            found.append("DeepSpeed's block brings its own attention: choose attention=default")
        return found

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


def _beyond_blocks(ctx: Context) -> list[str]:
    """Returns what of the model and the size of its images DeepSpeed's blocks cannot take."""
    if (part_config(ctx.model, "unet") or {}).get("addition_embed_type"):
        return ["DeepSpeed's blocks are tried with Stable Diffusion 1.x and 2.x alone: not with SDXL"]
    if ((ctx.workload.size or ctx.model.size) // 8) ** 2 > _TOKENS:
        return [f"DeepSpeed's workspace holds {_TOKENS} tokens: images of up to 512 pixels, as in workload.size=512"]
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
    from deepspeed.ops.transformer.inference.diffusers_2d_transformer import Diffusers2DTransformerConfig
    from deepspeed.ops.transformer.inference.diffusers_transformer_block import DeepSpeedDiffusersTransformerBlock

    blocks = _blocks(denoiser)
    for _, name, block in blocks:
        require_fitting(name, block)
    compile_kernels("InferenceBuilder", "SpatialInferenceBuilder")
    begin_a_model()
    for owner, name, block in blocks:
        block.attn1, block.attn2 = attention_of(block.attn1, _TOKENS), attention_of(block.attn2, _TOKENS)
        replacement = DeepSpeedDiffusersTransformerBlock(block, Diffusers2DTransformerConfig(int8_quantization=False))
        replacement.register_forward_pre_hook(_contiguous)
        setattr(owner, name, replacement)


def _contiguous(_block: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return args[0].contiguous(), *args[1:]


def require_fitting(name: str, block: Any) -> None:
    """Raises ValueError if a transformer block of diffusers is not what DeepSpeed's takes it for."""
    attentions = [lacks(block.attn1), lacks(block.attn2)]
    wrong = {
        "norms with weights": any(norm.weight is None for norm in (block.norm1, block.norm2, block.norm3)),
        "a GEGLU": type(block.ff.net[0]).__name__ != "GEGLU",
        **{what: any(each[what] for each in attentions) for what in attentions[0]},
        "attention to itself first": block.only_cross_attention,
        "float16 weights": any(weight.dtype != torch.float16 for weight in block.parameters()),
    }
    missing = [what for what, found in wrong.items() if found]
    if missing:
        raise ValueError(f"DeepSpeed's block needs {', '.join(missing)}, and the block {name} has none")
