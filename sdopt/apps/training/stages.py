"""Runs the stages of the training in order, and exports what they trained to folders that diffusers loads.

Whatever needs the files of a stage that has not run raises UsageError, which names it.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from transformers import CLIPImageProcessorPil

from sdopt.apps.training.autoencoder import (
    load_autoencoder,
    train_autoencoder,
    train_tiny_autoencoder,
)
from sdopt.apps.training.captions import (
    caption,
    choose_prompts,
    draw_background,
    draw_sheet,
    write_references,
)
from sdopt.apps.training.cards import read_recipe, write_card
from sdopt.apps.training.clip import train_clip
from sdopt.apps.training.config import STAGES, TrainReferenceConfig
from sdopt.apps.training.data import IMAGE_SIZE, Dataset, build
from sdopt.apps.training.denoiser import join, train_denoiser
from sdopt.apps.training.loop import load_average, missing_stage
from sdopt.apps.training.loras import FILE, train_few_steps, train_loras
from sdopt.apps.training.networks import (
    build_clip,
    build_denoiser,
    build_scheduler,
    build_text_encoder,
    build_tiny_autoencoder,
    load_tokenizer,
    train_tokenizer,
)
from sdopt.apps.training.packages import STYLES
from sdopt.apps.training.transformer import assemble_flux, train_transformer
from sdopt.errors import UsageError
from sdopt.quality.features import ClipFeatures
from sdopt.quality.reference_sets import (
    HELD_OUT,
    PACKAGED_NAME,
    PRECOMPUTED,
    ReferenceSet,
)

CAPTIONS_PER_PICTURE = 3
"""Number of random captions per training picture from which the tokenizer learns."""

PRODUCTS = {"data": "records.json", "tokenizer": "tokenizer.json"}
"""Output files by stage: `stage=all` skips these stages if the file exists. Other stages resume from checkpoints."""


def run(config: TrainReferenceConfig) -> None:
    """Runs one stage, or all stages. Each stage reads the files of earlier stages from `config.folder`.

    With `resume`, `stage=all` keeps an existing data set and tokenizer, and each training continues from its
    checkpoint.

    Raises:
        DataError: the data cannot be fetched, verified or read.
        UsageError: a setting is impossible (no such pipeline, no CUDA device, more held-out concepts than concepts).
        DivergenceError: a loss is not finite.
    """
    if (
        config.start_from is not None
        and not (Path(config.start_from) / "model_index.json").is_file()
    ):
        raise UsageError(
            f"start_from={config.start_from}: there is no model_index.json; choose a pipeline folder"
        )
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    work = Path(config.folder)
    for stage in STAGES:
        kept = (
            config.resume
            and stage in PRODUCTS
            and (work / stage / PRODUCTS[stage]).exists()
        )
        if config.stage == stage or (config.stage == "all" and not kept):
            _run_stage(stage, config, work)


def _run_stage(stage: str, config: TrainReferenceConfig, work: Path) -> None:
    if stage == "data":
        dataset = build(
            work / "packages",
            held_out_concepts=config.data.held_out_concepts,
            seed=config.seed,
        )
        dataset.save(work / stage)
        return
    # Before anything else, so that an error names the earliest missing stage.
    dataset = Dataset.load(work / "data")
    if stage == "tokenizer":
        make_tokenizer(config, dataset, work / stage)
    elif stage == "autoencoder":
        train_autoencoder(config, dataset)
    elif stage == "tiny_autoencoder":
        train_tiny_autoencoder(config, dataset, load_autoencoder(work / "autoencoder"))
    elif stage == "denoiser":
        tokenizer, autoencoder = (
            load_tokenizer(work / "tokenizer"),
            load_autoencoder(work / "autoencoder"),
        )
        train_denoiser(config, dataset, tokenizer, autoencoder)
    elif stage == "transformer":
        train_transformer(config, dataset, find_pipeline(config))
        export_transformer(config, dataset)
    elif stage in ("loras", "few_steps"):
        train = train_loras if stage == "loras" else train_few_steps
        train(config, dataset, find_pipeline(config))
        export_loras(config, dataset, stage)
    elif stage == "clip":
        train_clip(config, dataset, load_tokenizer(work / "tokenizer"))
        export_clip(config, dataset)
    elif stage == "export":
        export_tiny_autoencoder(config, dataset)
        export_loras(config, dataset, "loras")
        export_loras(config, dataset, "few_steps")
        export_pipeline(config, dataset)
        export_transformer(config, dataset)


def make_tokenizer(
    config: TrainReferenceConfig, dataset: Dataset, folder: Path
) -> None:
    """Learns a tokenizer in a folder, or copies that of `start_from`: its text encoder fits no other tokens."""
    shutil.rmtree(folder, ignore_errors=True)
    if config.start_from is not None:
        load_tokenizer(Path(config.start_from) / "tokenizer").save_pretrained(folder)
    else:
        train_tokenizer(training_captions(dataset, config), folder)


def training_captions(dataset: Dataset, config: TrainReferenceConfig) -> Iterator[str]:
    """Yields random captions of each training picture, from the distribution of the denoiser's training."""
    random = np.random.default_rng([config.seed, 0])
    for index in dataset.indices(held_out=False):
        for _ in range(CAPTIONS_PER_PICTURE):
            record = dataset.records[index]
            yield caption(
                record,
                random,
                draw_background(record, random, config.denoiser.background_share),
            )


