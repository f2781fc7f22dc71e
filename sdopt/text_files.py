"""Reads a user's text as Windows and others write it; imports nothing heavy."""

import codecs
import re
from collections.abc import Mapping
from pathlib import Path

from sdopt.errors import UsageError

_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class NotUtf8Error(ValueError):
    """Why bytes are no text; it ends with the way out."""


def decoded(content: bytes) -> str:
    """Returns text in UTF-8, without the byte order mark that Windows may put before it; ends of lines stay.

    Raises:
        NotUtf8Error: it is of another encoding, or no text.
    """
    if content.startswith(_UTF_16):
        raise NotUtf8Error("is UTF-16, as PowerShell's > writes it; save it as UTF-8")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise NotUtf8Error(
            f"is not UTF-8 (line {line} has the byte {content[error.start]:#04x}); save it as UTF-8"
        ) from error
    if "\0" in text:
        raise NotUtf8Error("is no plain text (it holds zero bytes); save it as UTF-8")
    return text


def read_text(file: Path) -> str:
    """Returns what a text file holds, as `decoded` does. Raises UsageError, which names the file, or OSError."""
    try:
        return decoded(file.read_bytes())
    except NotUtf8Error as error:
        raise UsageError(f"{file}: {error}") from error


def first_match(table: Mapping[str, str], text: str, otherwise: str = "") -> str:
    """Returns what stands beside the first pattern of a table that is found in a text; `otherwise` if none is."""
    for pattern, meaning in table.items():
        if re.search(pattern, text):
            return meaning
    return otherwise
