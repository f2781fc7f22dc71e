"""Writes blocks for a terminal. A table with columns to spare has one line for each row, however narrow it is."""

from collections.abc import Iterator, Sequence

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


def shown(
    blocks: Sequence[Block],
    width: int,
) -> Group:
    """Returns what a terminal of some width shows of blocks; of plots and images nothing."""
    parts: list[RenderableType] = []
    for block in blocks:
        parts += _shown(block, width)
    return Group(*parts)


def sections_shown(
    sections: Sequence[Section],
    width: int,
) -> Group:
    """Returns sections below their titles, without those that have nothing to show in a terminal."""
    parts: list[RenderableType] = []
    for section in sections:
        content = shown(section.blocks, width).renderables
        if content:
            parts.append(Text(f"\n{section.title}", "bold"))
            parts += content
    return Group(*parts)


def _shown(
    block: Block,
    width: int,
) -> Iterator[RenderableType]:
    match block:
        case Prose(text, strong):
            yield Text(text, "bold" if strong else "")
        case Notes(lines):
            for line in lines:
                yield Padding(Text(line, "dim"), (0, 0, 0, 2))
        case Code(title, lines):
            code = "\n".join(f"    {line}" for line in lines)
            yield Text(f"{title}:")
            yield Text(code, "cyan", no_wrap=True, overflow="ignore")
        case Table():
            yield _Layout(block, width).grid()
        case Facts(pairs):
            for name, value in pairs:
                yield Text(f"  {name}: {value}")
        case Fold(title, blocks):
            yield Text(f"{title}:")
            for inner in blocks:
                yield from _shown(inner, width)


class _Layout:
    """The columns of a table for which there is room: the whole ones, and those without their details."""

    def __init__(
        self,
        table: Table,
        width: int,
    ) -> None:
        self.table = table
        self.width = width
        self.rows = table.cells
        names = [str(row[0]) for row in self.rows]
        words = " ".join(names).split()
        self.longest_name = max(map(len, names), default=0)
        self.longest_word = max(map(len, words), default=0)
        self.detailed = dict.fromkeys(range(len(table.headings)), True)
        """The columns to show, and whether each has its details."""

    def grid(self) -> Grid:
        """Returns the table with as many details and columns as there is room for."""
        headings = list(self.table.headings)
        for heading in self.table.spare:
            if self._room(_WHOLE_NAME) < 0:
                self.detailed[headings.index(heading)] = False
        for heading in self.table.needless:
            if self._room(_NAME) < 0:
                del self.detailed[headings.index(heading)]
        grid = Grid(
            box=None if self.table.spare else box.SIMPLE_HEAD,
            pad_edge=False,
            padding=(0, _GAP, 0, 0),
        )
        self._add_columns(grid)
        for row in self.rows:
            cells = [
                _cell(row[column], detailed)
                for column, detailed in self.detailed.items()
            ]
            grid.add_row(*cells)
        return grid

    def _room(self, name_width: int) -> int:
        """Returns how much room the columns leave beside names; negative if they take too much."""
        widths = [self._width(column) for column in self.detailed if column]
        name = min(name_width, self.longest_name)
        return self.width - name - sum(widths) - _GAP * len(self.detailed)

    def _width(self, column: int) -> int:
        texts = [self.table.headings[column]]
        for row in self.rows:
            cell = row[column]
            texts.append(str(cell) if self.detailed[column] else cell.figure)
        return max(map(len, texts))

    def _add_columns(self, grid: Grid) -> None:
        room = self._room(_NAME)
        fits = room >= 0 and bool(self.table.spare)
        for column in self.detailed:
            heading = self.table.headings[column]
            names = column == 0
            grid.add_column(
                escape(heading),
                justify="right" if heading in self.table.numbers else "left",
                header_style="dim",
                no_wrap=fits,
                overflow="ellipsis" if fits else "fold",
                width=min(self.longest_name, _NAME + room) if fits and names else None,
                min_width=min(self.longest_word, _WORD) if names and not fits else None,
            )


def _cell(
    cell: Cell,
    detailed: bool,
) -> Text:
    text = Text(cell.figure.replace("\n", " "), RICH[cell.tone] if cell.tone else "")
    if detailed and cell.detail:
        text.append(f" {cell.detail}", "dim")
    return text
