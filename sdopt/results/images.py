"""Opens image files, which may be anybody's."""

from pathlib import Path
from typing import TYPE_CHECKING

from sdopt.errors import UsageError

if TYPE_CHECKING:
    from PIL.Image import Image


def open_image(file: Path) -> "Image":
    """Reads an image whole. Raises UsageError where it cannot be read, with the file and the reason."""
    from PIL import Image, UnidentifiedImageError

    if not file.is_file():  # a pipe or a device would be waited for without end
        raise UsageError(f"{file}: cannot be read as an image (no such file)")
    try:
        with Image.open(file) as image:
            image.load()
            return image
    except UnidentifiedImageError as error:
        raise UsageError(f"{file}: cannot be read as an image (unknown format)") from error
    except Exception as error:  # a decoder raises what it will when a file is damaged, SyntaxError among others
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"{file}: cannot be read as an image ({reason})") from error
