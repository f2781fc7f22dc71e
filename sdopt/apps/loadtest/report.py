"""Tells what a load test found: its answer in a sentence, its tables, and what the figures rest on."""

import math
from collections.abc import Iterator, Sequence
from itertools import chain

from sdopt.apps.loadtest.record import ROUNDED, LoadRecord, LoadRow, RowFigures
from sdopt.apps.traffic.figures import Window
from sdopt.report.blocks import Block, Cell, Notes, Prose, Table
from sdopt.report.columns import OF_ONE_STUDY, TableView, further_columns, value_cell
from sdopt.report.markdown import written
from sdopt.statistics.measures import ratio_text
from sdopt.statistics.ratios import MINIMUM_PROCESSES


def answer_of(record: LoadRecord) -> str:
    """Returns which row carries most, in a sentence, and before it which rows did other work than was meant."""
    before = ""
    unlike = [
        f"{row.name}: {', '.join(row.unlike)}" for row in record.rows if row.unlike
    ]
    if unlike:
        before = f"Not the same work: {'; '.join(unlike)}. "
    others = list(chain.from_iterable(map(_unlike_asked, record.rows)))
    if others:
        before += f"Not what was asked for: {'; '.join(others)}. "
    return f"{before}{_most(record)}"


def _unlike_asked(row: LoadRow) -> Iterator[str]:
    """Yields which images came instead of those that requests named, and instead of one for each seed."""
    for asked, came, unit in (
        (row.asked_size, row.came("sizes"), " pixels"),
        (row.asked_kind, row.came("kinds"), ""),
    ):
        if asked not in ("", "auto") and came not in ([], [asked]):
            yield f"{row.name}: its images are {' and '.join(came)}{unit}, although requests ask for {asked}"
    if row.own_seeds and row.repeated:
        yield (
            f"{row.name}: {row.repeated} of {row.images} images are the same as another one, though each request has a "
            "seed of its own: it ignores seeds, answers from a cache, which generates nothing, or returns an empty "
            "picture"
        )


def _most(record: LoadRecord) -> str:
    shown = (
        " (at 99 % confidence, by MLPerf's early stopping)"
        if record.early_stopping
        else ""
    )
    within = f"with {100 * record.attainment:g} % of the requests within {record.limit_s:.3g} s{shown}"
    figures = record.figures
    if not figures:
        return "nothing was measured"
    baseline, *others = figures
    compared = []
    for of_row in others:
        if of_row.ratio is not None and of_row.ratio_bound != "<":
            compared.append((of_row.ratio, of_row))
    if not compared:
        most = f"{baseline.row.name} carries {rate_text(baseline)} requests/s {within}"
        doubts = "".join(_doubts(record, [baseline]))
        unknown = len(figures) < len(record.rows)
        return f"{most}{_of_others(others, unknown)}{doubts}."
    ratio, best = max(compared, key=lambda pair: pair[0].estimate)
    carries = "carries" if best.ratio_bound == "=" else "carries at least"
    replicates = min(len(best.row.replicates), len(baseline.row.replicates))
    few = replicates < MINIMUM_PROCESSES
    doubts = ""
    if best.ratio_bound != "=":
        doubts += "; the rates do not bracket it"
    if few:
        doubts += "; three replicates or more would give an interval"
    if ratio.low is not None and ratio.low <= 1 <= (ratio.high or ratio.low):
        doubts += "; the interval includes 1, so it may carry no more"
    doubts += "".join(_doubts(record, [baseline, best]))
    before = "Not enough runs to tell: " if few else ""
    rates = f"{rate_text(best)} instead of {rate_text(baseline)} a second"
    times = f"{ratio_text(ratio)} the requests of {baseline.row.name}"
    return f"{before}{best.row.name} {carries} {times} {within}: {rates}{doubts}."


def _doubts(record: LoadRecord, figures: Sequence[RowFigures]) -> Iterator[str]:
    """Yields why the windows of some rows say little, each after a semicolon."""
    for of_row in figures:
        windows = of_row.windows[of_row.typical]
        requests = sum(window.requests for window in windows)
        # Where a single late one misses the share; early stopping says itself how many it needs.
        needed = math.ceil(1 / (1 - record.attainment) - ROUNDED)
        if requests < needed and not record.early_stopping:
            share = f"{100 * record.attainment:g} %"
            yield f"; {requests} requests at a rate cannot tell {share} from less, load.requests={needed} can"
            break
    disturbed = []
    for of_row in figures:
        windows = of_row.row.windows
        if len(record.disturbed(windows)) == len(windows):
            disturbed.append(of_row.row.name)
    if disturbed:
        yield f"; other work disturbed all windows of {' and '.join(disturbed)}"


def _of_others(others: Sequence[RowFigures], unknown: bool) -> str:
    """Returns what is known of rows that all carry less than some share of the baseline's requests; "" without any.

    `unknown` is whether nothing was measured of some row.
    """
    bounds = [row.ratio.estimate for row in others if row.ratio is not None]
    if len(bounds) < len(others) or max(bounds, default=0.0) > 1:
        return "; whether another row carries more cannot be told from these rates"
    which = "other measured row" if unknown else "other row"
    return f"; no {which} carries more" if others else ""


