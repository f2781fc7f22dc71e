"""The transformer stage: trains a small FLUX by rectified flow, with the denoiser of another pipeline as a teacher.

The latents, the captions and the text encoder are those of that pipeline. The clean picture x₀ and the noise ε make
x_σ = (1 − σ)·x₀ + σ·ε, and the network predicts the velocity ε − x₀ (Liu et al. 2022; Esser et al. 2024).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    StableDiffusionPipeline,
)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sdopt.apps.training.config import TrainReferenceConfig
from sdopt.apps.training.data import Dataset
from sdopt.apps.training.denoiser import captioned_latents, picture_chances, token_ids
from sdopt.apps.training.loop import in_precision, load_average, pick_device, train
from sdopt.apps.training.networks import (
    LATENT_CHANNELS,
    LATENT_SIZE,
    LENGTH,
    TEXT_WIDTH,
)

PATCH = 2
"""Side of the square of latents that makes one token."""


def build_transformer() -> FluxTransformer2DModel:
    """Builds an untrained FLUX of 6.3 million parameters: 16 tokens of a picture and 24 of a caption."""
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=LATENT_CHANNELS * PATCH**2,
        num_layers=2,
        num_single_layers=6,
        attention_head_dim=32,
        num_attention_heads=6,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        guidance_embeds=False,
        axes_dims_rope=(8, 12, 12),
    )


def build_flow_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Builds the scheduler of the rectified flow, which spends more of its steps on heavy noise."""
    return FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=1.5)


def shifted_levels(count: int, shift: float, random: np.random.Generator) -> np.ndarray:
    """Draws a noise level σ from each of `count` equal intervals, in random order, shifted towards noise.

    The shift is that of Esser et al. 2024: s·σ / (1 + (s − 1)·σ). Returns float32 (count,).
    """
    levels = random.permutation((np.arange(count) + random.random(count)) / count)
    return (shift * levels / (1 + (shift - 1) * levels)).astype(np.float32)


def packed(latents: Tensor) -> Tensor:
    """Returns latents (n, 8, 8, 8) as tokens (n, 16, 32), as `FluxPipeline` packs them."""
    count, channels, height, width = latents.shape
    tokens: Tensor = FluxPipeline._pack_latents(latents, count, channels, height, width)
    return tokens


class Teacher:
    """The denoiser of a pipeline, which predicts v at a timestep, asked for velocities at a noise level.

    A variance-preserving mixture is the rectified flow's divided by √((1 − σ)² + σ²); its timestep is the one with the
    same ratio of signal to noise.
    """

    def __init__(self, pipeline: StableDiffusionPipeline, device: torch.device) -> None:
        self.denoiser = pipeline.unet.to(device).eval().requires_grad_(False)
        alphas = pipeline.scheduler.alphas_cumprod.double().numpy()
        self.logarithms = np.log(alphas / (1 - alphas))

    def timesteps(self, levels: np.ndarray) -> np.ndarray:
        """Returns the timestep, which need not be whole, of each noise level, (n,)."""
        clipped = np.clip(levels.astype(np.float64), 1e-4, 1 - 1e-4)
        wanted = 2 * np.log((1 - clipped) / clipped)
        steps = np.arange(len(self.logarithms), dtype=np.float64)
        found: np.ndarray = np.interp(-wanted, -self.logarithms, steps).astype(
            np.float32
        )
        return found

    def velocity(self, mixed: Tensor, levels: np.ndarray, states: Tensor) -> Tensor:
        """Returns ε − x₀ as the denoiser predicts it, (n, 8, 8, 8), for a mixture of the rectified flow."""
        device = mixed.device
        sigma = torch.from_numpy(levels).to(device)[:, None, None, None]
        length = ((1 - sigma) ** 2 + sigma**2).sqrt()
        signal, noise = (1 - sigma) / length, sigma / length
        scaled = mixed / length
        predicted = self.denoiser(
            scaled, torch.from_numpy(self.timesteps(levels)).to(device), states
        ).sample.float()
        velocity: Tensor = (noise * scaled + signal * predicted) - (
            signal * scaled - noise * predicted
        )
        return velocity


def flow_loss(
    config: TrainReferenceConfig,
    dataset: Dataset,
    pipeline: StableDiffusionPipeline,
    transformer: Any,
) -> Callable[[int], Tensor]:
    """Returns the loss of the velocity as a function of the step, for `train`."""
    options, device = config.transformer, pick_device(config.device)
    _, chances = picture_chances(dataset, options.flat_weight)
    draw = captioned_latents(config, "transformer", dataset, pipeline.vae, chances)
    text_encoder = pipeline.text_encoder.to(device).eval().requires_grad_(False)
    teacher = Teacher(pipeline, device)
    side = LATENT_SIZE // PATCH
    image_ids = FluxPipeline._prepare_latent_image_ids(
        1, side, side, device, torch.float32
    )
    text_ids = torch.zeros(LENGTH, 3, device=device)

    def loss(step: int) -> Tensor:
        captions, clean, noise, random = draw(step)
        levels = shifted_levels(len(captions), options.shift, random)
        sigma = torch.from_numpy(levels).to(device)
        shares = sigma[:, None, None, None]
        mixed = (1 - shares) * clean + shares * noise
        true = packed(noise - clean)
        # The backward pass of the fused kernel is slow on CPUs, in bf16 slower than all products together.
        with in_precision(config.arithmetic, device), sdpa_kernel(SDPBackend.MATH):
            with torch.no_grad():
                text = text_encoder(token_ids(pipeline.tokenizer, captions).to(device))
                taught = packed(teacher.velocity(mixed, levels, text.last_hidden_state))
            predicted = transformer(
                hidden_states=packed(mixed),
                timestep=sigma,
                pooled_projections=text.pooler_output,
                encoder_hidden_states=text.last_hidden_state,
                img_ids=image_ids,
                txt_ids=text_ids,
            ).sample.float()
        towards_true, towards_taught = (
            (predicted - true).square().mean(),
            (predicted - taught).square().mean(),
        )
        total: Tensor = (
            1 - options.teacher_share
        ) * towards_true + options.teacher_share * towards_taught
        return total

    return loss


def train_transformer(
    config: TrainReferenceConfig, dataset: Dataset, pipeline: StableDiffusionPipeline
) -> None:
    """Trains a transformer on the latents and the text encoder of a pipeline."""
    torch.manual_seed(config.seed)
    transformer = build_transformer().to(pick_device(config.device))
    loss = flow_loss(config, dataset, pipeline, transformer)
    train(
        config, "transformer", transformer, loss,
        start_from=config.start_from, pictures=len(dataset.indices(held_out=False)),
    )  # fmt: skip


def assemble_flux(folder: Path, pipeline: StableDiffusionPipeline) -> FluxPipeline:
    """Returns the trained transformer with the other networks of the pipeline that it was trained with.

    The one text encoder has both places: FLUX takes pooled states of the first, and all states of the second.
    """
    transformer = build_transformer()
    load_average(folder, transformer)
    pipeline.vae.register_to_config(shift_factor=0.0)
    return FluxPipeline(
        scheduler=build_flow_scheduler(),
        vae=pipeline.vae,
        text_encoder=pipeline.text_encoder,
        tokenizer=pipeline.tokenizer,
        text_encoder_2=pipeline.text_encoder,
        tokenizer_2=pipeline.tokenizer,
        transformer=transformer,
    )
