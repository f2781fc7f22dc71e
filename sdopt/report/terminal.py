"""Writes blocks for a terminal. A table with columns to spare has one line for each row, however narrow it is."""

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from sdopt.report.blocks import (
    Block,
    Cell,
    Code,
    Facts,
    Fold,
    Notes,
    Prose,
    Section,
    Table,
)
from sdopt.report.tones import RICH

_GAP = 2
"""Blanks between columns."""

_NAME = 16
"""Least width of the column that names the rows, beside columns to spare."""

_WHOLE_NAME = 30
"""Names up to this width are shown whole before any figure has its details."""

_WORD = 30
"""Greatest width that this column claims so that no word of it is broken."""


def shown(blocks: Sequence[Block], width: int) -> Group:
    """Returns what a terminal of some width shows of blocks; of plots and images nothing."""
    parts: list[RenderableType] = []
    for block in blocks:
        match block:
            case Prose(text, strong):
                parts.append(Text(text, "bold" if strong else ""))
            case Notes(lines):
                texts = [Text(line, "dim") for line in lines]
                parts += [Padding(text, (0, 0, 0, 2)) for text in texts]
            case Code(title, lines):
                code = "\n".join(f"    {line}" for line in lines)
                parts.append(Text(f"{title}:"))
                parts.append(Text(code, "cyan", no_wrap=True, overflow="ignore"))
            case Table():
                parts.append(_grid(block, width))
            case Facts(pairs):
                parts += [Text(f"  {name}: {value}") for name, value in pairs]
            case Fold(title, inner):
                parts += [Text(f"{title}:"), *shown(inner, width).renderables]
    return Group(*parts)


def sections_shown(sections: Sequence[Section], width: int) -> Group:
    """Returns sections below their titles, without those that have nothing to show in a terminal."""
    parts: list[RenderableType] = []
    for section in sections:
        content = shown(section.blocks, width).renderables
        if content:
            parts.append(Text(f"\n{section.title}", "bold"))
            parts += content
    return Group(*parts)


def _grid(table: Table, width: int) -> Grid:
    """Returns a table with as many details, and then columns, as there is room for."""
    rows = table.cells
    headings = list(table.headings)
    names = [str(row[0]) for row in rows]
    longest_name = max(map(len, names), default=0)
    detailed = dict.fromkeys(range(len(headings)), True)  # each column to show

    def room(name_width: int) -> int:
        """Returns how much the columns leave beside names; negative if they take too much."""
        left = width - min(name_width, longest_name) - _GAP * len(detailed)
        for column in detailed:
            if column:
                left -= _width(headings, rows, column, detailed[column])
        return left

    for heading in table.spare:
        if room(_WHOLE_NAME) < 0:
            detailed[headings.index(heading)] = False
    for heading in table.needless:
        if room(_NAME) < 0:
            del detailed[headings.index(heading)]
    spared = room(_NAME)
    fits = spared >= 0 and bool(table.spare)
    name_width = min(longest_name, _NAME + spared) if fits else None
    longest_word = max(map(len, " ".join(names).split()), default=0)
    grid = Grid(
        box=None if table.spare else box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, _GAP, 0, 0),
    )
    for column in detailed:
        heading = headings[column]
        grid.add_column(
            escape(heading),
            justify="right" if heading in table.numbers else "left",
            header_style="dim",
            no_wrap=fits,
            overflow="ellipsis" if fits else "fold",
            width=None if column else name_width,
            min_width=None if column or fits else min(longest_word, _WORD),
        )
    for row in rows:
        grid.add_row(*(_cell(row[column], detailed[column]) for column in detailed))
    return grid


def _width(
    headings: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    column: int,
    detailed: bool,
) -> int:
    texts = [headings[column]]
    for row in rows:
        cell = row[column]
        texts.append(str(cell) if detailed else cell.figure)
    return max(map(len, texts))


def _cell(cell: Cell, detailed: bool) -> Text:
    text = Text(cell.figure.replace("\n", " "), RICH[cell.tone] if cell.tone else "")
    if detailed and cell.detail:
        text.append(f" {cell.detail}", "dim")
    return text
