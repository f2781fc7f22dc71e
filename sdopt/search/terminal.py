"""Shows what a search found in a terminal."""

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sdopt.report.tones import RICH, Tone
from sdopt.search.answer import columns_of, load_line
from sdopt.search.record import Entry, Fate, SearchRecord, start_said
from sdopt.search.space import Space
from sdopt.statistics.words import shortened

_STYLES = {
    Fate.WINNER: f"bold {RICH[Tone.GOOD]}",
    Fate.PASSED: RICH[Tone.GOOD],
    Fate.NOT_PASSED: RICH[Tone.BAD],
    Fate.RULED_OUT: RICH[Tone.PLAIN],
}

_SHOWN = 15
"""Number of candidates that the table shows; `search.md` has all."""

_WIDEST = 30
"""The most characters that the column of names may claim: the figures need the rest of a line of 80."""


def answer_table(record: SearchRecord) -> Group:
    """Returns the best candidates, the answer, and how to apply it."""
    parts: list[RenderableType] = []
    if record.entries:
        table = Table(box=box.SIMPLE, pad_edge=False)
        shown = record.entries[:_SHOWN]
        columns = columns_of(record, brief=True)
        # A name may break between its options, but not within one.
        longest = max(len(option) for entry in shown for option in entry.name.split())
        table.add_column(columns[0][0], overflow="fold", ratio=1, min_width=min(longest, _WIDEST))
        for heading, _ in columns[1:]:
            table.add_column(heading, overflow="fold")
        for entry in shown:
            table.add_row(*(escape(cell(entry)) for _, cell in columns), style=_STYLES.get(entry.fate, ""))
        parts.append(table)
        parts += [
            Padding(Text(f"{entry.name}: {_reason(entry)}", style=_STYLES.get(entry.fate, "")), (0, 0, 0, 2))
            for entry in shown
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
        parts.append(Padding(Text(load_line(record, record.winner)), (0, 0, 0, 4)))
    judged = [entry for entry in record.entries if entry.command]
    if judged:
        parts.append(Text("To measure the judged candidates again:"))
        parts += [Padding(Text(entry.command), (0, 0, 0, 4)) for entry in judged]
    return Group(*parts)


def _reason(entry: Entry) -> str:
    """Returns all reasons of a judged candidate; of any other only the first one, because `search.md` has all."""
    if not entry.command:
        return shortened(entry.because)
    said = start_said(entry.start)
    return f"{entry.because}; start {said}" if said else entry.because


def space_table(space: Space) -> Group:
    """Returns a table of the variables to search, and the options that cannot run here."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for heading in ("varied", "values", "of the baseline"):
        table.add_column(heading, overflow="fold")
    for variable in space.variables:
        table.add_row(variable.name, escape(", ".join(map(str, variable.values))), variable.plain or "")
    return Group(table, *(Text(f"  cannot run: {reason}", style="dim") for reason in space.left_out))
