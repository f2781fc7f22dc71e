"""Shows a load test: its tables."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from sdopt.loadtest.record import LoadRecord, RowFigures, answer_of, header_texts, rate_text, told_ratio
from sdopt.report.blocks import Block, Cell, Notes, Prose, Table
from sdopt.report.markdown import written


def blocks_of(record: LoadRecord) -> list[Block]:
    """Returns the answer, the table, and what the figures rest on."""
    missing = [f"{row.name}: not measured to the end: {row.reason}" for row in record.rows if row.reason]
    notes = [*header_texts(record), *_not_measured(record), *missing]
    return [Prose(answer_of(record), strong=True), rows_table(record), Notes(notes)]


def _not_measured(record: LoadRecord) -> Iterator[str]:
    counted = any(window.image_j for row in record.rows for each in row.replicates for window in each.windows)
    if counted or record.price_per_hour is not None:
        yield "energy and cost are those of the whole device at that rate, idle time included"
    if not counted:
        yield "energy: not measured here, since there is no card whose own counter can be read"
    if record.price_per_hour is None:
        yield "cost: not measured here, since hardware.price_per_hour is not given"


def rows_table(record: LoadRecord) -> Table:
    """Returns a table with a line for each row: the highest rate, and figures at the highest measured one below it."""
    headings = ["variant, policy", "most requests/s", "of the baseline's", "at", "p50", "p95", "p99", "queue", "call"]
    headings += ["batch", "refused", "measured/simulated", "memory", "energy per 1,000", "cost per 1,000"]
    return Table(headings, [_line(record, each) for each in record.figures], numbers=headings[1:]).filled()


def embedded(folder: Path) -> str:
    """Returns the table of a load test as a page has it that `sdopt report --readme` writes. Raises UsageError."""
    record = LoadRecord.read(folder)
    table = rows_table(record).filled("p50", "p99", "queue", "call", "memory")
    return written([Prose(answer_of(record), strong=True), table, Notes(header_texts(record))])


def _line(record: LoadRecord, figures: RowFigures) -> list[Cell | str]:
    rate = figures.typical
    cost, image_j = figures.cost(record.price_per_hour), figures.mean(rate, "image_j")
    memory = figures.row.memory_gib
    seconds = [figures.mean(rate, key) for key in ("p50_s", "p95_s", "p99_s", "queue_s", "compute_s")]
    lost = (figures.mean(rate, "rejected") or 0) + (figures.mean(rate, "errors") or 0)
    return [
        figures.row.name,
        rate_text(figures),
        told_ratio(figures),
        f"{rate:.3g}/s",
        *("" if value is None else f"{value:.3g} s" for value in seconds),
        _number(figures.mean(rate, "batch")),
        f"{lost:.3g}" if lost else "",
        _number(figures.gap),
        "" if memory is None else f"{memory:.2f} GiB",
        "" if image_j is None else f"{image_j:.3g} kJ",
        "" if cost is None else f"{cost:.3g}",
    ]


def windows_table(figures: Sequence[RowFigures]) -> Table:
    """Returns a table of all windows."""
    headings = ["variant, policy", "offered/s", "images/s", "in time/s", "in time", "p50", "p95", "p99"]
    headings += ["refused", "errors", "sent late by", "disturbed"]
    rows = [
        [
            each.row.name,
            f"{window.rate:.3g}",
            f"{window.achieved:.3g}",
            f"{window.goodput:.3g}",
            f"{100 * window.attainment:.1f} %",
            *("" if value is None else f"{value:.3g} s" for value in (window.p50_s, window.p95_s, window.p99_s)),
            str(window.rejected),
            str(window.errors),
            f"{1000 * window.lag_s:.1f} ms",
            "" if window.disturbed is None else f"{100 * window.disturbed:.0f} %",
        ]
        for each in figures
        for rate in sorted(each.windows)
        for window in each.windows[rate]
    ]
    return Table(headings, rows, numbers=headings[1:])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
