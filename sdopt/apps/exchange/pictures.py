"""Reads tables, and folders of images that any engine wrote.

Who made an image tells its prompt, seed and settings in a table beside it, or in the image itself (`metadata`).
"""

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sdopt.apps.exchange.formats import Format, format_of
from sdopt.apps.exchange.logs import origins_logged
from sdopt.apps.exchange.metadata import Origin, origin_from, origin_of
from sdopt.apps.exchange.own import origins_in
from sdopt.apps.exchange.texts import json_object, text_beside
from sdopt.errors import UsageError
from sdopt.quality.images import SUFFIXES, image_files, read_image
from sdopt.record.files import short_digest
from sdopt.record.images import open_image
from sdopt.text_files import read_text

# ---- tables: `.csv` with a line of names, or `.jsonl` with an object on each line ------------------------------------


@dataclass(frozen=True)
class ImportedRow:
    """One row of a table; names of columns are in lower case.

    Every method takes several names of a column, of which the first one that the table has counts.
    """

    place: str
    values: dict[str, Any]

    def text(self, *names: str) -> str | None:
        """Returns a text; None where the table has none."""
        value = next(
            (
                self.values[name]
                for name in names
                if self.values.get(name) not in (None, "")
            ),
            None,
        )
        return None if value is None else str(value)

    def need(self, *names: str) -> str:
        """Returns a text that each row must have. Raises UsageError if it is missing."""
        value = self.text(*names)
        if value is None:
            columns = ", ".join(self.values) or "none"
            raise UsageError(f"{self.place}: no {names[0]}; columns: {columns}")
        return value

    def number(self, *names: str) -> float | None:
        """Returns a finite number; None where the table has none. Raises UsageError if it is something else."""
        text = self.text(*names)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            advice = (
                f" (write {text.replace(',', '.')})" if text.count(",") == 1 else ""
            )
            raise UsageError(
                f"{self.place}: {names[0]} is '{text}', which is not a number{advice}"
            )
        return value

    def whole(self, *names: str) -> int | None:
        """Returns a whole number, of any length as seeds are; None where the table has none. Raises UsageError."""
        text = self.text(*names)
        try:
            return (
                None if text is None else int(text.removesuffix(".0"))
            )  # as pandas writes it beside empty cells
        except ValueError:
            raise UsageError(
                f"{self.place}: {names[0]} is '{text}', which is not a whole number"
            ) from None


def columns_of(rows: Iterable[ImportedRow]) -> list[str]:
    """Returns the names of all columns of a table, each once."""
    columns: dict[str, None] = {}
    for row in rows:
        columns |= dict.fromkeys(row.values)
    return list(columns)


def read_table(file: Path) -> list[ImportedRow]:
    """Returns the rows of a table. Raises UsageError if it cannot be read, is empty, or a row has too many values."""
    try:
        text = read_text(file)
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror})") from error
    rows = list(
        _json_rows(file, text)
        if file.suffix.lower() == ".jsonl"
        else _csv_rows(file, text)
    )
    if not rows:
        raise UsageError(f"{file}: has no rows")
    return rows


def _csv_rows(file: Path, text: str) -> list[ImportedRow]:
    head = text.partition("\n")[0]
    delimiter = next((sign for sign in ",;\t" if sign in head), ",")
    # A prompt may hold what `str.splitlines` takes for the end of a line.
    reader = csv.DictReader(
        io.StringIO(text, newline=""), strict=True, delimiter=delimiter
    )
    try:
        rows = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise UsageError(f"{file}:{reader.line_num}: {error}") from error
    if twice := repeated(
        name.strip().lower() for name in reader.fieldnames or () if name.strip()
    ):
        raise UsageError(
            f"{file}: has several columns of the name {twice}; keep one of them"
        )
    imported = []
    for line, row in rows:
        if None in row or None in row.values():
            raise UsageError(
                f"{file}:{line}: has not as many values as there are names; quote values with commas"
            )
        values = {name.strip().lower(): value for name, value in row.items()}
        imported.append(ImportedRow(f"{file}:{line}", values))
    return imported