def assemble(work: Path) -> StableDiffusionPipeline:
    """Builds the pipeline, in single precision, from the work folder."""
    networks = join(build_denoiser(), build_text_encoder())
    load_average(work / "denoiser", networks)
    return StableDiffusionPipeline(
        vae=load_autoencoder(work / "autoencoder"),
        text_encoder=networks["text_encoder"],
        tokenizer=load_tokenizer(work / "tokenizer"),
        unet=networks["denoiser"],
        scheduler=build_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def find_pipeline(config: TrainReferenceConfig) -> StableDiffusionPipeline:
    """Returns the pipeline of the work folder, or the pipeline `start_from` if no denoiser was trained there."""
    work = Path(config.folder)
    if config.start_from is None or (work / "denoiser").exists():
        return assemble(work)
    return StableDiffusionPipeline.from_pretrained(
        config.start_from,
        dtype=torch.float32,
        local_files_only=True,
        safety_checker=None,
    )


@contextmanager
def exported(
    target: Path,
    model: str,
    config: TrainReferenceConfig,
    dataset: Dataset,
    trainings: dict[str, Path],
) -> Iterator[Path]:
    """Yields an empty folder for weights; adds their recipe and their card, and replaces the files of `target`.

    `model` is the card's template (see `write_card`); `trainings` are the folders of the trainings that made the
    weights, by their name in the recipe.
    """
    fresh = target.with_name(f"{target.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    yield fresh
    write_recipe(fresh, config, dataset, trainings)
    write_card(fresh, model)
    for file in sorted(fresh.rglob("*")):
        if file.is_file():
            place = target / file.relative_to(fresh)
            place.parent.mkdir(parents=True, exist_ok=True)
            # diffusers writes weights with read permission only for the owner.
            file.chmod(0o644)
            file.replace(place)
    shutil.rmtree(fresh)
    # An old evaluation does not apply to the new weights.
    (target / "evaluation.json").unlink(missing_ok=True)


def export_pipeline(config: TrainReferenceConfig, dataset: Dataset) -> None:
    """Exports the pipeline in half precision; beside it prompts and reference pictures; and the contact sheet."""
    work, target = Path(config.folder), Path(config.export.target)
    pipeline = assemble(work)
    # The sheet uses the released weights: rounded to half precision, with arithmetic in single precision.
    pipeline.to(dtype=torch.float16)
    trainings = {stage: work / stage for stage in ("autoencoder", "denoiser")}
    with exported(target, "emoji", config, dataset, trainings) as fresh:
        pipeline.save_pretrained(fresh)
        load_in_single_precision(fresh / "text_encoder")
    pipeline.to(dtype=torch.float32)
    prompts = choose_prompts(dataset, config.seed)
    # One caption per line for readable diffs.
    target.with_name("prompts.json").write_text(
        json.dumps(prompts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    write_references(dataset, prompts["gate"], target.parent)
    file = Path(config.export.contact_sheet)
    draw_sheet(pipeline, prompts["contact_sheet"], config.seed, file)


def export_transformer(config: TrainReferenceConfig, dataset: Dataset) -> None:
    """Exports the pipeline of the transformer, and its contact sheet.

    The transformer is in bfloat16, the usual type of its kind, and the networks of the other pipeline are in the type
    of their files. The sheet uses the released weights, with arithmetic in single precision.
    """
    folder, options = Path(config.folder) / "transformer", config.transformer
    pipeline = assemble_flux(folder, find_pipeline(config))
    for name, network in pipeline.components.items():
        if isinstance(network, torch.nn.Module):
            network.to(torch.bfloat16 if name == "transformer" else torch.float16)
    with exported(
        Path(options.target), "emoji_dit", config, dataset, {"transformer": folder}
    ) as fresh:
        pipeline.save_pretrained(fresh)
        for name in ("text_encoder", "text_encoder_2"):
            load_in_single_precision(fresh / name)
    pipeline.to(dtype=torch.float32)
    captions = choose_prompts(dataset, config.seed)["contact_sheet"]
    draw_sheet(pipeline, captions, config.seed, Path(options.contact_sheet))


def export_clip(config: TrainReferenceConfig, dataset: Dataset) -> None:
    """Exports the CLIP in half precision, with its features of the packaged reference pictures."""
    work, network = Path(config.folder), build_clip()
    load_average(work / "clip", network)
    side = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    processor = CLIPImageProcessorPil(
        size=side,
        do_center_crop=False,
        crop_size=side,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    with exported(
        Path(config.clip.target), "clip", config, dataset, {"clip": work / "clip"}
    ) as fresh:
        network.half().save_pretrained(fresh)
        load_in_single_precision(fresh)
        load_tokenizer(work / "tokenizer").save_pretrained(fresh)
        processor.save_pretrained(fresh)
        extractor = ClipFeatures("emojiclip", str(fresh))
        ReferenceSet.of_folder(HELD_OUT, extractor, PACKAGED_NAME).save(
            fresh / PRECOMPUTED.name
        )


def export_tiny_autoencoder(config: TrainReferenceConfig, dataset: Dataset) -> None:
    """Exports the tiny autoencoder in half precision to `export.companions`."""
    folder, network = Path(config.folder) / "tiny_autoencoder", build_tiny_autoencoder()
    load_average(folder, network)
    target = Path(config.export.companions) / folder.name
    with exported(target, folder.name, config, dataset, {folder.name: folder}) as fresh:
        network.half().save_pretrained(fresh)


def export_loras(config: TrainReferenceConfig, dataset: Dataset, stage: str) -> None:
    """Exports what the stage `loras` or `few_steps` wrote to `export.companions`."""
    folder, target = (
        Path(config.folder) / stage,
        Path(config.export.companions) / "loras",
    )
    trainings, names = (
        {style.name: folder / style.name for style in STYLES},
        [f"{s.name}.safetensors" for s in STYLES],
    )
    if stage == "few_steps":
        target, trainings, names = target / stage, {stage: folder}, [FILE]
    files = [folder / "model" / name for name in names]
    if missing := [file for file in files if not file.exists()]:
        raise missing_stage(stage, missing[0])
    with exported(target, stage, config, dataset, trainings) as fresh:
        for file in files:
            shutil.copy(file, fresh)


def write_recipe(
    fresh: Path,
    config: TrainReferenceConfig,
    dataset: Dataset,
    trainings: dict[str, Path],
) -> None:
    """Writes `recipe.json`: data, settings and progress of each training, and the recipe of the initial weights."""
    recipe: dict[str, Any] = {
        "seed": config.seed,
        "data": {
            "pictures": dict(Counter(record.style for record in dataset.records)),
            "concepts": len({record.concept for record in dataset.records}),
            "held_out_concepts": len(
                {record.concept for record in dataset.records if record.held_out}
            ),
        },
    }
    for name, folder in trainings.items():
        recipe[name] = json.loads(
            (folder / "checkpoint" / "state.json").read_text(encoding="utf-8")
        )
        start = recipe[name].pop("start_from", None)
        if start and (Path(start) / "recipe.json").is_file():
            recipe["started_from"] = read_recipe(Path(start))
    (fresh / "recipe.json").write_text(json.dumps(recipe, indent=1) + "\n")


def load_in_single_precision(model: Path) -> None:
    """Makes a saved transformers model load as float32 by default.

    The default `dtype` of transformers is in `config.json`, which records the type of the saved weights; the default of
    diffusers is float32. A pipeline loaded without a `dtype` would mix both types, and its first call would fail.
    """
    file = model / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**config, "dtype": "float32"}, indent=2) + "\n")
