"""The images of a study side by side: a row per prompt, a column per variant."""

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from sdopt.results import StudyResult, VariantResult

_CELL = 160
_GAP = 8
_HEAD = 34
_SIDE = 150


def comparison_sheet(result: StudyResult, folder: Path, rows: int = 8) -> Path | None:
    """Draws `comparison.png` in the run's folder, of the first `rows` images; nothing where no variant has images.

    The A/A control is left out: its images are the baseline's.
    """
    columns = [variant for variant in result.variants if variant.images and variant.role != "control"]
    if not columns:
        return None
    keys = [(record.prompt_index, record.image_index, record.prompt) for record in columns[0].images[:rows]]
    width = _SIDE + len(columns) * (_CELL + _GAP)
    sheet = Image.new("RGB", (width, _HEAD + len(keys) * (_CELL + _GAP)), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for x, variant in enumerate(columns):
        left = _SIDE + x * (_CELL + _GAP)
        pen.text((left, 4), _wrapped(variant.name, _CELL, font, lines=2), fill="black", font=font, spacing=1)
        for y, (prompt_index, image_index, _) in enumerate(keys):
            cell = _cell(variant, folder, prompt_index, image_index)
            if cell is not None:
                sheet.paste(cell, (left, _HEAD + y * (_CELL + _GAP)))
    for y, (_, _, prompt) in enumerate(keys):
        top = _HEAD + y * (_CELL + _GAP)
        pen.text((4, top + _CELL // 3), _wrapped(prompt, _SIDE - 12, font, lines=4), fill="black", font=font)
    path = folder / "comparison.png"
    sheet.save(path)
    return path


def _cell(variant: VariantResult, folder: Path, prompt_index: int, image_index: int) -> Image.Image | None:
    for record in variant.images:
        if (record.prompt_index, record.image_index) == (prompt_index, image_index):
            with Image.open(folder / record.path) as image:
                # Small images are enlarged pixel by pixel, so that nothing is smoothed away.
                method = Image.Resampling.NEAREST if image.width < _CELL else Image.Resampling.LANCZOS
                return image.convert("RGB").resize((_CELL, _CELL), method)
    return None


def _wrapped(text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, lines: int) -> str:
    found: list[str] = []
    for word in text.split():
        longer = f"{found[-1]} {word}" if found else word
        if found and font.getlength(longer) <= width:
            found[-1] = longer
        else:
            found.append(word)
    return "\n".join(found[:lines])
