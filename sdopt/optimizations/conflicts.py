"""Reasons that options of several groups share in their `conflicts`; `Variant.conflicts` collects them all."""

from importlib.util import find_spec

import torch

from sdopt.optimizations.base import Context, Optimization
from sdopt.optimizations.precision import FixedVae, FullVae
from sdopt.pipelines.loading import is_sdxl, part_config


def missing_packages(ctx: Context, extra: str, *modules: str) -> list[str]:
    """Returns the conflict, if any, of an option with packages of an extra that are not installed here."""
    # What is planned for another machine's card says nothing of the packages there.
    lacking = [name for name in modules if find_spec(name) is None] if ctx.device.is_here else []
    return [f"needs {', '.join(lacking)}: pip install 'sdopt[{extra}]'"] if lacking else []


def compiles(ctx: Context, *fitting: type[Optimization]) -> bool:
    """Returns whether a compiler other than the `fitting` ones takes the denoiser."""
    from sdopt.optimizations.compiler import Eager  # compilers build on this module

    return not isinstance(ctx.chosen.get("compiler", Eager()), (Eager, *fitting))


def records_autograd(ctx: Context, what: str) -> list[str]:
    """Returns the conflict, if any, of something that drops autograd's graph with `grad_mode=enabled`."""
    enabled = getattr(ctx.chosen.get("grad_mode"), "mode", None) == "enabled"
    return [f"{what} records nothing for autograd: choose another than grad_mode=enabled"] if enabled else []


def autocasts(ctx: Context, what: str) -> list[str]:
    """Returns the conflict, if any, of something that autocast does not reach."""
    kind = getattr(ctx.chosen.get("precision"), "autocast", None)
    return [f"{what} runs without autocast: choose precision=fp16, bf16 or fp32"] if kind else []


def upcasts_vae(ctx: Context) -> bool:
    """Returns whether diffusers casts the VAE to float32 in each call, and back: SDXL's own in float16."""
    precision = ctx.chosen.get("precision")
    if precision is None or isinstance(precision, FixedVae | FullVae) or "memory.tiny_vae" in ctx.chosen:
        return False
    loaded_in_half = precision.load_kwargs().get("dtype") == torch.float16
    return loaded_in_half and is_sdxl(ctx.model) and bool((part_config(ctx.model, "vae") or {}).get("force_upcast"))


def other_than_float16(ctx: Context, what: str) -> list[str]:
    """Returns the conflict, if any, of something that computes in float16 alone."""
    precision = ctx.chosen.get("precision")
    if getattr(precision, "weights", None) == "float16" and not getattr(precision, "autocast", None):
        return []
    return [f"{what} computes in float16 alone: choose precision=fp16"]


def leaves_adapters_out(ctx: Context) -> list[str]:
    """Returns the conflict with a LoRA that stays beside the weights: what joins the weights would leave it out."""
    if not getattr(ctx.chosen.get("lora"), "beside_the_weights", False):
        return []
    return ["takes the model's own weights, and would leave the LoRA out: choose lora=fused"]
