"""Images of a study side by side, as one picture."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from textwrap import wrap

from PIL import Image, ImageChops, ImageDraw, ImageFont

from sdopt.record.files import inside
from sdopt.record.images import is_replaced, open_image
from sdopt.record.scores import ImageRecord
from sdopt.report.columns import TableView, compared, images_cell, memory_text
from sdopt.report.summary import Summary
from sdopt.report.tables import worst_by_metric
from sdopt.statistics.rows import Row
from sdopt.statistics.words import seconds_text, unit_text

_CELL = 160

_STEP = _CELL + 8
"""Width of a column, and height of a row: an image and the gap beside it."""

_SIDE = 150

_LINE = 17
"""Height of a line of text."""

_LETTERS_IN_CELL = 20
"""Letters of a line in the width of an image: about 7 pixels each."""

_AMPLIFIED = 16

_LETTERS = str.maketrans({"×": "x", "−": "-"})
"""Replacements for characters that Pillow's own font does not have."""

_Picture = Image.Image | None
"""An image; None where there is none."""

_Row = tuple[str, Sequence[_Picture]]
"""The title of a row of images, and an image for each column."""


def comparison_sheet(
    summary: Summary,
    folder: Path,
    prompts: int = 6,
) -> bytes | None:
    """Draws a PNG with a column per variant, and two rows for each of some images: the image and its difference.

    The difference is that to the image of the variant's reference, amplified. Below each column are its figures against
    the same reference, that of its first comparison. The repeated baseline is left out: its images are the baseline's.
    `prompts` images of each variant are shown, those of the prompts that lost most by some metric first; None if no
    variant has any.
    """
    columns = [row for row in summary.rows if row.variant.images]
    columns.sort(key=lambda row: not row.is_baseline)
    if not columns:
        return None
    rows: list[_Row] = []
    lost = worst_by_metric(summary.result)
    shown = sorted(
        columns[0].variant.images, key=lambda image: -lost[image.prompt_index]
    )
    for record in shown[:prompts]:
        records: dict[str, ImageRecord | None] = {}
        images: dict[str, _Picture] = {}
        for column in columns:
            image = column.variant.image(record.prompt_index, record.image_index)
            records[column.name] = image
            images[column.name] = _opened(folder, image)
        cells = list(map(_cell, images.values()))
        rows.append((record.prompt, cells))
        if len(columns) == 1:
            continue
        differences = []
        for column in columns:
            mine = records[column.name]
            theirs = records.get(column.reference)
            other = images.get(column.reference)
            if not summary.result.is_imported and not _same_noise(mine, theirs):
                other = None  # the difference would be that of the noise
            difference = _difference(images[column.name], other)
            differences.append(_cell(difference))
        title = f"difference, amplified {_AMPLIFIED} times"
        rows.append((title, differences))
    heads = [compared(summary.result, column) for column in columns]
    return _draw(heads, rows, _feet(columns))


def _feet(columns: Sequence[Row]) -> dict[str, list[str]]:
    """Returns the figures below the columns: for each line its title, and one figure per column."""
    judged = any(column.has_verdict for column in columns)
    view = TableView(judged=judged)
    unit = unit_text(any(column.per_image for column in columns))
    lines = {
        f"time{unit}": [
            seconds_text(column.time) if column.time else "" for column in columns
        ],
        f"speed-up{unit}": [
            column.speedup.text if column.speedup else "" for column in columns
        ],
        "memory": [memory_text(column) for column in columns],
        "images": [str(images_cell(column, view)) for column in columns],
    }
    for title, cells in [*lines.items()]:
        if not any(cells):
            del lines[title]
    return lines


def _draw(
    heads: Sequence[str],
    rows: Sequence[_Row],
    feet: Mapping[str, Sequence[str]],
) -> bytes:
    """Draws a grid of images with heads, titles of rows and lines below; a missing image leaves a gap."""
    wrapped = [wrap(head, _LETTERS_IN_CELL) for head in heads]
    tallest = max(map(len, wrapped))
    top = 10 + _LINE * tallest
    bottom = top + len(rows) * _STEP
    width = _SIDE + len(heads) * _STEP
    height = bottom + _LINE * len(feet)
    if feet:
        height += 4
    sheet = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(sheet)
    pen.font = ImageFont.load_default(13)
    columns = range(_SIDE, width, _STEP)
    for x, lines in zip(columns, wrapped, strict=True):
        text = "\n".join(lines)
        pen.text((x, 4), text, fill="black", spacing=1)
    for number, (title, images) in enumerate(rows):
        y = top + number * _STEP
        lines = wrap(title, _LETTERS_IN_CELL)
        lines = lines[: _CELL // _LINE]
        text = "\n".join(lines)
        pen.text((4, y), text, fill="black", spacing=1)
        for x, image in zip(columns, images, strict=True):
            if image is not None:
                sheet.paste(image, (x, y))
    for number, (title, cells) in enumerate(feet.items()):
        y = bottom + number * _LINE
        pen.text((4, y), title.translate(_LETTERS), fill="#5d6b79")
        for x, cell in zip(columns, cells, strict=True):
            pen.text((x, y), cell.translate(_LETTERS), fill="#0072b2")
    stream = BytesIO()
    sheet.save(stream, "PNG")
    return stream.getvalue()


def _opened(folder: Path, record: ImageRecord | None) -> _Picture:
    if record is None or is_replaced(folder, record):
        return None
    path = inside(folder, record.path)
    return open_image(path).convert("RGB")


def _same_noise(record: ImageRecord | None, other: ImageRecord | None) -> bool:
    if record is None or other is None:
        return False
    return record.seed == other.seed


def _difference(
    image: _Picture,
    other: _Picture,
) -> _Picture:
    if image is None or other is None:
        return None
    if image.size != other.size:
        return None
    difference = ImageChops.difference(image, other)
    return difference.point(lambda value: min(255, _AMPLIFIED * value))


def _cell(image: _Picture) -> _Picture:
    if image is None:
        return None
    method = Image.Resampling.LANCZOS
    if image.width < _CELL:  # enlarged pixel by pixel, so that nothing is smoothed away
        method = Image.Resampling.NEAREST
    return image.resize((_CELL, _CELL), method)
