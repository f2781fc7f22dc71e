"""The stages of the training, in their order."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sdopt.training.autoencoder import load_autoencoder, train_autoencoder
from sdopt.training.clip import train_clip
from sdopt.training.config import Stage, TrainReferenceConfig
from sdopt.training.data import Dataset, build, caption, draw_background
from sdopt.training.denoiser import train_denoiser
from sdopt.training.export import export, export_clip, export_loras, export_tiny_autoencoder, find_pipeline
from sdopt.training.loras import train_loras
from sdopt.training.tiny_autoencoder import train_tiny_autoencoder
from sdopt.training.tokenizer import load_tokenizer, train_tokenizer

CAPTIONS_PER_PICTURE = 3
"""How many random captions of every training picture the tokenizer learns from."""


def training_captions(dataset: Dataset, config: TrainReferenceConfig) -> Iterator[str]:
    """Random captions of every training picture, as the denoiser sees them."""
    random = np.random.default_rng([config.seed, 0])
    for index in dataset.indices(held_out=False):
        for _ in range(CAPTIONS_PER_PICTURE):
            record = dataset.records[index]
            yield caption(record, random, draw_background(record, random, config.denoiser.background_share))


def run(config: TrainReferenceConfig) -> None:
    """Run one stage, or all of them; each reads what the ones before it left in `config.folder`.

    With `resume`, `stage=all` keeps a data set and a tokenizer that are already there, and the trainings go on
    from their checkpoints.

    Raises:
        DataError: the data cannot be fetched, verified or read.
        UsageError: an earlier stage has not run, or a setting cannot be met (no CUDA device, more concepts held out
            than there are).
        FloatingPointError: a loss is not finite.
    """
    import torch

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    folder = Path(config.folder)
    data, tokenizer, autoencoder, tiny_autoencoder, denoiser, loras, clip = (
        folder / stage.value
        for stage in (
            Stage.data,
            Stage.tokenizer,
            Stage.autoencoder,
            Stage.tiny_autoencoder,
            Stage.denoiser,
            Stage.loras,
            Stage.clip,
        )
    )

    def wanted(stage: Stage, product: Path | None = None) -> bool:
        kept = config.resume and product is not None and product.exists()
        return config.stage is stage or (config.stage is Stage.all and not kept)

    if wanted(Stage.data, data / "records.json"):
        dataset = build(
            folder / "packages",
            held_out_concepts=config.data.held_out_concepts,
            seed=config.seed,
            threads=config.threads,
        )
        dataset.save(data)
    if wanted(Stage.tokenizer, tokenizer / "tokenizer.json"):
        shutil.rmtree(tokenizer, ignore_errors=True)
        if config.start_from is not None:
            # The text encoder's weights mean nothing with other tokens.
            load_tokenizer(Path(config.start_from) / "tokenizer").save_pretrained(tokenizer)
        else:
            train_tokenizer(training_captions(Dataset.load(data), config), tokenizer)
    if wanted(Stage.autoencoder):
        train_autoencoder(config, Dataset.load(data), autoencoder)
    if wanted(Stage.tiny_autoencoder):
        train_tiny_autoencoder(config, Dataset.load(data), load_autoencoder(autoencoder), tiny_autoencoder)
    if wanted(Stage.denoiser):
        train_denoiser(
            config,
            Dataset.load(data),
            load_tokenizer(tokenizer),
            load_autoencoder(autoencoder),
            denoiser,
            export=lambda: export(config),
        )
    if wanted(Stage.loras):
        train_loras(config, Dataset.load(data), find_pipeline(config), loras)
        export_loras(config)
    if wanted(Stage.clip):
        dataset = Dataset.load(data)
        train_clip(config, dataset, load_tokenizer(tokenizer), clip)
        # One that has padded would save that.
        export_clip(config, dataset, load_tokenizer(tokenizer), clip)
    if wanted(Stage.export):
        export_tiny_autoencoder(config)
        export_loras(config)
        export(config)
