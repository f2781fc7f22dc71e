"""Shows the result tables in a terminal."""

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sdopt.analysis.answer import answer_of
from sdopt.report.header import header_of
from sdopt.report.notes import SWEEP_NOTE, notes_of
from sdopt.report.published import published_tables
from sdopt.report.quality import headline_columns, quality_columns, quality_heading, quality_notes, quality_rows
from sdopt.report.rows import EFFECT_HEADINGS, Row, answer_cells, effect_cells, rows_of, shape_of, speedup_headings
from sdopt.report.shapes import SHAPE_HEADINGS, shape_rows
from sdopt.report.tones import RICH, TONES
from sdopt.results.comparisons import Effect
from sdopt.results.records import StudyResult

_WIDE = 130
"""Width of a terminal from which on intervals stand beside their figures, and evidence in the table."""

_BESIDE_SPEEDUPS, _SPEEDUP_WIDE, _SPEEDUP_NARROW = 40, 22, 15
"""Width of a table of several shapes without its speed-ups, and width of a speed-up."""


def terminal_table(result: StudyResult, width: int) -> Group:
    """Returns the table and its notes, for a terminal of the given width."""
    header = [Text(line, "bold") for line in header_of(result)]
    more = [shapes_table(result)] if shape_rows(result) else []
    more += [effects_table(result.effects)] if result.effects else []
    more += [quality_table(result)] if quality_columns(result) else []
    notes = [Text(f"  {note}", "dim") for note in [*notes_of(result), *quality_notes(headline_columns(result))]]
    published = published_tables(result, width >= _WIDE)
    return Group(*header, *_tables("", rows_of(result), width), *more, *notes, *published)


def shapes_table(result: StudyResult) -> Table:
    """Returns the table of each variant's time and memory at each shape, with the cost of a new shape."""
    table = Table(title="shapes", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in SHAPE_HEADINGS:
        # A name without spaces is longer than a narrow terminal leaves for it.
        table.add_column(heading, justify="left" if heading in ("variant", "shape") else "right", overflow="fold")
    for cells in shape_rows(result):
        table.add_row(*map(escape, cells))
    return table


def quality_table(result: StudyResult) -> Table:
    """Returns the table of quality: each variant's own scores, and the distances to the reference's images."""
    table = Table(title="quality", title_justify="left", box=box.SIMPLE_HEAD)
    names = headline_columns(result)
    table.add_column("variant", min_width=14, overflow="fold")
    for name in names:
        # On two lines, the features or the unit below the metric: a narrow terminal would cut the last columns.
        heading = quality_heading(name)
        heading = "\n".join(heading.rsplit("_", 1)) if "_" in heading else heading.replace(" ", "\n", 1)
        table.add_column(heading.replace("_", " "), justify="right")
    for cells in quality_rows(result, names):
        table.add_row(*map(escape, cells))
    return table


def effects_table(effects: Sequence[Effect]) -> Table:
    """Returns the table of main effects and interactions of a factorial study."""
    table = Table(title="effects", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in EFFECT_HEADINGS:
        table.add_column(heading, justify="left" if heading in ("effect", "of") else "right")
    for cells in map(effect_cells, effects):
        table.add_row(*map(escape, cells))
    return table


def sweep_table(rows: Sequence[tuple[str, Row]], width: int) -> Group:
    """Returns one table of a sweep's candidates, each with the number of its job."""
    numbers = [number for number, _ in rows]
    tables = _tables(f"sweep of {len(rows)} jobs", [row for _, row in rows], width, numbers)
    return Group(*tables, Text(f"  {SWEEP_NOTE}", "dim"))


def _tables(title: str, rows: Sequence[Row], width: int, jobs: Sequence[str] | None = None) -> list[Table | Text]:
    """Returns a table; if narrow, intervals and references go below figures and names, and evidence below the table.

    As many shapes stand side by side as fit; the others follow in further tables.
    """
    headings, wide = speedup_headings(rows), width >= _WIDE
    one = len(headings) == 1
    at_once = max(1, (width - _BESIDE_SPEEDUPS) // (_SPEEDUP_WIDE if wide else _SPEEDUP_NARROW))
    parts = [headings[start : start + at_once] for start in range(0, len(headings), at_once)]
    tables = [_table(title, rows, wide, part, one, jobs) for part in parts]
    if wide and one:
        return [*tables]
    return [*tables, *(Text(f"  {row.variant}: {row.evidence}") for row in rows if row.evidence)]


def _table(
    title: str, rows: Sequence[Row], wide: bool, headings: Sequence[str], one: bool, jobs: Sequence[str] | None
) -> Table:
    """Returns a table with some columns of speed-ups; with one shape, also with latency, memory and evidence."""
    references = {row.reference for row in rows if row.reference}
    against = f"against {references.pop()}" if len(references) == 1 else ""
    if not one:
        title = f"{title}: speed-up {against}".rstrip().removeprefix(": ")
    table = Table(title=escape(title) or None, title_justify="left", box=box.SIMPLE_HEAD)
    if jobs is not None:
        table.add_column("job", justify="right")
    table.add_column("variant", min_width=16, overflow="fold")
    table.add_column("status", no_wrap=True)
    if one:
        table.add_column("latency", justify="right", no_wrap=True)
    for heading in headings:
        label = f"{heading}\n{against}".rstrip() if one else shape_of(heading).replace(", ", "\n")
        table.add_column(escape(label), justify="right", no_wrap=True)
    beside = wide and not against
    if beside:
        table.add_column("against")
    if one:
        table.add_column("memory", justify="right", no_wrap=True)
    if wide and one:
        table.add_column("evidence")
    for number, row in enumerate(rows):
        latency, memory, *speedups = (
            escape(figure if wide else figure.replace(" [", "\n[").replace(" (", "\n("))
            for figure in (row.latency, row.memory, *(row.speedups.get(heading, "") for heading in headings))
        )
        table.add_row(
            *([] if jobs is None else [jobs[number]]),
            escape(
                row.variant if against or beside or not row.reference else f"{row.variant}\n against {row.reference}"
            ),
            Text(str(row.status), RICH[TONES[row.status]]),
            *([latency] if one else []),
            *speedups,
            *([escape(row.reference)] if beside else []),
            *([memory] if one else []),
            *([escape(row.evidence)] if wide and one else []),
        )
    return table


def answer_group(result: StudyResult) -> Group:
    """Returns the answer of a study: a sentence, a verdict on each option, and how to apply the best one."""
    answer = answer_of(result)
    table = Table.grid(padding=(0, 2))
    for option in answer.options:
        verdict, name, figure, because = answer_cells(option)
        table.add_row("", Text(verdict, RICH[TONES[option.worth]]), Text(f"{name}  {figure}\n{because}"))
    parts: list[RenderableType] = [Text(f"\nAnswer: {answer.sentence}", "bold"), *([table] if answer.options else [])]
    parts += [Text(f"  {note}", "dim") for note in answer.notes]
    if (best := answer.best) is not None:
        parts += [Text(f"To turn on {best.option} for a pipeline `pipe`:"), _code("\n".join(best.lines))]
        parts += [Text("To measure it again:"), _code(best.command)]
    return Group(*parts)


def _code(text: str) -> Padding:
    return Padding(Text(text, "cyan"), (0, 0, 0, 4))


def show(result: StudyResult, console: Console, folder: Path) -> None:
    """Prints the table, and where to look next."""
    console.print(terminal_table(result, console.width))
    console.print(f"result: {folder / 'result.json'}", markup=False, highlight=False, soft_wrap=True)
