"""The tables of a study as blocks: the ranking, several shapes, effects, images; and all of it as a data frame."""

import math
from collections.abc import Sequence
from csv import DictWriter
from dataclasses import dataclass, replace
from io import StringIO
from itertools import chain
from typing import TYPE_CHECKING, Any

from sdopt.quality.metrics import in_reading_order, known_family
from sdopt.record.choices import difference
from sdopt.record.comparisons import Comparison, Effect, Interval
from sdopt.record.records import Status, StudyResult, VariantResult
from sdopt.report.blocks import Block, Cell, Notes, Table
from sdopt.report.columns import TableView, further_columns, ratio_cell, table_of, values_of, word
from sdopt.statistics.figures import stage_peaks
from sdopt.statistics.measures import MEMORY_RATIO, SPEEDUP, bounds_text
from sdopt.statistics.objections import REPEATS
from sdopt.statistics.published import MEMORY, PublishedClaim, notes_of_published
from sdopt.statistics.rows import Row
from sdopt.statistics.scale import decision_of
from sdopt.statistics.summary import Summary
from sdopt.statistics.words import compared, gib_text, seconds_parts, seconds_text, unit_text

if TYPE_CHECKING:
    import pandas as pd


def ranking(summary: Summary) -> Table:
    """Returns the table of all variants but the repeated baseline, best first, with their verdicts."""
    result, judged = summary.result, any(row.decision for row in summary.rows)
    look = TableView(judged, result.per_image, result.shapes if len(result.shapes) > 1 else ())
    return table_of(summary.rows, look, before=[("variant", [row.name for row in summary.rows])])


def evidence(summary: Summary) -> list[str]:
    """Returns for each comparison what shows that the options in which its sides differ were active."""
    result, lines = summary.result, []
    for row in summary.figures:
        variant, edge = row.variant, row.comparison
        if edge is None or variant.is_control:
            continue
        shown = [variant.reason] if variant.reason else []
        if variant.measurements and variant.status is Status.OK:
            reference = result.variant(edge.reference)
            axes = difference(variant.choices, reference.choices)
            shown += [REPEATS] if not axes and variant.config == reference.config else []
            shown += [item.summary for item in variant.measurements[0].shapes[0].evidence if item.axis in axes]
        shown += [edge.note] if edge.note and variant.status.timed else []
        if shown:
            lines.append(f"{compared(result, row)}: {'; '.join(shown)}")
    return lines


def shapes_table(summary: Summary) -> Table | None:
    """Returns the table of time and memory at several shapes, and of the cost of a new one; None for one shape."""
    rows = [row for row in summary.first.values() if row.further and row.latency and not row.variant.is_control]
    cells = []
    for at_shape in zip(*(row.shapes for row in rows), strict=True):
        cells += [(str(at.shape), at.name, *_at_shape(at)) for at in at_shape]
    time = f"time{unit_text(summary.result.per_image)}"
    headings = ("shape", "variant", time, "memory", "first call", "compiled in it", "compiled later")
    return Table(headings, cells, headings[2:]) if cells else None


def _at_shape(figures: Row) -> tuple[Cell | str, ...]:
    known = figures.figures
    first, compiled = known.get("latency/cold_start_s"), known.get("latency/compile_s")
    graphs = _graphs_text(known.get("compile/graphs"))
    if graphs and known["compile/graphs"] and compiled is not None:
        graphs += f", {seconds_text(Interval(compiled))}"
    return (
        Cell(*seconds_parts(figures.time)) if figures.time else "",
        gib_text(figures.headline_memory[1]) if figures.headline_memory else "",
        "" if first is None else seconds_text(Interval(first)),
        graphs,
        _graphs_text(known.get("compile/recompiles")),
    )


def _graphs_text(count: float | None) -> str:
    if count is None:
        return ""
    return f"{count:g} graph" if count == 1 else f"{count:g} graphs"


def stage_memory_table(summary: Summary) -> Table | None:
    """Returns the table of the peak memory of each stage, with all weights; None if none was measured."""
    rows = [row for row in summary.first.values() if not row.variant.is_control and stage_peaks(row.variant)]
    stages: dict[str, None] = {}
    for row in rows:
        stages |= dict.fromkeys(stage_peaks(row.variant))
    cells = []
    for row in rows:
        peaks = stage_peaks(row.variant)
        cells.append((row.name, *(gib_text(peaks[stage]) if stage in peaks else "" for stage in stages)))
    headings = ("variant", *(f"peak in {stage.replace('_', ' ')}" for stage in stages))
    return Table(headings, cells, headings[1:]) if cells else None


def effects_table(summary: Summary) -> Table | None:
    """Returns the effects of a factorial study; None if there are none."""
    effects = summary.result.effects
    headings = ("effect", "of", "speed-up", "memory")
    return Table(headings, list(map(_effect, effects)), headings[2:]) if effects else None


def _effect(effect: Effect) -> tuple[Cell | str, ...]:
    kind = "main" if len(effect.options) == 1 else "interaction"
    if effect.aliased_with:
        first, *others = effect.aliased_with
        more = f" and {len(others)} other{'s' if len(others) > 1 else ''}" if others else ""
        return kind, " × ".join(effect.options), f"aliased with {first}{more}", ""
    return kind, " × ".join(effect.options), ratio_cell(effect.speedup), ratio_cell(effect.memory_ratio)


BROKEN = "broken"
"""The column that counts broken images."""

_WORST = 3
"""Prompts that are named by each metric."""

_SAME = 0.9999
"""From here on a similarity tells no loss; rounding alone gives less than 1."""