_SIGNS = {"=": "", ">": "more than ", "<": "less than ", "?": "about "}


def rate_text(figures: RowFigures) -> str:
    """Returns the highest rate, with a sign if it is only a bound."""
    most = figures.most
    text = f"{_SIGNS[figures.bound]}{most.estimate:.3g}"
    if most.low is None:
        return text
    return f"{text} [{most.low:.3g}, {most.high:.3g}]"


def _header_texts(record: LoadRecord) -> Sequence[str]:
    """Returns what the figures of a record rest on."""
    replicates = [len(of_row.row.replicates) for of_row in record.figures]
    windows = record.windows
    most = max((window.requests for window in windows), default=0)
    disturbed = record.disturbed(windows)
    requests = str(record.requests)
    if most > record.requests:
        requests = f"{requests} to {most}"
    disturbance = (
        f"disturbed by other work: {len(disturbed)} of {len(windows)} windows, by up to "
        f"{100 * max(disturbed, default=0):.0f} % of the worker's processor time, also when they were sent again; "
        "their figures say little of the server"
    )
    bounded = any(figures.most.low is not None for figures in record.figures)
    intervals = "two-sided 95 % intervals" if bounded else "no intervals"
    here = any(
        row.service_s for row in record.rows
    )  # a server that sdopt has started and called before
    server = (
        "on an empty, warm server"
        if here
        else "on a server whose other work nobody knows"
    )
    return [
        *record.header,
        f"{record.arrivals} arrivals, {requests} requests per rate; latency from the scheduled arrival",
        f"{_replicates_text(replicates, record.arrivals)}; {intervals}",
        f"the highest rate is that of windows this long {server}; in longer ones queues grow further",
        *([disturbance] if disturbed else []),
        *_out_of_order(record),
        *_remarks(record),
    ]


def _out_of_order(record: LoadRecord) -> Iterator[str]:
    """Yields the rows that carried a higher rate than one that they did not carry, below which theirs is looked for."""
    for row in record.rows:
        for replicate in row.replicates:
            carried, missed = [0.0], [math.inf]
            for window in replicate.windows:
                enough = window.attainment >= record.wanted(window.requests)
                (carried if enough else missed).append(window.rate)
            if max(carried) > min(missed):
                yield (
                    f"{row.name}: too few requests were in time at {min(missed):.3g}/s, but enough at "
                    f"{max(carried):.3g}/s: not the rate delayed them, and the highest one may be more"
                )
                break


def _remarks(record: LoadRecord) -> Iterator[str]:
    """Yields what of a server's answers makes its figures others than those of generating an image for each request."""
    for row in record.rows:
        if row.chosen:
            yield f"{row.name} does other work by choice: {', '.join(row.chosen)}"
        windows = row.windows
        fetched_s = [window.link_s for window in windows if window.link_s is not None]
        if fetched_s:
            mean_s = sum(fetched_s) / len(fetched_s)
            yield (
                f"{row.name} answers with links: an image counts once it is fetched, which takes {mean_s:.3g} s of its "
                "latency"
            )
        if row.repeated and not row.own_seeds:
            yield (
                f"{row.name}: {row.repeated} of {row.images} images are the same as another one, and load.fields gives "
                "requests no seeds of their own: it may answer them from a cache, which generates nothing"
            )
        failed = sum(window.errors for window in windows)
        if failed:
            requests = sum(window.requests for window in windows)
            why = next((window.why for window in windows if window.why), "unknown")
            yield f"{row.name}: {failed} of {requests} requests failed, and count as late; the first: {why}"
        refused = sum(window.rejected for window in windows)
        if refused:
            requests = sum(window.requests for window in windows)
            yield (
                f"{row.name}: {refused} of {requests} requests were refused (429 or 503), and count as late: the "
                "highest rate is that of its limits or its queue, which may be below what its card can generate"
            )
        if sizes := row.came("sizes"):
            yield f"{row.name}: its images have {' and '.join(sizes)} pixels"
        most = max((window.most_images for window in windows), default=1)
        if most > 1:
            yield f"{row.name}: an answer has up to {most} images, and counts as one: per image, it costs less"


def _replicates_text(counts: Sequence[int], arrivals: str) -> str:
    """Returns how often rows were measured, by their `counts`: of some that an end came before, less often."""
    least, count = min(counts, default=0), max(counts, default=0)
    if count == 1:
        return "1 replicate, with the same trace for all rows"
    number = str(count) if least == count else f"{least} to {count}"
    if arrivals != "poisson":
        return f"{number} replicates, all with the same trace"
    return f"{number} replicates, each with a fresh trace, the same for all rows"


def blocks_of(record: LoadRecord, brief: bool = False) -> list[Block]:
    """Returns the answer, the table, and what the figures rest on; `brief` is as a terminal shows it."""
    missing = [
        f"{row.name}: not measured to the end: {row.reason}"
        for row in record.rows
        if row.reason
    ]
    notes = [*_header_texts(record), *_not_measured(record), *missing]
    table = rows_table(record)
    if brief:
        table = table.filled("p99", "queue", "call", "measured/simulated")
    return [Prose(answer_of(record), strong=True), table, Notes(notes)]


