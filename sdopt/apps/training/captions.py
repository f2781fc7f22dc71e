"""Draws captions of training pictures, chooses those that are packaged, and generates and writes pictures of them."""

import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline, FluxPipeline
from PIL import Image, ImageDraw, ImageFont

from sdopt.apps.training.data import BACKGROUNDS, IMAGE_SIZE, Dataset, PictureRecord
from sdopt.apps.training.networks import LENGTH

INTRODUCTION_CHANCE = 0.2
"""Probability that a caption begins with an article or with `a picture of`."""

TAGS_CHANCE = 0.25
"""Probability that a caption ends with one or two of the drawing's tags."""

FLAT_STYLE_CHANCE = 0.2
"""Probability that the caption of a flat drawing names the style, which plain captions imply."""

TRAINING_PROMPTS = 200
"""Number of training captions in the file."""

GATE_PROMPTS = 240
"""Number of captions in the file that combine known words in an unseen way."""

SHEET_PER_GROUP = 3
"""Number of captions on the contact sheet from each of emojibase's eight groups."""

REFERENCES = 120
"""Number of held-out pictures, for the first captions of `gate`."""

MASK_RADIUS = 20


def on_background(label: str, background: str | None) -> str:
    """Returns the plain caption of a drawing on one of `BACKGROUNDS`, or on white."""
    if background is None:
        return label
    return f"{label} on {'an' if background[0] in 'aeiou' else 'a'} {background} background"


def draw_background(
    record: PictureRecord, random: np.random.Generator, share: float
) -> str | None:
    """Draws a training background, never the unseen one: a colour with probability `share`, else white (None)."""
    if random.random() >= share:
        return None
    return str(
        random.choice(
            [name for name in BACKGROUNDS if name != record.unseen_background]
        )
    )


def plain_caption(
    record: PictureRecord, random: np.random.Generator, background: str | None = None
) -> str:
    """Draws a caption of a picture without a style word.

    Tags and articles are random, so that the model learns longer and less strict prompts too.
    """
    text = on_background(record.label, background)
    if random.random() < INTRODUCTION_CHANCE:
        text = f"{random.choice(['a', 'an emoji of', 'a picture of'])} {text}"
    if record.tags and random.random() < TAGS_CHANCE:
        tags = random.choice(
            record.tags,
            size=min(len(record.tags), int(random.integers(1, 3))),
            replace=False,
        )
        text = ", ".join([text, *tags])
    return text


def caption(
    record: PictureRecord, random: np.random.Generator, background: str | None = None
) -> str:
    """Draws a training caption of a picture.

    A caption without a style word always means the *flat* style. Otherwise a small model would blend the drawings of
    four vendors, and images of plain prompts would look soft. Captions of other styles always name the style (`police
    officer, noto style`).
    """
    text = plain_caption(record, random, background)
    if record.style != "flat" or random.random() < FLAT_STYLE_CHANCE:
        text = f"{text}, {record.style} style"
    return text


def choose_prompts(dataset: Dataset, seed: int) -> dict[str, list[str]]:
    """Chooses plain captions (without a style word) by purpose.

    Returns:
        `gate`: unseen captions of known words: a training name on its unseen background. `held_out`: all names that
        training never saw, in random order. `training`: a random sample of training names with a flat drawing.
        `contact_sheet`: three captions of training names from each group, in the order of the groups: the first on
        white, the second on a background seen in training, the third on its unseen background.
    """
    random = np.random.default_rng([seed, 3])
    held_out = dataset.labels(held_out=True)
    training = dataset.labels(held_out=False, style="flat")
    backgrounds = {record.label: record.unseen_background for record in dataset.records}
    sheet: list[str] = []
    by_group: dict[int, list[str]] = {}
    for record in dataset.records:
        if not record.held_out and record.style == "flat":
            by_group.setdefault(record.group, []).append(record.label)
    for group in sorted(by_group):
        labels = [
            by_group[group][i]
            for i in random.permutation(len(by_group[group]))[:SHEET_PER_GROUP]
        ]
        # The colour after the unseen one was seen in training.
        names = list(BACKGROUNDS)
        seen = [
            names[(names.index(backgrounds[label]) + 1) % len(names)]
            for label in labels
        ]
        behind = [None, seen[1], backgrounds[labels[2]]]
        sheet += [
            on_background(label, colour)
            for label, colour in zip(labels, behind, strict=True)
        ]
    gate = [training[i] for i in random.permutation(len(training))[:GATE_PROMPTS]]
    return {
        "gate": [on_background(label, backgrounds[label]) for label in gate],
        "held_out": [held_out[i] for i in random.permutation(len(held_out))],
        "training": [
            training[i] for i in random.permutation(len(training))[:TRAINING_PROMPTS]
        ],
        "contact_sheet": sheet,
    }


def records_of(dataset: Dataset, captions: Sequence[str]) -> list[PictureRecord]:
    """Returns the records of the flat drawings for captions of `gate`, in order. Raises KeyError for other captions."""
    flat = (
        record
        for record in dataset.records
        if record.style == "flat" and not record.held_out
    )
    by_caption = {
        on_background(record.label, record.unseen_background): record for record in flat
    }
    return [by_caption[caption] for caption in captions]


