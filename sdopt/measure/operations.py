"""Floating-point operations of one image, counted without running it."""

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from sdopt.measure.stages import denoiser_of, plain, text_encoders_of
from sdopt.schema import Workload

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


def tflop_per_image(pipe: "DiffusionPipeline", workload: Workload, size: int) -> dict[str, float]:
    """Operations (multiply and add count as two) of one image, in TFLOP, by stage and in `total`.

    Counted by PyTorch's FlopCounterMode on the meta device: on a CPU it counts nothing for fused attention.
    With guidance every step runs the denoiser on two samples, and the text encoder reads two prompts, once for all
    images of a prompt. Some schedulers run the denoiser more often than there are steps.
    """
    samples = 2 if workload.guidance_scale > 1 else 1
    denoiser, vae = plain(denoiser_of(pipe)), pipe.vae
    latent = size // (2 ** (len(vae.config.block_out_channels) - 1))
    encoders = text_encoders_of(pipe)
    length = pipe.tokenizer.model_max_length
    pipe.scheduler.set_timesteps(workload.steps)
    calls = len(pipe.scheduler.timesteps)
    with torch.device("meta"):
        fresh_denoiser = type(denoiser).from_config(denoiser.config)
        fresh_vae = type(vae).from_config(vae.config)
        fresh_encoders = [type(plain(encoder))(plain(encoder).config) for encoder in encoders]
        sample = torch.empty(samples, denoiser.config.in_channels, latent, latent)
        states = torch.empty(samples, length, denoiser.config.cross_attention_dim)
        counted = {
            "text_encoder": sum(
                tflop(encoder, torch.zeros(samples, length, dtype=torch.long)) for encoder in fresh_encoders
            )
            / workload.images_per_prompt,
            "denoiser": calls * tflop(fresh_denoiser, sample, torch.tensor(1), states),
            "vae_decoder": tflop(fresh_vae.decode, torch.empty(1, vae.config.latent_channels, latent, latent)),
        }
    return counted | {"total": sum(counted.values())}


def tflop(function: Any, *inputs: torch.Tensor) -> float:
    """Operations of one call, in TFLOP; give it modules and tensors on the meta device."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        function(*inputs)
    return counter.get_total_flops() / 1e12
