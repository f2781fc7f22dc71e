"""Evaluates the tiny autoencoder against the full one, and the LoRAs by the style of their pictures."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sdopt.measure.operations import tflop
from sdopt.training.autoencoder import encode_all, peak_signal_to_noise, pixels
from sdopt.training.data import Dataset, draw_style
from sdopt.training.evaluation import Figure
from sdopt.training.networks import LATENT_CHANNELS, LATENT_SIZE, build_autoencoder, build_tiny_autoencoder
from sdopt.training.packages import STYLES
from sdopt.training.sheet import generate, generate_latents

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, AutoencoderTiny, StableDiffusionPipeline
    from torch import Tensor


DECODED = 32
"""Number of captions whose latents the tiny autoencoder decodes."""

COMPARED = 32
"""Number of concepts, of each split, on which a LoRA is evaluated."""


def evaluate_tiny(
    folder: Path, pipeline: StableDiffusionPipeline, dataset: Dataset, captions: Sequence[str], seed: int
) -> list[Figure]:
    """Returns the figures of the tiny autoencoder in `folder` against the pipeline's autoencoder.

    Args:
        folder: an exported `AutoencoderTiny`.
        pipeline: in single precision.
        dataset: the drawings.
        captions: captions for generated latents.
        seed: picture i starts from the noise of seed + i.
    """
    import torch
    from diffusers import AutoencoderTiny

    network = AutoencoderTiny.from_pretrained(folder, dtype=torch.float32)
    latents = generate_latents(pipeline, captions[:DECODED], seed=seed)
    fast, slow = count_operations()
    return [
        Figure(f"times faster to decode {len(latents)} pictures", (speed_up(network, pipeline.vae, latents),), "×", 3),
        Figure("times fewer operations to decode", (slow / fast,), "×"),
        Figure(
            "PSNR against the full decoder, generated latents",
            (decoder_psnr(network, pipeline.vae, latents),),
            "dB",
        ),
        *compare_on_pictures(network, pipeline.vae, dataset.images[dataset.indices(held_out=True)]),
    ]


def compare_on_pictures(network: AutoencoderTiny, teacher: AutoencoderKL, images: np.ndarray) -> list[Figure]:
    """Compares the distilled networks with their teacher on pictures, uint8 (n, 64, 64, 3)."""
    import torch

    scale = teacher.config.scaling_factor
    latents = scale * encode_all(teacher, images)[0]
    with torch.inference_mode():
        mine = torch.cat(
            [network.encode(pixels(batch)).latents for batch in np.array_split(images, -(-len(images) // 64))]
        )
        through = [
            float(peak_signal_to_noise(teacher.decode(encoded / scale).sample, pixels(images)).mean())
            for encoded in (mine, latents)
        ]
    return [
        Figure(
            "PSNR against the full decoder, held-out pictures' latents",
            (decoder_psnr(network, teacher, latents),),
            "dB",
        ),
        Figure("PSNR of held-out pictures through tiny encoder and full decoder", (through[0],), "dB"),
        Figure("PSNR of held-out pictures through the full autoencoder", (through[1],), "dB"),
        Figure("RMS error of the encoder's latents, in deviations", (float((mine - latents).square().mean().sqrt()),)),
    ]


def decoder_psnr(network: AutoencoderTiny, teacher: AutoencoderKL, latents: Tensor) -> float:
    """Returns the mean PSNR in dB of the decoder's pictures against the teacher's, for scaled latents (n, 8, 8, 8)."""
    import torch

    with torch.inference_mode():
        target = teacher.decode(latents / teacher.config.scaling_factor).sample.clamp(-1, 1)
        return float(peak_signal_to_noise(network.decode(latents).sample, target).mean())


def speed_up(network: AutoencoderTiny, teacher: AutoencoderKL, latents: Tensor, rounds: int = 40) -> float:
    """Returns how many times faster the decoder is than its teacher: the geometric mean of rounds with both.

    Args:
        network: the distilled networks.
        teacher: the autoencoder.
        latents: one batch, scaled, (n, 8, 8, 8).
        rounds: number of timed rounds, after three warm-up rounds.
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
    return float(np.exp(np.mean(slow - fast)))


