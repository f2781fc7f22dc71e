"""A data set that needs no network: coloured squares and discs, as fake npm archives and as a work folder."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from diffusers import StableDiffusionPipeline

from sdopt.apps.training.data import Dataset, build, icon_key
from sdopt.apps.training.packages import (
    DRAWINGS,
    EMOJIBASE,
    STYLES,
    DrawingSet,
    Package,
    Style,
)
from sdopt.reference import MODEL

COLOURS = ("red", "blue", "green", "orange", "purple", "brown", "black", "teal")
SHAPES = {
    "square": '<rect x="4" y="4" width="24" height="24" fill="{}"/>',
    "circle": '<circle cx="16" cy="16" r="12" fill="{}"/>',
}


def pack(folder: Path, package: Package, files: dict[str, Any]) -> Package:
    """Write an archive as `npm pack` would, and return the package pinned to its digest."""
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / package.file_name
    with tarfile.open(archive, "w:gz") as tar:
        for name, content in files.items():
            raw = json.dumps(content).encode()
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(raw)
            tar.addfile(entry, io.BytesIO(raw))
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    return replace(package, integrity=f"sha512-{digest}")


@pytest.fixture(scope="session")
def pipeline() -> StableDiffusionPipeline:
    """The packaged pipeline. A test that changes it changes it back."""
    pipeline = StableDiffusionPipeline.from_pretrained(MODEL, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="session")
def archives(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Package, tuple[DrawingSet, ...]]:
    """A folder of archives with sixteen concepts, a flag, a component and a letter in all four styles."""
    folder = tmp_path_factory.mktemp("packages")
    emoji, icons, chars = [], {}, {}
    for number, (colour, shape) in enumerate((c, s) for c in COLOURS for s in SHAPES):
        code = f"{0x1F300 + number:X}"
        emoji.append(
            {
                "label": f"{colour.title()} {shape}",
                "hexcode": f"{code}-FE0F",
                "tags": [colour],
                "group": 8,
            }
        )
        icons[f"{colour}-{shape}"] = {"body": SHAPES[shape].format(colour)}
        chars[code.lower()] = f"{colour}-{shape}"
    for label, group in (("flag: nowhere", 9), ("red hair", 2), ("letter a", None)):
        emoji.append(
            {"label": label, "hexcode": f"{len(emoji):X}"}
            | ({} if group is None else {"group": group})
        )
        icons[label.replace(": ", "-").replace(" ", "-")] = {
            "body": SHAPES["square"].format("red")
        }
    names = pack(folder, EMOJIBASE, {"en/data.json": emoji})
    drawings = tuple(
        replace(
            drawing,
            package=pack(
                folder,
                drawing.package,
                {"icons.json": {"icons": icons, "width": 32, "height": 32}}
                | ({"chars.json": chars} if drawing.names == drawing.style else {}),
            ),
        )
        for drawing in DRAWINGS
    )
    return folder, names, drawings


@pytest.fixture(scope="session")
def dataset(archives: tuple[Path, Package, tuple[DrawingSet, ...]]) -> Dataset:
    """The sixteen concepts rendered, four of them held out."""
    folder, names, drawings = archives
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sdopt.apps.training.data.EMOJIBASE", names)
        patch.setattr("sdopt.apps.training.data.DRAWINGS", drawings)
        return build(folder, held_out_concepts=4, seed=0)


@pytest.fixture
def work_folder(tmp_path: Path, dataset: Dataset) -> Path:
    """A work folder as the stages before the trainings leave it, with the packaged tokenizer."""
    folder = tmp_path / "work"
    dataset.save(folder / "data")
    shutil.copytree(MODEL / "tokenizer", folder / "tokenizer")
    return folder


@pytest.fixture
def styles(
    work_folder: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> tuple[Style, ...]:
    """The LoRAs' styles with fake archives: black discs and green triangles for every concept."""
    bodies = (
        '<circle cx="16" cy="16" r="14"/>',
        '<path d="M16 2 30 30H2Z" fill="green"/>',
    )
    fakes = []
    for style, body in zip(STYLES, bodies, strict=True):
        icons = {icon_key(record, style): {"body": body} for record in dataset.records}
        content = {"icons.json": {"icons": icons, "width": 32, "height": 32}}
        fakes.append(
            replace(
                style, package=pack(work_folder / "packages", style.package, content)
            )
        )
    for module in ("loras", "evaluation"):
        monkeypatch.setattr(f"sdopt.apps.training.{module}.STYLES", tuple(fakes))
    return tuple(fakes)
