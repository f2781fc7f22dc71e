"""Writes the result tables as Markdown."""

from collections.abc import Sequence

from sdopt.report.rows import (
    EFFECT_HEADINGS,
    HEADINGS,
    SWEEP_NOTE,
    Row,
    cells_of,
    effect_cells,
    notes_of,
    quality_columns,
    quality_heading,
    quality_notes,
    quality_rows,
    rows_of,
)
from sdopt.results.records import StudyResult


def markdown_table(result: StudyResult) -> str:
    """The table of a study with its notes, its effects and its quality scores."""
    columns = quality_columns(result)
    heads = ("variant", *map(quality_heading, columns))
    quality = markdown(heads, quality_rows(result, columns), quality_notes(columns)) if columns else ""
    effects = markdown(EFFECT_HEADINGS, list(map(effect_cells, result.effects)), []) if result.effects else ""
    return markdown(HEADINGS, [cells_of(row) for row in rows_of(result)], notes_of(result)) + "\n" + effects + quality


def sweep_markdown(rows: Sequence[tuple[str, Row]]) -> str:
    """The table of a sweep as Markdown."""
    return markdown(("job", *HEADINGS), [(number, *cells_of(row)) for number, row in rows], [SWEEP_NOTE])


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """A Markdown table with notes below it; cells are escaped."""
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    lines += ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)]) + "\n"


def _cell(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("|", "\\|").replace("\n", " ")
