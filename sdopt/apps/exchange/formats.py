"""Tells how the files of images are written, and whether that changes what they show."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from sdopt.record.images import is_srgb

if TYPE_CHECKING:
    from PIL.Image import Image

_SAME_QUALITY = 4
"""Quantizers of one motif and one quality differ by no more, and a quarter of them."""

_LUMINANCE = 57.625
"""The mean of the table for brightness in the JPEG standard (ISO/IEC 10918-1, K.1), whose quality is 50."""


@dataclass(frozen=True)
class Format:
    """How an image is written.

    Attributes:
        name: such as `PNG`, or `JPEG of quality 75`.
        lossy: whether pixels change when it is written, or when its colours are made those of sRGB in 8 bits.
        quantizer: how coarsely a lossy WebP is quantized, from 0 to 127; None of other formats. It depends on the motif
            too, so that two images of one quality may differ in it.
    """

    name: str = ""
    lossy: bool = False
    quantizer: int | None = field(default=None, compare=False)

    def named_beside(self, other: "Format") -> str:
        """Returns its name, with how coarse it is where another one of the same name is much coarser or finer."""
        mine, theirs = self.quantizer, other.quantizer
        if self != other or mine is None or theirs is None:
            return self.name
        if abs(mine - theirs) <= _SAME_QUALITY + max(mine, theirs) / 4:
            return self.name
        return f"{self.name} of quantizer {mine} (beside {theirs})"


def format_of(image: "Image", file: Path) -> Format:
    """Returns how an image was written that was opened from a file, and not changed since."""
    kind = image.format or "unknown"
    extra = f"{_channels(image)}{_profile(image)}"
    if kind in ("JPEG", "MPO"):
        return Format(
            f"JPEG of quality {_quality(image)}{_sampling(image)}{extra}", lossy=True
        )
    if kind == "WEBP":
        frame = _webp_frame(file)
        if frame is None:
            return Format(f"lossless WebP{extra}")
        return Format(f"lossy WebP{extra}", lossy=True, quantizer=_quantizer(frame))
    if kind in ("AVIF", "HEIF", "JPEG2000") or image.info.get("compression") == "jpeg":
        return Format(f"{kind}{extra}", lossy=True)
    if image.mode in ("P", "PA"):
        return Format(
            f"{kind} of {len(image.getcolors(256) or ())} colours", lossy=True
        )
    cut = _is_cut(image, file)
    bits = " of 16 bits" if cut or image.mode.startswith("I") else ""
    return Format(f"{kind}{bits}{extra}", lossy=cut or bool(extra))


_DEPTH_AT, _BITS = 24, 258
"""Where a PNG says the bits of a sample (PNG, 11.2.2), and TIFF's tag of them."""


def _is_cut(image: "Image", file: Path) -> bool:
    """Returns whether an image has colours of 16 bits, of which Pillow keeps the upper 8 without rounding them."""
    if image.mode.startswith("I"):  # grey, which is rounded
        return False
    if image.format == "PNG":
        with file.open("rb") as stream:
            stream.seek(_DEPTH_AT)
            return stream.read(1) == b"\x10"
    bits: Sequence[int] = getattr(image, "tag_v2", {}).get(_BITS, ())
    return max(bits, default=8) > 8


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


_CHANNELS = {
    "1": " in black and white",
    "L": " in grey",
    "LA": " in grey",
    "I": " in grey",
    "I;16": " in grey",
    "I;16B": " in grey",
    "CMYK": " in CMYK",
    "YCbCr": " in YCbCr",
}
"""What an image has in place of red, green and blue, by its mode: its colours are lost, or rounded."""


def _channels(image: "Image") -> str:
    return _CHANNELS.get(image.mode, "")


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
    return "" if is_srgb(name) else f" with the profile {name}"


def _webp_frame(file: Path) -> bytes | None:
    """Returns the begin of a WebP's lossy frame, which other chunks may stand before; None if it is lossless."""
    with file.open("rb") as stream:
        stream.seek(12)
        while len(head := stream.read(8)) == 8:
            if head[:4] == b"VP8L":
                return None
            if head[:4] == b"VP8 ":
                return stream.read(_FRAME_BYTES)
            size = int.from_bytes(head[4:], "little")
            stream.seek(size + size % 2, 1)
    return b""


_FRAME_BYTES, _KEY_FRAME = 64, 10
"""Bytes of a frame that are read, and of a key frame before its header (RFC 6386, section 9.1)."""


def _quantizer(frame: bytes) -> int | None:
    """Reads the header of a WebP's frame up to its quantizer (RFC 6386, sections 9.1 to 9.6); None if it is none."""
    if len(frame) <= _KEY_FRAME + 1 or frame[3:6] != b"\x9d\x01\x2a":
        return None
    bits = _Bits(frame[_KEY_FRAME:])
    bits.read(2)  # colour space, clamping
    if bits.read(1):  # segments
        has_map, has_values = bits.read(1), bits.read(1)
        if has_values:
            bits.read(1)
            bits.skip_optional(4, 8)
            bits.skip_optional(4, 7)
        if has_map:
            bits.skip_optional(3, 8)
    bits.read(10)  # the loop filter: type, level, sharpness
    if bits.read(1) and bits.read(1):
        bits.skip_optional(8, 7)
    bits.read(2)  # partitions
    return bits.read(7)


class _Bits:
    """Decodes bits of equal chances (RFC 6386, section 7), of which headers consist."""

    def __init__(self, data: bytes) -> None:
        self._value = int.from_bytes(data[:2], "big")
        self._rest = iter(data[2:])
        self._range, self._shifted = 255, 0

    def read(self, count: int) -> int:
        """Returns a number of so many bits, the highest first."""
        number = 0
        for _ in range(count):
            number = 2 * number + self._bit()
        return number

    def skip_optional(self, count: int, bits: int) -> None:
        """Skips numbers of which each begins with a bit that says whether it is there."""
        for _ in range(count):
            if self._bit():
                self.read(bits)

    def _bit(self) -> int:
        split = 1 + ((self._range - 1) >> 1)
        bit = int(self._value >= split << 8)
        if bit:
            self._range -= split
            self._value -= split << 8
        else:
            self._range = split
        while self._range < 128:
            self._value <<= 1
            self._range <<= 1
            self._shifted += 1
            if self._shifted == 8:
                self._shifted = 0
                self._value |= next(self._rest, 0)
        return bit


def common_format(formats: Iterable[Format]) -> Format:
    """Returns how several images are written; of several ways, the most frequent ones in one name."""
    several = list(formats)
    counts = Counter(several)
    names = [written.name for written, _ in counts.most_common(3)]
    quantizers = [one.quantizer for one in several if one.quantizer is not None]
    return Format(
        " and ".join(names),
        lossy=any(written.lossy for written in counts),
        quantizer=round(median(quantizers)) if quantizers else None,
    )
