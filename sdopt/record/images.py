"""Opens image files, which may come from anybody."""

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from sdopt.errors import UsageError, one_line
from sdopt.record.files import POINTER, inside, is_pointer, short_digest, stays_within
from sdopt.record.records import StudyResult
from sdopt.record.scores import ImageRecord

if TYPE_CHECKING:
    from PIL.Image import Image


def digest_of(file: Path) -> str:
    """Returns what tells a file from another one that takes its place. Raises OSError."""
    return short_digest(file.read_bytes())


def is_replaced(folder: Path, record: ImageRecord) -> bool:
    """Returns whether an image of a run's folder is another file than the one that was scored; false without a file."""
    if not record.digest or not stays_within(record.path):
        return False
    file = folder / record.path  # or a link, as DVC makes: what it holds counts
    try:
        return file.is_file() and digest_of(file) != record.digest
    except OSError:  # who opens it is told why it cannot be read
        return False


def is_there(folder: Path, record: ImageRecord) -> bool:
    """Returns whether the file of an image is there, and no other one has taken its place."""
    return (folder / record.path).is_file() and not is_replaced(folder, record)


def scored_file(folder: Path, record: ImageRecord) -> Path:
    """Returns the file of an image. Raises UsageError if another one has taken its place since it was recorded."""
    if is_replaced(folder, record):
        raise UsageError(
            f"{folder / record.path}: {REPLACED}, so that figures would be of another image; put it back, or measure "
            "again"
        )
    return inside(folder, record.path)


def replaced_images(result: StudyResult, folder: Path) -> list[str]:
    """Returns the paths of a study's images that other files have taken the place of."""
    records = result.drawn_images
    for more in result.redrawn.values():
        records += more
    return [record.path for record in records if is_replaced(folder, record)]


def remarks_on_images(result: StudyResult, folder: Path) -> list[str]:
    """Returns a line if images of a study were replaced; none if they are there, or all gone."""
    replaced = replaced_images(result, folder)
    if not replaced:
        return []
    named = ", ".join(replaced[:3]) + (", …" if len(replaced) > 3 else "")
    what = f"{len(replaced)} image{'s' * (len(replaced) > 1)} ({named})"
    advice = "figures and verdicts are of what was recorded, and reports leave these files out"
    return [f"{folder}: {what}: each {REPLACED}; {advice}"]


REPLACED = "was replaced or changed after it was recorded"


def open_image(file: Path) -> "Image":
    """Reads an image whole. Raises UsageError if it cannot be read, with the file and the reason."""
    return _read(file, lambda image: image)


def open_picture(file: Path) -> "Image":
    """Reads a picture that a user made, as a viewer shows it: upright, RGB in 8 bits.

    Raises:
        UsageError: it cannot be read; or it shows more than one such picture: it has several frames, transparent
            pixels, or numbers of which nobody says which one is white.
    """
    return _read(file, _as_shown)


def _read(file: Path, convert: Callable[["Image"], "Image"]) -> "Image":
    from PIL import Image

    if not file.is_file():  # reading a pipe or a device may block
        raise UsageError(
            f"{file}: cannot be read as an image ({'not a' if file.exists() else 'no such'} file)"
        )
    try:
        with Image.open(file) as image:
            image.load()
            return convert(image)
    except UsageError as error:
        raise UsageError(
            [f"{file}: {problem}" for problem in error.problems]
        ) from error
    except Exception as error:  # a decoder may raise anything for a damaged file
        reason = POINTER if is_pointer(file) else one_line(error)
        raise UsageError(f"{file}: cannot be read as an image ({reason})") from error


def _as_shown(image: "Image") -> "Image":
    from PIL import ImageOps

    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format not in _FIRST_IS_WHOLE:
        raise UsageError(
            f"holds {frames} frames; save the one to use as an image of its own"
        )
    if getattr(image, "tag_v2", {}).get(_SUBFILE, 0) & 1:
        raise UsageError(
            "begins with a preview of the picture, as raw files of cameras do; save it as PNG or JPEG"
        )
    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith(("I", "F")):
        return _scaled(image, upright).convert("RGB")
    if upright.has_transparency_data:
        upright = upright.convert("RGBA")
        if sum(upright.getchannel("A").histogram()[:_OPAQUE]):
            raise UsageError(_TRANSPARENT)
    if upright.mode not in ("RGB", "L", "CMYK"):
        upright = upright.convert("RGB")
    return _in_srgb(upright, image.info.get("icc_profile")).convert("RGB")


def is_srgb(profile: str) -> bool:
    """Returns whether a profile of this description is that of sRGB: Krita and GIMP have a linear one, too."""
    name = profile.lower()
    linear = "linear" in name or "-g10" in name
    return "srgb" in name and not linear


def _in_srgb(picture: "Image", profile: bytes | None) -> "Image":
    """Returns the colours that a profile means, such as a telephone's Display P3, as those of sRGB."""
    from PIL import ImageCms

    if not profile:
        return picture
    try:
        source = ImageCms.ImageCmsProfile(BytesIO(profile))
        if is_srgb(ImageCms.getProfileDescription(source)):
            return picture
        return (
            ImageCms.profileToProfile(
                picture, source, ImageCms.createProfile("sRGB"), outputMode="RGB"
            )
            or picture
        )
    except (
        ImageCms.PyCMSError,
        OSError,
    ):  # damaged, or for another kind of picture: viewers ignore it
        return picture


def _scaled(image: "Image", upright: "Image") -> "Image":
    """Returns an image of 16-bit numbers in 8 bits; PIL's own conversion cuts them off at 255, which is white."""
    import numpy as np
    from PIL import Image as Images

    tags = getattr(image, "tag_v2", {})
    whole = tags.get(_BITS, (16,)) == (16,) and tags.get(_PHOTOMETRIC, 1) == 1
    if (
        not (upright.mode.startswith("I;16") and whole)
        and (upright.mode, image.format) not in _16_BITS_IN_32
    ):
        raise UsageError(
            f"holds numbers ({image.format}, mode {upright.mode}) of which the file does not say which is white; "
            "save it with 8 bits"
        )
    values = np.asarray(upright)
    if (values == upright.info.get("transparency", -1)).any():
        raise UsageError(_TRANSPARENT)
    return Images.fromarray((values / 257).round().astype(np.uint8))


_FIRST_IS_WHOLE = ("MPO", "PSD")
"""Formats whose first frame is the picture: a camera adds views or previews, Photoshop its layers."""

_OPAQUE = 254
"""Alpha from which a pixel counts as opaque: NovelAI and others hide texts in its lowest bit."""

_TRANSPARENT = "has transparent pixels, below which an image has no colour; flatten it onto a background"

_SUBFILE, _BITS, _PHOTOMETRIC = 254, 258, 262
"""TIFF's tags of the kind of an image, 1 for one that is reduced; of the bits in a sample, and of its meaning: 1 is a
grey value that grows towards white."""

_16_BITS_IN_32 = (("I", "PNG"), ("I", "PPM"))
"""Modes and formats in which PIL keeps 16-bit numbers in 32 bits."""
