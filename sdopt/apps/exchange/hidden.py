"""Reads the text that NovelAI and extensions of A1111 and ComfyUI hide in the lowest bits of an image's pixels.

It stays where texts beside the pixels were stripped. The form is that of `sd-webui-stealth-pnginfo`: a signature, the
length of the text in bits, and the text, column by column; in the alpha channel, or in the three colours.
"""

import zlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

_SIGNATURES = {
    b"stealth_pnginfo": False,
    b"stealth_pngcomp": True,
    b"stealth_rgbinfo": False,
    b"stealth_rgbcomp": True,
}
"""How a hidden text begins, and whether it is compressed by gzip."""

_SIGNED, _LENGTH = 15, 4
"""Bytes of a signature, and of the length that follows it."""

_LONGEST = 4_000_000
"""Characters of a text that are read."""

_GZIP = 31
"""The window of zlib for what gzip writes."""


def hidden_text(image: "Image") -> str:
    """Returns the text that is hidden in an image; "" if there is none, or it is damaged."""
    if image.mode not in ("RGB", "RGBA"):
        return ""
    pixels = np.asarray(image)
    channels = [pixels[..., :3]]
    if image.mode == "RGBA":
        channels.append(pixels[..., 3:])
    for values in channels:
        columns = values.transpose(1, 0, 2).reshape(-1)
        compressed = _SIGNATURES.get(_bytes_in(columns, 0, _SIGNED))
        if compressed is not None:
            return _text_in(columns, compressed)
    return ""


def _text_in(columns: np.ndarray, compressed: bool) -> str:
    bits = int.from_bytes(_bytes_in(columns, _SIGNED, _LENGTH), "big")
    content = _bytes_in(columns, _SIGNED + _LENGTH, bits // 8)
    if compressed:
        try:
            content = zlib.decompressobj(_GZIP).decompress(content, _LONGEST)
        except zlib.error:
            return ""
    return content[:_LONGEST].decode("utf-8", errors="replace")


def _bytes_in(columns: np.ndarray, first: int, count: int) -> bytes:
    """Returns bytes of which each value's lowest bit is one bit, the highest first."""
    values = columns[8 * first : 8 * (first + count)]
    return np.packbits(values & 1).tobytes()
