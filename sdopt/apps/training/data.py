"""Builds the data of the reference models: rendered, openly licensed emoji drawings with names and tags."""

import io
import json
import re
import unicodedata
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import resvg_py
import torch
from PIL import Image

from sdopt.apps.training.loop import missing_stage
from sdopt.apps.training.packages import DRAWINGS, EMOJIBASE, Style, fetch, read_json
from sdopt.errors import UsageError

IMAGE_SIZE = 64
"""Width and height of every picture, in pixels."""

BACKGROUNDS = {
    "red": (214, 69, 65),
    "orange": (245, 166, 80),
    "yellow": (250, 225, 110),
    "green": (120, 190, 120),
    "blue": (100, 150, 220),
    "purple": (155, 110, 190),
    "pink": (245, 170, 195),
    "brown": (150, 115, 90),
    "gray": (160, 160, 160),
    "black": (30, 30, 30),
}
"""The background colours that captions can name, as RGB; the default background is white."""

WHITE = (255, 255, 255)


def colour_of(background: str | None) -> tuple[int, int, int]:
    """Returns the colour of a background; None is white."""
    return BACKGROUNDS[background] if background else WHITE


FLAGS_AND_COMPONENTS = (2, 9)
"""Excluded emojibase groups: components (hair, skin tones) and flags (hundreds of near-duplicates)."""


@dataclass(frozen=True)
class PictureRecord:
    """One picture with its metadata.

    Attributes:
        concept: emojibase's hexcode; the unit by which captions are held out.
        label: the English name in lower case.
        tags: English keywords.
        group: emojibase's group (0 smileys, 1 people, 3 animals, 4 food, 5 travel, 6 activities, 7 objects, 8 symbols).
        style: the style word of the drawing set.
        held_out: whether the concept is excluded from training.
        unseen_background: the colour in `BACKGROUNDS` on which training never shows this concept. The pair is an unseen
            caption of known words, which the model should be able to draw.
    """

    concept: str
    label: str
    tags: tuple[str, ...]
    group: int
    style: str
    held_out: bool
    unseen_background: str


@dataclass(frozen=True)
class Dataset:
    """Pictures and their records, in the same order.

    Attributes:
        images: uint8, shape (pictures, 64, 64, 3), RGB on white.
        alphas: uint8, shape (pictures, 64, 64), alpha of the drawing.
        records: one for each picture.
    """

    images: np.ndarray
    alphas: np.ndarray
    records: tuple[PictureRecord, ...]

    def __len__(self) -> int:
        return len(self.records)

    def indices(self, *, held_out: bool) -> np.ndarray:
        """Returns the indices of the training pictures, or of the held-out pictures, int64."""
        return np.array(
            [i for i, record in enumerate(self.records) if record.held_out == held_out],
            dtype=np.int64,
        )

    @property
    def flat_drawings(self) -> dict[str, int]:
        """The index of each concept's drawing in the flat style."""
        flat = enumerate(self.records)
        return {record.concept: i for i, record in flat if record.style == "flat"}

    def labels(self, *, held_out: bool, style: str | None = None) -> list[str]:
        """Returns the distinct names in order, optionally only names with a drawing in `style`."""
        chosen = (
            r
            for r in self.records
            if r.held_out == held_out and style in (None, r.style)
        )
        return list(dict.fromkeys(record.label for record in chosen))

    def on(self, indices: np.ndarray, colours: np.ndarray) -> np.ndarray:
        """Returns pictures on the given colours, uint8 (n, 3), instead of white: uint8 (n, 64, 64, 3)."""
        uncovered = 1 - self.alphas[indices, :, :, None] / np.float32(255)
        missing = (255 - colours.astype(np.float32))[:, None, None, :]
        pictures: np.ndarray = (
            (self.images[indices] - uncovered * missing)
            .clip(0, 255)
            .round()
            .astype(np.uint8)
        )
        return pictures

    def on_named(self, indices: np.ndarray, names: Sequence[str | None]) -> np.ndarray:
        """Returns pictures on the named backgrounds; None is white: uint8 (n, 64, 64, 3)."""
        return self.on(
            indices,
            np.array([colour_of(name) for name in names], np.uint8),
        )

    def save(self, folder: Path) -> None:
        """Writes `images.npy`, `alphas.npy` and `records.json`."""
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "images.npy", self.images, allow_pickle=False)
        np.save(folder / "alphas.npy", self.alphas, allow_pickle=False)
        (folder / "records.json").write_text(
            json.dumps([asdict(r) for r in self.records], ensure_ascii=False),
            encoding="utf-8",
        )

    @classmethod
    def load(cls, folder: Path) -> "Dataset":
        """Reads a folder written by `save`."""
        try:
            images, alphas = (
                np.load(folder / f"{name}.npy", allow_pickle=False)
                for name in ("images", "alphas")
            )
            raw = json.loads((folder / "records.json").read_text(encoding="utf-8"))
        except FileNotFoundError as missing:
            raise missing_stage("data", Path(missing.filename)) from missing
        return cls(
            images,
            alphas,
            tuple(PictureRecord(**{**r, "tags": tuple(r["tags"])}) for r in raw),
        )


