"""Defines the drawing styles that the LoRAs learn, and renders their drawings."""

from __future__ import annotations

import os
import re
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from sdopt.errors import UsageError
from sdopt.training.data import Dataset, Record, choose_held_out, code_points
from sdopt.training.packages import Package, fetch, read_json
from sdopt.training.rendering import render, svg

STREAM = 5
"""Number of the LoRA stage in the path of a random seed."""


@dataclass(frozen=True)
class Style:
    """A drawing style that a LoRA learns.

    Attributes:
        name: the stem of the weights file.
        title: the name of the drawings.
        package: the npm package of the drawings.
        address: the URL of the original project.
        names: the source of icon names: `label` (the current English name) or `unicode` (the character's name).
        look: a description of the style for the card.
        black: whether the drawings are black, and therefore invisible on a black background.
    """

    name: str
    title: str
    package: Package
    address: str
    names: Literal["label", "unicode"]
    look: str
    black: bool = False


STYLES = (
    Style(
        "fxemoji",
        "Firefox OS Emoji",
        Package(
            "@iconify-json/fxemoji",
            "1.2.2",
            "sha512-UAasRaxzFUKfIGSmLwnoarsssA4LX0VLLuEmplIqM6ZNQqIQRtav8tZ4H1neTlBreXuMQyAifr5jP4kn78DpiQ==",
            "Apache-2.0",
            "Mozilla Foundation",
        ),
        "https://github.com/mozilla/fxemoji",
        "unicode",
        "large plain shapes in muted colours",
    ),
    Style(
        "high_contrast",
        "Fluent Emoji High Contrast",
        Package(
            "@iconify-json/fluent-emoji-high-contrast",
            "1.2.6",
            "sha512-esqhZPpkrF7sNX3NsLoh8KW64okEr/bzko7WNnFP+qTJGAqDPDYjp0925yxuivXy3HtVQB8xhIKu3+Nq1byX5w==",
            "MIT",
            "Microsoft Corporation",
        ),
        "https://github.com/microsoft/fluentui-emoji",
        "label",
        "black line drawings",
        black=True,
    ),
)


def letters(name: str) -> str:
    """Returns a name in lower case, and only its letters and digits, to match names of different vendors."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def icon_key(record: Record, style: Style) -> str:
    """Returns the normalized name (see `letters`) of a concept's icon in the style, or "" if there cannot be one."""
    if style.names == "label":
        return letters(record.label)
    code = code_points(record.concept).split("-")
    return letters(unicodedata.name(chr(int(code[0], 16)), "")) if len(code) == 1 else ""


def draw_style(
    style: Style, base: Dataset, packages: Path, *, held_out_concepts: int, seed: int, threads: int | None = None
) -> Dataset:
    """Renders the style's drawings of concepts that the denoiser learns in the flat style, and holds some concepts out.

    Args:
        style: the style to render.
        base: the denoiser's data; its held-out concepts are excluded.
        packages: the folder of the archives.
        held_out_concepts: how many concepts to keep from the LoRA's training.
        seed: the seed of that choice.
        threads: rendering threads; the default is one per core.

    Raises:
        DataError: the archive cannot be fetched, verified or read.
        UsageError: no more than `held_out_concepts` concepts match.
    """
    icons = read_json(fetch(style.package, packages), "icons.json")
    names = {letters(name): name for name in (*icons.get("aliases", {}), *icons["icons"])}
    found: list[tuple[Record, str]] = []
    for record in base.records:
        if record.style == "flat" and not record.held_out:
            name = names.get(icon_key(record, style))
            markup = name and svg(icons, name)
            if markup:
                found.append((record, markup))
    if len(found) <= held_out_concepts:
        raise UsageError(
            f"loras.held_out_concepts={held_out_concepts}: {style.package.name} has drawings of only {len(found)} "
            "concepts that the denoiser is trained on"
        )
    hidden = choose_held_out([record.concept for record, _ in found], held_out_concepts, seed)
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        layers = np.stack(list(pool.map(render, (markup for _, markup in found))))
    records = tuple(replace(r, style=style.name, held_out=r.concept in hidden) for r, _ in found)
    return Dataset(layers[..., :3].copy(), layers[..., 3].copy(), records)
