"""Computes after how many images a variant has repaid its start-up cost."""

import math
from dataclasses import replace

from sdopt.record.comparisons import BreakEven, Interval
from sdopt.record.records import VariantResult


def break_even(
    candidate: VariantResult,
    reference: VariantResult,
    call: Interval | None,
    speedup: Interval | None,
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
    first = first_image_s(candidate)
    start = start_up_s(candidate)
    reference_start = start_up_s(reference)
    if first is None or start is None or reference_start is None:
        return None
    if call is None or speedup is None:
        return None
    extra_s = start - reference_start
    images = candidate.config.images_per_call
    reference_images = reference.config.images_per_call
    image_s = call.estimate / reference_images
    # Where both have made as many images in as much time.
    behind_s = extra_s - (images - reference_images) * image_s

    def repaid(ratio: float | None) -> float | None:
        if extra_s <= 0:
            return 0.0
        saved_s = image_s * (1 - 1 / ratio) if ratio else 0.0
        if saved_s <= 0:
            return None
        return max(images + behind_s / saved_s, images)

    level = BreakEven(
        first_image_s=first,
        extra_s=extra_s,
        call_s=call.estimate,
        images=repaid(speedup.estimate),
        shapes=len(candidate.config.shapes),
    )
    if speedup.low is None:
        return level
    # The larger the gain, the sooner.
    return replace(
        level,
        images_low=repaid(speedup.high),
        images_high=repaid(speedup.low),
        confidence=speedup.confidence,
    )


def uncounted(level: BreakEven) -> BreakEven:
    """Returns the break-even of two variants whose calls differ by no more than the A/A floor: no count is known.

    A start that is no slower is repaid at once all the same.
    """
    if level.images == 0:
        return level
    return replace(
        level,
        images=None,
        images_low=None,
        images_high=None,
        confidence=None,
        within_floor=True,
    )


def first_image_s(variant: VariantResult) -> float | None:
    """Returns the seconds from the start of loading to the end of the first call; None where they were not measured."""
    for measurement in variant.measurements:
        load_s = measurement.load_s
        call_s = measurement.main.cold_start_s
        if load_s is not None and call_s is not None:
            return load_s + call_s
    return None


def compiled_earlier_s(variant: VariantResult) -> float:
    """Returns the seconds that earlier runs took to compile the packages that a variant loaded."""
    seconds = 0.0
    for measurement in variant.measurements:
        for samples in measurement.shapes:
            seconds += samples.earlier_compile_s or 0.0
    return seconds


def start_up_s(variant: VariantResult) -> float | None:
    """Returns the seconds of loading and of the first call at each shape; None where they were not measured.

    Packages that an earlier run had compiled cost as much as in that run.
    """
    for measurement in variant.measurements:
        calls = [samples.cold_start_s for samples in measurement.shapes]
        calls_known = [call for call in calls if call is not None]
        if measurement.load_s is not None and len(calls_known) == len(calls):
            return measurement.load_s + sum(calls_known) + compiled_earlier_s(variant)
    return None


def start_text(level: BreakEven) -> str:
    """Returns what the start-up is, as in "before the first image"."""
    if level.shapes == 1:
        return "before the first image"
    return f"in loading and the first calls at {level.shapes} shapes"


def break_even_text(level: BreakEven) -> str:
    """Returns when the start is repaid, as in "after 310 images [220, 520]"."""
    if level.within_floor:
        return "and its times differ by no more than those of two identical baselines"
    if level.is_open:
        return "and it is not known whether this is ever repaid"
    if level.images is None:
        return "never repaid: it is no faster"
    return f"repaid after {images_text(level, ' images')}"


def images_text(level: BreakEven, unit: str = "") -> str:
    """Returns after how many images the start is repaid, with its bounds; "never" where it never is."""
    if level.within_floor or level.is_open:
        return "not known"
    if level.images is None:
        return "never"
    text = f"{_count(level.images)}{unit}"
    if level.confidence is None:
        return text
    low = _count(level.images_low, otherwise="0")
    high = _count(level.images_high, otherwise="never")
    return f"{text} [{low}, {high}]"


def _count(images: float | None, otherwise: str = "") -> str:
    if images is None:
        return otherwise
    return f"{math.ceil(round(images, 6)):,}"
