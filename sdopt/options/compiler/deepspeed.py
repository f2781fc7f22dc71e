"""DeepSpeed's transformer blocks, inserted by sdopt, as in Lightning's "Serve Stable Diffusion Three Times Faster".

`deepspeed.init_inference` no longer works: its UNet wrapper reads `unet.in_channels`, which diffusers has removed, and
its text encoder wrapper reads `text_model`, which transformers 5 has removed. The blocks themselves still work. They
assume the following, as of DeepSpeed 0.19.8; `require_fitting` checks each assumption, or it is a conflict:

- A block reads `norm1`–`norm3` (layer norms with weights), `ff.net[0].proj` (GEGLU), `ff.net[2]`, `attn1` and `attn2`.
- The first layer norm of a block assumes contiguous hidden states (`ds_layer_norm`), which only a channels-last
  convolution produces; DeepSpeed's own wrapper sets that layout. Here a hook makes them contiguous.
- The workspace is allocated for `max_out_tokens` = 4096: images of up to 512×512.
- `sdopt.options.deepspeed` lists the assumptions of its attention.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from typing_extensions import override

from sdopt.measure import compilation
from sdopt.measure.trace import Trace
from sdopt.options.assumptions import common_attention, plain_weights, unchanged_layers, ungated_blocks
from sdopt.options.attention import Default
from sdopt.options.base import Assumption, Context, Finding, Proof
from sdopt.options.compiler.base import Compiler
from sdopt.options.deepspeed import attention_of, begin_a_model, compile_kernels, lacks, misfits
from sdopt.pipelines.loading import part_config
from sdopt.pipelines.parts import Pipeline, denoiser_of

_TOKENS = 4096
"""The `max_out_tokens` of DeepSpeed's own injection."""

_KERNELS = ("fused_gate_activation", "fused_ln", "opt_bias_add")
"""Parts of the names of DeepSpeed's kernels in each block."""


@dataclass(frozen=True)
class DeepSpeed(Compiler):
    """Replaces the denoiser's transformer blocks by DeepSpeed's fused blocks, with the same weights; float16 on CUDA.

    Two of the three layer norms of a block run in PyTorch, because DeepSpeed implements them as fallbacks.
    """

    assumes: ClassVar[tuple[Assumption, ...]] = (common_attention, ungated_blocks, plain_weights, unchanged_layers)
    keeps_structure: ClassVar[bool] = True

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        found = misfits(ctx) + _beyond_blocks(ctx)
        attention = ctx.chosen.get("attention")
        if attention is not None and not isinstance(attention, Default):
            found.append("DeepSpeed's block has its own attention: choose attention=default")
        return found

    @override
    def apply(self, pipe: Pipeline) -> Proof:
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
    """Returns the conflicts of DeepSpeed's blocks with the model and the image size."""
    if (part_config(ctx.model, "unet") or {}).get("addition_embed_type"):
        return ["DeepSpeed's blocks are tested only with Stable Diffusion 1.x and 2.x: not with SDXL"]
    if ((ctx.workload.size or ctx.model.size) // 8) ** 2 > _TOKENS:
        return [f"DeepSpeed's workspace holds {_TOKENS} tokens: images of up to 512 pixels, as in workload.size=512"]
    return []


def _blocks(denoiser: torch.nn.Module) -> list[tuple[torch.nn.Module, str, Any]]:
    """Returns (owner, attribute, block) of each diffusers transformer block in a denoiser."""
    return [
        (owner, name, child)
        for owner in denoiser.modules()
        for name, child in owner.named_children()
        if type(child).__name__ == "BasicTransformerBlock"
    ]


def replace_blocks(denoiser: torch.nn.Module) -> None:
    """Replaces each transformer block by DeepSpeed's, with the same weights. Raises ValueError if a block differs."""
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
    """Raises ValueError if a diffusers transformer block violates an assumption of DeepSpeed's block."""
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
        raise ValueError(f"DeepSpeed's block needs {', '.join(missing)}, which the block {name} lacks")
