"""Computes after how many images a variant has repaid its start-up cost."""

import math
from dataclasses import replace

from sdopt.record.comparisons import BreakEven, Interval
from sdopt.record.records import VariantResult


def break_even(
    candidate: VariantResult, reference: VariantResult, call: Interval | None, speedup: Interval | None
) -> BreakEven | None:
    """Returns the extra start-up cost of a candidate over its reference, and when that cost is repaid.

    The time of n images is loading, the first call, which makes the first of them, and the further images. With several
    shapes, the first call at each of the others, in which it may be compiled again, is part of the start-up too; the n
    images are at the main shape. The candidate breaks even once it has saved the difference in start-up time. The
    bounds come from the speed-up's interval; the uncertainty of the start-up times, of which each process gives one, is
    not included.

    Args:
        candidate: the variant with the start-up cost.
        reference: the variant that it is compared with.
        call: the time of one call of the reference, in seconds.
        speedup: time of the reference over time of the candidate, per image.

    Returns:
        the cost and the break-even point; None if the start or the speed-up was not measured.
    """
    first, begun, others = first_image_s(candidate), start_up_s(candidate), start_up_s(reference)
    if first is None or begun is None or others is None or call is None or speedup is None:
        return None
    first_images, others_images = candidate.config.images_per_call, reference.config.images_per_call
    image_s = call.estimate / others_images

    def repaid(ratio: float | None) -> float | None:
        saved_s = image_s * (1 - 1 / ratio) if ratio else 0.0
        if begun <= others:
            return 0.0
        if saved_s <= 0:
            return None
        # Where both have made as many images in as much time.
        sooner = first_images + (begun - others - (first_images - others_images) * image_s) / saved_s
        return max(sooner, first_images)

    # The larger the gain, the sooner.
    bounded = speedup.low is not None
    return BreakEven(
        first_image_s=first,
        extra_s=begun - others,
        call_s=call.estimate,
        images=repaid(speedup.estimate),
        images_low=repaid(speedup.high) if bounded else None,
        images_high=repaid(speedup.low) if bounded else None,
        confidence=speedup.confidence if bounded else None,
        shapes=len(candidate.config.shapes),
    )


def uncounted(found: BreakEven) -> BreakEven:
    """Returns the break-even of two variants whose calls differ by no more than the A/A floor: no count is known.

    A start that is no slower is repaid at once all the same.
    """
    if found.images == 0:
        return found
    return replace(found, images=None, images_low=None, images_high=None, confidence=None, within_floor=True)


def first_image_s(variant: VariantResult) -> float | None:
    """Returns the seconds from the start of loading to the end of the first call; None where they were not measured."""
    for measurement in variant.measurements:
        if measurement.load_s is not None and measurement.shapes[0].cold_start_s is not None:
            return measurement.load_s + measurement.shapes[0].cold_start_s
    return None


def compiled_earlier_s(variant: VariantResult) -> float:
    """Returns the seconds that earlier runs took to compile the packages that a variant loaded."""
    shapes = (shape for measurement in variant.measurements for shape in measurement.shapes)
    return sum(shape.earlier_compile_s or 0.0 for shape in shapes)


def start_up_s(variant: VariantResult) -> float | None:
    """Returns the seconds of loading and of the first call at each shape; None where they were not measured.

    Packages that an earlier run had compiled cost as much as in that run.
    """
    for measurement in variant.measurements:
        calls = [shape.cold_start_s for shape in measurement.shapes]
        if measurement.load_s is not None and None not in calls:
            return measurement.load_s + sum(call for call in calls if call is not None) + compiled_earlier_s(variant)
    return None


def start_text(found: BreakEven) -> str:
    """Returns what the start-up is, as in "before the first image"."""
    if found.shapes == 1:
        return "before the first image"
    return f"in loading and the first calls at {found.shapes} shapes"


def break_even_text(found: BreakEven) -> str:
    """Returns when the start is repaid, as in "after 310 images [220, 520]"."""
    if found.within_floor:
        return "and its times differ by no more than those of two identical baselines"
    if found.images is None:
        return "never repaid: it is no faster"
    return f"repaid after {images_text(found, ' images')}"


def images_text(found: BreakEven, unit: str = "") -> str:
    """Returns after how many images the start is repaid, with its bounds; "never" where it never is."""
    if found.within_floor:
        return "not known"
    if found.images is None:
        return "never"
    text = f"{_count(found.images)}{unit}"
    if found.confidence is None:
        return text
    low = "0" if found.images_low is None else _count(found.images_low)
    return f"{text} [{low}, {'never' if found.images_high is None else _count(found.images_high)}]"


def _count(images: float) -> str:
    return f"{math.ceil(round(images, 6)):,}"
