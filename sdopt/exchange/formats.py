"""Tells how the files of images are written, and whether that changes what they show."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

_LUMINANCE = 57.625
"""The mean of the table for brightness in the JPEG standard (ISO/IEC 10918-1, K.1), whose quality is 50."""


@dataclass(frozen=True)
class Format:
    """How an image is written.

    Attributes:
        name: such as `PNG`, or `JPEG of quality 75`.
        lossy: whether pixels change when it is written, or when its colours are made those of sRGB.
    """

    name: str = ""
    lossy: bool = False


def format_of(image: "Image", file: Path) -> Format:
    """Returns how an image was written that was opened from a file, and not changed since."""
    kind = image.format or "unknown"
    extra = _profile(image)
    if kind in ("JPEG", "MPO"):
        return Format(
            f"JPEG of quality {_quality(image)}{_sampling(image)}{extra}", lossy=True
        )
    if kind == "WEBP":
        lossless = _is_lossless_webp(file)
        return Format(
            f"{'lossless' if lossless else 'lossy'} WebP{extra}", lossy=not lossless
        )
    if kind in ("AVIF", "HEIF", "JPEG2000") or image.info.get("compression") == "jpeg":
        return Format(f"{kind}{extra}", lossy=True)
    if image.mode in ("P", "PA"):
        return Format(
            f"{kind} of {len(image.getcolors(256) or ())} colours", lossy=True
        )
    bits = " of 16 bits" if image.mode.startswith("I") else ""
    return Format(f"{kind}{bits}{extra}", lossy=bool(extra))


def _quality(image: "Image") -> int:
    """Returns the quality from 1 to 100 that libjpeg calls the table by; programs with tables of their own are near."""
    table: Sequence[int] = getattr(image, "quantization", {}).get(0, ())
    if not table:
        return 0
    scale = 100 * (sum(table) / len(table)) / _LUMINANCE
    return round(100 - scale / 2 if scale <= 100 else 5000 / scale)


def _sampling(image: "Image") -> str:
    """Returns how a JPEG keeps colours, where it does not halve their resolution as is usual."""
    from PIL.JpegImagePlugin import get_sampling

    kept = {
        0: " with whole colours (4:4:4)",
        1: " with colours of half the width (4:2:2)",
    }
    return kept.get(get_sampling(image), "")


def _profile(image: "Image") -> str:
    """Returns the name of an image's colours where they are not those of sRGB."""
    from PIL import ImageCms

    profile = image.info.get("icc_profile")
    if not profile:
        return ""
    try:
        name = ImageCms.getProfileDescription(
            ImageCms.ImageCmsProfile(BytesIO(profile))
        ).strip()
    except (ImageCms.PyCMSError, OSError):  # damaged: viewers ignore it
        return ""
    return "" if "srgb" in name.lower() else f" with the profile {name}"


def _is_lossless_webp(file: Path) -> bool:
    """Returns whether a WebP is lossless: by its first chunk of pixels, which other chunks may stand before."""
    with file.open("rb") as stream:
        stream.seek(12)
        while len(head := stream.read(8)) == 8:
            if head[:4] in (b"VP8 ", b"VP8L"):
                return head[:4] == b"VP8L"
            size = int.from_bytes(head[4:], "little")
            stream.seek(size + size % 2, 1)
    return False


def common_format(formats: Iterable[Format]) -> Format:
    """Returns how several images are written; of several ways, the most frequent ones in one name."""
    counts = Counter(formats)
    names = [written.name for written, _ in counts.most_common(3)]
    return Format(" and ".join(names), lossy=any(written.lossy for written in counts))