def slug(label: str) -> str:
    """Returns Iconify's icon name for a label: lower case, with words joined by hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", label.lower().replace("’", "")).strip("-")


def plain(text: str) -> str:
    """Returns a text in lower case, with typewriter instead of typographic quotation marks."""
    return text.lower().translate(str.maketrans("’‘“”", "''\"\""))


def code_points(hexcode: str) -> str:
    """Returns a code point sequence without variation selectors and joiners, in which vendors differ."""
    return "-".join(
        part for part in hexcode.lower().split("-") if part not in ("fe0f", "200d")
    )


def choose_held_out(concepts: Sequence[str], count: int, seed: int) -> frozenset[str]:
    """Returns `count` concepts to exclude from training, as a function of the seed."""
    if count >= len(concepts):
        raise UsageError(
            f"data.held_out_concepts={count}: there are only {len(concepts)} concepts"
        )
    order = np.random.default_rng(seed).permutation(len(concepts))
    return frozenset(concepts[i] for i in order[:count])


def build(folder: Path, *, held_out_concepts: int, seed: int) -> Dataset:
    """Downloads, matches and renders the whole data set, except skin-tone variants, flags and components.

    The archives are kept in `folder`; the concepts that are held out are drawn by `seed`. Pictures are ordered by
    concept, then by style.

    Raises:
        DataError: an archive cannot be fetched, verified or read.
    """
    names = read_json(fetch(EMOJIBASE, folder), "en/data.json")
    archives = {drawing.style: fetch(drawing.package, folder) for drawing in DRAWINGS}
    icon_sets = {
        style: read_json(archive, "icons.json") for style, archive in archives.items()
    }
    by_code: dict[str, dict[str, str]] = {}
    for style in {drawing.names for drawing in DRAWINGS}:
        names_by_code = read_json(archives[style], "chars.json")
        by_code[style] = {
            code_points(code): name for code, name in names_by_code.items()
        }
    found: list[tuple[dict[str, Any], str, str]] = []
    for emoji in names:
        # Emojibase has no group for regional indicators, which are letters.
        if "group" not in emoji or emoji["group"] in FLAGS_AND_COMPONENTS:
            continue
        for drawing in DRAWINGS:
            name = by_code[drawing.names].get(
                code_points(emoji["hexcode"]), slug(emoji["label"])
            )
            markup = svg(icon_sets[drawing.style], name)
            if markup is not None:
                found.append((emoji, drawing.style, markup))
    concepts = list(dict.fromkeys(emoji["hexcode"] for emoji, _, _ in found))
    held_out = choose_held_out(concepts, held_out_concepts, seed)
    colours = np.random.default_rng([seed, 5]).choice(
        list(BACKGROUNDS), size=len(concepts)
    )
    unseen = dict(zip(concepts, colours.tolist(), strict=True))
    records = [
        PictureRecord(
            concept=emoji["hexcode"],
            label=plain(emoji["label"]),
            tags=tuple(map(plain, emoji.get("tags", ()))),
            group=emoji["group"],
            style=style,
            held_out=emoji["hexcode"] in held_out,
            unseen_background=unseen[emoji["hexcode"]],
        )
        for emoji, style, _ in found
    ]
    return drawn([markup for _, _, markup in found], records)


def draw_style(
    style: Style, base: Dataset, packages: Path, *, held_out_concepts: int, seed: int
) -> Dataset:
    """Renders the style's drawings of concepts that the denoiser learns in the flat style, and holds some concepts out.

    Raises:
        DataError: the archive cannot be fetched, verified or read.
    """
    icons = read_json(fetch(style.package, packages), "icons.json")
    names = {
        letters(name): name for name in (*icons.get("aliases", {}), *icons["icons"])
    }
    found: list[tuple[PictureRecord, str]] = []
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
    hidden = choose_held_out(
        [record.concept for record, _ in found], held_out_concepts, seed
    )
    records = [
        replace(r, style=style.name, held_out=r.concept in hidden) for r, _ in found
    ]
    return drawn([markup for _, markup in found], records)


def letters(name: str) -> str:
    """Returns a name in lower case, and only its letters and digits, to match names of different vendors."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def icon_key(record: PictureRecord, style: Style) -> str:
    """Returns the normalized name (see `letters`) of a concept's icon in the style, or "" if there cannot be one."""
    if style.names == "label":
        return letters(record.label)
    code = code_points(record.concept).split("-")
    return (
        letters(unicodedata.name(chr(int(code[0], 16)), "")) if len(code) == 1 else ""
    )


