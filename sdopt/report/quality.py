"""Derives the tables of quality: which metrics they show, their headings and notes, and their cells."""

from collections.abc import Sequence

from sdopt.quality.metrics import in_reading_order, known_family
from sdopt.record.records import StudyResult
from sdopt.statistics.figures import Figures

BROKEN = "broken"
"""The column that counts broken images."""


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
