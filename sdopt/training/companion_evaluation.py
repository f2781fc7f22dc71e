"""Evaluates the tiny autoencoder against the full one, and the LoRAs by the style or the steps of their pictures."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sdopt.quality.features import feature_extractor
from sdopt.quality.images import channels_first
from sdopt.training.autoencoder import encode_all, peak_signal_to_noise
from sdopt.training.data import Dataset, draw_style
from sdopt.training.evaluation import JUDGE, Figure, share
from sdopt.training.generator_evaluation import NEAREST, concept_ranks
from sdopt.training.packages import STYLES
from sdopt.training.prompts import real_pictures, records_of
from sdopt.training.sheet import STEPS, generate, generate_latents

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
    recipe = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))
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


FEW_STEPS = (8, 4)
"""Numbers of steps with and without the LoRA for few steps."""

JUDGED = 96
"""Number of captions on which it is evaluated."""


def evaluate_few_steps(
    folder: Path, pipeline: StableDiffusionPipeline, dataset: Dataset, captions: Sequence[str], seed: int
) -> list[Figure]:
    """Returns the figures of the LoRA for few steps against the pipeline in few and in all steps.

    Args:
        folder: the LoRA.
        pipeline: in single precision; the LoRA is loaded and unloaded with diffusers' public functions.
        dataset: the drawings.
        captions: those of `gate`; picture i starts from the noise of seed + i.
        seed: the seed.
    """
    from diffusers import LCMScheduler

    extractor = feature_extractor(JUDGE)
    captions = captions[:JUDGED]
    records = records_of(dataset, captions)
    real = extractor(channels_first(real_pictures(dataset, records)))
    names = [record.label for record in records]
    whole = generate(pipeline, captions, seed=seed)

    def figures(what: str, pictures: np.ndarray) -> list[Figure]:
        found = share(concept_ranks(extractor(channels_first(pictures)), names, real, names) < NEAREST[-1])
        near = f"{what}: own concept among the {NEAREST[-1]} nearest of {len(set(names))}"
        if pictures is whole:
            return [Figure(near, (found,), "%")]
        error = np.square((pictures.astype(np.float64) - whole) / 255).mean(axis=(1, 2, 3))
        psnr = float(np.mean(-10 * np.log10(np.maximum(error, 1e-10))))
        return [Figure(near, (found,), "%"), Figure(f"{what}: PSNR against {STEPS} steps", (psnr,), "dB")]

    made = figures(f"{STEPS} steps", whole)
    for steps in FEW_STEPS:
        made += figures(f"{steps} steps", generate(pipeline, captions, seed=seed, steps=steps))
    own = pipeline.scheduler
    pipeline.load_lora_weights(folder)
    pipeline.scheduler = LCMScheduler.from_config(own.config)
    for steps in FEW_STEPS:
        made += figures(f"{steps} steps with it", generate(pipeline, captions, seed=seed, steps=steps, guidance=1))
    pipeline.unload_lora_weights()
    pipeline.scheduler = own
    return made
