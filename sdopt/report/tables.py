"""The tables of a study as blocks: the ranking, several shapes, effects, images; and all of it as a data frame."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from csv import DictWriter
from dataclasses import dataclass, replace
from io import StringIO
from itertools import chain
from typing import TYPE_CHECKING, Any

from sdopt.quality.metrics import MetricFamily, in_reading_order, known_family
from sdopt.record.choices import difference
from sdopt.record.comparisons import Comparison, Effect, Interval
from sdopt.record.records import Status, StudyResult, VariantResult
from sdopt.report.blocks import Block, Cell, Notes, Table
from sdopt.report.columns import (
    TableView,
    compared,
    further_columns,
    ratio_cell,
    table_of,
    values_of,
    word,
)
from sdopt.report.sentences.objections import REPEATS
from sdopt.report.summary import Summary
from sdopt.statistics.bounds import differences
from sdopt.statistics.measures import MEMORY_RATIO, SPEEDUP, bounds_text
from sdopt.statistics.reproduction import MEMORY, PublishedClaim, notes_of_published
from sdopt.statistics.row_figures import stage_peaks
from sdopt.statistics.rows import Row
from sdopt.statistics.words import (
    gib_text,
    seconds_parts,
    seconds_text,
    unit_text,
)

if TYPE_CHECKING:
    import pandas as pd


def ranking(summary: Summary) -> Table:
    """Returns the table of all variants but the repeated baseline, best first, with their verdicts."""
    result = summary.result
    view = TableView(
        judged=any(row.has_verdict for row in summary.rows),
        per_image=result.per_image,
        shapes=result.shapes if len(result.shapes) > 1 else (),
    )
    names = [row.name for row in summary.rows]
    return table_of(summary.rows, view, before=[("variant", names)])


def evidence(summary: Summary) -> list[str]:
    """Returns for each comparison what shows that the options in which its sides differ were active."""
    lines = []
    for row in summary.figures:
        if row.comparison is None or row.variant.is_control:
            continue
        text = "; ".join(_evidence_of(summary.result, row.variant, row.comparison))
        if text:
            lines.append(f"{compared(summary.result, row)}: {text}")
    return lines


def _evidence_of(
    result: StudyResult,
    variant: VariantResult,
    edge: Comparison,
) -> Iterator[str]:
    if variant.reason:
        yield variant.reason
    if variant.measurements and variant.status is Status.OK:
        reference = result.variant(edge.reference)
        axes = difference(variant.choices, reference.choices)
        if not axes and variant.config == reference.config:
            yield REPEATS
        for item in variant.measurements[0].main.evidence:
            if item.axis in axes:
                yield item.summary
    if edge.note and variant.status.timed:
        yield edge.note


def shapes_table(summary: Summary) -> Table | None:
    """Returns the table of time and memory at several shapes, and of the cost of a new one; None for one shape."""
    rows = []
    for row in summary.first.values():
        if row.further and row.latency and not row.variant.is_control:
            rows.append(row)
    cells: list[tuple[Cell | str, ...]] = []
    for at_shape in zip(*(row.shapes for row in rows), strict=True):
        cells += map(_shape_cells, at_shape)
    if not cells:
        return None
    time = f"time{unit_text(summary.result.per_image)}"
    headings = (
        "shape",
        "variant",
        time,
        "memory",
        "first call",
        "compiled in it",
        "compiled later",
    )
    return Table(headings, cells, headings[2:])


def _shape_cells(row: Row) -> tuple[Cell | str, ...]:
    figures = row.figures
    first = ""
    if "latency/cold_start_s" in figures:
        first = seconds_text(Interval(figures["latency/cold_start_s"]))
    compiled = _graphs_text(figures.get("compile/graphs"))
    if figures.get("compile/graphs") and "latency/compile_s" in figures:
        compiled += f", {seconds_text(Interval(figures['latency/compile_s']))}"
    return (
        str(row.shape),
        row.name,
        Cell(*seconds_parts(row.time)) if row.time else "",
        "" if row.peak_gib is None else gib_text(row.peak_gib),
        first,
        compiled,
        _graphs_text(figures.get("compile/recompiles")),
    )


def _graphs_text(count: float | None) -> str:
    if count is None:
        return ""
    return f"{count:g} graph" if count == 1 else f"{count:g} graphs"


def stage_memory_table(summary: Summary) -> Table | None:
    """Returns the table of the peak memory of each stage, with all weights; None if none was measured."""
    peaks_of: dict[str, dict[str, float]] = {}
    stages: dict[str, None] = {}
    for row in summary.first.values():
        peaks = stage_peaks(row.variant)
        if peaks and not row.variant.is_control:
            peaks_of[row.name] = peaks
            stages |= dict.fromkeys(peaks)
    if not peaks_of:
        return None
    cells = []
    for name, peaks in peaks_of.items():
        texts = {stage: gib_text(peak) for stage, peak in peaks.items()}
        cells.append((name, *(texts.get(stage, "") for stage in stages)))
    names = [stage.replace("_", " ") for stage in stages]
    headings = ("variant", *(f"peak in {name}" for name in names))
    return Table(headings, cells, headings[1:])


def effects_table(summary: Summary) -> Table | None:
    """Returns the effects of a factorial study; None if there are none."""
    effects = summary.result.effects
    if not effects:
        return None
    headings = ("effect", "of", "speed-up", "memory")
    return Table(
        headings,
        list(map(_effect, effects)),
        headings[2:],
    )


def _effect(effect: Effect) -> tuple[Cell | str, ...]:
    kind = "main" if len(effect.options) == 1 else "interaction"
    options = " × ".join(effect.options)
    if not effect.aliased_with:
        return (
            kind,
            options,
            ratio_cell(effect.speedup),
            ratio_cell(effect.memory_ratio),
        )
    first, *others = effect.aliased_with
    alias = f"aliased with {first}"
    if others:
        alias += f" and {len(others)} other{'s' if len(others) > 1 else ''}"
    return kind, options, alias, ""


BROKEN = "broken"
"""The column that counts broken images."""

_WORST = 3
"""Prompts that are named by each metric."""

_SAME = 0.9999
"""From here on a similarity tells no loss; rounding alone gives less than 1."""


def quality_columns(result: StudyResult) -> list[str]:
    """Returns the metrics that some variant has and that tables show, and the count of broken images; [] for none."""
    measured: list[str] = []
    owners: list[VariantResult | Comparison] = [*result.variants, *result.comparisons]
    for owner in owners:
        measured += owner.quality
    columns = []
    for name in in_reading_order(measured):
        family = known_family(name)
        if family is None or family.tabulated:
            columns.append(name)
    return [*columns, BROKEN] if columns else []


def headline_columns(result: StudyResult) -> list[str]:
    """Returns the metrics that the terminal and the page show, and the count of broken images if there are any."""
    columns = []
    for name in quality_columns(result):
        family = known_family(name)
        if family and family.headline:
            columns.append(name)
        if name == BROKEN and any(variant.trips for variant in result.variants):
            columns.append(name)
    return columns


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
    meanings = {}
    for name in names:
        family = known_family(name)
        if family is not None:
            meanings[family.name] = f"{family.name}: {family.meaning}"
    if not meanings:
        return []
    return [f"↑ more is better, ↓ less is better. {'; '.join(meanings.values())}."]


def metric_text(row: Row, name: str) -> str:
    """Returns a comparison's score in one metric as tables show it; "" if it has none."""
    variant = row.variant
    if name == BROKEN:
        if not variant.trips:
            return ""
        return (
            f"{variant.broken_images} of {len(variant.images)}"
            if variant.broken_images
            else "yes"
        )
    score = row.scores.get(name)
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


