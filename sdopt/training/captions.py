"""Draws captions of training pictures, and backgrounds."""

from __future__ import annotations

import numpy as np

from sdopt.training.data import BACKGROUNDS, Record

INTRODUCTION_CHANCE = 0.2
"""Probability that a caption begins with an article or with `a picture of`."""

TAGS_CHANCE = 0.25
"""Probability that a caption ends with one or two of the drawing's tags."""

FLAT_STYLE_CHANCE = 0.2
"""Probability that the caption of a flat drawing names the style, which plain captions imply."""


def on_background(label: str, background: str | None) -> str:
    """Returns the plain caption of a drawing on one of `BACKGROUNDS`, or on white."""
    if background is None:
        return label
    return f"{label} on {'an' if background[0] in 'aeiou' else 'a'} {background} background"


def draw_background(record: Record, random: np.random.Generator, share: float) -> str | None:
    """Draws a training background, never the unseen one: a colour with probability `share`, else white (None)."""
    if random.random() >= share:
        return None
    return str(random.choice([name for name in BACKGROUNDS if name != record.unseen_background]))


def plain_caption(record: Record, random: np.random.Generator, background: str | None = None) -> str:
    """Draws a caption of a picture without a style word.

    Tags and articles are random, so that the model learns longer and less strict prompts too.
    """
    text = on_background(record.label, background)
    if random.random() < INTRODUCTION_CHANCE:
        text = f"{random.choice(['a', 'an emoji of', 'a picture of'])} {text}"
    if record.tags and random.random() < TAGS_CHANCE:
        tags = random.choice(record.tags, size=min(len(record.tags), int(random.integers(1, 3))), replace=False)
        text = ", ".join([text, *tags])
    return text


def caption(record: Record, random: np.random.Generator, background: str | None = None) -> str:
    """Draws a training caption of a picture.

    A caption without a style word always means the *flat* style. Otherwise a small model would blend the drawings of
    four vendors, and images of plain prompts would look soft. Captions of other styles always name the style (`police
    officer, noto style`).
    """
    text = plain_caption(record, random, background)
    if record.style != "flat" or random.random() < FLAT_STYLE_CHANCE:
        text = f"{text}, {record.style} style"
    return text
