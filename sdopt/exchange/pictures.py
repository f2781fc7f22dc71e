"""Reads tables, and folders of images that any engine wrote; finds which image of one belongs to which of another.

Who made an image tells its prompt and seed in a table beside it, or in the image itself, as A1111's web UI and ComfyUI
do. Where nobody tells, images belong together by their file names.
"""

import csv
import io
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from sdopt.errors import UsageError
from sdopt.quality.images import image_files, read_image
from sdopt.record.images import open_image
from sdopt.text_files import read_text

# ---- tables: `.csv` with a line of names, or `.jsonl` with an object on each line ------------------------------------


@dataclass(frozen=True)
class Row:
    """One row of a table; names of columns are in lower case.

    Every method takes several names of a column, of which the first one that the table has counts.
    """

    place: str
    values: dict[str, Any]

    def text(self, *names: str) -> str | None:
        """Returns a text; None where the table has none."""
        found = next((self.values[name] for name in names if self.values.get(name) not in (None, "")), None)
        return None if found is None else str(found)

    def need(self, *names: str) -> str:
        """Returns a text that each row must have. Raises UsageError if it is missing."""
        found = self.text(*names)
        if found is None:
            columns = ", ".join(self.values) or "none"
            raise UsageError(f"{self.place}: no {names[0]}; columns: {columns}")
        return found

    def number(self, *names: str) -> float | None:
        """Returns a finite number; None where the table has none. Raises UsageError if it is something else."""
        found = self.text(*names)
        if found is None:
            return None
        try:
            value = float(found)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            advice = f" (write {found.replace(',', '.')})" if found.count(",") == 1 else ""
            raise UsageError(f"{self.place}: {names[0]} is '{found}', which is not a number{advice}")
        return value

    def whole(self, *names: str) -> int | None:
        """Returns a whole number, of any length as seeds are; None where the table has none. Raises UsageError."""
        found = self.text(*names)
        try:
            return None if found is None else int(found.removesuffix(".0"))  # as pandas writes it beside empty cells
        except ValueError:
            raise UsageError(f"{self.place}: {names[0]} is '{found}', which is not a whole number") from None


def read_table(file: Path) -> list[Row]:
    """Returns the rows of a table. Raises UsageError if it cannot be read, is empty, or a row has too many values."""
    try:
        text = read_text(file)
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror})") from error
    rows = list(_json_rows(file, text) if file.suffix.lower() == ".jsonl" else _csv_rows(file, text))
    if not rows:
        raise UsageError(f"{file}: has no rows")
    return rows


def _csv_rows(file: Path, text: str) -> list[Row]:
    head = text.partition("\n")[0]
    delimiter = next((each for each in ",;\t" if each in head), ",")
    # A prompt may hold what `str.splitlines` takes for the end of a line.
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True, delimiter=delimiter)
    try:
        rows = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise UsageError(f"{file}:{reader.line_num}: {error}") from error
    if twice := repeated(name.strip().lower() for name in reader.fieldnames or () if name.strip()):
        raise UsageError(f"{file}: has several columns of the name {twice}; keep one of them")
    for line, row in rows:
        if None in row or None in row.values():
            raise UsageError(f"{file}:{line}: has not as many values as there are names; quote values with commas")
    return [Row(f"{file}:{line}", {name.strip().lower(): value for name, value in row.items()}) for line, row in rows]


def _json_rows(file: Path, text: str) -> list[Row]:
    found = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{file}:{number}: {error}") from error
        if not isinstance(row, dict):
            raise UsageError(f"{file}:{number}: is not an object")
        found.append(Row(f"{file}:{number}", {str(name).strip().lower(): value for name, value in row.items()}))
    return found


# ---- pictures --------------------------------------------------------------------------------------------------------

_SIDE = 16
"""Side in pixels to which images are reduced to see whether they show the same."""

_TABLES = ("prompts.csv", "prompts.jsonl", "metadata.csv", "metadata.jsonl")
"""Tables beside images; Hugging Face's image folders have the last two."""

_USER_COMMENT, _EXIF = 0x9286, 0x8769

_A1111 = re.compile(r"(?s)(.*(?:^|\n))Steps: \d.*?\bSeed: (\d+)")
"""Prompts, and then settings on the last line that begins as they do: prompts may hold such words, too."""