def _json_rows(file: Path, text: str) -> list[ImportedRow]:
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{file}:{number}: {error}") from error
        if not isinstance(row, dict):
            raise UsageError(f"{file}:{number}: is not an object")
        rows.append(
            ImportedRow(
                f"{file}:{number}",
                {str(name).strip().lower(): value for name, value in row.items()},
            )
        )
    return rows


# ---- pictures --------------------------------------------------------------------------------------------------------

_SIDE = 16
"""Side in pixels to which images are reduced to see whether they show the same."""

_TABLES = ("prompts.csv", "prompts.jsonl", "metadata.csv", "metadata.jsonl")
"""Tables beside images; Hugging Face's image folders have the last two."""

_LISTS = ("prompts.json", "metadata.json")
"""Documents that scripts write beside images: one that lists them is a table, and any other says nothing."""

_OF_ALL = ("metadata.json", "settings.json", "args.json", "params.json", "config.json")
"""Documents in which scripts write once what all images of a folder were made with."""

_FILE_COLUMNS = ("file", "file_name", "filename", "image")


class Looks(NamedTuple):
    """What an image shows, however its file is written.

    `size` is its width and height in pixels, `reduced` a small copy in which the same motif looks the same, `pixels` a
    digest of all pixels; `plain` says that they have one colour, as images have that a safety checker blocked, and
    `black_and_white` that they have these two, as masks do.
    """

    size: tuple[int, int]
    reduced: np.ndarray
    pixels: str
    plain: bool
    black_and_white: bool


@dataclass(frozen=True)
class ImportedPicture:
    """One image, what it was made from, and how it is written; a prompt or seed is None where nobody tells it."""

    file: Path
    origin: Origin = field(default_factory=Origin)
    written: Format = field(default_factory=Format)

    @property
    def prompt(self) -> str | None:
        """Its prompt; None where nobody tells it."""
        return self.origin.prompt

    @property
    def negative(self) -> str:
        """Its negative prompt."""
        return self.origin.negative

    @property
    def seed(self) -> int | None:
        """Its seed; None where nobody tells it."""
        return self.origin.seed

    @cached_property
    def looks(self) -> Looks:
        """What it shows."""
        from PIL import Image

        pixels = read_image(self.file)
        image = Image.fromarray(pixels)
        reduced = image.resize((_SIDE, _SIDE), Image.Resampling.BOX)
        plain = bool((pixels == pixels[0, 0]).all())
        return Looks(
            image.size,
            np.asarray(reduced, dtype=np.float64).reshape(-1),
            short_digest(pixels.tobytes()),
            plain,
            not plain and _is_black_and_white(pixels),
        )

    @property
    def made_from(self) -> tuple[str | None, str, int] | None:
        """Its prompts and seed; None where the seed is not known."""
        return None if self.seed is None else (self.prompt, self.negative, self.seed)


def _is_black_and_white(pixels: np.ndarray) -> bool:
    grey = (pixels == pixels[..., :1]).all()
    return bool(grey and np.isin(pixels[..., 0], (0, 255)).all())


def read_folder(folder: Path) -> list[ImportedPicture]:
    """Returns the images of a folder with what is known of each, sorted by file name.

    Raises:
        UsageError: there is no image, two files have one name but for the suffix, or a table beside them does not fit.
    """
    files = image_files(folder)
    if twice := repeated(file.stem for file in files):
        raise UsageError(
            f"{folder}: several images are named {twice}; keep one of them"
        )
    recorded = origins_logged(folder) | origins_in(folder)
    table, listed_rows = _table_in(folder)
    of_all = _of_all(folder)
    if table is None:
        return [
            _as_it_says(file, None, recorded.get(file.name, of_all)) for file in files
        ]
    rows = [(Path(row.need(*_FILE_COLUMNS)).name, row) for row in listed_rows]
    by_name, there = dict(rows), {file.name for file in files}
    if twice := repeated(name for name, _ in rows):
        raise UsageError(
            f"{table}: {twice} is listed several times; list each image of the folder once"
        )
    if lacking := sorted(by_name.keys() ^ there):
        what = (
            "is listed, and is not there" if lacking[0] in by_name else "is not listed"
        )
        raise UsageError(
            f"{table}: {lacking[0]} {what}; list each image of the folder once"
        )
    pictures = []
    for file in files:
        row = by_name[file.name]
        row.whole(
            "seed"
        )  # a table is written to be read, so what it says wrongly is an error
        listed = origin_from("table", row.values)
        pictures.append(_as_it_says(file, listed, recorded.get(file.name, of_all)))
    return pictures


