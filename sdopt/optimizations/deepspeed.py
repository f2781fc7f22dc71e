"""attention=deepspeed; and DeepSpeed's attention with the weights of diffusers', which its blocks need as well.

What its kernels take for granted, as of DeepSpeed 0.19.8, is checked here or is a conflict:

- Projections without bias, an output with one, float16 alone, and hidden states (batch, tokens, channels) on CUDA.
- The Triton kernel (`triton_ops.py`) serves heads of up to 128 channels; wider ones take two products and a softmax. It
  reads whole tiles of 64 tokens and checks no border.
- The workspace is sized by the layer of number 0, the first one made, for `max_out_tokens` of its configuration.
- Masks and `cross_attention_kwargs` are dropped; nothing in these pipelines sets them.
"""

import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from sdopt.measure.trace import Trace
from sdopt.optimizations.attention import EquivalentAttention
from sdopt.optimizations.base import Context, Finding, Proof
from sdopt.optimizations.conflicts import compiles, leaves_adapters_out, missing_packages, other_than_float16
from sdopt.pipelines.loading import head_dimensions_by_level, part_config
from sdopt.pipelines.parts import denoiser_of

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

_TILE, _LARGEST_HEAD = 64, 128
_KERNEL, _TRANSPOSITION = "_fwd_kernel", "transform_0213"
"""The beginning of the name of DeepSpeed's attention, and a part of the name of the transposition before it."""


@dataclass(frozen=True)
class Attention(EquivalentAttention):
    """DeepSpeed's attention with its own kernels, in place of diffusers' layers; everything else stays as it is.

    Its kernels take float16 alone, and layers of a multiple of 64 latents. PyTorch compiles some of them when they are
    first used, with nvcc.
    """

    @property
    @override
    def claims(self) -> frozenset[str]:
        return frozenset({"latency"})

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        found = misfits(ctx)
        if compiles(ctx):
            found.append("DeepSpeed's kernels are opaque to a compiler: choose compiler=eager")
        return found + leaves_adapters_out(ctx)

    @override
    def apply(self, pipe: "DiffusionPipeline") -> Proof:
        from diffusers.models import attention_processor

        denoiser, kind = denoiser_of(pipe), attention_processor.Attention
        names = [name for name, layer in denoiser.named_modules() if isinstance(layer, kind)]
        begin_a_model()
        for name in names:
            denoiser.set_submodule(name, Layer(denoiser.get_submodule(name)))

        def proof(trace: Trace) -> Finding:
            replaced = sum(isinstance(layer, Layer) for layer in denoiser.modules())
            kept = sum(isinstance(layer, kind) for layer in denoiser.modules())
            ran = {name: n for name, n in trace.kernels.items() if name.startswith(_KERNEL) or _TRANSPOSITION in name}
            facts = {"replaced": replaced, "kept": kept, "kernels": ran}
            summary = f"{replaced} of {replaced + kept} layers replaced; {sum(ran.values())} kernels of DeepSpeed ran"
            return Finding(replaced == len(names) > 0 and not kept and bool(ran), summary, facts)

        return proof


class Layer(torch.nn.Module):
    """DeepSpeed's attention with the weights and the arguments of a layer of diffusers.

    Args:
        layer: the `diffusers.models.attention_processor.Attention` that it replaces.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.attention = attention_of(layer)

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the attention's output, of the shape of `hidden_states`. Raises ValueError for a mask."""
        if attention_mask is not None:
            raise ValueError("attention=deepspeed takes no mask")
        # The size of the workspace, which the first layer of a model allocates: it has the most latents.
        self.attention.config.max_out_tokens = hidden_states.shape[1]
        output: torch.Tensor = self.attention(hidden_states, context=encoder_hidden_states)
        return output


def misfits(ctx: Context) -> list[str]:
    """Returns why DeepSpeed's attention cannot run: the card, packages, tools, types, or the sizes of the layers."""
    what = "DeepSpeed's attention"
    # Triton's smallest.
    found = ctx.device.needs_cuda(what, (7, 0)) or missing_packages(ctx, "deepspeed", "deepspeed", "triton", "ninja")
    if ctx.device.is_cuda and ctx.device.is_here and not (shutil.which("nvcc") or os.environ.get("CUDA_HOME")):
        found.append("DeepSpeed compiles its kernels with nvcc: install the CUDA toolkit, and set CUDA_HOME")
    found += other_than_float16(ctx, what)
    if (part_config(ctx.model, "unet") or {}).get("upcast_attention"):
        found.append("this model computes its attention in float32, which DeepSpeed's kernels cannot")
    if ctx.shapes > 1:
        found.append("DeepSpeed allocates its workspace for one shape: give one workload.size and batch_size")
    return found + _beyond_tiles(ctx)


def _beyond_tiles(ctx: Context) -> list[str]:
    """Returns the conflict of layers whose latents are no whole number of tiles."""
    side, wrong = (ctx.workload.size or ctx.model.size) // 8, []
    for level, channels in head_dimensions_by_level(ctx.model).items():
        # A convolution halves the side and rounds up.
        latents = (-(-side // 2**level)) ** 2
        if channels <= _LARGEST_HEAD and latents % _TILE:
            wrong.append(str(latents))
    sizes = f"layers of {', '.join(wrong)} latents"
    found = f"DeepSpeed's attention takes multiples of {_TILE} latents, and this size has {sizes}: set workload.size"
    return [found] if wrong else []


def begin_a_model() -> None:
    """Makes the layer that is made next the one that allocates the workspace of all: it must be the first that runs."""
    _classes()[0].layer_id = 0


def attention_of(layer: Any, tokens: int = 1) -> Any:
    """Returns DeepSpeed's attention with the weights of diffusers': to itself, with one product for all three.

    Args:
        layer: the `diffusers.models.attention_processor.Attention` whose weights it takes.
        tokens: how many the workspace has to hold, if this layer allocates it; may be set before a call.
    """
    kind, configure = _classes()
    weight = layer.to_q.weight
    made = kind(
        configure(
            hidden_size=weight.shape[1],
            heads=layer.heads,
            dtype=weight.dtype,
            triangular_masking=False,
            max_out_tokens=tokens,
        )
    )
    # It multiplies from the right: its weights are those of diffusers, transposed.
    own = {f"attn_{name}w": getattr(layer, f"to_{name}").weight.T for name in "qkv"}
    if not layer.is_cross_attention:
        own = {"attn_qkvw": torch.cat([*own.values()], dim=1)}
    for name in ("attn_qkvw", "attn_qw", "attn_kw", "attn_vw"):
        setattr(made, name, _frozen(own[name]) if name in own else None)
    made.attn_qkvb = None
    made.attn_ow = _frozen(layer.to_out[0].weight.T)
    made.attn_ob = _frozen(layer.to_out[0].bias)
    return made


def _classes() -> tuple[Any, Any]:
    """Returns the classes of DeepSpeed's attention and of its configuration."""
    from deepspeed.ops.transformer import DeepSpeedInferenceConfig
    from deepspeed.ops.transformer.inference.diffusers_attention import DeepSpeedDiffusersAttention

    return DeepSpeedDiffusersAttention, DeepSpeedInferenceConfig


def _frozen(weight: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(weight.detach().contiguous(), requires_grad=False)
