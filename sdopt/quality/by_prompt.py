"""Makes a score of a value for each image."""

import math
from collections.abc import Sequence

import numpy as np

from sdopt.record.scores import Score


def by_prompt(
    prompts: Sequence[int], values: Sequence[float | None] | np.ndarray
) -> Score:
    """Returns the mean of a value of each image over the images of each prompt, their largest, and the mean of all.

    None stands for what is not finite.
    """
    found: dict[int, list[float]] = {}
    for prompt, value in zip(prompts, values, strict=True):
        found.setdefault(prompt, []).append(math.nan if value is None else float(value))
    means = [float(np.mean(those)) for _, those in sorted(found.items())]
    several = any(len(those) > 1 for those in found.values())
    worst = (
        [finite(float(np.max(those))) for _, those in sorted(found.items())]
        if several
        else []
    )
    return Score(
        finite(float(np.mean(means))), [finite(mean) for mean in means], worst=worst
    )


def finite(value: float) -> float | None:
    """Returns a value, or None if it is infinite or NaN."""
    return value if math.isfinite(value) else None