def quality_columns(result: StudyResult) -> list[str]:
    """Returns the metrics that some variant has and that tables show, and the count of broken images; [] for none."""
    owners: list[VariantResult | Comparison] = [*result.variants, *result.comparisons]
    shown = []
    for name in in_reading_order(chain.from_iterable(owner.quality for owner in owners)):
        family = known_family(name)
        if family is None or family.tabulated:
            shown.append(name)
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


def metric_text(figures: Row, name: str) -> str:
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


def quality_table(summary: Summary, headline: bool = True) -> Table | None:
    """Returns the scores of each comparison's images, or only the `headline` ones; None if nothing was scored."""
    names = (headline_columns if headline else quality_columns)(summary.result)
    headings = ("variant", *map(quality_heading, names))
    rows = [
        (compared(summary.result, row), *(metric_text(row, name) for name in names))
        for row in summary.figures
        if row.variant.images and not row.variant.is_control
    ]
    return Table(headings, rows, headings[1:]) if names and rows else None


def worst_table(summary: Summary) -> Table | None:
    """Returns the prompts that lost most by each metric that a reader needs first; None if none lost."""
    result = summary.result
    rows = []
    for row in summary.figures:
        if row.variant.is_control or not row.variant.images:
            continue
        by_metric: dict[str, list[WorstPrompt]] = {}
        for one in worst_prompts(result, row.variant.name, headline_columns(result)):
            by_metric.setdefault(one.metric, []).append(one)
        for metric, those in by_metric.items():
            named = [f"{one.prompt or f'number {one.prompt_index + 1}'} ({one.value:.3g})" for one in those]
            rows.append((compared(result, row), metric, "; ".join(named)))
    return Table(("variant", "metric", "worst prompts"), rows) if rows else None


def published_blocks(result: StudyResult, claims: Sequence[PublishedClaim]) -> list[Block]:
    """Returns a table of the figures of an article beside those measured, and its notes; nothing without a figure."""
    words = {
        SPEEDUP.name: ("speed-up", "×"),
        MEMORY_RATIO.name: ("memory", "×"),
        MEMORY: ("memory limit", " GB"),
    }
    headings = ("variant", "against", "figure", "shape", "GPU", "published", "here", "verdict", "because")
    rows: list[tuple[Cell | str, ...]] = []
    for claim in claims:
        (what, unit), value, here = words[claim.measure], claim.figure.value, claim.measured
        told = f"{value.value:g}" if value and claim.measure == MEMORY else f"{value.value:.2f}" if value else ""
        published = f"{'<' if value.below else ''}{told}{unit}" if value else ""
        printed = f"{claim.figure.printed}, {claim.place}" if claim.figure.printed else ""
        measured = Cell(f"{here.estimate:.2f}{unit}", bounds_text(here)) if here else ""
        sides = (claim.variant, claim.reference, what, claim.shape, claim.gpu)
        rows.append((*sides, Cell(published, printed), measured, word(claim.verdict), claim.reason))
    return [Table(headings, rows).filled(), Notes(notes_of_published(result, claims))] if claims else []


def to_dataframe(summary: Summary) -> "pd.DataFrame":
    """Returns a row for the baseline and one for each comparison, best first.

    The first columns are the answer, since a notebook shows no more: `variant`, `speedup`, `latency/p50_s`,
    `memory_ratio`, and the verdicts `speed`, `images` and `gate`. Then come `role`, `status`, `reason`, `contract`,
    `against`, and the option of each axis; "" stands for none. The others are figures by their flat names, with
    two-sided bounds (`speedup_low`, `quality/…`), as floats: NaN for what was not measured. Ratios are over the
    study's baseline; those of a comparison with another variant begin with `step/`. Of several shapes, each has columns
    of its own too, as `speedup/512x512b1`.
    """
    import pandas as pd

    return pd.DataFrame(_records(summary))


def to_csv(summary: Summary) -> str:
    """Returns the rows of `to_dataframe` as CSV, without importing pandas."""
    text, rows = StringIO(), _records(summary)
    writer = DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {name: "" if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()}
        )
    return text.getvalue()


def _records(summary: Summary) -> list[dict[str, Any]]:
    """Returns a row for the baseline and for each comparison: facts, then figures, in the same columns."""
    order = [row.name for row in summary.rows]
    rows = sorted(summary.figures, key=lambda row: len(order) if row.variant.is_control else order.index(row.name))
    columns = further_columns(["step"])  # here each step has a row of its own
    facts, numbers = [], []
    for row in rows:
        values = values_of(_with_verdicts(summary, row), columns)
        words = {column.name: values.get(column.name, "") for column in columns if not column.number}
        figures = {name: value for name, value in values.items() if name not in words}
        facts.append({"variant": row.name, **words, **_facts(row)})
        numbers.append({**figures, **row.flat})
    texts = dict.fromkeys(chain.from_iterable(facts), "")
    unknown = dict.fromkeys(chain.from_iterable(numbers), math.nan)
    first = ["variant", *(column.name for column in columns if column.name in unknown)]
    empty: dict[str, Any] = dict.fromkeys(first) | texts | unknown
    return [{**empty, **of_facts, **of_figures} for of_facts, of_figures in zip(facts, numbers, strict=True)]


def _facts(row: Row) -> dict[str, str]:
    variant = row.variant
    return {
        "role": "baseline" if row.is_baseline else variant.role,
        "status": str(variant.status),
        "reason": variant.reason,
        "contract": variant.contract,
        "against": row.reference,
        **variant.choices,
    }


def _with_verdicts(summary: Summary, row: Row) -> Row:
    """Returns the row of a comparison with the verdicts on its variant, or on its step on top of another one."""
    whole = summary.row(row.name)
    if whole is None:
        return row
    step = next((step for step in whole.steps if step.comparison is row.comparison), whole)
    decision = decision_of(row.judgement.verdict) if row.judgement else None
    return replace(row, speed=step.speed, images=whole.images, decision=decision)