def worst_prompts(
    result: StudyResult,
    name: str,
    metrics: Sequence[str] | None = None,
) -> list[WorstPrompt]:
    """Returns the prompts of a variant that lost most, by metric, the worst ones first.

    Without `metrics` to look at, these are all of which one way is worse. Those of whole sets have no worst prompt.
    """
    edge = result.first_comparison(name)
    variant = result.variant(name)
    if edge is None:
        return []
    prompts = {image.prompt_index: image.prompt for image in variant.images}
    if metrics is None:
        metrics = [*variant.quality, *edge.quality]
    worst: list[WorstPrompt] = []
    for metric in in_reading_order(metrics):
        family = known_family(metric)
        if family is None or family.higher_is_better is None:
            continue
        lost = []
        changes = _changes(result, variant, edge, family, metric)
        for (index, prompt), change in zip(prompts.items(), changes, strict=False):
            if change is not None and _is_loss(family, change):
                lost.append(WorstPrompt(metric, index, prompt, change))
        # The worst change has the largest value where less is better.
        lost.sort(key=lambda prompt: prompt.value, reverse=not family.higher_is_better)
        worst += lost[:_WORST]
    return worst


def worst_by_metric(result: StudyResult) -> Counter[int]:
    """Returns by how many headline metrics of variants a prompt lost most, by its number."""
    numbers = Counter[int]()
    metrics = headline_columns(result)
    for variant in result.candidates:
        worst_of: dict[str, int] = {}
        for worst in worst_prompts(result, variant.name, metrics):
            worst_of.setdefault(worst.metric, worst.prompt_index)
        numbers.update(worst_of.values())
    return numbers


