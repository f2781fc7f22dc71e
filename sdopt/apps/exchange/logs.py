"""Reads the logs that programs keep beside their images: Fooocus' `log.html`, and A1111's `log.csv` of saved images.

Fooocus leaves nothing in its images unless it is asked to. What cannot be read says nothing, as in `metadata`.
"""

import csv
import html
import io
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from sdopt.apps.exchange.metadata import Origin, origin_from, with_loras
from sdopt.errors import UsageError
from sdopt.text_files import read_text


def origins_logged(folder: Path) -> dict[str, Origin]:
    """Returns by file name what logs in a folder say of its images."""
    origins: dict[str, Origin] = {}
    for name, values in _of_fooocus(_text(folder / "log.html")):
        origins[name] = origin_from("Fooocus", values)
    for name, values in _of_web_ui(_text(folder / "log.csv")):
        origins[name] = origin_from("A1111", values)
    return origins


def _text(file: Path) -> str:
    try:
        return read_text(file) if file.is_file() else ""
    except (OSError, UsageError):
        return ""


_IMAGE = re.compile(r"""<img src=['"]([^'"]+)['"]""")

_COPIED = re.compile(r"to_clipboard\('([^']+)'\)")
"""The values as JSON, which a button copies; early versions have no such button."""

_ROW = re.compile(
    r"(?s)<td class='label'>(.*?)</td>\s*<td class='value'>(.*?)</td>|([A-Z][^:<>]*): <b>(.*?)</b>"
)


def _of_fooocus(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the file and the values of each image; every one has a block that begins with its picture."""
    places = [match.start() for match in _IMAGE.finditer(text)]
    for begin, end in pairwise([*places, len(text)]):
        block = text[begin:end]
        picture = _IMAGE.match(block)
        assert picture is not None
        values = _copied(block) or _rows(block)
        if values:
            yield Path(picture[1]).name, with_loras(values)


def _copied(block: str) -> dict[str, Any]:
    button = _COPIED.search(block)
    if button is None:
        return {}
    try:
        values = json.loads(unquote(button[1]))
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _rows(block: str) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for label, value, early_label, early_value in _ROW.findall(block):
        rows[html.unescape(label or early_label).strip()] = html.unescape(
            value or early_value
        ).strip()
    return rows


def _of_web_ui(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        rows = list(csv.DictReader(io.StringIO(text, newline="")))
    except csv.Error:
        return
    for row in rows:
        if row.get("filename") and row.get("seed"):
            values = {
                str(key): value for key, value in row.items() if isinstance(value, str)
            }
            yield Path(row["filename"]).name, {**values, "cfg": values.pop("cfgs", "")}
