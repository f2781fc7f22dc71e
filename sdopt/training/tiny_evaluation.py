"""Compares the tiny autoencoder with the full one in quality and speed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from sdopt.measure.operations import tflop
from sdopt.training.architecture import LATENT_CHANNELS, LATENT_SIZE, build_autoencoder, build_tiny_autoencoder
from sdopt.training.autoencoder import peak_signal_to_noise, pixels
from sdopt.training.evaluation import Figure, at_least
from sdopt.training.sheet import GUIDANCE, STEPS

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, AutoencoderTiny, StableDiffusionPipeline
    from torch import Tensor

    from sdopt.training.data import Dataset


def compare_on_pictures(
    network: AutoencoderTiny, teacher: AutoencoderKL, dataset: Dataset, batch_size: int = 64
) -> dict[str, float]:
    """Compares the distilled networks with their teacher on the held-out pictures.

    Returns:
        `held_out_psnr_db`: PSNR of the decoder's pictures against the teacher's, both from the teacher's latents.
        `encoder_psnr_db`: PSNR against the real pictures of the *teacher's* decoded pictures from the distilled
        encoder's latents, and `teacher_psnr_db` from the teacher's own latents. `latent_error`: root mean squared error
        of the latents, which have a standard deviation of about 1.
    """
    import torch

    scale = teacher.config.scaling_factor
    images = dataset.images[dataset.indices(held_out=True)]
    decoded, encoded, ceiling, errors = [], [], [], []
    with torch.inference_mode():
        for start in range(0, len(images), batch_size):
            pictures = pixels(images[start : start + batch_size])
            latents = scale * teacher.encode(pictures).latent_dist.mode()
            target = teacher.decode(latents / scale).sample
            mine = network.encode(pictures).latents
            decoded.append(peak_signal_to_noise(network.decode(latents).sample, target.clamp(-1, 1)))
            encoded.append(peak_signal_to_noise(teacher.decode(mine / scale).sample, pictures))
            ceiling.append(peak_signal_to_noise(target, pictures))
            errors.append((mine - latents).square().mean(dim=(1, 2, 3)))
    return {
        "held_out_psnr_db": float(torch.cat(decoded).mean()),
        "encoder_psnr_db": float(torch.cat(encoded).mean()),
        "teacher_psnr_db": float(torch.cat(ceiling).mean()),
        "latent_error": float(torch.cat(errors).mean().sqrt()),
    }


def generated_latents(pipeline: StableDiffusionPipeline, captions: Sequence[str], seed: int) -> Tensor:
    """Generates latents from captions; returns scaled latents, float32 (n, 8, 8, 8)."""
    import torch

    pipeline.set_progress_bar_config(disable=True)
    noise = [torch.Generator().manual_seed(seed + i) for i in range(len(captions))]
    made: Any = pipeline(
        list(captions), num_inference_steps=STEPS, guidance_scale=GUIDANCE, generator=noise, output_type="latent"
    )
    latents: Tensor = made.images
    return latents


def compare_on_latents(network: AutoencoderTiny, teacher: AutoencoderKL, latents: Tensor) -> float:
    """Returns the mean PSNR in dB of the decoder's pictures against the teacher's, for scaled latents (n, 8, 8, 8)."""
    import torch

    with torch.inference_mode():
        target = teacher.decode(latents / teacher.config.scaling_factor).sample.clamp(-1, 1)
        return float(peak_signal_to_noise(network.decode(latents).sample, target).mean())


@dataclass(frozen=True)
class Speed:
    """The speed-up of one decoder over another.

    Attributes:
        mean: geometric mean over the rounds.
        low: 5 % quantile of the rounds.
        high: 95 % quantile of the rounds.
    """

    mean: float
    low: float
    high: float


def compare_speed(network: AutoencoderTiny, teacher: AutoencoderKL, latents: Tensor, rounds: int = 40) -> Speed:
    """Measures the speed-up of the decoder over its teacher's; both run alternately in this process.

    Args:
        network: the distilled networks.
        teacher: the autoencoder.
        latents: one batch, scaled, (n, 8, 8, 8).
        rounds: number of timed rounds, each with one call of both decoders, after three warm-up rounds.
    """
    import torch

    seconds: list[list[float]] = []
    with torch.inference_mode():
        for _ in range(rounds + 3):
            marks = [time.perf_counter()]
            for decode in (teacher.decode, network.decode):
                decode(latents)
                marks.append(time.perf_counter())
            seconds.append([after - before for before, after in pairwise(marks)])
    slow, fast = np.log(seconds[3:]).T
    # The spread of rounds within one process is not a confidence interval, which must include other processes.
    low, high = np.exp(np.quantile(slow - fast, (0.05, 0.95)))
    return Speed(float(np.exp(np.mean(slow - fast))), float(low), float(high))


def tiny_figures(
    network: AutoencoderTiny, pipeline: StableDiffusionPipeline, dataset: Dataset, captions: Sequence[str], seed: int
) -> list[Figure]:
    """Returns the figures of the distilled networks for the family's table."""
    latents = generated_latents(pipeline, captions, seed)
    fast, slow = count_operations()
    speed = compare_speed(network, pipeline.vae, latents)
    held_out = compare_on_pictures(network, pipeline.vae, dataset)
    return [
        at_least("tiny autoencoder", f"times faster to decode {len(captions)} pictures", speed.mean, "", 3),
        Figure("tiny autoencoder", "times fewer operations to decode", slow / fast),
        Figure(
            "tiny autoencoder",
            "PSNR against the full decoder, generated latents",
            compare_on_latents(network, pipeline.vae, latents),
            "dB",
        ),
        Figure("tiny autoencoder", "… held-out pictures' latents", held_out["held_out_psnr_db"], "dB"),
    ]


def count_operations() -> tuple[float, float]:
    """Returns the MFLOP to decode one picture, of the distilled decoder and of its teacher."""
    import torch

    with torch.device("meta"):
        latents = torch.zeros(1, LATENT_CHANNELS, LATENT_SIZE, LATENT_SIZE)
        return 1e6 * tflop(build_tiny_autoencoder().decode, latents), 1e6 * tflop(build_autoencoder().decode, latents)