def _changes(
    result: StudyResult,
    variant: VariantResult,
    edge: Comparison,
    family: MetricFamily,
    metric: str,
) -> list[float | None]:
    """Returns by prompt the distance from the reference's images, or the difference from its score."""
    if metric in edge.quality and family.needs_pair:
        return edge.quality[metric].per_prompt
    score = variant.quality.get(metric)
    reference = result.variant(edge.reference).quality.get(metric)
    if score is None or reference is None:
        return []
    count = min(len(score.per_prompt), len(reference.per_prompt))
    return differences(
        score.per_prompt[:count],
        reference.per_prompt[:count],
        1.0,
    )


def _is_loss(family: MetricFamily, change: float) -> bool:
    """Returns whether a change is for the worse: equal images, whose similarity is 1, have lost nothing."""
    if not family.higher_is_better:
        return change > 0
    if family.needs_pair:
        return not _SAME <= change <= 1
    return change < 0


def quality_table(summary: Summary, headline: bool = True) -> Table | None:
    """Returns the scores of each comparison's images, or only the `headline` ones; None if nothing was scored."""
    result = summary.result
    names = headline_columns(result) if headline else quality_columns(result)
    rows = []
    for row in summary.figures:
        if row.variant.images and not row.variant.is_control:
            scores = [metric_text(row, name) for name in names]
            rows.append((compared(result, row), *scores))
    if not names or not rows:
        return None
    headings = ("variant", *map(quality_heading, names))
    return Table(headings, rows, headings[1:])


def worst_table(summary: Summary) -> Table | None:
    """Returns the prompts that lost most by each metric that a reader needs first; None if none lost."""
    result = summary.result
    rows = []
    for row in summary.figures:
        if row.variant.is_control or not row.variant.images:
            continue
        by_metric: dict[str, list[str]] = {}
        for worst in worst_prompts(result, row.variant.name, headline_columns(result)):
            prompt = worst.prompt or f"number {worst.prompt_index + 1}"
            by_metric.setdefault(worst.metric, []).append(
                f"{prompt} ({worst.value:.3g})"
            )
        for metric, prompts in by_metric.items():
            rows.append((compared(result, row), metric, "; ".join(prompts)))
    return Table(("variant", "metric", "worst prompts"), rows) if rows else None


def published_blocks(
    result: StudyResult,
    claims: Sequence[PublishedClaim],
) -> list[Block]:
    """Returns a table of the figures of an article beside those measured, and its notes; nothing without a figure."""
    if not claims:
        return []
    headings = (
        "variant",
        "against",
        "figure",
        "shape",
        "GPU",
        "published",
        "here",
        "verdict",
        "because",
    )
    table = Table(headings, list(map(_claim_cells, claims)))
    return [table.filled(), Notes(notes_of_published(result, claims))]


