"""Images of a study side by side, as one picture."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from sdopt.analysis.figures import figures_by_variant, ratio_text
from sdopt.results.records import StudyResult, VariantResult

_CELL = 160

_GAP = 8

_HEAD = 50

_SIDE = 150


def comparison_sheet(result: StudyResult, folder: Path, rows: int = 8) -> bytes | None:
    """Draws a PNG with a row for each of the first images and a column per variant, headed by its speed-up.

    The A/A control is left out: its images are the baseline's.

    Args:
        result: the study.
        folder: the run's, where its images are.
        rows: how many images of each variant are shown.

    Returns:
        None where no variant has images.
    """
    columns = [variant for variant in result.variants if variant.images and variant.role != "control"]
    if not columns:
        return None
    shown = [
        (record.prompt, [_find(variant, record.prompt_index, record.image_index) for variant in columns])
        for record in columns[0].images[:rows]
    ]
    speedups = {name: figures.speedup for name, figures in figures_by_variant(result).items()}
    captions = [ratio_text(found.interval) if (found := speedups[variant.name]) else "" for variant in columns]
    return _draw([variant.name for variant in columns], captions, shown, folder)


def broken_sheet(result: StudyResult, folder: Path, rows: int = 12) -> bytes | None:
    """Draws a PNG of images that a tripwire caught, each beside the baseline's.

    Args:
        result: the study.
        folder: the run's, where its images are.
        rows: how many of them are shown.

    Returns:
        None where no image is broken.
    """
    baseline = result.variant(result.baseline)
    shown = []
    for variant in result.variants:
        for record in variant.images:
            wires = [trip.wire for trip in variant.trips if trip.path == record.path]
            if wires:
                beside = _find(baseline, record.prompt_index, record.image_index)
                shown.append((f"{variant.name}: {', '.join(wires)}: {record.prompt}", [beside, record.path]))
    return _draw(["baseline", "broken"], ["", ""], shown[:rows], folder) if shown else None


def _draw(
    heads: Sequence[str], captions: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], folder: Path
) -> bytes:
    """Draws a grid of images, whose paths are relative to the folder ("" leaves a gap), with heads and row titles."""
    width = _SIDE + len(heads) * (_CELL + _GAP)
    sheet = Image.new("RGB", (width, _HEAD + len(rows) * (_CELL + _GAP)), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for x, (head, caption) in enumerate(zip(heads, captions, strict=True)):
        left = _SIDE + x * (_CELL + _GAP)
        pen.text((left, 4), _wrapped(head, _CELL, font, lines=2), fill="black", font=font, spacing=1)
        pen.text((left, _HEAD - 16), caption, fill="#0072B2", font=font)
    for y, (title, paths) in enumerate(rows):
        top = _HEAD + y * (_CELL + _GAP)
        pen.text((4, top + _CELL // 3), _wrapped(title, _SIDE - 12, font, lines=4), fill="black", font=font)
        for x, path in enumerate(paths):
            if path:
                sheet.paste(_cell(folder / path), (_SIDE + x * (_CELL + _GAP), top))
    stream = BytesIO()
    sheet.save(stream, "PNG")
    return stream.getvalue()


def _find(variant: VariantResult, prompt_index: int, image_index: int) -> str:
    for record in variant.images:
        if (record.prompt_index, record.image_index) == (prompt_index, image_index):
            return record.path
    return ""


def _cell(path: Path) -> Image.Image:
    with Image.open(path) as image:
        # Small images are enlarged pixel by pixel, so that nothing is smoothed away.
        method = Image.Resampling.NEAREST if image.width < _CELL else Image.Resampling.LANCZOS
        return image.convert("RGB").resize((_CELL, _CELL), method)


def _wrapped(text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, lines: int) -> str:
    found: list[str] = []
    for word in text.split():
        longer = f"{found[-1]} {word}" if found else word
        if found and font.getlength(longer) <= width:
            found[-1] = longer
        else:
            found.append(word)
    return "\n".join(found[:lines])