def real_pictures(dataset: Dataset, records: Sequence[PictureRecord]) -> np.ndarray:
    """Returns the flat drawing of each record's concept, on its unseen background: uint8 (records, 64, 64, 3)."""
    place = dataset.flat_drawings
    indices = np.array([place[record.concept] for record in records])
    return dataset.on_named(indices, [record.unseen_background for record in records])


def write_references(dataset: Dataset, captions: Sequence[str], folder: Path) -> None:
    """Writes lossless WebP files to `held_out/` and `inputs/` in `folder`.

    `inputs/image.webp` is the drawing of the first caption on white, and `inputs/mask.webp` is a white disc in the
    middle: the packaged inputs of image-to-image and inpainting.
    """
    records = records_of(dataset, captions[:REFERENCES])
    target = folder / "held_out"
    shutil.rmtree(target, ignore_errors=True)
    for number, picture in enumerate(real_pictures(dataset, records)):
        write_webp(picture, target / f"{number:03d}.webp")
    first = next(
        i
        for i, r in enumerate(dataset.records)
        if r.concept == records[0].concept and r.style == "flat"
    )
    write_webp(dataset.images[first], folder / "inputs" / "image.webp")
    rows, columns = np.indices((IMAGE_SIZE, IMAGE_SIZE)) - (IMAGE_SIZE - 1) / 2
    disc = np.hypot(rows, columns) <= MASK_RADIUS
    write_webp(
        np.repeat(np.uint8(255) * disc[..., None], 3, axis=-1),
        folder / "inputs" / "mask.webp",
    )


def write_webp(picture: np.ndarray, file: Path) -> None:
    """Writes uint8 pixels (height, width, 3) to a lossless WebP file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture).save(file, lossless=True, quality=100, method=6)


# ---- generated pictures ----------------------------------------------------------------------------------------------

STEPS, GUIDANCE = 25, 4.5
"""With which all pictures of the family are generated, but those of the transformer."""

FLOW_GUIDANCE = 3.0
"""The guidance of the transformer, which knows its pictures less well: more makes them too strong in colour."""

AT_ONCE = 24
"""Number of pictures that are generated together."""

ENLARGEMENT, COLUMNS, TITLE_HEIGHT, MARGIN = 3, 6, 40, 12
"""Of a contact sheet; heights and margins in pixels."""


def generate(
    pipeline: DiffusionPipeline, captions: Sequence[str], *, seed: int, **options: Any
) -> np.ndarray:
    """Generates one picture per caption, uint8 (captions, 64, 64, 3). Picture i starts from the noise of seed + i."""
    pictures = [
        call(
            pipeline,
            captions[start : start + AT_ONCE],
            seed=seed + start,
            output_type="np",
            **options,
        )
        for start in range(0, len(captions), AT_ONCE)
    ]
    return (np.concatenate(pictures) * 255).round().astype(np.uint8)


def call(
    pipeline: DiffusionPipeline, captions: Sequence[str], *, seed: int, **options: Any
) -> Any:
    """Calls the pipeline once, with the family's steps and guidance unless `options` has others; returns the images."""
    pipeline.set_progress_bar_config(disable=True)
    noise = [torch.Generator().manual_seed(seed + i) for i in range(len(captions))]
    guided: dict[str, Any] = {"guidance_scale": GUIDANCE}
    if isinstance(pipeline, FluxPipeline):
        guided = {
            "true_cfg_scale": FLOW_GUIDANCE,
            "negative_prompt": [""] * len(captions),
        }
        guided |= {
            "max_sequence_length": LENGTH,
            "height": IMAGE_SIZE,
            "width": IMAGE_SIZE,
        }
    usual = {"num_inference_steps": STEPS, "generator": noise} | guided
    return pipeline(list(captions), **usual | options).images


def draw_sheet(
    pipeline: DiffusionPipeline, captions: Sequence[str], seed: int, file: Path
) -> None:
    """Writes a PNG grid of what a pipeline draws of captions, enlarged threefold, with the captions."""
    pictures = generate(pipeline, captions, seed=seed)
    side = ENLARGEMENT * pictures.shape[1]
    rows = -(-len(captions) // COLUMNS)
    page = Image.new(
        "RGB",
        (
            COLUMNS * (side + MARGIN) + MARGIN,
            rows * (side + TITLE_HEIGHT + MARGIN) + MARGIN,
        ),
        "white",
    )
    draw = ImageDraw.Draw(page)
    font = ImageFont.load_default(size=14)
    for index, (picture, title) in enumerate(zip(pictures, captions, strict=True)):
        left = MARGIN + (index % COLUMNS) * (side + MARGIN)
        top = MARGIN + (index // COLUMNS) * (side + TITLE_HEIGHT + MARGIN)
        lines = textwrap.wrap(title, 26)[:2]
        draw.multiline_text(
            (left + side / 2, top + TITLE_HEIGHT - 4),
            "\n".join(lines),
            "black",
            font,
            "md",
            2,
            "center",
        )
        enlarged = Image.fromarray(picture).resize(
            (side, side), Image.Resampling.LANCZOS
        )
        page.paste(enlarged, (left, top + TITLE_HEIGHT))
        draw.rectangle(
            (left - 1, top + TITLE_HEIGHT - 1, left + side, top + TITLE_HEIGHT + side),
            outline="#dddddd",
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    page.save(file, optimize=True)
