"""Evaluates the family of models: one table of figures for the generator, and one for each companion."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionPipeline

from sdopt.errors import UsageError
from sdopt.quality.features import feature_extractor, require_features
from sdopt.training.clip_evaluation import evaluate_clip
from sdopt.training.companion_evaluation import evaluate_few_steps, evaluate_loras, evaluate_tiny
from sdopt.training.data import Dataset, build
from sdopt.training.evaluation import JUDGE, Figure, Note
from sdopt.training.generator_evaluation import evaluate_generator


def evaluate_family(model: Path, work: Path, note: Note) -> dict[Path, list[Figure]]:
    """Returns the figures of a pipeline and of its companions, by folder.

    Args:
        model: a pipeline exported by `sdopt train-reference`, or the packaged pipeline. Companions are sought beside
            it, and in `companions/` beside it.
        work: work folder of `sdopt train-reference`; a missing data set is downloaded and rendered there.
        note: called before each step.

    Raises:
        UsageError: the folder has no exported pipeline, or `effnet` is not installed.
        DataError: the data cannot be downloaded.
    """
    require_features(JUDGE)
    if not (model / "recipe.json").is_file():
        raise UsageError(f"--model {model}: there is no recipe.json; name what `sdopt train-reference` exported")

    recipe = json.loads((model / "recipe.json").read_text(encoding="utf-8"))
    seed: int = recipe["seed"]
    dataset = _dataset(work, recipe, note)
    pipeline = StableDiffusionPipeline.from_pretrained(model, dtype=torch.float32, local_files_only=True)
    prompts = json.loads(model.with_name("prompts.json").read_text(encoding="utf-8"))
    figures = {model: evaluate_generator(pipeline, dataset, prompts, feature_extractor(JUDGE), seed=seed, note=note)}
    companions: dict[str, Callable[[Path], list[Figure]]] = {
        "clip": lambda folder: evaluate_clip(folder, dataset),
        "tiny_autoencoder": lambda folder: evaluate_tiny(folder, pipeline, dataset, prompts["training"], seed),
        "loras": lambda folder: evaluate_loras(folder, pipeline, dataset, work / "packages"),
        "loras/few_steps": lambda folder: evaluate_few_steps(folder, pipeline, dataset, prompts["gate"], seed),
    }
    for name, evaluate in companions.items():
        for folder in (model.parent / name, model.parent / "companions" / name):
            if (folder / "recipe.json").is_file():
                note(name.replace("_", " "))
                figures[folder] = evaluate(folder)
                break
    return figures


def _dataset(work: Path, recipe: dict[str, Any], note: Note) -> Dataset:
    if not (work / "data" / "records.json").is_file():
        note("fetching and rendering the data set")
        held_out = recipe["data"]["held_out_concepts"]
        build(work / "packages", held_out_concepts=held_out, seed=recipe["seed"]).save(work / "data")
    return Dataset.load(work / "data")