def _of_all(folder: Path) -> Origin | None:
    """Returns the settings that a document tells of all images in a folder; None without one."""
    for name in _OF_ALL:
        told = origin_from("JSON", json_object(text_beside(folder / name)))
        if told.settings:
            return Origin("JSON", settings=told.settings, others=told.others)
    return None


def unread_below(folders: Sequence[Path]) -> Iterator[str]:
    """Yields a line for each of some folders within which further folders hold images, which are not read."""
    resolved = {folder.resolve() for folder in folders}
    for folder in folders:
        counts: dict[str, int] = {}
        for below in sorted(folder.iterdir()):
            if below.name.startswith(".") or below.resolve() in resolved:
                continue
            count = _images_in(below)
            if count:
                counts[below.name] = count
        if counts:
            named = ", ".join([*counts][:3]) + (", …" if len(counts) > 3 else "")
            yield f"{folder}: {sum(counts.values())} images in its folders ({named}) are not read"


def _images_in(folder: Path) -> int:
    try:
        names = [file.suffix.lower() for file in folder.iterdir()]
    except OSError:  # no folder, or another user's
        return 0
    return sum(suffix in SUFFIXES for suffix in names)


def _table_in(folder: Path) -> tuple[Path | None, list[ImportedRow]]:
    """Returns the table beside a folder's images, and its rows; none without one. Raises UsageError as `read_table`."""
    for name in _TABLES:
        if (folder / name).is_file():
            return folder / name, read_table(folder / name)
    for name in _LISTS:
        if rows := _listed_rows(folder / name):
            return folder / name, rows
    return None, []


def _listed_rows(file: Path) -> list[ImportedRow]:
    """Returns the rows of a JSON document that is a list of images, or has an object for each; [] of any other."""
    try:
        content = json.loads(read_text(file)) if file.is_file() else None
    except (OSError, UsageError, ValueError, RecursionError):
        return []
    if isinstance(content, dict):
        content = [
            {_FILE_COLUMNS[0]: name, **values}
            for name, values in content.items()
            if isinstance(values, dict) and name.lower().endswith(SUFFIXES)
        ]
    rows = []
    for number, item in enumerate(content if isinstance(content, list) else (), 1):
        values = item if isinstance(item, dict) else {}
        plain = {str(name).strip().lower(): value for name, value in values.items()}
        row = ImportedRow(f"{file}: item {number}", plain)
        if row.text(*_FILE_COLUMNS) is None:
            return []
        rows.append(row)
    return rows


def _as_it_says(
    file: Path, listed: Origin | None, own: Origin | None
) -> ImportedPicture:
    """Returns an image with what the program that wrote it left in the file; what a table lists counts more.

    `own` is what a run of sdopt or another program's log records of it, where nothing is left in the file.
    """
    image = open_image(file)
    origin = origin_of(image, file)
    if own is not None and origin.seed is None and not origin.settings:
        origin = own
    if listed is not None:
        origin = _as_listed(origin, listed)
    return ImportedPicture(file, origin, format_of(image, file))


def _as_listed(origin: Origin, listed: Origin) -> Origin:
    """Returns what is known of an image that a table lists; its own seed is told beside the table's."""
    others = {**origin.others, **listed.others}
    if None not in (origin.seed, listed.seed):
        others["seed in the image"] = str(origin.seed)
    return Origin(
        origin.program or listed.program,
        listed.prompt if listed.prompt is not None else origin.prompt,
        listed.negative or origin.negative,
        listed.seed if listed.seed is not None else origin.seed,
        {**origin.settings, **listed.settings},
        others,
        origin.version,
        origin.wiring,
        origin.batch,
    )


def repeated(values: Iterable[Any]) -> Any:
    """Returns a value that occurs several times; None if there is none."""
    return next((value for value, count in Counter(values).items() if count > 1), None)
