"""The captions of training pictures, and the backgrounds that they name."""

from __future__ import annotations

import numpy as np

from sdopt.training.data import BACKGROUNDS, Record

INTRODUCTION_CHANCE = 0.2
"""Of a caption that begins with an article or with `a picture of`."""

TAGS_CHANCE = 0.25
"""Of a caption that ends with one or two of the drawing's tags."""

FLAT_STYLE_CHANCE = 0.2
"""Of a caption of a flat drawing that names the style, which a plain caption means anyway."""


def on_background(label: str, background: str | None) -> str:
    """Returns the plain caption of a drawing on one of `BACKGROUNDS`, or on white."""
    if background is None:
        return label
    return f"{label} on {'an' if background[0] in 'aeiou' else 'a'} {background} background"


def draw_background(record: Record, random: np.random.Generator, share: float) -> str | None:
    """Draws a background for training, never the unseen one: a colour with chance `share`, else white (None)."""
    if random.random() >= share:
        return None
    return str(random.choice([name for name in BACKGROUNDS if name != record.unseen_background]))


def plain_caption(record: Record, random: np.random.Generator, background: str | None = None) -> str:
    """Draws one caption of a picture without a word for its style.

    Tags and articles come and go, so that the model learns longer and looser prompts too.
    """
    text = on_background(record.label, background)
    if random.random() < INTRODUCTION_CHANCE:
        text = f"{random.choice(['a', 'an emoji of', 'a picture of'])} {text}"
    if record.tags and random.random() < TAGS_CHANCE:
        tags = random.choice(record.tags, size=min(len(record.tags), int(random.integers(1, 3))), replace=False)
        text = ", ".join([text, *tags])
    return text


def caption(record: Record, random: np.random.Generator, background: str | None = None) -> str:
    """Draws one caption of a picture as training sees it.

    A plain name mostly stands for the *flat* style and never for another one: a small model would blend the drawings of
    four vendors, and a plain prompt would look soft. A caption of another style always names it (`police officer, noto
    style`).
    """
    text = plain_caption(record, random, background)
    if record.style != "flat" or random.random() < FLAT_STYLE_CHANCE:
        text = f"{text}, {record.style} style"
    return text
