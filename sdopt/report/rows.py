"""Derives the rows and cells of the result tables; other modules format them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sdopt.analysis.answer import REPEATS, OptionAnswer
from sdopt.analysis.figures import Figures, figures_of, ratio_text
from sdopt.report.words import memory_text, seconds_text
from sdopt.results.comparisons import Effect
from sdopt.results.records import Status, StudyResult
from sdopt.study.designs import difference


@dataclass(frozen=True)
class Row:
    """One variant against one reference, in words."""

    variant: str
    status: Status
    latency: str
    speedups: Mapping[str, str]
    """By heading of its column: one for each shape of the study."""
    reference: str
    memory: str
    evidence: str

    @property
    def speedup(self) -> str:
        """The speed-up at the main shape; "" for none."""
        return next(iter(self.speedups.values()), "")


SPEEDUP_HEADING = "speed-up"


def rows_of(result: StudyResult) -> list[Row]:
    """Returns a row for the baseline, then one for each comparison; variants without a comparison last."""
    return [row_of(result, figures) for figures in figures_of(result)]


def row_of(result: StudyResult, figures: Figures) -> Row:
    """Returns the row of one of a study's figures."""
    return Row(
        variant=figures.variant.name,
        status=figures.variant.status,
        latency=seconds_text(figures.latency) if figures.latency else "",
        speedups={
            f"{SPEEDUP_HEADING}, {at.shape}" if figures.further else SPEEDUP_HEADING: (
                at.speedup.text if at.speedup else ""
            )
            for at in figures.shapes
        },
        reference=figures.reference,
        memory=memory_text(figures),
        evidence=_explanation(result, figures),
    )


def _explanation(result: StudyResult, figures: Figures) -> str:
    """Returns why there is no figure; else the evidence that the options in which the two sides differ took effect."""
    variant, edge = figures.variant, figures.comparison
    shown = [variant.reason] if variant.reason else []
    if edge is not None and variant.measurements and variant.status is Status.OK:
        reference = result.variant(edge.reference)
        axes = difference(variant.choices, reference.choices)
        same = not axes and variant.config == reference.config
        shown += [REPEATS] if same and variant.role != "control" else []
        shown += [item.summary for item in variant.measurements[0].shapes[0].evidence if item.axis in axes]
    return "; ".join([*shown, *([edge.note] if edge and edge.note and variant.status.timed else [])])


def speedup_headings(rows: Sequence[Row]) -> list[str]:
    """Returns all columns of speed-ups that occur in the rows."""
    return list(dict.fromkeys(heading for row in rows for heading in row.speedups)) or [SPEEDUP_HEADING]


def shape_of(heading: str) -> str:
    """Returns the shape of a column of speed-ups; "" in a study with one shape."""
    return heading.removeprefix(SPEEDUP_HEADING).removeprefix(", ")


def table_of(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Returns the headings and cells of a table. Latency and memory at several shapes have a table below."""
    speedups = speedup_headings(rows)
    one = len(speedups) == 1
    cells = [
        {
            "variant": row.variant,
            "status": str(row.status),
            **({"latency": row.latency} if one else {}),
            **{heading: row.speedups.get(heading, "") for heading in speedups},
            "against": row.reference,
            **({"memory": row.memory} if one else {}),
            "evidence": row.evidence,
        }
        for row in rows
    ]
    return list(cells[0]), [list(row.values()) for row in cells]


EFFECT_HEADINGS = ("effect", "of", "speed-up", "memory")


def effect_cells(effect: Effect) -> tuple[str, ...]:
    """Returns the cells of one effect, by `EFFECT_HEADINGS`."""
    kind = "main" if len(effect.options) == 1 else "interaction"
    if effect.aliased_with:
        first, *others = effect.aliased_with
        more = f" and {len(others)} other{'s' if len(others) > 1 else ''}" if others else ""
        return kind, " × ".join(effect.options), f"aliased with {first}{more}", ""
    figures = [ratio_text(figure) if figure else "" for figure in (effect.speedup, effect.memory_ratio)]
    return kind, " × ".join(effect.options), *figures


ANSWER_HEADINGS = ("verdict", "option", "speed-up", "because")


def answer_cells(option: OptionAnswer) -> tuple[str, ...]:
    """Returns the cells of the verdict on one option, by `ANSWER_HEADINGS`."""
    images = [option.images] if option.ratios else []
    return str(option.worth), option.option, option.figure, "; ".join([*images, option.because])
