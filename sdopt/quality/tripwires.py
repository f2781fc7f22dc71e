"""Defines tripwires: signs that an image is broken, whatever its metrics are.

A metric averages: a black frame among many healthy ones changes it little, and scores of black frames overlap with
those of poor but intact images. So tripwires are separate from metrics and look at each image alone, and one that trips
fails the variant. Their thresholds are far from any intact image; a smaller loss of quality is for the metrics to find.
"""

import math
from collections.abc import Hashable, Sequence

import numpy as np

BLACK_LEVEL = 16
"""Video's black (ITU-R BT.601): a frame shows nothing if 99 % of its pixels are no brighter.

A decoder that met NaN returns zeros. In the darkest of 6,030 emoji the brightest 1 % of the pixels is above 140."""

CONSTANT_RANGE = 2.0
"""Levels of 255 by which the means of 8×8 pixels may differ in a constant frame; rounding alone gives one.

Means, so that a little noise does not hide it. A white square on white, the flattest of 6,030 emoji, has 4.8."""

NOISE_CORRELATION = 0.35
"""Correlation between neighbouring pixels below which a frame is noise.

White noise has 0; of 6,030 emoji at 64 pixels the least has 0.69, photographs have 0.88 and more."""

NOISE_DROP = 0.3
"""Largest drop of the correlation between neighbouring blocks below that of the reference's image.

Decoded noise drops by 0.4 (median); another seed, guidance or number of steps by at most 0.1."""

CLIP_DISTANCE = 16
"""Levels that a value must have moved to an end of the range to count as newly clipped.

White backgrounds, which are at 250 in one precision and at 255 in another, must not count."""

CLIP_SHARE = 0.5
"""Share of an image's values, among those free in the reference, that may be newly clipped."""

CLIP_MEAN_SHARE = 0.1
"""The same as a mean over a variant's other images. 1.5 times the contrast gives 0.2, other seeds at most 0.02."""

ALIKE_DEVIATION = 4.0
"""Root mean square deviation of images from their mean image, in levels of 255, below which all are alike.

This is a contrast of 1.5 %, about the least that is visible."""

ALIKE_SHARE = 0.25
"""The same relative to the reference's images."""

_BLOCK = 8
"""Pixels per latent in the autoencoders of Stable Diffusion."""

_ENOUGH_BLOCKS = 32
"""Blocks per side from which on their correlation alone decides: the few blocks of a small image may all differ."""

_LUMA = np.array([0.299, 0.587, 0.114])
"""Weights of gamma-coded red, green and blue in the luma (ITU-R BT.601)."""

_LEAST_FREE = 0.05
"""Clipping is relative to at least this share of the values: in an image that is almost all background, the few other
values mean little."""


Trip = tuple[str, int | None, str]
"""A tripwire that tripped (`non_finite`, `black`, `constant`, `noise`, `alike` or `clipping`), the index of the image, or
None if it concerns all images, and the finding, with numbers."""


def tripped(
    images: np.ndarray,
    *,
    latents: np.ndarray | None = None,
    finite: Sequence[bool] | None = None,
    draws: Sequence[Hashable] | None = None,
    reference: np.ndarray | None = None,
) -> list[Trip]:
    """Returns every tripwire that the images of one variant trip.

    Args:
        images: uint8 (n, height, width, 3), n ≥ 1.
        latents: final latents (n, …), before decoding.
        finite: whether all pixels of each image were finite before rounding, which uint8 cannot show.
        draws: the inputs of each image, such as (prompt, noise); images of equal draws may be equal. None: all draws
            differ.
        reference: the reference variant's images of the same prompts and seeds, for tripwires that compare.
    """
    trips: list[Trip] = []
    for index, image in enumerate(images):
        before = None if reference is None else reference[index]
        findings = []
        if latents is not None:
            findings.append(("non_finite", _non_finite(latents[index])))
        if finite is not None and not finite[index]:
            findings.append(("non_finite", "pixels are NaN or infinite"))
        findings.append(_looks(image, before))
        for wire, finding in findings:
            if finding:
                trips.append((wire, index, finding))
    trips += _alike(images, draws, reference)
    if reference is not None:
        trips += _clipping(images, reference)
    return trips


def _non_finite(latents: np.ndarray) -> str:
    """Returns how many of an image's latents are not finite, in words; "" if all are."""
    bad = 1 - np.isfinite(latents).mean()
    if not bad:
        return ""
    return f"{bad:.1%} of the final latents are NaN or infinite"


def _looks(image: np.ndarray, reference: np.ndarray | None) -> tuple[str, str]:
    """Returns the tripwire that the look of an image trips, and the finding; no finding if it trips none."""
    brightest = float(np.quantile(image @ _LUMA, 0.99))
    if brightest <= BLACK_LEVEL:
        text = f"99 % of the pixels are no brighter than {brightest:.0f} of 255"
        return "black", text
    blocks = _blocks(image)
    extent = float(np.ptp(blocks, axis=(0, 1)).max())
    if extent <= CONSTANT_RANGE:
        return "constant", f"parts of the image differ by {extent:.1f} of 255 levels"
    return "noise", _noise(image, blocks, reference)


