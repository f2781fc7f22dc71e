"""Writes the result tables as Markdown."""

from collections.abc import Sequence

from sdopt.report.rows import (
    EFFECT_HEADINGS,
    SWEEP_NOTE,
    Row,
    effect_cells,
    notes_of,
    quality_columns,
    quality_heading,
    quality_notes,
    quality_rows,
    rows_of,
    table_of,
)
from sdopt.report.shapes import SHAPE_HEADINGS, shape_rows
from sdopt.results.records import StudyResult


def markdown_table(result: StudyResult) -> str:
    """The table of a study with its notes, its shapes, its effects and its quality scores."""
    columns = quality_columns(result)
    heads = ("variant", *map(quality_heading, columns))
    quality = markdown(heads, quality_rows(result, columns), quality_notes(columns)) if columns else ""
    effects = markdown(EFFECT_HEADINGS, list(map(effect_cells, result.effects)), []) if result.effects else ""
    several = shape_rows(result)
    shapes = markdown(SHAPE_HEADINGS, several, []) + "\n" if several else ""
    return markdown(*table_of(rows_of(result)), notes_of(result)) + "\n" + shapes + effects + quality


def sweep_markdown(rows: Sequence[tuple[str, Row]]) -> str:
    """The table of a sweep as Markdown."""
    headings, cells = table_of([row for _, row in rows])
    return markdown(("job", *headings), [(job, *row) for (job, _), row in zip(rows, cells, strict=True)], [SWEEP_NOTE])


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """A Markdown table with notes below it; cells are escaped."""
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    lines += ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)]) + "\n"


def _cell(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("|", "\\|").replace("\n", " ")
