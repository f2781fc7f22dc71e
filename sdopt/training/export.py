"""Exports the trained networks to diffusers and transformers folders, with recipes, cards, prompts and pictures."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdopt.quality.features import ClipFeatures
from sdopt.quality.reference_sets import HELD_OUT, PACKAGED_NAME, PRECOMPUTED, ReferenceSet
from sdopt.reference import MODEL
from sdopt.training.architecture import build_scheduler
from sdopt.training.autoencoder import load_autoencoder
from sdopt.training.card import write_card
from sdopt.training.checkpoints import missing_stage, read_figures
from sdopt.training.clip import load_clip
from sdopt.training.clip_card import write_clip_card
from sdopt.training.clip_evaluation import draw_in_fewer_steps, evaluate_clip, judged_captions, write_clip_evaluation
from sdopt.training.config import TrainReferenceConfig
from sdopt.training.data import Dataset
from sdopt.training.denoiser import load_networks
from sdopt.training.prompts import choose_prompts, write_prompts
from sdopt.training.references import write_references
from sdopt.training.rendering import IMAGE_SIZE
from sdopt.training.sheet import draw_sheet, generate
from sdopt.training.tiny_autoencoder import load_tiny_autoencoder
from sdopt.training.tiny_card import write_tiny_card
from sdopt.training.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline
    from transformers import CLIPTokenizer


DECODED_CAPTIONS = 48
"""Number of captions for the tiny autoencoder's figure on generated latents."""