@dataclass(frozen=True)
class Picture:
    """One image, and what it was made from; a prompt or seed is None where nobody tells it."""

    file: Path
    prompt: str | None = None
    seed: int | None = None
    negative: str = ""

    @cached_property
    def looks(self) -> tuple[tuple[int, int], np.ndarray]:
        """Its width and height in pixels, and a reduced copy in which the same motif looks the same."""
        from PIL import Image

        image = Image.fromarray(read_image(self.file))
        reduced = image.resize((_SIDE, _SIDE), Image.Resampling.BOX)
        return image.size, np.asarray(reduced, dtype=np.float64).reshape(-1)

    @property
    def made_from(self) -> tuple[str, str, int] | None:
        """Its prompts and seed; None where one of them is not known."""
        return None if self.prompt is None or self.seed is None else (self.prompt, self.negative, self.seed)


def read_folder(folder: Path) -> list[Picture]:
    """Returns the images of a folder with what is known of each, sorted by file name.

    Raises:
        UsageError: there is no image, two files have one name but for the suffix, or a table beside them does not fit.
    """
    files = image_files(folder)
    if twice := repeated(file.stem for file in files):
        raise UsageError(f"{folder}: several images are named {twice}; keep one of them")
    tables = [folder / name for name in _TABLES if (folder / name).is_file()]
    if not tables:
        return [_as_it_says(file) for file in files]
    rows = [(Path(row.need("file", "file_name", "filename", "image")).name, row) for row in read_table(tables[0])]
    by_name, there = dict(rows), {file.name for file in files}
    if twice := repeated(name for name, _ in rows):
        raise UsageError(f"{tables[0]}: {twice} is listed several times; list each image of the folder once")
    if lacking := sorted(by_name.keys() ^ there):
        what = "is listed, and is not there" if lacking[0] in by_name else "is not listed"
        raise UsageError(f"{tables[0]}: {lacking[0]} {what}; list each image of the folder once")
    return [
        Picture(
            file,
            row.text("prompt", "text", "caption"),
            row.whole("seed"),
            row.text("negative_prompt", "negative") or "",
        )
        for file in files
        for row in [by_name[file.name]]
    ]


def _as_it_says(file: Path) -> Picture:
    """Returns an image with the prompt and seed that the program which wrote it left in the file."""
    image = open_image(file)
    given = image.info.get("parameters") or _comment(image)
    if isinstance(given, str) and (made := _A1111.match(given)):
        prompt, _, negative = f"\n{made[1]}".partition("\nNegative prompt: ")
        return Picture(file, prompt.strip(), int(made[2]), negative.strip())
    try:
        graph = json.loads(image.info.get("prompt") or "{}")
    except ValueError:
        graph = {}
    return _of_graph(file, graph if isinstance(graph, dict) else {})


def _comment(image: Any) -> str | None:
    """Returns the comment that A1111's web UI leaves in JPEG and WebP files."""
    comment = image.getexif().get_ifd(_EXIF).get(_USER_COMMENT)
    if not isinstance(comment, bytes) or not comment.startswith(b"UNICODE\0"):
        return None
    return comment.removeprefix(b"UNICODE\0").decode("utf-16-be", errors="replace")


def _of_graph(file: Path, graph: dict[str, Any]) -> Picture:
    """Returns an image with what a graph of ComfyUI says; a graph of several samplers does not say which one it was."""
    found = {name: node.get("inputs") for name, node in graph.items() if isinstance(node, dict)}
    nodes = {name: inputs for name, inputs in found.items() if isinstance(inputs, dict)}

    def follow(value: Any, names: Sequence[str], depth: int = 0) -> Any:
        """Follows links from node to node until a plain value is found under one of the names."""
        if not (isinstance(value, list) and value and str(value[0]) in nodes):
            return value
        inputs = nodes[str(value[0])]
        given = next((inputs[name] for name in names if name in inputs), None)
        return None if depth > len(nodes) else follow(given, names, depth + 1)

    texts = ("text", "text_g", "conditioning", "string", "value")

    def made_from(inputs: dict[str, Any]) -> tuple[str | None, str, int | None]:
        prompt = follow(inputs["positive"], (*texts, "positive"))
        negative = follow(inputs.get("negative"), (*texts, "negative"))
        seed = follow(inputs.get("noise_seed", inputs.get("seed")), ("noise_seed", "seed", "value"))
        return (
            prompt if isinstance(prompt, str) else None,
            negative if isinstance(negative, str) else "",
            seed if isinstance(seed, int) else None,
        )

    samplers = [node for node in nodes.values() if "positive" in node and ("seed" in node or "noise_seed" in node)]
    origins = {made_from(inputs) for inputs in samplers}
    if len(origins) != 1:
        return Picture(file)
    prompt, negative, seed = origins.pop()
    return Picture(file, prompt, seed, negative)


