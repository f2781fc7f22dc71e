"""Makes the inputs of one call of the pipeline: prompts, and the noise that its images start from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sdopt.options.base import Inputs
from sdopt.pipelines.families import factor_of, latent_channels_of
from sdopt.pipelines.latents import drawn, laid_out
from sdopt.pipelines.loading import family_of, guidance_of
from sdopt.pipelines.parts import denoiser_of, unwrapped
from sdopt.pipelines.prompts import take
from sdopt.pipelines.tasks import inputs_of
from sdopt.variant import Variant
from sdopt.worker.draws import Draw

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline


def prompts_and_noise(
    variant: Variant,
    pipe: DiffusionPipeline,
    device: str,
    given: torch.Tensor | None,
    index: int,
    draw: Draw,
) -> Inputs:
    """Returns the prompts and the initial noise of one call; a last, short batch is filled up from the start.

    The noise of each image is drawn on the CPU in float32 from a seed of its own, and only then cast: precision, batch
    size and device do not change where an image starts.

    `given` are latents from a file that replace the noise; `index` is the number of the call within the draw.
    """
    count = variant.workload.images_per_prompt
    positions = draw.positions
    first = index * draw.batch_size
    chosen = [
        positions[number % len(positions)]
        for number in range(first, first + draw.batch_size)
    ]
    numbers: list[int] = []
    for prompt in chosen:
        numbers += range(prompt * count, (prompt + 1) * count)
    prompts = [draw.prompts[i] for i in chosen]
    negatives = [draw.negatives[i] for i in chosen] if draw.negatives else None
    seeds = [draw.seed + number for number in numbers]

    def taken(shape: tuple[int, ...]) -> list[torch.Tensor] | None:
        return (
            None
            if given is None
            else take(given, numbers, shape, variant.workload.latents or "")
        )

    return asked_inputs(
        variant, pipe, device, draw.size, prompts, negatives, seeds, taken
    )


def asked_inputs(
    variant: Variant,
    pipe: DiffusionPipeline,
    device: str,
    size: int,
    prompts: Sequence[str],
    negatives: Sequence[str] | None,
    seeds: Sequence[int],
    given: Callable[[tuple[int, ...]], list[torch.Tensor] | None] = lambda shape: None,
) -> Inputs:
    """Returns the prompts and the initial noise of one call for images that are named one by one.

    `seeds` has one for each image, of which each prompt has one or more. `given` returns what replaces the noise, given
    the shape of one image's latents.
    """
    import torch

    family, guidance = family_of(variant.model), guidance_of(variant.model)
    inputs = inputs_of(
        variant.task, variant.model, size, len(seeds), with_size=not family.is_unet
    )
    inputs["prompt"] = list(prompts)
    if (
        negatives is None
        and guidance.needs_negative
        and guidance.guides(variant.guidance_scale)
    ):
        negatives = [""] * len(prompts)  # without any, the pipeline would not be guided
    if negatives is not None:
        inputs["negative_prompt"] = list(negatives)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    if variant.task.kind != "txt2img":
        # The call itself makes the initial latents, from the encoded input image and noise that it draws.
        return inputs | {"generator": generators}
    side = size // factor_of(pipe.vae.config)
    channels, form = latent_channels_of(pipe.vae.config) or 4, family.latents
    noise = given((channels, side, side))
    latents = (
        drawn(generators, channels, side, form)
        if noise is None
        else laid_out(torch.cat(noise), form)
    )
    # Not the type of the parameters, which may be stored in fewer bits than they compute in.
    dtype = torch.float32 if form.kept else unwrapped(denoiser_of(pipe)).dtype
    latents = latents.to(device=device, dtype=dtype)
    # Some schedulers draw noise at every step: each image has its own seed for that, too.
    return inputs | {"latents": latents, "generator": generators}
