"""The images of a study for its page: those that differ most from their reference's first, in few bytes."""

import base64
import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path

from PIL import Image

from sdopt.quality.metrics import in_reading_order, known_family
from sdopt.record.files import inside
from sdopt.record.images import REPLACED, is_replaced, open_image, replaced_images
from sdopt.record.records import StudyResult, VariantResult
from sdopt.record.scores import ImageRecord, Score
from sdopt.report.blocks import Gallery, PromptImages, ShownImage
from sdopt.report.tables import worst_by_metric

_LOSSLESS_UP_TO = 128
"""Edge in pixels up to which an image keeps each of its pixels, and is enlarged pixel by pixel."""

_EDGE = 384
"""Edge that larger images are scaled to."""

_PROMPTS = 12

_Losses = dict[str, dict[int, float]]
"""How much images differ from those of the reference, by variant and prompt."""


def gallery_of(result: StudyResult, folder: Path, budget: int) -> Gallery | None:
    """Makes a grid of images, as many prompts as fit `budget` bytes of the page and at least one.

    Returns None if the baseline has no images, or they are not in the run's folder.
    """
    baseline = result.baseline_variant
    others = [variant for variant in result.candidates if variant.images]
    if not baseline.images or not has_images(result, folder):
        return None
    metric, losses = _losses(result, others)
    ordered = _ordered(result, folder, losses)
    if not ordered:
        return None
    with Image.open(inside(folder, baseline.images[0].path)) as image:
        edge = max(image.size)
    rows: list[PromptImages] = []
    spent = 0
    for prompt in ordered[:_PROMPTS]:
        row = _row(prompt, result, others, losses, folder)
        spent += len(row.baseline.uri) + sum(len(image.uri) for image in row.variants)
        if rows and spent > budget:
            break
        rows.append(row)
    order = "in the order of the prompts"
    if metric:
        order = (
            f"the worst of each metric first, then those whose images differ most ({metric}; the figure under an image "
            "compares it to its reference)"
        )
    noise = ""
    if not result.is_imported and all(_starts_alike(row, baseline) for row in others):
        noise = " All variants start from the same noise."
    if replaced := replaced_images(result, folder):
        noise += (
            f" {len(replaced)} images of the folder are not shown: each {REPLACED}."
        )
    return Gallery(
        rows,
        width=min(max(edge, 160), 260),
        pixelated=edge <= _LOSSLESS_UP_TO,
        caption=f"{len(rows)} of {len(ordered)} prompts, {order}.{noise}",
    )


def _starts_alike(variant: VariantResult, baseline: VariantResult) -> bool:
    """Returns whether each image starts from the noise of the baseline's: with more images per prompt they do not."""
    for image in variant.images:
        other = baseline.image(image.prompt_index, image.image_index)
        if other is not None and other.seed != image.seed:
            return False
    return True


def _ordered(
    result: StudyResult,
    folder: Path,
    losses: _Losses,
) -> list[int]:
    """Returns the prompts whose image of the baseline is there, those with the worst images of variants first."""
    images = result.baseline_variant.images
    there = {one.prompt_index for one in images if _is_there(folder, one)}
    # The worst by each metric first: a prompt may lose its subject and change few pixels.
    first = worst_by_metric(result)

    def largest_loss(prompt: int) -> float:
        of_variants = [
            of_prompts.get(prompt, -math.inf) for of_prompts in losses.values()
        ]
        return max(of_variants, default=-math.inf)

    return sorted(
        there, key=lambda prompt: (prompt not in first, -largest_loss(prompt), prompt)
    )


def _is_there(folder: Path, record: ImageRecord) -> bool:
    """Returns whether the image that was scored is in the run's folder."""
    return inside(folder, record.path).is_file() and not is_replaced(folder, record)


def has_images(result: StudyResult, folder: Path) -> bool:
    """Returns whether a study's images, if it has any, are in a folder; checks only the first of each variant."""
    return all(
        inside(folder, variant.images[0].path).is_file()
        for variant in result.variants
        if variant.images
    )


def _losses(
    result: StudyResult,
    variants: Sequence[VariantResult],
) -> tuple[str, _Losses]:
    """Returns the metric that orders the prompts, and its values by variant and prompt."""
    scores: dict[str, Mapping[str, Score]] = {}
    names: list[str] = []
    for variant in variants:
        edge = result.first_comparison(variant.name)
        if edge:
            scores[variant.name] = edge.quality
            names += edge.quality
    metric = next(filter(_is_distance, in_reading_order(names)), "")
    images = result.baseline_variant.images
    prompts = list(dict.fromkeys(image.prompt_index for image in images))
    losses: _Losses = {}
    for name, quality in scores.items():
        if metric in quality:
            values = zip(prompts, quality[metric].per_prompt, strict=False)
            losses[name] = {
                prompt: value for prompt, value in values if value is not None
            }
    family = known_family(metric)
    return f"{metric}, {family.meaning}" if family else metric, losses


def _is_distance(metric: str) -> bool:
    """Returns whether a metric's values by prompt grow with the difference from the reference."""
    family = known_family(metric)
    return family is not None and family.needs_pair and family.higher_is_better is False


def _row(
    prompt: int,
    result: StudyResult,
    variants: Sequence[VariantResult],
    losses: _Losses,
    folder: Path,
) -> PromptImages:
    baseline = result.baseline_variant
    of_prompt = (image for image in baseline.images if image.prompt_index == prompt)
    first = next(image for image in of_prompt if _is_there(folder, image))
    plain = inside(folder, first.path).read_bytes()
    images = []
    for variant in variants:
        record = variant.image(prompt, first.image_index)
        if record is None or not _is_there(folder, record):
            continue
        loss = losses.get(variant.name, {}).get(prompt)
        reference = _reference_text(result, variant)
        caption = uri = ""
        if loss is not None:
            caption = f"{'equal' if loss == 0 else f'{loss:.2g}'}{reference}"
        path = inside(folder, record.path)
        same = path.read_bytes() == plain or (loss == 0 and not reference)
        if not same:  # the page shows an image that equals the baseline's once
            uri = _uri(path)
        broken = ", ".join(
            trip.wire for trip in variant.trips if trip.path in ("", record.path)
        )
        images.append(ShownImage(variant.name, uri, caption, broken))
    return PromptImages(
        first.prompt,
        ShownImage(baseline.name, _uri(inside(folder, first.path))),
        images,
    )


def _reference_text(result: StudyResult, variant: VariantResult) -> str:
    """Returns what a variant's images are compared with, where this is not the baseline."""
    edge = result.first_comparison(variant.name)
    if edge is None or edge.reference == result.baseline:
        return ""
    return f" against {edge.reference}"


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