def partners(first: Sequence[Picture], second: Sequence[Picture], folders: tuple[Path, Path]) -> list[Picture]:
    """Returns the second folder's images in the order of the first one's: by file name, else by prompt and seed.

    Raises:
        UsageError: an image has no partner, or one of the same name that was made from another prompt or seed.
    """
    if (named := _by_name(first, second)) is not None:
        for picture, partner in zip(first, named, strict=True):
            sides = picture.made_from, partner.made_from
            if None not in sides and sides[0] != sides[1]:
                raise UsageError(
                    f"{partner.file}: was made from another prompt or seed than {picture.file}; compare images of "
                    "the same prompts and seeds, or give the files of a pair the same name"
                )
        return named
    if None in [picture.made_from for picture in (*first, *second)]:
        names = {picture.file.stem for picture in first}
        alone = sorted(names ^ {picture.file.stem for picture in second})
        has, lacks = folders if alone[0] in names else folders[::-1]
        raise UsageError(
            f"{lacks}: has no image named {alone[0]}, as {has} has ({len(alone)} names are in one folder only). Give "
            "the files of a pair the same name, or list file, prompt and seed in a prompts.csv in both folders"
        )
    for folder, pictures in zip(folders, (first, second), strict=True):
        if twice := repeated(picture.made_from for picture in pictures):
            raise UsageError(f"{folder}: several images are of the seed {twice[2]} and the prompt '{twice[0]}'")
    by_origin = {picture.made_from: picture for picture in second}
    alone_of = {picture.made_from for picture in first} ^ by_origin.keys()
    if alone_of:
        prompt, _, seed = min(origin for origin in alone_of if origin is not None)
        raise UsageError(
            f"{folders[0]} and {folders[1]}: {len(alone_of)} images are in one folder only, as that of the seed {seed} "
            f"and the prompt '{prompt}'; compare the same prompts and seeds"
        )
    return [by_origin[picture.made_from] for picture in first]


def of_other_noise(first: Sequence[Picture], second: Sequence[Picture], folders: tuple[Path, Path]) -> list[Picture]:
    """Returns the second folder's images in the order of the first one's, where both are of the same prompts.

    Raises:
        UsageError: an image has no partner, or is the same in both folders.
    """
    found = _by_name(first, second)
    if found is None:
        by_prompt = {picture.prompt: picture for picture in second}
        prompts = [picture.prompt for picture in first]
        if None in prompts or repeated(prompts) or {*prompts} != by_prompt.keys() or len(by_prompt) < len(second):
            raise UsageError(
                f"{folders[0]} and {folders[1]}: which images are of the same prompt? Give them the same file name, or "
                "list file, prompt and seed in a prompts.csv in both folders"
            )
        found = [by_prompt[prompt] for prompt in prompts]
    for picture, partner in zip(first, found, strict=True):
        if None not in (picture.prompt, partner.prompt) and picture.prompt != partner.prompt:
            raise UsageError(f"{picture.file} and {partner.file}: are of different prompts")
        if np.array_equal(read_image(picture.file), read_image(partner.file)):
            raise UsageError(
                f"{picture.file} and {partner.file}: are the same image; a calibration needs the same prompts from "
                "other seeds"
            )
    return found


def _by_name(first: Sequence[Picture], second: Sequence[Picture]) -> list[Picture] | None:
    """Returns the second images in the order of the first ones, by file name; None if the names are not the same."""
    other = {picture.file.stem: picture for picture in second}
    names = [picture.file.stem for picture in first]
    return [other[name] for name in names] if {*names} == other.keys() else None


def repeated(values: Iterable[Any]) -> Any:
    """Returns a value that occurs several times; None if there is none."""
    return next((value for value, count in Counter(values).items() if count > 1), None)


_ALIKE = 0.9
"""Partners must differ by less than this share of what images that do not belong together differ by."""


def require_alike(first: Sequence[Picture], second: Sequence[Picture]) -> None:
    """Checks that partners show the same, as images from the same noise do.

    Raises:
        UsageError: they differ as much as images that do not belong together, and neither side shows one image alone.
    """
    if len(first) < 3:
        return
    mine, other = (np.stack([picture.looks[1] for picture in side]) for side in (first, second))

    def distance(these: np.ndarray, those: np.ndarray) -> float:
        return float(np.median(np.sqrt(np.mean((these - those) ** 2, axis=1))))

    apart = distance(mine, np.roll(other, 1, axis=0))
    varied = [distance(side, np.roll(side, 1, axis=0)) > apart / 4 for side in (mine, other)]
    if all(varied) and distance(mine, other) >= _ALIKE * apart:
        raise UsageError(
            f"{first[0].file.parent} and {second[0].file.parent}: no image looks like its partner, as if they were "
            "made from other noise. Compare images of the same prompts and seeds, made in the same size by the same "
            "sampler"
        )
