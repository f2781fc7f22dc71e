"""Evaluates the tiny autoencoder against the full one, and the LoRAs by the style of their pictures."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sdopt.training.autoencoder import encode_all, peak_signal_to_noise
from sdopt.training.data import Dataset, draw_style
from sdopt.training.evaluation import Figure
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
    held_out = encode_all(pipeline.vae, dataset.images[dataset.indices(held_out=True)])[0]
    drawn = pipeline.vae.config.scaling_factor * held_out
    return [
        Figure(f"times faster to decode {len(latents)} pictures", (speed_up(network, pipeline.vae, latents),), "×", 3),
        *(
            Figure(
                f"PSNR against the full decoder, {what} latents", (decoder_psnr(network, pipeline.vae, given),), "dB"
            )
            for what, given in (("generated", latents), ("held-out pictures'", drawn))
        ),
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


def evaluate_loras(folder: Path, pipeline: StableDiffusionPipeline, base: Dataset, packages: Path) -> list[Figure]:
    """Compares pictures without and with each LoRA to the style's drawings and the flat drawings of the same concepts.

    All figures use mean latents of the pipeline's autoencoder. Picture i starts from the noise of seed + i, with and
    without the LoRA.

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

        random = np.random.default_rng([seed, 5])
        for split, held_out in (("concepts trained on", False), ("held-out concepts", True)):
            places = random.permutation(dataset.indices(held_out=held_out))[:COMPARED]
            captions = [dataset.records[i].label for i in places]
            own = latents(dataset.images[places])
            other = latents(base.images[[flat[dataset.records[i].concept] for i in places]])
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
            ]
    return figures
