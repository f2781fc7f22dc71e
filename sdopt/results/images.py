"""Opens image files, which may come from anybody, and identifies them."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from sdopt.errors import UsageError

if TYPE_CHECKING:
    from PIL.Image import Image


def digest_of(file: Path) -> str:
    """Returns the SHA-256 of a file; "" if it cannot be read."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""


def open_image(file: Path) -> "Image":
    """Reads an image whole. Raises UsageError if it cannot be read, with the file and the reason."""
    from PIL import Image, UnidentifiedImageError

    if not file.is_file():  # reading a pipe or a device may block
        raise UsageError(f"{file}: cannot be read as an image (no such file)")
    try:
        with Image.open(file) as image:
            image.load()
            return image
    except UnidentifiedImageError as error:
        raise UsageError(f"{file}: cannot be read as an image (unknown format)") from error
    except Exception as error:  # a decoder may raise anything for a damaged file, even SyntaxError
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"{file}: cannot be read as an image ({reason})") from error
