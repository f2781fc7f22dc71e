"""Images of a study side by side, as one picture."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from textwrap import wrap

from PIL import Image, ImageChops, ImageDraw, ImageFont

from sdopt.record.files import inside
from sdopt.record.images import is_replaced, open_image
from sdopt.record.scores import ImageRecord
from sdopt.report.columns import TableView, images_cell
from sdopt.statistics.rows import Row
from sdopt.statistics.summary import Summary
from sdopt.statistics.words import compared, memory_text, seconds_text, unit_text

_CELL = 160

_GAP = 8

_SIDE = 150

_LINE = 17
"""Height of a line of text."""

_LETTERS_IN_CELL = 20
"""Letters of a line in the width of an image: about 7 pixels each."""

_AMPLIFIED = 16

_LETTERS = str.maketrans({"×": "x", "−": "-"})
"""Replacements for characters that Pillow's own font does not have."""

_Row = tuple[str, Sequence[Image.Image | None]]
"""The title of a row of images, and an image for each column."""


def comparison_sheet(summary: Summary, folder: Path, prompts: int = 6) -> bytes | None:
    """Draws a PNG with a column per variant, and two rows for each of the first images: the image and its difference.

    The difference is that to the image of the variant's reference, amplified. Below each column are its figures against
    the same reference, that of its first comparison. The repeated baseline is left out: its images are the baseline's.
    `prompts` images of each variant are shown; None if no variant has any.
    """
    plain_first = sorted(summary.rows, key=lambda row: not row.is_baseline)
    columns = [row for row in plain_first if row.variant.images]
    if not columns:
        return None
    rows: list[_Row] = []
    for record in columns[0].variant.images[:prompts]:
        records: dict[str, ImageRecord | None] = {}
        images: dict[str, Image.Image | None] = {}
        for column in columns:
            image = column.variant.image(record.prompt_index, record.image_index)
            records[column.name] = image
            images[column.name] = _opened(folder, image)
        rows.append((record.prompt, list(map(_cell, images.values()))))
        if len(columns) > 1:
            differences = []
            for column in columns:
                other = images.get(column.reference)
                mine, theirs = records[column.name], records.get(column.reference)
                if not (summary.result.is_imported or _same_noise(mine, theirs)):
                    other = None  # the difference would be that of the noise
                differences.append(_difference(images[column.name], other))
            rows.append(
                (
                    f"difference, amplified {_AMPLIFIED} times",
                    list(map(_cell, differences)),
                )
            )
    heads = [compared(summary.result, column) for column in columns]
    return _draw(heads, rows, _feet(columns))


def _feet(columns: Sequence[Row]) -> list[tuple[str, list[str]]]:
    """Returns the figures below the columns: for each line its title, and one figure per column."""
    look = TableView(judged=any(column.has_verdict for column in columns))
    unit = unit_text(any(column.per_image for column in columns))
    lines: dict[str, list[str]] = {}
    for column in columns:
        cells = {
            f"time{unit}": seconds_text(column.time) if column.time else "",
            f"speed-up{unit}": column.speedup.text if column.speedup else "",
            "memory": memory_text(column),
            "images": str(images_cell(column, look)),
        }
        for title, cell in cells.items():
            lines.setdefault(title, []).append(cell)
    return [(title, cells) for title, cells in lines.items() if any(cells)]


def _draw(
    heads: Sequence[str],
    rows: Sequence[_Row],
    feet: Sequence[tuple[str, Sequence[str]]],
) -> bytes:
    """Draws a grid of images with heads, titles of rows and lines below; a missing image leaves a gap."""
    font = ImageFont.load_default(13)
    wrapped = [wrap(head, _LETTERS_IN_CELL) for head in heads]
    top = 10 + _LINE * max(len(lines) for lines in wrapped)
    bottom = top + len(rows) * (_CELL + _GAP)
    sheet = Image.new(
        "RGB",
        (
            _SIDE + len(heads) * (_CELL + _GAP),
            bottom + _LINE * len(feet) + 4 * bool(feet),
        ),
        "white",
    )
    pen = ImageDraw.Draw(sheet)
    for x, lines in enumerate(wrapped):
        pen.text(
            (_SIDE + x * (_CELL + _GAP), 4),
            "\n".join(lines),
            fill="black",
            font=font,
            spacing=1,
        )
    for y, (title, images) in enumerate(rows):
        at = top + y * (_CELL + _GAP)
        lines = wrap(title, _LETTERS_IN_CELL)[: _CELL // _LINE]
        pen.text((4, at), "\n".join(lines), fill="black", font=font, spacing=1)
        for x, image in enumerate(images):
            if image is not None:
                sheet.paste(image, (_SIDE + x * (_CELL + _GAP), at))
    for y, (title, cells) in enumerate(feet):
        at = bottom + y * _LINE
        pen.text((4, at), title.translate(_LETTERS), fill="#5d6b79", font=font)
        for x, cell in enumerate(cells):
            pen.text(
                (_SIDE + x * (_CELL + _GAP), at),
                cell.translate(_LETTERS),
                fill="#0072b2",
                font=font,
            )
    stream = BytesIO()
    sheet.save(stream, "PNG")
    return stream.getvalue()


def _opened(folder: Path, record: ImageRecord | None) -> Image.Image | None:
    if record is None or is_replaced(folder, record):
        return None
    return open_image(inside(folder, record.path)).convert("RGB")


def _same_noise(record: ImageRecord | None, other: ImageRecord | None) -> bool:
    return record is not None and other is not None and record.seed == other.seed


def _difference(
    image: Image.Image | None, other: Image.Image | None
) -> Image.Image | None:
    if image is None or other is None or image.size != other.size:
        return None
    return ImageChops.difference(image, other).point(
        lambda value: min(255, _AMPLIFIED * value)
    )


def _cell(image: Image.Image | None) -> Image.Image | None:
    if image is None:
        return None
    # Small images are enlarged pixel by pixel, so that nothing is smoothed away.
    method = (
        Image.Resampling.NEAREST if image.width < _CELL else Image.Resampling.LANCZOS
    )
    return image.resize((_CELL, _CELL), method)
