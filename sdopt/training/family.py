"""Evaluates the whole family: the generator, and its companions CLIP, tiny autoencoder and LoRAs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from sdopt.errors import UsageError
from sdopt.quality.features import feature_extractor, require_features
from sdopt.training.clip_evaluation import clip_figures, draw_in_fewer_steps, evaluate_clip, judged_captions
from sdopt.training.data import Dataset, build
from sdopt.training.evaluation import Figure, Note, evaluate_generator
from sdopt.training.lora_evaluation import lora_figures
from sdopt.training.prompts import read_prompts
from sdopt.training.tiny_evaluation import tiny_figures

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline

FEATURES = "effnet"
"""The feature extractor, EfficientNet-lite0 trained on ImageNet, which is independent of the family."""

DECODED_CAPTIONS = 32
"""Number of captions for the tiny autoencoder's figures."""


def evaluate_family(model: Path, folder: Path, note: Note) -> list[Figure]:
    """Returns all figures of a pipeline folder and of the companions next to it.

    Args:
        model: a pipeline exported by `sdopt train-reference`, or the packaged pipeline.
        folder: work folder of `sdopt train-reference`; a missing data set is downloaded and rendered there.
        note: called before each step.

    Raises:
        UsageError: the folder has no exported pipeline, or the extra `effnet` is not installed.
        DataError: the data cannot be downloaded.
    """
    require_features(FEATURES)
    if not (model / "recipe.json").is_file():
        raise UsageError(f"--model {model}: there is no recipe.json; name what `sdopt train-reference` exported")

    import torch
    from diffusers import StableDiffusionPipeline

    recipe = json.loads((model / "recipe.json").read_text())
    seed: int = recipe["seed"]
    if not (folder / "data" / "records.json").is_file():
        note("fetching and rendering the data set")
        held_out = recipe["data"]["held_out_concepts"]
        build(folder / "packages", held_out_concepts=held_out, seed=seed).save(folder / "data")
    dataset = Dataset.load(folder / "data")
    pipeline = StableDiffusionPipeline.from_pretrained(model, dtype=torch.float32, local_files_only=True)
    prompts = read_prompts(model.with_name("prompts.json"))
    extractor = feature_extractor(FEATURES)
    figures = evaluate_generator(pipeline, dataset, prompts, extractor, folder / "features", seed=seed, note=note)
    return figures + _companions(model, pipeline, dataset, prompts, seed, note)


def _companions(
    model: Path,
    pipeline: StableDiffusionPipeline,
    dataset: Dataset,
    prompts: dict[str, list[str]],
    seed: int,
    note: Note,
) -> list[Figure]:
    import torch
    from diffusers import AutoencoderTiny

    clip, tiny, loras = (model.with_name(name) for name in ("clip", "tiny_autoencoder", "loras"))
    figures: list[Figure] = []
    if (clip / "model.safetensors").is_file():
        note("CLIP")
        captions = judged_captions(dataset, seed)
        made = draw_in_fewer_steps(pipeline, captions, seed)
        figures += clip_figures(evaluate_clip(clip, dataset, captions, made))
    if (tiny / "config.json").is_file():
        note("tiny autoencoder")
        network = AutoencoderTiny.from_pretrained(tiny, dtype=torch.float32)
        figures += tiny_figures(network, pipeline, dataset, prompts["training"][:DECODED_CAPTIONS], seed)
    if (loras / "figures.json").is_file():
        figures += lora_figures(json.loads((loras / "figures.json").read_text()))
    return figures
