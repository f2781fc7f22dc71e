"""Writes blocks for a terminal. A table with columns to spare has one line for each row, however narrow it is."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from sdopt.report.blocks import Block, Cell, Code, Facts, Fold, Notes, Prose, Section, Table
from sdopt.report.tones import RICH

_GAP = 2
"""Blanks between columns."""

_NAME = 16
"""Least width of the column that names the rows, beside columns to spare."""

_WORD = 30
"""Greatest width that this column claims so that no word of it is broken."""


def shown(blocks: Sequence[Block], width: int) -> Group:
    """Returns what a terminal of some width shows of blocks; of plots and images nothing."""
    return Group(*(part for block in blocks for part in _shown(block, width)))


def sections_shown(sections: Sequence[Section], width: int) -> Group:
    """Returns sections below their titles, without those that have nothing to show in a terminal."""
    parts: list[RenderableType] = []
    for section in sections:
        if blocks := [part for block in section.blocks for part in _shown(block, width)]:
            parts += [Text(f"\n{section.title}", "bold"), *blocks]
    return Group(*parts)


def _shown(block: Block, width: int) -> Iterator[RenderableType]:
    match block:
        case Prose(text, strong):
            yield Text(text, "bold" if strong else "")
        case Notes(lines):
            yield from (Padding(Text(line, "dim"), (0, 0, 0, 2)) for line in lines)
        case Code(title, lines):
            yield Text(f"{title}:")
            yield Text("\n".join(f"    {line}" for line in lines), "cyan", no_wrap=True, overflow="ignore")
        case Table():
            yield _grid(block, width)
        case Facts(pairs):
            yield from (Text(f"  {name}: {value}") for name, value in pairs)
        case Fold(title, blocks):
            yield Text(f"{title}:")
            for inner in blocks:
                yield from _shown(inner, width)


def _grid(table: Table, width: int) -> Grid:
    """Returns a table with as many details and columns as there is room for."""
    rows, headings = table.cells, list(table.headings)
    kept = dict.fromkeys(range(len(headings)), True)  # the columns, and whether each has its details

    longest = max([len(str(row[0])) for row in rows], default=0)
    word = max([len(part) for row in rows for part in str(row[0]).split()], default=0)

    def room() -> int:
        wide = [
            max([len(headings[n]), *(len(str(row[n]) if kept[n] else row[n].figure) for row in rows)])
            for n in kept
            if n
        ]
        return width - min(_NAME, longest) - sum(wide) - _GAP * len(kept)

    for heading in table.spare:
        if room() < 0:
            kept[headings.index(heading)] = False
    for heading in table.needless:
        if room() < 0:
            del kept[headings.index(heading)]
    whole = room() >= 0 and bool(table.spare)
    grid = Grid(box=box.SIMPLE_HEAD if not table.spare else None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for n in kept:
        right = headings[n] in table.numbers
        grid.add_column(
            escape(headings[n]),
            justify="right" if right else "left",
            header_style="dim",
            no_wrap=whole,
            overflow="ellipsis" if whole else "fold",
            width=min(longest, _NAME + room()) if whole and not n else None,
            min_width=min(word, _WORD) if not whole and not n else None,
        )
    for row in rows:
        grid.add_row(*(_cell(row[n], kept[n]) for n in kept))
    return grid


def _cell(cell: Cell, detailed: bool) -> Text:
    found = Text(cell.figure.replace("\n", " "), RICH[cell.tone] if cell.tone else "")
    return found.append(f" {cell.detail}", "dim") if detailed and cell.detail else found