def count_operations() -> tuple[float, float]:
    """Returns the TFLOP to decode one picture, of the distilled decoder and of its teacher."""
    import torch

    with torch.device("meta"):
        latents = torch.zeros(1, LATENT_CHANNELS, LATENT_SIZE, LATENT_SIZE)
        return tflop(build_tiny_autoencoder().decode, latents), tflop(build_autoencoder().decode, latents)


def evaluate_loras(folder: Path, pipeline: StableDiffusionPipeline, base: Dataset, packages: Path) -> list[Figure]:
    """Compares pictures without and with each LoRA to the style's drawings and the flat drawings of the same concepts.

    All figures use mean latents of the pipeline's autoencoder. A linear probe, fitted to drawings of the concepts that
    the LoRA was trained on, in both styles, classifies the style independent of the concept. Picture i starts from the
    noise of seed + i, with and without the LoRA.

    Args:
        folder: the LoRAs and their recipe.
        pipeline: in single precision; each LoRA is loaded and unloaded with diffusers' public functions.
        base: the denoiser's data, with the flat drawings.
        packages: the folder of the drawings' archives.

    Raises:
        DataError: an archive cannot be fetched, verified or read.
    """
    recipe = json.loads((folder / "recipe.json").read_text())
    seed = recipe["seed"]
    flat = {record.concept: index for index, record in enumerate(base.records) if record.style == "flat"}

    def latents(pictures: np.ndarray) -> Tensor:
        return encode_all(pipeline.vae, pictures)[0].flatten(1)

    figures: list[Figure] = []
    for style in STYLES:
        dataset = draw_style(
            style, base, packages, held_out_concepts=recipe[style.name]["held_out_concepts"], seed=seed
        )

        def both(places: np.ndarray, dataset: Dataset = dataset) -> tuple[Tensor, Tensor]:
            """Returns the latents of the style's drawings and of the flat drawings."""
            concepts = [dataset.records[i].concept for i in places]
            return latents(dataset.images[places]), latents(base.images[[flat[concept] for concept in concepts]])

        is_styled = fit_probe(*both(dataset.indices(held_out=False)))
        random = np.random.default_rng([seed, 5])
        for split, held_out in (("concepts trained on", False), ("held-out concepts", True)):
            places = random.permutation(dataset.indices(held_out=held_out))[:COMPARED]
            captions = [dataset.records[i].label for i in places]
            own, other = both(places)
            before = latents(generate(pipeline, captions, seed=seed))
            pipeline.load_lora_weights(folder, weight_name=f"{style.name}.safetensors")
            after = latents(generate(pipeline, captions, seed=seed))
            pipeline.unload_lora_weights()
            near, far = ([(made - real).norm(dim=1) for made in (before, after)] for real in (own, other))
            nearer = [100 * float((n < f).float().mean()) for n, f in zip(near, far, strict=True)]
            what = f"{style.name}, {len(places)} {split}"
            figures += [
                Figure(f"{what}: distance to the style's drawing", tuple(float(n.mean()) for n in near)),
                Figure(f"{what}: nearer to it than to the flat drawing", tuple(nearer), "%"),
                Figure(f"{what}: probe says the style's", (is_styled(before), is_styled(after)), "%"),
                Figure(
                    f"{what}: probe says so of flat drawings → the style's", (is_styled(other), is_styled(own)), "%"
                ),
            ]
    return figures


def fit_probe(styled: Tensor, flat: Tensor) -> Callable[[Tensor], float]:
    """Fits a ridge regression that classifies two equally large sets of features (n, d).

    Returns:
        A function from features (m, d) to the percentage classified as `styled`.
    """
    import torch

    features = torch.cat([styled, flat])
    target = torch.cat([torch.ones(len(styled)), -torch.ones(len(flat))])
    centre = features.mean(dim=0)
    spread = features - centre
    # Strong regularization, because there are about as many parameters as drawings.
    ridge = spread.square().mean() * len(features) * torch.eye(features.shape[1])
    weights = torch.linalg.solve(spread.T @ spread + ridge, spread.T @ target)
    return lambda other: 100 * float(((other - centre) @ weights > 0).float().mean())
