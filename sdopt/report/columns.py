"""The columns of variants. An entry of `COLUMNS` is all that a figure needs to be seen everywhere.

Tables in a terminal, in Markdown and on a page, `table.csv` and data frames, `--json`, sweeps, searches, load tests,
and MLflow's metrics, tags and leaderboard are made from it. They show a column as soon as some row has a value.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sdopt.record.comparisons import Interval
from sdopt.record.records import Status, StudyResult
from sdopt.report.blocks import Cell, Table
from sdopt.report.tones import TONES
from sdopt.schema import Shape
from sdopt.statistics.measures import MEMORY_RATIO, SPEEDUP, bounds_text
from sdopt.statistics.rows import PSNR, Row
from sdopt.statistics.words import (
    gib_text,
    seconds_parts,
    share_text,
    unit_text,
)

Value = float | str | None


@dataclass(frozen=True)
class TableView:
    """What a table knows of all its rows.

    Attributes:
        judged: whether a gate judged one of them.
        per_image: whether times are those of one image.
        shapes: those of the study, if there are several.
    """

    judged: bool = False
    per_image: bool = False
    shapes: Sequence[Shape] = ()


@dataclass(frozen=True)
class Column:
    """A figure of variants, or a verdict on them.

    Attributes:
        name: its key in data, and its metric or tag in MLflow.
        heading: in tables; `{unit}` says that times are per image, `{judged}` that nothing was judged.
        value: a row's number or word; None for a row without one.
        cell: what a table shows; None for the value itself.
        number: whether values are numbers, which stand at the right, and are metrics rather than tags.
        tracked: whether MLflow gets it, and shows it on the leaderboard.
        narrow: its turn to lose its details in a narrow terminal; None to keep them.
        needless: whether it is then left out, by the same turns.
        at_shapes: whether each shape of a study has a column of its own.
        at_main: whether it is of the first shape alone, which its heading then names.
    """

    name: str
    heading: str
    value: Callable[[Row], Value]
    cell: Callable[[Row, TableView], Cell] | None = None
    number: bool = True
    tracked: bool = False
    narrow: int | None = 0
    needless: bool = True
    at_shapes: bool = False
    at_main: bool = False

    def headings(self, view: TableView) -> list[str]:
        """Returns its heading, or one for each shape."""
        judged = "" if view.judged else " (not judged)"
        heading = self.heading.format(unit=unit_text(view.per_image), judged=judged)
        if self.at_shapes and view.shapes:
            return [f"{heading}, {shape}" for shape in view.shapes]
        if self.at_main and view.shapes:
            return [f"{heading}, {view.shapes[0]}"]
        return [heading]

    def cells(self, row: Row | None, view: TableView) -> list[Cell]:
        """Returns a row's cell below each of its headings."""
        if row is None:
            return [Cell() for _ in self.headings(view)]
        rows = row.shapes if self.at_shapes and view.shapes else (row,)
        if self.cell is not None:
            return [self.cell(row, view) for row in rows]
        return [value_cell(self.value(row)) for row in rows]


def compared(result: StudyResult, row: Row) -> str:
    """Returns the variant's name, with that of its reference where this is not the baseline."""
    if row.reference in ("", result.baseline):
        return row.name
    return f"{row.name} against {row.reference}"


# Cells ----------------------------------------------------------------------------------------------------------------


def value_cell(value: Value) -> Cell:
    """Returns a cell with a number, to three digits, or a word; an empty one for None."""
    if isinstance(value, float | int):
        return Cell(f"{value:.3g}")
    return Cell(value or "")


def ratio_cell(ratio: Interval | None) -> Cell:
    """Returns a cell with a ratio and its bounds; an empty one for None."""
    return Cell(f"{ratio.estimate:.2f}×", bounds_text(ratio)) if ratio else Cell()


def slower_cell(row: Row) -> Cell:
    """Returns a cell with the bound of a speed-up whose timing ended early, as in `≤ 0.14×`."""
    times = row.at_least_slower
    return Cell(f"≤ {1 / times:.2f}×") if times is not None else Cell()