def _noise(
    image: np.ndarray,
    blocks: np.ndarray,
    reference: np.ndarray | None,
) -> str:
    """Returns by what an image, of which `blocks` are means, is noise, in words; "" if it is none."""
    pixels = _correlation(image.astype(np.float64))
    if pixels < NOISE_CORRELATION:
        return f"neighbouring pixels correlate by {pixels:.2f} (noise: 0)"
    structure = _correlation(blocks)
    enough = min(blocks.shape[:2]) >= _ENOUGH_BLOCKS
    if enough and structure < NOISE_CORRELATION:
        return f"neighbouring blocks of 8 pixels correlate by {structure:.2f}"
    if reference is None:
        return ""
    before = _correlation(_blocks(reference))
    if before - structure <= NOISE_DROP:
        return ""
    return f"blocks of 8 pixels correlate by {structure:.2f}; in the reference {before:.2f}"


def _alike(
    images: np.ndarray,
    draws: Sequence[Hashable] | None,
    reference: np.ndarray | None,
) -> list[Trip]:
    if draws is None:
        draws = range(len(images))
    trips: list[Trip] = []
    first: dict[bytes, int] = {}
    for index, image in enumerate(images):
        earlier = first.setdefault(image.tobytes(), index)
        if draws[earlier] != draws[index]:
            # For example an output buffer that was overwritten before it was read.
            text = f"identical to image {earlier}, which has another prompt or seed"
            trips.append(("alike", index, text))
    if len(set(draws)) < 2:
        return trips
    spread = _spread(images)
    before = 0.0 if reference is None else _spread(reference)
    text = ""
    if spread < ALIKE_DEVIATION:
        text = f"all images differ by {spread:.1f} of 255 levels (root mean square)"
    elif spread < ALIKE_SHARE * before:
        text = f"images differ by {spread:.1f} of 255 levels; the reference's by {before:.1f}"
    if text:
        trips.append(("alike", None, text))
    return trips


def _clipping(images: np.ndarray, reference: np.ndarray) -> list[Trip]:
    trips: list[Trip] = []
    intact = []
    for index, image in enumerate(images):
        share = _newly_clipped(image, reference[index])
        if share > CLIP_SHARE:
            text = (
                f"{share:.0%} of the values are at 0 or 255, but not in the reference"
            )
            trips.append(("clipping", index, text))
        else:
            intact.append(share)
    if not intact:
        return trips
    # A few burnt images say nothing of the others, which a trip of all would count as broken.
    mean = float(np.mean(intact))
    if mean > CLIP_MEAN_SHARE:
        text = f"on average {mean:.0%} of the values of an image are at 0 or 255, but not in the reference"
        trips.append(("clipping", None, text))
    return trips


def _newly_clipped(image: np.ndarray, reference: np.ndarray) -> float:
    """Returns the share of values at an end of the range whose counterparts in the reference are not near it.

    Values are matched by rank: a drawing that moved a few pixels clips nothing.
    """
    values = np.sort(image, axis=None).astype(np.int16)
    before = np.sort(reference, axis=None).astype(np.int16)
    low = (values <= 1) & (before - values > CLIP_DISTANCE)
    high = (values >= 254) & (values - before > CLIP_DISTANCE)
    clipped = (low | high).mean()
    free = ((before > 1) & (before < 254)).mean()
    return float(clipped / max(free, _LEAST_FREE))


def _blocks(image: np.ndarray) -> np.ndarray:
    """Returns means of 8×8 pixels, float64 (height / 8, width / 8, 3); of fewer pixels if a side is below 16."""
    height, width, _ = image.shape
    side = max(1, min(_BLOCK, height // 2, width // 2))
    rows = height // side
    columns = width // side
    whole = image[: rows * side, : columns * side]
    blocks = whole.reshape(rows, side, columns, side, 3)
    means: np.ndarray = blocks.mean(axis=(1, 3))
    return means


def _correlation(values: np.ndarray) -> float:
    """Returns the correlation of neighbours from their differences, 1 − E[(xᵢ − xⱼ)²] / 2 Var[x]; 1 if constant."""
    variance = float(values.var(axis=(0, 1)).mean())
    if variance == 0 or min(values.shape[:2]) < 2:
        return 1.0
    steps = 0.0
    for axis in (0, 1):
        differences = np.diff(values, axis=axis)
        steps += float(np.square(differences).mean())
    return 1 - steps / 4 / variance


def _spread(images: np.ndarray) -> float:
    """Returns the root mean square deviation of images from their mean image."""
    variances = images.astype(np.float32).var(axis=0)
    return math.sqrt(float(variances.mean()))