def drawn(markups: Sequence[str], records: Sequence[PictureRecord]) -> Dataset:
    """Renders one SVG text per record, with as many threads as PyTorch may use."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        layers = np.stack(list(pool.map(render, markups)))
    return Dataset(layers[..., :3].copy(), layers[..., 3].copy(), tuple(records))


def svg(icon_set: dict[str, Any], name: str) -> str | None:
    """Returns the SVG text of an icon; None if the set lacks it. An icon may be another one, or its mirror image.

    Source: the Iconify JSON format (https://iconify.design/docs/types/iconify-json.html), of which the pinned sets use
    neither rotations nor offsets.
    """
    mirrored = False
    while name not in icon_set["icons"]:
        alias = icon_set.get("aliases", {}).get(name)
        if alias is None:
            return None
        mirrored ^= alias.get("hFlip", False)
        name = alias["parent"]
    icon = icon_set["icons"][name]
    width, height = (icon.get(side, icon_set[side]) for side in ("width", "height"))
    body = (
        f'<g transform="translate({width} 0) scale(-1 1)">{icon["body"]}</g>'
        if mirrored
        else icon["body"]
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="0 0 {width} {height}">{body}</svg>'
    )


def render(markup: str) -> np.ndarray:
    """Renders SVG text to uint8 (64, 64, 4): the RGB of the drawing on white, and its alpha.

    The drawing is rendered at four times the size and averaged: resvg's own antialiasing leaves hairlines between
    touching shapes, which the autoencoder would learn.
    """
    size = 4 * IMAGE_SIZE
    png = bytes(
        resvg_py.svg_to_bytes(
            svg_string=markup, width=size, height=size, skip_system_fonts=True
        )
    )
    picture = Image.open(io.BytesIO(png)).convert("RGBA")
    page = Image.new("RGBA", (size, size))
    # Centre drawings that are narrower than Iconify's square artboard.
    page.alpha_composite(
        picture, ((size - picture.width) // 2, (size - picture.height) // 2)
    )
    white = Image.new("RGBA", (size, size), "white")
    white.alpha_composite(page)
    # Average colours on white, since transparent pixels have no colour.
    layers = [*white.convert("RGB").split(), page.getchannel("A")]
    small = [
        np.asarray(layer.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BOX))
        for layer in layers
    ]
    return np.stack(small, axis=-1)