def word(verdict: str | None) -> Cell:
    """Returns a cell with a verdict or a status, in its tone; an empty one for None."""
    return Cell(str(verdict), tone=TONES[verdict]) if verdict is not None else Cell()


def speedup_cell(row: Row, view: TableView | None = None) -> Cell:
    """Returns a variant's speed-up over the baseline with its bounds, or the bound at which its timing ended."""
    if row.variant.given_up:
        return slower_cell(row)
    return ratio_cell(row.speedup.interval if row.speedup else None)


def speed_cell(row: Row, view: TableView | None = None) -> Cell:
    """Returns what a variant's speed-up shows; its status, where that is another than `ok`."""
    if row.status is Status.PENDING:
        return word("in part" if row.variant.measurements else "not measured")
    return word(row.speed if row.status is Status.OK else row.status)


def memory_cell(row: Row, view: TableView | None = None) -> Cell:
    """Returns how much more or less memory a variant takes than the baseline, and its peak."""
    peak = ""
    if row.peak_gib is not None and row.status.timed:
        peak = gib_text(row.peak_gib)
    return (
        Cell(share_text(row.memory.interval.estimate), f"({peak})")
        if row.memory
        else Cell(peak)
    )


def memory_text(row: Row) -> str:
    """Returns the peak of memory, and by how much it differs from the baseline's; "" if it was not measured."""
    if row.peak_gib is None:
        return ""
    text = gib_text(row.peak_gib)
    ratio = row.over_baseline.get(MEMORY_RATIO.name)
    if ratio is None:
        return text
    return f"{text} ({share_text(ratio.interval.estimate)})"


def images_cell(row: Row, view: TableView) -> Cell:
    """Returns what is known of a variant's images, with the metric that is read first; else that metric alone."""
    metric, figure = row.distance
    text = f"{figure} dB" if metric == PSNR and figure != "equal" else figure
    if not view.judged or row.images is None:
        return Cell(text)
    return Cell(
        str(row.images),
        f"({text})" if text not in ("", "equal") else "",
        TONES[row.images],
    )


def _time_cell(row: Row, view: TableView) -> Cell:
    return Cell(*seconds_parts(row.time)) if row.time and row.status.timed else Cell()


def _step_cell(row: Row, view: TableView) -> Cell:
    figure, _, detail = _steps_text(row).partition(" ")
    return Cell(figure, detail)


def _steps_text(row: Row) -> str:
    return "; ".join(step.step_text for step in row.steps if step.step_text)


# The registry ---------------------------------------------------------------------------------------------------------

COLUMNS: tuple[Column, ...] = (
    Column(
        SPEEDUP.name,
        "speed-up{unit}",
        lambda row: row.flat.get(SPEEDUP.name),
        speedup_cell,
        tracked=True,
        narrow=5,
        needless=False,
        at_shapes=True,
    ),
    Column(
        "speed",
        "speed",
        lambda row: row.speed,
        speed_cell,
        number=False,
        tracked=True,
        narrow=None,
    ),
    Column(
        "latency/p50_s",
        "time{unit}",
        lambda row: row.flat.get("latency/p50_s"),
        _time_cell,
        tracked=True,
        narrow=1,
        at_main=True,
    ),
    Column(
        MEMORY_RATIO.name,
        "memory",
        lambda row: row.flat.get(MEMORY_RATIO.name),
        memory_cell,
        tracked=True,
        narrow=4,
        at_main=True,
    ),
    Column(
        "images",
        "images{judged}",
        lambda row: row.images,
        images_cell,
        number=False,
        tracked=True,
        narrow=3,
        needless=False,
        at_main=True,
    ),
    Column(
        "gate",
        "gate",
        lambda row: row.decision,
        lambda row, view: word(row.decision),
        number=False,
        tracked=True,
        narrow=None,
    ),
    Column(
        "step",
        "step",
        lambda row: _steps_text(row) or None,
        _step_cell,
        number=False,
        tracked=True,
        narrow=2,
    ),
)
"""In the order of display."""


