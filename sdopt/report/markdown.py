"""Writes the result tables as Markdown."""

import re
from collections.abc import Sequence

from sdopt.analysis.answer import Answer, answer_of
from sdopt.report.header import header_of
from sdopt.report.notes import SWEEP_NOTE, notes_of
from sdopt.report.quality import quality_columns, quality_heading, quality_notes, quality_rows
from sdopt.report.rows import ANSWER_HEADINGS, EFFECT_HEADINGS, Row, answer_cells, effect_cells, rows_of, table_of
from sdopt.report.shapes import SHAPE_HEADINGS, shape_rows
from sdopt.results.records import StudyResult


def markdown_table(result: StudyResult) -> str:
    """Returns the answer, the header, and the table with its notes, shapes, effects and quality scores."""
    columns = quality_columns(result)
    heads = ("variant", *map(quality_heading, columns))
    quality = markdown(heads, quality_rows(result, columns), quality_notes(columns)) if columns else ""
    effects = markdown(EFFECT_HEADINGS, list(map(effect_cells, result.effects)), []) if result.effects else ""
    several = shape_rows(result)
    shapes = markdown(SHAPE_HEADINGS, several, []) + "\n" if several else ""
    table = markdown(*table_of(rows_of(result)), notes_of(result))
    header = " · ".join(map(_cell, header_of(result)))
    return "\n".join([answer_markdown(answer_of(result)), f"{header}\n", table, shapes + effects + quality])


def answer_markdown(answer: Answer) -> str:
    """Returns the answer's sentence, a verdict on each option, and how to apply the best one."""
    parts = [f"**{_cell(answer.sentence)}**\n"]
    if answer.options:
        parts.append(markdown(ANSWER_HEADINGS, [answer_cells(option) for option in answer.options], answer.notes))
    if (best := answer.best) is not None:
        parts.append(f"To turn on {_cell(best.option)} for a pipeline `pipe`:\n\n{code_block(best.lines, 'python')}")
        parts.append(f"To measure it again: `{' '.join(best.command.split())}`\n")
    return "\n".join(parts)


def sweep_markdown(rows: Sequence[tuple[str, Row]]) -> str:
    """Returns the table of a sweep as Markdown."""
    headings, cells = table_of([row for _, row in rows])
    return markdown(("job", *headings), [(job, *row) for (job, _), row in zip(rows, cells, strict=True)], [SWEEP_NOTE])


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """Returns a Markdown table with notes below it; cells and notes are escaped."""
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    lines += ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    return "\n".join([*lines, "", *(f"- {escaped(note)}" for note in notes)]) + "\n"


def _cell(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("|", "\\|").replace("\n", " ")


def code_block(lines: Sequence[str], language: str = "") -> str:
    """Returns lines of code between fences that none of them can end."""
    fence = "`" * max([3, *(1 + len(run) for line in lines for run in re.findall("`+", line))])
    return f"{fence}{language}\n" + "\n".join(lines) + f"\n{fence}\n"


def escaped(text: str) -> str:
    """Returns a text escaped for Markdown, except for code between backticks."""
    parts = text.replace("\n", " ").split("`")
    if len(parts) % 2 == 0:
        return _plain(text.replace("\n", " "))
    return "".join(f"`{part}`" if number % 2 else _plain(part) for number, part in enumerate(parts))


def _plain(text: str) -> str:
    for mark, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(mark, entity)
    # Within a word an underscore is no markup.
    return re.sub(r"[\\`*\[\]]|(?<!\w)_|_(?!\w)", r"\\\g<0>", text)
