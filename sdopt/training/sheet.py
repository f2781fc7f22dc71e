"""Generates pictures, and draws contact sheets of pictures with captions."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline
    from torch import Tensor


STEPS = 25

GUIDANCE = 4.5

ENLARGEMENT = 3

COLUMNS = 6

TITLE_HEIGHT = 40

MARGIN = 12


def generate(
    pipeline: StableDiffusionPipeline,
    captions: Sequence[str],
    *,
    seed: int,
    steps: int = STEPS,
    guidance: float = GUIDANCE,
    batch_size: int = 24,
) -> np.ndarray:
    """Generates one picture per caption, uint8 (captions, 64, 64, 3). Picture i starts from the noise of seed + i."""
    pictures = [
        _call(pipeline, captions[start : start + batch_size], seed + start, steps, guidance, "np")
        for start in range(0, len(captions), batch_size)
    ]
    return (np.concatenate(pictures) * 255).round().astype(np.uint8)


def generate_latents(pipeline: StableDiffusionPipeline, captions: Sequence[str], *, seed: int) -> Tensor:
    """Generates one picture per caption in one call; returns scaled latents, float32 (n, 8, 8, 8)."""
    latents: Tensor = _call(pipeline, captions, seed, STEPS, GUIDANCE, "latent")
    return latents


def _call(
    pipeline: StableDiffusionPipeline, captions: Sequence[str], seed: int, steps: int, guidance: float, output: str
) -> Any:
    import torch

    pipeline.set_progress_bar_config(disable=True)
    noise = [torch.Generator().manual_seed(seed + i) for i in range(len(captions))]
    return pipeline(
        list(captions), num_inference_steps=steps, guidance_scale=guidance, generator=noise, output_type=output
    ).images


def draw_sheet(pictures: np.ndarray, captions: Sequence[str], file: Path) -> None:
    """Writes a PNG grid of `pictures` (n, height, width, 3), enlarged threefold, with captions."""
    from PIL import Image, ImageDraw, ImageFont

    side = ENLARGEMENT * pictures.shape[1]
    rows = -(-len(captions) // COLUMNS)
    page = Image.new(
        "RGB", (COLUMNS * (side + MARGIN) + MARGIN, rows * (side + TITLE_HEIGHT + MARGIN) + MARGIN), "white"
    )
    draw = ImageDraw.Draw(page)
    font = ImageFont.load_default(size=14)
    for index, (picture, title) in enumerate(zip(pictures, captions, strict=True)):
        left = MARGIN + (index % COLUMNS) * (side + MARGIN)
        top = MARGIN + (index // COLUMNS) * (side + TITLE_HEIGHT + MARGIN)
        lines = textwrap.wrap(title, 26)[:2]
        draw.multiline_text(
            (left + side / 2, top + TITLE_HEIGHT - 4), "\n".join(lines), "black", font, "md", 2, "center"
        )
        enlarged = Image.fromarray(picture).resize((side, side), Image.Resampling.LANCZOS)
        page.paste(enlarged, (left, top + TITLE_HEIGHT))
        draw.rectangle((left - 1, top + TITLE_HEIGHT - 1, left + side, top + TITLE_HEIGHT + side), outline="#dddddd")
    file.parent.mkdir(parents=True, exist_ok=True)
    page.save(file, optimize=True)
