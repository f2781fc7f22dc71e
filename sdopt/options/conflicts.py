"""Conflicts that options of several groups share; `Variant.conflicts` collects those of all options."""

from sdopt.options import Context, Optimization
from sdopt.options.assumptions import LEAVES_A_LORA_OUT
from sdopt.options.base import loading_arguments
from sdopt.options.grad_mode import GradMode
from sdopt.options.layout import Layout
from sdopt.options.lora import Lora
from sdopt.options.precision import FixedVae, FullVae, Precision
from sdopt.pipelines.families import factor_of
from sdopt.pipelines.loading import family_of, guidance_of, part_config


def compiles(ctx: Context, *fitting: type[Optimization]) -> bool:
    """Returns whether the variant compiles the denoiser with a compiler other than the `fitting` ones."""
    compiler = ctx.chosen.get("compiler")
    return (
        compiler is not None and compiler.compiles and not isinstance(compiler, fitting)
    )


def records_autograd(ctx: Context, what: str) -> list[str]:
    """Returns the conflict, if any, of `what`, which drops autograd's graph, with `grad_mode=enabled`."""
    if not keeps_gradients(ctx):
        return []
    return [
        f"{what} does not support autograd (grad_mode=enabled): choose grad_mode=no_grad or inference_mode"
    ]


def grad_mode_of(ctx: Context) -> str | None:
    """Returns the gradient mode of a call, such as `inference_mode`; None if no option sets it."""
    chosen = ctx.chosen.get("grad_mode")
    return chosen.mode if isinstance(chosen, GradMode) else None


def keeps_gradients(ctx: Context) -> bool:
    """Returns whether autograd records the calls of the variant."""
    return grad_mode_of(ctx) == "enabled"


def is_channels_last(ctx: Context) -> bool:
    """Returns whether convolutions have their weights in the layout `channels_last`."""
    layout = ctx.chosen.get("layout")
    return isinstance(layout, Layout) and layout.memory_format == "channels_last"


def weights_of(ctx: Context) -> str | None:
    """Returns the type of all weights, such as `float16`; None if no option sets it, or some are in 8 bits."""
    precision = ctx.chosen.get("precision")
    return precision.weights if isinstance(precision, Precision) else None


def autocast_of(ctx: Context) -> str | None:
    """Returns the type that autocast computes in, such as `float16`; None without autocast."""
    precision = ctx.chosen.get("precision")
    return precision.autocast if isinstance(precision, Precision) else None


def attends_in_float32(ctx: Context) -> bool:
    """Returns whether an option sets the inputs of attention to be float32."""
    import torch

    # Layers with 8-bit weights return the type that all other weights are loaded in.
    return (
        not autocast_of(ctx)
        and loading_arguments(ctx.chosen.values()).get("dtype") == torch.float32
    )


def upcasts_vae(ctx: Context) -> bool:
    """Returns whether diffusers casts the VAE to float32 and back in each call, as it does with SDXL's in float16."""
    import torch

    precision = ctx.chosen.get("precision")
    if (
        precision is None
        or isinstance(precision, FixedVae | FullVae)
        or "memory.tiny_vae" in ctx.chosen
    ):
        return False
    loaded_in_half = precision.load_kwargs().get("dtype") == torch.float16
    return (
        loaded_in_half
        and family_of(ctx.model).upcasts_vae
        and bool((part_config(ctx.model, "vae") or {}).get("force_upcast"))
    )


def unguided(ctx: Context, what: str) -> list[str]:
    """Returns the conflict, if any, of an option that needs guidance with a model or a workload that has none."""
    guidance = guidance_of(ctx.model)
    if guidance.form == "embedded":
        return [
            f"the model takes the guidance scale as an input, so there is no {what}: leave the option out"
        ]
    if guidance.form == "none":
        return [
            f"guidance was distilled into the model's weights, so there is no {what}: leave the option out"
        ]
    if not guidance.guides(ctx.workload.guidance(ctx.model)):
        return [
            f"there is no {what}: set workload.guidance_scale above {guidance.above:g}"
        ]
    return []


def untold(ctx: Context, *properties: str) -> list[str]:
    """Returns the conflict, if any, of an option that asks diffusers' pipeline for what it does not say."""
    family = family_of(ctx.model)
    if family.is_unet or not properties:
        return []
    import diffusers

    cls = getattr(diffusers, family.pipeline, None)
    lacking = [name for name in properties if not hasattr(cls, name)]
    if not lacking:
        return []
    return [f"diffusers' {family.pipeline} does not say its {' and '.join(lacking)}"]


def latent_side(ctx: Context) -> int:
    """Returns how many latents a side an image of the variant has."""
    factor = factor_of(part_config(ctx.model, "vae") or {})
    return (ctx.workload.size or ctx.model.size) // factor


def leaves_adapters_out(ctx: Context) -> list[str]:
    """Returns the conflict, if any, of an option that reads or joins the model's weights with an unfused LoRA."""
    lora = ctx.chosen.get("lora")
    if not (isinstance(lora, Lora) and lora.beside_the_weights):
        return []
    return [LEAVES_A_LORA_OUT]
