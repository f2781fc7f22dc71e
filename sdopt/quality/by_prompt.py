"""Makes a score of a value for each image."""

import math
from collections.abc import Sequence

import numpy as np

from sdopt.record.scores import Score


def by_prompt(
    prompts: Sequence[int],
    values: Sequence[float | None] | np.ndarray,
) -> Score:
    """Returns the mean of a value of each image over the images of each prompt, their largest, and the mean of all.

    None stands for what is not finite.
    """
    of_prompts: dict[int, list[float]] = {}
    for prompt, value in zip(prompts, values, strict=True):
        of_prompt = of_prompts.setdefault(prompt, [])
        of_prompt.append(math.nan if value is None else float(value))
    means: list[float] = []
    largest: list[float | None] = []
    several = False
    for _, of_prompt in sorted(of_prompts.items()):
        means.append(float(np.mean(of_prompt)))
        largest.append(finite(float(np.max(of_prompt))))
        several |= len(of_prompt) > 1
    return Score(
        estimate=finite(float(np.mean(means))),
        per_prompt=[finite(mean) for mean in means],
        worst=largest if several else [],
    )


def finite(value: float) -> float | None:
    """Returns a value, or None if it is infinite or NaN."""
    return value if math.isfinite(value) else None
