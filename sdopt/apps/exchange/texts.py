"""Finds the texts that programs leave in an image's chunks, in EXIF or XMP, and in files beside it."""

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

_USER_COMMENT, _EXIF, _SOFTWARE = 0x9286, 0x8769, 0x0131

_LONGEST_TEXT = 4_000_000
"""Characters of a text beside an image that are read: graphs of ComfyUI have some hundred thousand."""


def texts_of(image: "Image") -> Iterator[tuple[str, str]]:
    """Yields the texts in an image by name, in lower case."""
    for key, value in image.info.items():
        name, text = str(key).lower(), value
        if isinstance(value, bytes) and name in ("comment", "xmp"):
            text = value.decode("utf-8", errors="replace")
        elif isinstance(value, str):
            text = _in_utf8(value)
        if isinstance(text, str):
            yield name, text
            if name in ("xmp", "xml:com.adobe.xmp"):
                yield from _of_xmp(text)
    yield from _of_exif(image)


def _of_exif(image: "Image") -> Iterator[tuple[str, str]]:
    """Yields the texts in an image's EXIF."""
    try:
        exif = image.getexif()
        tags = [*exif.items(), *exif.get_ifd(_EXIF).items()]
    except Exception:  # damaged tags raise whatever their parser meets
        return
    for tag, value in tags:
        if tag == _USER_COMMENT:
            yield "usercomment", _comment(value)
        elif isinstance(value, str) and _SETTINGS_IN_EXIF.search(value):
            yield "usercomment", value
        elif isinstance(value, str):  # ComfyUI's WebP
            name, _, text = value.partition(":")
            if name.lower() in ("prompt", "workflow"):
                yield name.lower(), text
            elif tag == _SOFTWARE:
                yield "software", value


_SETTINGS_IN_EXIF = re.compile(r"^\s*\{|(?m:^)Steps: \d")
"""How settings are told in tags of any name: in JSON, as SwarmUI wrote them long ago, or as A1111 writes them."""


def _in_utf8(text: str) -> str:
    """Returns the text of a chunk that is Latin-1 by the standard, and UTF-8 as stable-diffusion.cpp writes it."""
    try:
        return text.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return text


def _comment(value: Any) -> str:
    """Returns the user comment of EXIF, which begins with the name of its encoding; that does not say its order."""
    if isinstance(value, str):
        return value
    if not isinstance(value, bytes):
        return ""
    kind, text = value[:8], value[8:]
    if kind.startswith(b"UNICODE"):
        return text.decode(_encoding(text), errors="replace").strip("\0")
    if kind.startswith((b"ASCII", b"\0\0\0\0\0\0\0\0")):
        return text.decode("utf-8", errors="replace").strip("\0")
    return value.decode("utf-8", errors="replace").strip("\0")


def _encoding(text: bytes) -> str:
    """Returns how a comment is encoded that says Unicode alone; some write UTF-8 there."""
    if text[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "utf-16"
    if 0 not in text.rstrip(b"\0"):
        return "utf-8"
    # Settings are written in ASCII, whose upper bytes are zero.
    big = text[::2].count(0) >= text[1::2].count(0)
    return "utf-16-be" if big else "utf-16-le"


_COMMENT = "exif:UserComment"

_IN_XMP = (
    ("description", "dc:description"),
    ("usercomment", _COMMENT),
    ("parameters", "sdcpp:parameters"),
)


def _of_xmp(text: str) -> Iterator[tuple[str, str]]:
    """Yields the texts of XMP: its description, its user comment as Draw Things writes it, stable-diffusion.cpp's line."""
    for name, tag in _IN_XMP:
        match = re.search(rf"(?s)<{tag}>(.*?)</{tag}>", text)
        if match:
            yield name, html.unescape(re.sub(r"<[^>]*>", "", match[1])).strip()
        elif tag == _COMMENT and (match := re.search(rf'{tag}="([^"]*)"', text)):
            yield name, html.unescape(match[1])


def text_beside(file: Path) -> str:
    """Returns the text of a file beside an image, with lines that end as in an image; "" without one."""
    try:
        raw = file.read_bytes()[:_LONGEST_TEXT] if file.is_file() else b""
    except OSError:
        return ""
    text = raw.decode(
        "utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig",
        errors="replace",
    )
    return text.replace("\r\n", "\n")


def json_object(text: Any) -> dict[str, Any]:
    """Returns the object of a text in JSON; an empty one for anything else."""
    if not isinstance(text, str) or not text.lstrip().startswith("{"):
        return {}
    try:
        value = json.loads(text.strip("\0"))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
