"""The parts of a report: sections of blocks, which are written for a terminal, as Markdown and as HTML."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sdopt.report.tones import Tone


@dataclass(frozen=True)
class Prose:
    """A paragraph of sentences; a `strong` one holds the main result."""

    text: str
    strong: bool = False


@dataclass(frozen=True)
class Notes:
    """Short remarks, a line each."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Code:
    """Lines to copy, with their purpose."""

    title: str
    lines: Sequence[str]
    language: str = ""


@dataclass(frozen=True)
class Cell:
    """A cell of a table: a figure or a word, what belongs to it (an interval, a ratio), and the tone of a verdict."""

    figure: str = ""
    detail: str = ""
    tone: Tone | None = None

    def __str__(self) -> str:
        return f"{self.figure} {self.detail}".strip()


def _as_cell(cell: Cell | str) -> Cell:
    return cell if isinstance(cell, Cell) else Cell(cell)


def _chosen(row: Sequence[Cell | str], columns: Sequence[int]) -> list[Cell | str]:
    return [row[column] for column in columns]


@dataclass(frozen=True)
class Table:
    """A table; texts in it are cells without detail.

    Attributes:
        headings: of all columns; the first one names the rows.
        rows: cells, as many as there are headings.
        numbers: headings of columns that hold figures, which a terminal aligns at the right.
        spare: headings of columns that a narrow terminal shows without details, in this order. Without any, cells are
            broken into lines.
        needless: headings of columns that it then does not show at all, in this order.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    numbers: Collection[str] = ()
    spare: Sequence[str] = ()
    needless: Sequence[str] = ()

    @property
    def cells(self) -> list[list[Cell]]:
        """All cells, row by row."""
        return [list(map(_as_cell, row)) for row in self.rows]

    def filled(self, *left_out: str) -> "Table":
        """Returns the table without empty columns, and without those of some headings."""
        columns = []
        for number, heading in enumerate(self.headings):
            is_filled = number == 0 or any(str(row[number]) for row in self.rows)
            if is_filled and heading not in left_out:
                columns.append(number)
        headings = [self.headings[number] for number in columns]
        return replace(
            self,
            headings=headings,
            rows=[_chosen(row, columns) for row in self.rows],
            spare=[heading for heading in self.spare if heading in headings],
            needless=[heading for heading in self.needless if heading in headings],
        )


@dataclass(frozen=True)
class Facts:
    """Names and values, a pair a line."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Chart:
    """A plot, with several views if the reader may choose what it shows.

    Attributes:
        views: name and Vega-Lite specification of each view.
        choice: label of the choice among the views.
        caption: explains the plot.
        legend: the meaning of its numbers, with a verdict each.
        file: the picture in the run's folder that shows the same; "" if there is none.
    """

    views: Sequence[tuple[str, dict[str, Any]]]
    caption: str = ""
    choice: str = ""
    legend: Sequence[tuple[int, str, Cell]] = ()
    file: str = ""


@dataclass(frozen=True)
class ShownImage:
    """One image of a variant; `uri` is "" if it is the same as the baseline's."""

    variant: str
    uri: str
    caption: str = ""
    broken: str = ""


@dataclass(frozen=True)
class PromptImages:
    """The images of one prompt: the baseline's, and those of the variants."""

    prompt: str
    baseline: ShownImage
    variants: Sequence[ShownImage]


@dataclass(frozen=True)
class Gallery:
    """Images, those that differ most first; `width` is that of an image on the page, in pixels."""

    prompts: Sequence[PromptImages]
    width: int
    pixelated: bool
    caption: str
    file: str = "comparison.png"


@dataclass(frozen=True)
class Fold:
    """Blocks that are shown on request."""

    title: str
    blocks: Sequence["Block"]


Block = Prose | Notes | Code | Table | Facts | Chart | Gallery | Fold


def charts_of(
    views: Sequence[tuple[str, dict[str, Any] | None]],
    caption: str,
    file: str = "",
    choice: str = "",
) -> list[Block]:
    """Returns a chart of those views that there are; nothing without any."""
    charts = [(name, spec) for name, spec in views if spec is not None]
    if not charts:
        return []
    return [Chart(charts, caption, choice, file=file)]


@dataclass(frozen=True)
class Section:
    """A part of a report with a heading."""

    key: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Page:
    """A report: of a study, or of several with what comes before them."""

    title: str
    summary: Sequence[tuple[str, str]]
    """Facts below the title: model, device, date."""
    sections: Sequence[Section]
    studies: Sequence["Page"] = field(default=())
