"""The images of a study for its page: those that differ most from their reference's first, in few bytes."""

import base64
import math
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from PIL import Image

from sdopt.quality.metrics import in_reading_order, known_family
from sdopt.record.files import inside
from sdopt.record.images import open_image
from sdopt.record.records import StudyResult, VariantResult
from sdopt.report.blocks import Gallery, PromptImages, ShownImage
from sdopt.report.tables import headline_columns, worst_prompts

_LOSSLESS_UP_TO = 128
"""Edge in pixels up to which an image keeps each of its pixels, and is enlarged pixel by pixel."""

_EDGE = 384
"""Edge that larger images are scaled to."""

_PROMPTS = 12


def gallery_of(result: StudyResult, folder: Path, budget: int) -> Gallery | None:
    """Makes a grid of images, as many prompts as fit `budget` bytes of the page and at least one.

    Returns None if the baseline has no images, or they are not in the run's folder.
    """
    baseline = result.variant(result.baseline)
    others = [variant for variant in result.candidates if variant.images]
    if not baseline.images or not has_images(result, folder):
        return None
    prompts = list(dict.fromkeys(record.prompt_index for record in baseline.images))
    metric, losses = _losses(result, others, prompts)
    # The worst by each metric first: a prompt may lose its subject and change few pixels.
    metrics = headline_columns(result)
    by_metric = [worst_prompts(result, variant.name, [metric]) for variant in others for metric in metrics]
    first = {lost[0].prompt_index for lost in by_metric if lost}
    worst = {
        prompt: max((of.get(prompt, -math.inf) for of in losses.values()), default=-math.inf) for prompt in prompts
    }
    there = {record.prompt_index for record in baseline.images if inside(folder, record.path).is_file()}
    ordered = sorted(there, key=lambda prompt: (prompt not in first, -worst[prompt], prompts.index(prompt)))
    with Image.open(inside(folder, baseline.images[0].path)) as image:
        edge = max(image.size)
    rows: list[PromptImages] = []
    spent = 0
    for prompt in ordered[:_PROMPTS]:
        row = _row(prompt, result, others, losses, folder)
        spent += sum(len(picture.uri) for picture in (row.baseline, *row.variants))
        if rows and spent > budget:
            break
        rows.append(row)
    noise = "" if result.is_imported else " All variants start from the same noise."
    order = "in the order of the prompts"
    if metric:
        order = (
            f"the worst of each metric first, then those whose images differ most ({metric}; the figure under an image "
            "compares it to its reference)"
        )
    return Gallery(
        rows,
        min(max(edge, 160), 260),
        edge <= _LOSSLESS_UP_TO,
        f"{len(rows)} of {len(ordered)} prompts, {order}.{noise}",
    )


def has_images(result: StudyResult, folder: Path) -> bool:
    """Returns whether a study's images, if it has any, are in a folder; checks only the first of each variant."""
    return all(inside(folder, variant.images[0].path).is_file() for variant in result.variants if variant.images)


def _losses(
    result: StudyResult, variants: Sequence[VariantResult], prompts: Sequence[int]
) -> tuple[str, dict[str, dict[int, float]]]:
    """Returns the metric that orders the prompts, and its values by variant and prompt."""
    scores = {each.name: edge.quality for each in variants if (edge := result.first_comparison(each.name))}
    names = in_reading_order(name for quality in scores.values() for name in quality)
    # Whose values by prompt grow with the difference from the reference.
    distances = (
        name for name in names if (of := known_family(name)) and of.needs_pair and of.higher_is_better is False
    )
    metric = next(distances, "")
    values = {name: quality[metric].per_prompt for name, quality in scores.items() if metric in quality}
    losses = {
        name: {prompt: value for prompt, value in zip(prompts, those, strict=False) if value is not None}
        for name, those in values.items()
    }
    family = known_family(metric)
    return f"{metric}, {family.meaning}" if family else metric, losses


def _row(
    prompt: int,
    result: StudyResult,
    variants: Sequence[VariantResult],
    losses: dict[str, dict[int, float]],
    folder: Path,
) -> PromptImages:
    baseline = result.variant(result.baseline)
    images = (record for record in baseline.images if record.prompt_index == prompt)
    first = next(record for record in images if inside(folder, record.path).is_file())
    plain = inside(folder, first.path).read_bytes()
    pictures = []
    for variant in variants:
        record = variant.image(prompt, first.image_index)
        if record is None or not inside(folder, record.path).is_file():
            continue
        loss, compared = losses.get(variant.name, {}).get(prompt), result.first_comparison(variant.name)
        reference = f" against {compared.reference}" if compared and compared.reference != result.baseline else ""
        # The page shows an image that equals the baseline's once.
        same = inside(folder, record.path).read_bytes() == plain or (loss == 0 and not reference)
        caption = "" if loss is None else ("equal" if loss == 0 else f"{loss:.2g}") + reference
        broken = ", ".join(trip.wire for trip in variant.trips if trip.path in ("", record.path))
        pictures.append(ShownImage(variant.name, "" if same else _uri(inside(folder, record.path)), caption, broken))
    return PromptImages(first.prompt, ShownImage(baseline.name, _uri(inside(folder, first.path))), pictures)


def _uri(path: Path) -> str:
    """Returns an image as a WebP data URI: small images keep each pixel, large ones are scaled."""
    stream = BytesIO()
    small = open_image(path).convert("RGB")
    if max(small.size) <= _LOSSLESS_UP_TO:
        small.save(stream, "WEBP", lossless=True, quality=100)
    else:
        small.thumbnail((_EDGE, _EDGE), Image.Resampling.LANCZOS)
        small.save(stream, "WEBP", quality=85)
    return f"data:image/webp;base64,{base64.b64encode(stream.getvalue()).decode()}"
