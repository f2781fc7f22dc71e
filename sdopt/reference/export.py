"""From checkpoints to a diffusers pipeline folder with its prompts, its card and its contact sheet."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from sdopt.reference.architecture import build_scheduler
from sdopt.reference.autoencoder import load_autoencoder
from sdopt.reference.card import write_card
from sdopt.reference.config import TrainReferenceConfig
from sdopt.reference.data import Dataset
from sdopt.reference.denoiser import load_networks
from sdopt.reference.evaluation import recognise
from sdopt.reference.prompts import choose_prompts, write_prompts
from sdopt.reference.sheet import GUIDANCE, draw_sheet, generate
from sdopt.reference.tokenizer import load_tokenizer
from sdopt.reference.training import read_figures

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline

RECOGNITION_CAPTIONS = 100
"""How many captions of each kind the card's recognition figures rest on."""


def assemble(folder: Path) -> StableDiffusionPipeline:
    """The pipeline, in single precision, from what the stages left in their work folder.

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


def export(config: TrainReferenceConfig) -> None:
    """Write the pipeline folder in half precision with its card, `prompts.json` beside it, and the contact sheet.

    Files are swapped in one by one, each complete: whoever reads the folder meanwhile never sees half a file.

    Raises:
        UsageError: a stage has not run.
    """
    import torch

    folder, target = Path(config.folder), Path(config.export.target)
    dataset = Dataset.load(folder / "data")
    pipeline = assemble(folder)
    prompts = choose_prompts(dataset, config.seed)
    # The sheet shows the weights as they ship: rounded to half precision, computed in single.
    pipeline.to(dtype=torch.float16)
    fresh = target.with_name(f"{target.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    pipeline.save_pretrained(fresh)
    pipeline.to(dtype=torch.float32)
    figures = {stage: read_figures(folder / stage) for stage in ("autoencoder", "denoiser")}
    recognition = {
        purpose: recognise(
            pipeline, dataset, prompts[purpose][:RECOGNITION_CAPTIONS], seed=config.seed, guidance=GUIDANCE
        )
        for purpose in ("training", "held_out")
    }
    write_card(fresh / "README.md", dataset, figures, recognition)
    for file in sorted(fresh.rglob("*")):
        if file.is_file():
            place = target / file.relative_to(fresh)
            place.parent.mkdir(parents=True, exist_ok=True)
            # diffusers writes weights that only their owner may read.
            file.chmod(0o644)
            file.replace(place)
    shutil.rmtree(fresh)
    write_prompts(prompts, target.with_name("prompts.json"))
    captions = prompts["contact_sheet"]
    draw_sheet(generate(pipeline, captions, seed=config.seed), captions, Path(config.export.contact_sheet))
