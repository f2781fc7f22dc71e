"""The tables of a study as blocks: the ranking, several shapes, effects, images; and all of it as a data frame."""

import math
from collections.abc import Sequence
from csv import DictWriter
from dataclasses import dataclass
from enum import StrEnum
from io import StringIO
from typing import TYPE_CHECKING, Any

from sdopt.quality.metrics import in_reading_order, known_family
from sdopt.record.choices import difference
from sdopt.record.comparisons import Effect, Interval
from sdopt.record.records import Status, StudyResult
from sdopt.report.blocks import Block, Cell, Notes, Table
from sdopt.report.tones import TONES
from sdopt.statistics.figures import Figures, bounds_text
from sdopt.statistics.measures import MEMORY_RATIO, SPEEDUP
from sdopt.statistics.published import MEMORY, Claim, notes_of_published
from sdopt.statistics.scale import decision_of
from sdopt.statistics.summary import PSNR, REPEATS, Row, Summary
from sdopt.statistics.words import compared, gib_text, seconds_parts, seconds_text, share_text, unit_text

if TYPE_CHECKING:
    import pandas as pd


def ranking(summary: Summary) -> Table:
    """Returns the table of all variants but the repeated baseline, best first, with their verdicts."""
    judged = any(row.decision for row in summary.rows)
    images = "images" if judged else "images (not judged)"
    shapes, unit = summary.result.shapes, unit_text(summary.result.per_image)
    speedups = [f"speed-up{unit}, {shape}" if len(shapes) > 1 else f"speed-up{unit}" for shape in shapes]
    time = f"time{unit}"
    rows = [
        [
            Cell(row.name),
            *_speedups(row),
            speed_cell(row),
            _time(row),
            memory_cell(row),
            images_cell(row, judged),
            word(row.decision),
            _steps(row),
        ]
        for row in summary.rows
    ]
    headings = ["variant", *speedups, "speed", time, "memory", images, "gate", "step"]
    spare = (time, "step", images, "memory", *reversed(speedups))
    return Table(headings, rows, [*speedups, time, "memory"], spare, needless=(time, "step", "memory")).filled()


def ratio_cell(ratio: Interval | None) -> Cell:
    """Returns a cell with a ratio and its bounds; an empty one for None."""
    return Cell(f"{ratio.estimate:.2f}×", bounds_text(ratio)) if ratio else Cell()


def slower_cell(figures: Figures) -> Cell:
    """Returns a cell with the bound of a speed-up whose timing ended early, as in `≤ 0.14×`."""
    times = figures.at_least_slower
    return Cell(f"≤ {1 / times:.2f}×") if times is not None else Cell()


def word(verdict: StrEnum | None) -> Cell:
    """Returns a cell with a verdict or a status, in its tone; an empty one for None."""
    return Cell(str(verdict), tone=TONES[verdict]) if verdict is not None else Cell()


def speed_cell(row: Row) -> Cell:
    """Returns what a variant's speed-up shows; its status, where that is another than `ok`."""
    return word(row.speed if row.status is Status.OK else row.status)


def images_cell(row: Row, judged: bool = True) -> Cell:
    """Returns what is known of a variant's images, with the metric that is read first; else that metric alone."""
    metric, figure = row.distance
    shown = f"{figure} dB" if metric == PSNR and figure != "equal" else figure
    if judged and row.images is not None:
        return Cell(str(row.images), f"({shown})" if shown not in ("", "equal") else "", TONES[row.images])
    return Cell(shown)


def memory_cell(row: Row) -> Cell:
    """Returns how much more or less memory a variant takes than the baseline, and its peak."""
    peak = row.figures.headline_memory
    shown = gib_text(peak[1]) if peak and row.status.timed else ""
    return Cell(share_text(row.memory.interval.estimate), f"({shown})") if row.memory else Cell(shown)


def _time(row: Row) -> Cell:
    return Cell(*seconds_parts(row.figures.time)) if row.figures.time and row.status.timed else Cell()


def _speedups(row: Row) -> list[Cell]:
    """Returns the speed-up at each shape."""
    if row.variant.given_up:
        return [slower_cell(at) for at in row.figures.shapes]
    ratios = [at.overall.get(SPEEDUP.name) if row.speedup else None for at in row.figures.shapes]
    return [ratio_cell(ratio.interval if ratio else None) for ratio in ratios]


def _steps(row: Row) -> Cell:
    told = [step.text for step in row.steps if step.text]
    figure, _, detail = told[0].partition(" ") if told else ("", "", "")
    return Cell(figure, "; ".join([detail, *told[1:]]).strip("; "))


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
    cells = [
        (str(at.shape), at.variant.name, *_at_shape(at))
        for of_shape in zip(*(row.shapes for row in rows), strict=True)
        for at in of_shape
    ]
    time = f"time{unit_text(summary.result.per_image)}"
    headings = ("shape", "variant", time, "memory", "first call", "compiled in it", "compiled later")
    return Table(headings, cells, headings[2:]) if cells else None


def _at_shape(figures: Figures) -> tuple[Cell | str, ...]:
    found = figures.at_shape
    first, compiled = found["latency/cold_start_s"], found["latency/compile_s"]
    graphs, later = (
        "" if count is None else f"{count:g} graph{'s' if count != 1 else ''}"
        for count in (found["compile/graphs"], found["compile/recompiles"])
    )
    return (
        Cell(*seconds_parts(figures.time)) if figures.time else "",
        gib_text(figures.headline_memory[1]) if figures.headline_memory else "",
        "" if first is None else seconds_text(Interval(first)),
        graphs + ("" if compiled is None or not found["compile/graphs"] else f", {seconds_text(Interval(compiled))}"),
        later,
    )


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


def published_blocks(result: StudyResult, claims: Sequence[Claim]) -> list[Block]:
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
    result, order = summary.result, [row.name for row in summary.rows]
    rows = sorted(
        summary.figures, key=lambda one: len(order) if one.variant.is_control else order.index(one.variant.name)
    )
    facts = [
        {
            "variant": row.variant.name,
            **_verdicts(summary, row),
            "role": "baseline" if row.variant.name == result.baseline else row.variant.role,
            "status": str(row.variant.status),
            "reason": row.variant.reason,
            "contract": row.variant.contract,
            "against": row.reference,
            **row.variant.choices,
        }
        for row in rows
    ]
    figures = [row.flat for row in rows]
    texts = dict.fromkeys((name for row in facts for name in row), "")
    numbers = dict.fromkeys((name for row in figures for name in row), math.nan)
    first = ["variant", *(name for name in ("speedup", "latency/p50_s", "memory_ratio") if name in numbers)]
    empty: dict[str, Any] = dict.fromkeys(first) | texts | numbers
    return [empty | told | known for told, known in zip(facts, figures, strict=True)]


def _verdicts(summary: Summary, figures: Figures) -> dict[str, str]:
    """Returns the verdicts on a variant, or on its step on top of another one; "" for none."""
    row = summary.row(figures.variant.name)
    found = next((step for step in row.steps if step.figures is figures), row) if row else None
    return {
        "speed": str((found.speed if found else None) or ""),
        "images": str((row.images if row else None) or ""),
        "gate": str(decision_of(figures.judgement.verdict)) if figures.judgement else "",
    }
