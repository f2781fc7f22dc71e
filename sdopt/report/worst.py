"""Finds the prompts that lost most by each metric: a mean hides a few spoiled images."""

from collections.abc import Sequence
from dataclasses import dataclass

from sdopt.quality.metrics import in_reading_order, known_family
from sdopt.record.records import StudyResult

_SHOWN = 3

_SAME = 0.9999
"""From here on a similarity tells no loss; rounding alone gives less than 1."""


@dataclass(frozen=True)
class WorstPrompt:
    """A prompt that lost by a metric, against the reference's image of the same prompt.

    `value` is the metric of the two images or, of a metric of one image, its difference from the reference's.
    """

    metric: str
    prompt_index: int
    prompt: str
    value: float


def worst_prompts(result: StudyResult, name: str, metrics: Sequence[str] | None = None) -> list[WorstPrompt]:
    """Returns the prompts of a variant that lost most, by metric, the worst ones first.

    Args:
        result: the study.
        name: the variant.
        metrics: those to look at; None is all of which one way is worse. Those of whole sets have no worst prompt.
    """
    compared, variant = result.first_comparison(name), result.variant(name)
    if compared is None:
        return []
    prompts = list({record.prompt_index: record.prompt for record in variant.images}.items())
    theirs = result.variant(compared.reference).quality
    found: list[WorstPrompt] = []
    for metric in in_reading_order({**variant.quality, **compared.quality} if metrics is None else metrics):
        family = known_family(metric)
        if family is None or family.higher_is_better is None:
            continue
        changes: list[float | None] = []
        if metric in compared.quality and family.needs_pair:
            changes = compared.quality[metric].per_prompt
        elif metric in variant.quality and metric in theirs:
            pairs = zip(variant.quality[metric].per_prompt, theirs[metric].per_prompt, strict=False)
            changes = [None if own is None or other is None else own - other for own, other in pairs]
        sign = -1 if family.higher_is_better else 1
        # A gain is no loss, nor are equal images: their distance is 0, and their similarity 1.
        lost = [
            WorstPrompt(metric, index, prompt, value)
            for (index, prompt), value in zip(prompts, changes, strict=False)
            if value is not None and (sign * value > 0 or (family.needs_pair and sign < 0 and not _SAME <= value <= 1))
        ]
        found += sorted(lost, key=lambda one: -sign * one.value)[:_SHOWN]
    return found