def assemble(folder: Path) -> StableDiffusionPipeline:
    """Builds the pipeline, in single precision, from the work folder.

    Raises:
        UsageError: a stage has not run.
    """
    from diffusers import StableDiffusionPipeline

    networks = load_networks(folder / "denoiser")
    return StableDiffusionPipeline(
        vae=load_autoencoder(folder / "autoencoder"),
        text_encoder=networks["text_encoder"],
        tokenizer=load_tokenizer(folder / "tokenizer"),
        unet=networks["denoiser"],
        scheduler=build_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def find_pipeline(config: TrainReferenceConfig) -> StableDiffusionPipeline:
    """Returns the pipeline of the work folder, or the pipeline `start_from` if no denoiser was trained there.

    Raises:
        UsageError: a stage has not run.
    """
    import torch
    from diffusers import StableDiffusionPipeline

    folder = Path(config.folder)
    if config.start_from is None or (folder / "denoiser").exists():
        return assemble(folder)
    return StableDiffusionPipeline.from_pretrained(
        config.start_from, dtype=torch.float32, local_files_only=True, safety_checker=None
    )


def recipe(config: TrainReferenceConfig, dataset: Dataset) -> dict[str, Any]:
    """Returns the recipe of the weights: data, settings of each training, and the recipe of the initial weights."""
    stages = {stage: read_figures(Path(config.folder) / stage) for stage in ("autoencoder", "denoiser")}
    found: dict[str, Any] = {"seed": config.seed, "data": data_recipe(dataset), **stages}
    starts = [Path(start) for stage in stages.values() if (start := stage.pop("start_from", None))]
    if starts:
        found["started_from"] = read_recipe(starts[0])
    return found


def read_recipe(folder: Path) -> dict[str, Any]:
    """Reads the recipe of the weights in a folder; {} if there is none."""
    file = folder / "recipe.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return found


def data_recipe(dataset: Dataset) -> dict[str, Any]:
    """Returns the numbers of pictures by style, of concepts, and of held-out concepts."""
    return {
        "pictures": dict(Counter(record.style for record in dataset.records)),
        "concepts": len({record.concept for record in dataset.records}),
        "held_out_concepts": len({record.concept for record in dataset.records if record.held_out}),
    }


def export(config: TrainReferenceConfig) -> None:
    """Exports the pipeline in half precision, with its recipe and card, and the contact sheet.

    Prompts and reference pictures are written next to the pipeline folder.

    Raises:
        UsageError: a stage has not run.
    """
    import torch

    folder, target = Path(config.folder), Path(config.export.target)
    dataset = Dataset.load(folder / "data")
    pipeline = assemble(folder)
    prompts = choose_prompts(dataset, config.seed)
    # The sheet uses the released weights: rounded to half precision, with arithmetic in single precision.
    pipeline.to(dtype=torch.float16)
    fresh = target.with_name(f"{target.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    pipeline.save_pretrained(fresh)
    load_in_single_precision(fresh / "text_encoder")
    pipeline.to(dtype=torch.float32)
    (fresh / "recipe.json").write_text(json.dumps(recipe(config, dataset), indent=1) + "\n")
    write_card(fresh)
    swap_in(fresh, target)
    # An old evaluation does not apply to the new weights.
    (target / "evaluation.json").unlink(missing_ok=True)
    write_prompts(prompts, target.with_name("prompts.json"))
    write_references(dataset, prompts["gate"], target.parent)
    captions = prompts["contact_sheet"]
    draw_sheet(generate(pipeline, captions, seed=config.seed), captions, Path(config.export.contact_sheet))


def export_clip(config: TrainReferenceConfig, dataset: Dataset, tokenizer: CLIPTokenizer, folder: Path) -> None:
    """Exports the CLIP in half precision with its recipe, evaluates it, and writes its figures and card.

    The evaluation uses the released weights, rounded to half precision, in single precision arithmetic, and the
    packaged generator.

    Args:
        config: the whole configuration.
        dataset: the training data.
        tokenizer: the tokenizer for captions.
        folder: the folder with the weights from `train_clip`.

    Raises:
        UsageError: the stage has not run.
    """
    import torch
    from diffusers import StableDiffusionPipeline
    from transformers import CLIPImageProcessorPil

    target = Path(config.clip.target)
    fresh = target.with_name(f"{target.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    load_clip(folder).half().save_pretrained(fresh)
    load_in_single_precision(fresh)
    tokenizer.save_pretrained(fresh)
    side = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    processor = CLIPImageProcessorPil(
        size=side, do_center_crop=False, crop_size=side, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    processor.save_pretrained(fresh)
    figures = read_figures(folder)
    made_of = {"seed": config.seed, "data": data_recipe(dataset), "clip": figures}
    if (start := figures.pop("start_from", None)) is not None:
        made_of["started_from"] = read_recipe(Path(start))
    (fresh / "recipe.json").write_text(json.dumps(made_of, indent=1) + "\n")
    pipeline = StableDiffusionPipeline.from_pretrained(MODEL, dtype=torch.float32, local_files_only=True)
    captions = judged_captions(dataset, config.seed)
    evaluation = evaluate_clip(fresh, dataset, captions, draw_in_fewer_steps(pipeline, captions, config.seed))
    write_clip_evaluation(evaluation, fresh / "evaluation.json")
    extractor = ClipFeatures("emojiclip", str(fresh))
    ReferenceSet.of_folder(HELD_OUT, extractor, PACKAGED_NAME).save(fresh / PRECOMPUTED.name)
    write_clip_card(fresh)
    swap_in(fresh, target)


def export_tiny_autoencoder(config: TrainReferenceConfig) -> None:
    """Exports the tiny autoencoder and its card to `export.companions`; some figures of the card need the denoiser.

    Raises:
        UsageError: a stage has not run.
    """
    work = Path(config.folder) / "tiny_autoencoder"
    dataset, network = Dataset.load(Path(config.folder) / "data"), load_tiny_autoencoder(work)
    write_tiny_card(
        work / "model" / "README.md",
        network,
        find_pipeline(config),
        choose_prompts(dataset, config.seed)["training"][:DECODED_CAPTIONS],
        read_figures(work),
        config.seed,
    )
    copy_in(work / "model", Path(config.export.companions) / "tiny_autoencoder")


def export_loras(config: TrainReferenceConfig) -> None:
    """Exports the LoRAs and their card to `export.companions`.

    Raises:
        UsageError: the stage has not run.
    """
    model = Path(config.folder) / "loras" / "model"
    if not model.exists():
        raise missing_stage("loras", model)
    copy_in(model, Path(config.export.companions) / "loras")


def load_in_single_precision(model: Path) -> None:
    """Makes a saved transformers model load as float32 by default.

    The default `dtype` of transformers is in `config.json`, which records the type of the saved weights; the default of
    diffusers is float32. A pipeline loaded without a `dtype` would mix both types, and its first call would fail.

    Args:
        model: a folder written by transformers' `save_pretrained`.
    """
    file = model / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "dtype": "float32"}, indent=2) + "\n")


def copy_in(model: Path, target: Path) -> None:
    """Copies the files of `model` to `target`, and replaces each file atomically."""
    fresh = target.with_name(f"{target.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(model, fresh)
    swap_in(fresh, target)


def swap_in(fresh: Path, target: Path) -> None:
    """Moves the files of `fresh` to `target`, and replaces each file atomically."""
    for file in sorted(fresh.rglob("*")):
        if file.is_file():
            place = target / file.relative_to(fresh)
            place.parent.mkdir(parents=True, exist_ok=True)
            # diffusers writes weights with read permission only for the owner.
            file.chmod(0o644)
            file.replace(place)
    shutil.rmtree(fresh)
