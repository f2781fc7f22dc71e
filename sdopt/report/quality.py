"""Derives the tables of quality: which metrics they show, their headings, notes and cells, and the worst prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

from sdopt.quality.metrics import in_reading_order, known_family
from sdopt.record.records import StudyResult
from sdopt.statistics.figures import Figures

BROKEN = "broken"
"""The column that counts broken images."""

_WORST = 3
"""Prompts that are named by each metric."""

_SAME = 0.9999
"""From here on a similarity tells no loss; rounding alone gives less than 1."""


def quality_columns(result: StudyResult) -> list[str]:
    """Returns the metrics that some variant has and that tables show, and the count of broken images; [] for none."""
    scores = [*(variant.quality for variant in result.variants), *(edge.quality for edge in result.comparisons)]
    families = {name: known_family(name) for name in in_reading_order(name for quality in scores for name in quality)}
    shown = [name for name, family in families.items() if family is None or family.tabulated]
    return [*shown, BROKEN] if shown else []


def headline_columns(result: StudyResult) -> list[str]:
    """Returns the metrics that the terminal and the page show, and the count of broken images if there are any."""
    broken = any(variant.trips for variant in result.variants)
    columns = {name: known_family(name) for name in quality_columns(result)}
    return [name for name, family in columns.items() if (broken if name == BROKEN else family and family.headline)]


def quality_heading(name: str) -> str:
    """Returns a column's heading: the metric, its unit, and the better direction (↑ or ↓)."""
    family = known_family(name)
    if family is None:
        return name
    unit = f" ({family.unit})" if family.unit else ""
    arrow = {True: " ↑", False: " ↓", None: ""}[family.higher_is_better]
    return name.removesuffix(f"_{family.unit.lower()}") + unit + arrow


def quality_notes(names: Sequence[str]) -> list[str]:
    """Returns notes that explain the metrics and the arrows."""
    families = {family.name: family for name in names if (family := known_family(name)) is not None}
    meanings = "; ".join(f"{family.name}: {family.meaning}" for family in families.values())
    return [f"↑ more is better, ↓ less is better. {meanings}."] if families else []


def metric_text(figures: Figures, name: str) -> str:
    """Returns a comparison's score in one metric as tables show it; "" if it has none."""
    variant, score = figures.variant, figures.scores.get(name)
    if name == BROKEN:
        share = f"{variant.broken_images} of {len(variant.images)}" if variant.images else "yes"
        return share if variant.trips else ""
    if score is None:
        return ""
    if score.estimate is not None:
        return f"{score.estimate:.3g}"
    family = known_family(name)
    return (family.equal_text if family else "") or "?"


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

    Without `metrics` to look at, these are all of which one way is worse. Those of whole sets have no worst prompt.
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
        found += sorted(lost, key=lambda one: -sign * one.value)[:_WORST]
    return found
