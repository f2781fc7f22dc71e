"""Shows what a search found in a terminal."""

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sdopt.search.answer import columns_of, load_line
from sdopt.search.record import Entry, Fate, SearchRecord, shortened
from sdopt.search.space import Space

_STYLES = {Fate.WINNER: "bold green", Fate.PASSED: "green", Fate.NOT_PASSED: "red", Fate.RULED_OUT: "dim"}

_SHOWN = 15
"""Number of candidates that the table shows; `search.md` has all."""


def answer_table(record: SearchRecord) -> Group:
    """Returns the best candidates, the answer, and how to apply it."""
    parts: list[RenderableType] = []
    if record.entries:
        table = Table(box=box.SIMPLE, pad_edge=False)
        columns = columns_of(record, brief=True)
        for place, (heading, _) in enumerate(columns):
            table.add_column(heading, overflow="fold", ratio=None if place else 1)
        for entry in record.entries[:_SHOWN]:
            table.add_row(*(escape(cell(entry)) for _, cell in columns), style=_STYLES.get(entry.fate, ""))
        parts.append(table)
        parts += [
            Padding(Text(f"{entry.name}: {_reason(entry)}", style=_STYLES.get(entry.fate, "")), (0, 0, 0, 2))
            for entry in record.entries[:_SHOWN]
            if entry.command or entry.fate is Fate.RULED_OUT
        ]
        if len(record.entries) > _SHOWN:
            parts.append(Text(f"  and {len(record.entries) - _SHOWN} more", style="dim"))
    parts += [Padding(Text(note, style="dim"), (0, 0, 0, 2)) for note in record.notes]
    parts.append(Text(f"\nAnswer: {record.sentence}", style="bold"))
    if record.winner is not None:
        if record.lines:
            parts.append(Text("To turn it on for a pipeline `pipe`:"))
            parts += [Padding(Text(line), (0, 0, 0, 4)) for line in record.lines]
        parts.append(Text("Or, as it was measured:"))
        parts.append(Padding(Text(load_line(record)), (0, 0, 0, 4)))
    judged = [entry for entry in record.entries if entry.command]
    if judged:
        parts.append(Text("To measure again what was judged:"))
        parts += [Padding(Text(entry.command), (0, 0, 0, 4)) for entry in judged]
    return Group(*parts)


def _reason(entry: Entry) -> str:
    """Returns all reasons of a judged candidate; of any other only the first one, because `search.md` has all."""
    if not entry.command:
        return shortened(entry.because)
    return f"{entry.because}; start +{entry.start_said}" if entry.start_said else entry.because


def space_table(space: Space) -> Group:
    """Returns a table of the variables to search, and the options that cannot run here."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for heading in ("varied", "values", "of the baseline"):
        table.add_column(heading, overflow="fold")
    for variable in space.variables:
        table.add_row(variable.name, escape(", ".join(map(str, variable.values))), variable.plain or "")
    return Group(table, *(Text(f"  cannot run: {reason}", style="dim") for reason in space.left_out))
