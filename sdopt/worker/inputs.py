"""What one call of the pipeline is given: prompts, and the noise that its images start from."""

from typing import TYPE_CHECKING

import torch

from sdopt.optimizations.base import Inputs
from sdopt.pipelines.latents import take
from sdopt.pipelines.parts import denoiser_of, unwrapped
from sdopt.pipelines.tasks import inputs_of
from sdopt.variant import Variant
from sdopt.worker.draws import Draw

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


def prompts_and_noise(
    variant: Variant, pipe: "DiffusionPipeline", device: str, given: torch.Tensor | None, index: int, draw: Draw
) -> Inputs:
    """Returns the prompts and the initial noise of one call; a last, short batch is filled up from the start.

    The noise of each image is drawn on the CPU in float32 from a seed of its own, and only then cast: precision, batch
    size and device do not change where an image starts.

    Args:
        variant: says how many images there are of each prompt, and of what task.
        pipe: that is called.
        device: PyTorch's name of the one that it runs on.
        given: the latents that take the place of noise, if a file named some.
        index: number of the call among those of the draw.
        draw: which prompts, in which batches and of which size.
    """
    count = variant.workload.images_per_prompt
    chosen = [(index * draw.batch_size + offset) % len(draw.prompts) for offset in range(draw.batch_size)]
    numbers = [prompt * count + image for prompt in chosen for image in range(count)]
    inputs = inputs_of(variant.task, variant.model, draw.size, len(numbers))
    inputs["prompt"] = [draw.prompts[i] for i in chosen]
    generators = [torch.Generator().manual_seed(draw.seed + number) for number in numbers]
    if variant.task.kind != "txt2img":
        # What an image starts from is made within the call, out of the encoded input and of noise drawn there.
        return inputs | {"generator": generators}
    side = draw.size // pipe.vae_scale_factor
    shape = (1, pipe.vae.config.latent_channels, side, side)
    if given is None:
        noise = [torch.randn(shape, generator=generator) for generator in generators]
    else:
        noise = take(given, numbers, shape[1:], variant.workload.latents or "")
    # Not that of the parameters, which may be stored in fewer bits than they compute in.
    dtype = unwrapped(denoiser_of(pipe)).dtype
    latents = torch.cat(noise).to(device=device, dtype=dtype)
    # Some schedulers draw noise at every step: each image's comes from its own seed as well.
    return inputs | {"latents": latents, "generator": generators}
