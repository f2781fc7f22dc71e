"""Runs the stages of the training in order."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sdopt.training.autoencoder import load_autoencoder, train_autoencoder
from sdopt.training.captions import caption, draw_background
from sdopt.training.clip import train_clip
from sdopt.training.config import STAGES, TrainReferenceConfig
from sdopt.training.data import Dataset, build
from sdopt.training.denoiser import train_denoiser
from sdopt.training.export import export, export_clip, export_loras, export_tiny_autoencoder, find_pipeline
from sdopt.training.loras import train_loras
from sdopt.training.tiny_autoencoder import train_tiny_autoencoder
from sdopt.training.tokenizer import load_tokenizer, train_tokenizer

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
        UsageError: an earlier stage has not run, or a setting is impossible (no CUDA device, or more held-out concepts
            than concepts).
        DivergenceError: a loss is not finite.
    """
    import torch

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    stages = {
        "data": _data,
        "tokenizer": _tokenizer,
        "autoencoder": _autoencoder,
        "tiny_autoencoder": _tiny_autoencoder,
        "denoiser": _denoiser,
        "loras": _loras,
        "clip": _clip,
        "export": _export,
    }
    for name in STAGES:
        folder = Path(config.folder) / name
        kept = config.resume and name in PRODUCTS and (folder / PRODUCTS[name]).exists()
        if config.stage == name or (config.stage == "all" and not kept):
            stages[name](config, folder)


def training_captions(dataset: Dataset, config: TrainReferenceConfig) -> Iterator[str]:
    """Yields random captions of each training picture, from the distribution of the denoiser's training."""
    random = np.random.default_rng([config.seed, 0])
    for index in dataset.indices(held_out=False):
        for _ in range(CAPTIONS_PER_PICTURE):
            record = dataset.records[index]
            yield caption(record, random, draw_background(record, random, config.denoiser.background_share))


def _data(config: TrainReferenceConfig, folder: Path) -> None:
    packages, held_out = Path(config.folder) / "packages", config.data.held_out_concepts
    build(packages, held_out_concepts=held_out, seed=config.seed, threads=config.threads).save(folder)


def _tokenizer(config: TrainReferenceConfig, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if config.start_from is not None:
        # The text encoder's weights are only valid for the same tokens.
        load_tokenizer(Path(config.start_from) / "tokenizer").save_pretrained(folder)
    else:
        train_tokenizer(training_captions(_dataset(config), config), folder)


def _autoencoder(config: TrainReferenceConfig, folder: Path) -> None:
    train_autoencoder(config, _dataset(config), folder)


def _tiny_autoencoder(config: TrainReferenceConfig, folder: Path) -> None:
    dataset, teacher = _dataset(config), load_autoencoder(Path(config.folder) / "autoencoder")
    train_tiny_autoencoder(config, dataset, teacher, folder)


def _denoiser(config: TrainReferenceConfig, folder: Path) -> None:
    dataset, tokenizer = _dataset(config), load_tokenizer(Path(config.folder) / "tokenizer")
    autoencoder = load_autoencoder(Path(config.folder) / "autoencoder")
    train_denoiser(config, dataset, tokenizer, autoencoder, folder, export=lambda: export(config))


def _loras(config: TrainReferenceConfig, folder: Path) -> None:
    train_loras(config, _dataset(config), find_pipeline(config), folder)
    export_loras(config)


def _clip(config: TrainReferenceConfig, folder: Path) -> None:
    dataset, tokenizer = _dataset(config), Path(config.folder) / "tokenizer"
    train_clip(config, dataset, load_tokenizer(tokenizer), folder)
    # Reloads the tokenizer, since one that has padded would save its padding settings.
    export_clip(config, dataset, load_tokenizer(tokenizer), folder)


def _export(config: TrainReferenceConfig, folder: Path) -> None:
    export_tiny_autoencoder(config)
    export_loras(config)
    export(config)


def _dataset(config: TrainReferenceConfig) -> Dataset:
    """Loads the data; all stages do this first, so that an error names the earliest missing stage."""
    return Dataset.load(Path(config.folder) / "data")