def _not_measured(record: LoadRecord) -> Iterator[str]:
    windows = record.windows
    counted = any(window.image_j for window in windows)
    shown = []
    if counted:
        shown.append("energy")
    if record.price_per_hour is not None:
        shown.append("cost")
    if shown:
        yield f"{' and '.join(shown)}: of the whole device at that rate, idle time included"
    if not counted:
        here = any(row.service_s for row in record.rows)
        why = (
            "there is no card whose own counter can be read"
            if here
            else "the server's card is not within reach"
        )
        yield f"energy: not measured here, since {why}"
    if record.price_per_hour is None:
        yield "cost: not measured here, since hardware.price_per_hour is not given"


_ROW = "variant, policy"
"""The heading of the rows' names."""


def rows_table(record: LoadRecord) -> Table:
    """Returns a table with a line for each row: the highest rate, and figures at the highest measured one below it."""
    lines = []
    for figures in record.figures:
        line = _cells(record, figures)
        for column in further_columns(OF_ONE_STUDY):
            [heading] = column.headings(TableView())
            line[heading] = value_cell(figures.row.columns.get(column.name))
        lines.append(line)
    headings = list(lines[0]) if lines else [_ROW]
    return Table(
        headings,
        [list(line.values()) for line in lines],
        numbers=headings[1:],
        spare=["of the baseline's", "most requests/s", *_NEEDLESS],
        needless=_NEEDLESS,
    ).filled()


_NEEDLESS = (
    "memory",
    "batch",
    "p50",
    "at",
)
"""Columns that a narrow terminal does not show, the first ones first."""


def page_table(record: LoadRecord) -> str:
    """Returns the answer of a load test and its table, as a page of the documentation shows them."""
    table = rows_table(record).filled("p50", "p99", "queue", "call", "memory")
    return written(
        [Prose(answer_of(record), strong=True), table, Notes(_header_texts(record))]
    )


def _cells(record: LoadRecord, figures: RowFigures) -> dict[str, Cell | str]:
    """Returns the cells of a row by their headings."""
    rate = figures.typical

    def mean(form: str, key: str) -> str:
        return _shown(form, figures.mean(rate, key))

    ratio = ""
    if figures.ratio:
        ratio = f"{_SIGNS[figures.ratio_bound]}{ratio_text(figures.ratio)}"
    rejected = figures.mean(rate, "rejected") or 0
    errors = figures.mean(rate, "errors") or 0
    return {
        _ROW: figures.row.name,
        "most requests/s": _with_bounds(rate_text(figures)),
        "of the baseline's": _with_bounds(ratio),
        "at": f"{rate:.3g}/s",
        "p50": mean("{:.3g} s", "p50_s"),
        "p95": mean("{:.3g} s", "p95_s"),
        "p99": mean("{:.3g} s", "p99_s"),
        "queue": mean("{:.3g} s", "queue_s"),
        "call": mean("{:.3g} s", "compute_s"),
        "batch": mean("{:.2f}", "batch"),
        "refused": _shown("{:.3g}", rejected + errors or None),
        "measured/simulated": _shown("{:.2f}", figures.gap),
        "memory": _shown("{:.2f} GiB", figures.row.memory_gib),
        "energy per 1,000": mean("{:.3g} kJ", "image_j"),
        "cost per 1,000": _shown("{:.3g}", figures.cost(record.price_per_hour)),
    }


def _with_bounds(text: str) -> Cell:
    """Returns a cell of a figure, whose bounds a narrow terminal leaves out."""
    figure, _, bounds = text.partition(" [")
    return Cell(figure, f"[{bounds}" if bounds else "")


def windows_table(figures: Sequence[RowFigures]) -> Table:
    """Returns a table of all windows."""
    lines = []
    for of_row in figures:
        for _, windows in sorted(of_row.windows.items()):
            lines += [_window_cells(of_row.row.name, window) for window in windows]
    headings = list(lines[0]) if lines else [_ROW]
    rows = [list(line.values()) for line in lines]
    return Table(headings, rows, numbers=headings[1:])


def _window_cells(row: str, window: Window) -> dict[str, str]:
    """Returns the cells of a window by their headings."""
    disturbed = None if window.disturbed is None else 100 * window.disturbed
    return {
        _ROW: row,
        "offered/s": f"{window.rate:.3g}",
        "images/s": f"{window.achieved:.3g}",
        "in time/s": f"{window.goodput:.3g}",
        "in time": f"{100 * window.attainment:.1f} %",
        "p50": _shown("{:.3g} s", window.p50_s),
        "p95": _shown("{:.3g} s", window.p95_s),
        "p99": _shown("{:.3g} s", window.p99_s),
        "refused": str(window.rejected),
        "errors": str(window.errors),
        "sent late by": f"{1000 * window.lag_s:.1f} ms",
        "disturbed": _shown("{:.0f} %", disturbed),
    }


def _shown(form: str, value: float | None) -> str:
    """Returns a figure in some form; "" if there is none."""
    return "" if value is None else form.format(value)