def values_of(
    row: Row, columns: Sequence[Column] | None = None
) -> dict[str, float | str]:
    """Returns the values of a row by column, without those that it lacks."""
    values: dict[str, float | str] = {}
    for column in COLUMNS if columns is None else columns:
        value = column.value(row)
        if value is not None:
            values[column.name] = (
                value if isinstance(value, float | int) else str(value)
            )
    return values


OF_ONE_STUDY = (
    "speedup",
    "speed",
    "latency/p50_s",
    "memory_ratio",
    "images",
    "gate",
    "step",
)
"""Columns for which a search and a load test have figures of their own, over several studies or under load, or none."""


def further_columns(shown: Sequence[str]) -> list[Column]:
    """Returns the columns of all but these names, for tables that have their own way to derive some."""
    return [column for column in COLUMNS if column.name not in shown]


def _tracked(*, numbers: bool) -> list[str]:
    """Returns the columns that MLflow gets, as metrics (`numbers`) or as tags."""
    tracked = [column for column in COLUMNS if column.tracked]
    return [column.name for column in tracked if column.number is numbers]


def tracked_metrics(values: Mapping[str, float | str]) -> dict[str, float]:
    """Returns of values by column those that MLflow gets as metrics."""
    names = _tracked(numbers=True)
    return {name: float(values[name]) for name in names if name in values}


def tracked_tags(values: Mapping[str, float | str]) -> dict[str, str]:
    """Returns of values by column those that MLflow gets as tags."""
    names = _tracked(numbers=False)
    return {name: str(values[name]) for name in names if name in values}


def leaderboard() -> list[str]:
    """Returns the columns of MLflow's leaderboard, as its UI names them."""
    return [
        *(f"metrics.`{name}`" for name in _tracked(numbers=True)),
        f"metrics.`quality/{PSNR}`",
        *(f"tags.`{name}`" for name in _tracked(numbers=False)),
        "tags.`model`",
        # By which jobs of a sweep are told apart, whose variants have the same names.
        "tags.`size`",
        "tags.`steps`",
        "tags.`batch`",
        "tags.`lora_file`",
        "tags.`device`",
    ]


Cells = tuple[str, Sequence[Cell | str]]
"""A heading, and the cells below it."""


def table_of(
    rows: Sequence[Row | None],
    view: TableView,
    before: Sequence[Cells],
    after: Sequence[Cells] = (),
    instead: Mapping[str, Sequence[Cell | str]] | None = None,
) -> Table:
    """Returns a table of variants without empty columns.

    Args:
        rows: those of the table; None for one of which nothing but `before`, `after` and `instead` is known.
        view: what the table knows of all rows.
        before: what stands before the columns, the names of the rows first.
        after: what follows them.
        instead: cells that take the place of a column's own, by its name.
    """
    table: list[Cells] = list(before)
    numbers: list[str] = []
    narrow: list[tuple[int, str, bool]] = []
    for column in COLUMNS:
        headings = column.headings(view)
        cells = [column.cells(row, view) for row in rows]
        for number, heading in enumerate(headings):
            below: Sequence[Cell | str] = [of_row[number] for of_row in cells]
            if instead is not None:
                below = instead.get(column.name, below)
            table.append((heading, below))
            numbers += [heading] if column.number else []
            if column.narrow is not None:
                narrow.append((column.narrow, heading, column.needless))
    table += after
    narrow.reverse()  # of several shapes, the last one loses its details first
    turns = sorted(narrow, key=lambda turn: turn[0])
    return Table(
        headings=[heading for heading, _ in table],
        rows=list(zip(*(cells for _, cells in table), strict=True)),
        numbers=numbers,
        spare=[heading for _, heading, _ in turns],
        needless=[heading for _, heading, needless in turns if needless],
    ).filled()