_CLAIMED = {
    SPEEDUP.name: ("speed-up", "×"),
    MEMORY_RATIO.name: ("memory", "×"),
    MEMORY: ("memory limit", " GB"),
}
"""The name and the unit of what a claim is about."""


def _claim_cells(claim: PublishedClaim) -> tuple[Cell | str, ...]:
    name, unit = _CLAIMED[claim.measure]
    published = printed = ""
    if claim.value:
        value = claim.value.value
        number = f"{value:g}" if claim.measure == MEMORY else f"{value:.2f}"
        below = "<" if claim.value.below else ""
        published = f"{below}{number}{unit}"
    if claim.printed:
        printed = f"{claim.printed}, {claim.place}"
    here: Cell | str = ""
    if claim.measured:
        here = Cell(f"{claim.measured.estimate:.2f}{unit}", bounds_text(claim.measured))
    return (
        claim.variant,
        claim.reference,
        name,
        claim.shape,
        claim.gpu,
        Cell(published, printed),
        here,
        word(claim.verdict),
        claim.reason,
    )


def to_dataframe(summary: Summary) -> "pd.DataFrame":
    """Returns a row for the baseline and one for each comparison, best first.

    The first columns are the answer, since a notebook shows no more: `variant`, `speedup`, `latency/p50_s`,
    `memory_ratio`, and the verdicts `speed`, `images` and `gate`. Then come `role`, `status`, `reason`, `contract`,
    `against`, and the option of each axis; "" stands for none. The others are figures by their flat names, with
    two-sided bounds (`speedup_low`, `quality/…`), as floats: NaN for what was not measured. Ratios and `speed` are
    over the study's baseline; ratios of a comparison with another variant begin with `step/`. Distances of images,
    such as `quality/psnr_db`, are to those of `against`. Of several shapes, each has columns of its own too, as
    `speedup/512x512b1`.
    """
    import pandas as pd

    return pd.DataFrame(_records(summary))


def to_csv(summary: Summary) -> str:
    """Returns the rows of `to_dataframe` as CSV, without importing pandas."""
    rows = _records(summary)
    text = StringIO()
    writer = DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        for name, value in row.items():
            if isinstance(value, float) and math.isnan(value):
                row[name] = ""
        writer.writerow(row)
    return text.getvalue()


def _records(summary: Summary) -> list[dict[str, Any]]:
    """Returns a row for the baseline and for each comparison: facts, then figures, in the same columns."""
    order = [row.name for row in summary.rows]

    def place(row: Row) -> int:
        return len(order) if row.variant.is_control else order.index(row.name)

    columns = further_columns(["step"])  # here each step has a row of its own
    facts: list[dict[str, Any]] = []
    figures: list[dict[str, Any]] = []
    for row in sorted(summary.figures, key=place):
        values = values_of(_with_verdicts(summary, row), columns)
        words = {
            column.name: values.pop(column.name, "")
            for column in columns
            if not column.number
        }
        facts.append({"variant": row.name, **words, **_facts(row)})
        figures.append({**values, **row.flat})
    texts = dict.fromkeys(chain.from_iterable(facts), "")
    unknown = dict.fromkeys(chain.from_iterable(figures), math.nan)
    first = ["variant", *(column.name for column in columns if column.name in unknown)]
    empty: dict[str, Any] = dict.fromkeys(first) | texts | unknown
    return [
        {**empty, **of_row, **numbers}
        for of_row, numbers in zip(facts, figures, strict=True)
    ]


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
    """Returns the row of a comparison with the verdicts on its variant, and the gate's on the comparison."""
    whole = summary.row(row.name)
    if whole is None:
        return row
    return replace(
        row,
        speed=whole.speed,
        images=whole.images,
        decision=row.verdict,
    )
