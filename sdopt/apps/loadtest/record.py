"""What a load test found: the record as a file, its figures, its answer in a sentence, and its tables."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from sdopt.apps.traffic.figures import Window, interval_of, max_rate, wanted_share
from sdopt.errors import UsageError, first_line
from sdopt.record.comparisons import Interval
from sdopt.report.blocks import Block, Cell, Notes, Prose, Table
from sdopt.report.columns import OF_ONE_STUDY, TableView, further_columns, value_cell
from sdopt.report.markdown import written
from sdopt.statistics.measures import ratio_text
from sdopt.statistics.ratios import MINIMUM_PROCESSES

RECORD = "load.json"

_ROUNDED = 1e-9
"""By which share a mean of logarithms may miss the one rate that it is the mean of."""


@dataclass(frozen=True)
class Predicted:
    """What the simulated queue of a row does at a rate, on the same trace, from its service times alone."""

    rate: float
    attainment: float
    p50_s: float
    p95_s: float
    p99_s: float


@dataclass
class Replicate:
    """What one process of a row did."""

    number: int
    windows: list[Window]
    predicted: list[Predicted]
    """Of the same rates; none for a server that is only known by its address."""


@dataclass
class LoadRow:
    """A variant with a policy of batching.

    Attributes:
        service_s: seconds of a call by its number of images, without load.
        rates: requests a second.
        replicates: what its processes did.
        memory_gib: what its worker held after the last call.
        reason: why it was not measured, or not whole.
        columns: what further columns of tables have, by their names, of calls without load.
        own_seeds: whether each request had a seed that no other one had.
        asked_size: the size of image that requests named; "" if they named none.
        asked_kind: the kind of file that requests named, as in `webp`; "" if they named none.
        chosen: in words, what it chooses of the work otherwise than the baseline, as fewer steps.
        unlike: in words, what makes its work another one than the baseline's.
        tags: its work, its choices and where it ran, by which MLflow finds its run.
    """

    name: str
    variant: str
    policy: str
    service_s: dict[int, float] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    replicates: list[Replicate] = field(default_factory=list)
    memory_gib: float | None = None
    reason: str = ""
    columns: dict[str, float | str] = field(default_factory=dict)
    own_seeds: bool = True
    asked_size: str = ""
    asked_kind: str = ""
    chosen: list[str] = field(default_factory=list)
    unlike: list[str] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def windows(self) -> list[Window]:
        """Those of all replicates."""
        replicates = (replicate.windows for replicate in self.replicates)
        return list(chain.from_iterable(replicates))

    @property
    def images(self) -> int:
        """How many images it gave."""
        return sum(
            window.requests - window.rejected - window.errors for window in self.windows
        )

    def came(self, key: str) -> list[str]:
        """Returns the `sizes` or `kinds` of all its images."""
        of_windows = (getattr(window, key) for window in self.windows)
        return sorted(set(chain.from_iterable(of_windows)))


@dataclass
class LoadRecord:
    """A load test.

    Attributes:
        header: what was measured, and where.
        requests: requests of each window.
        attainment: the share that is to be in time.
        limit_s: what in time means.
        rows: the baseline first.
        interference: the share of the processor time above which a window counts as disturbed.
        early_stopping: whether each window must show with 99 % confidence that the share is in time.
    """

    name: str
    header: list[str]
    began: str
    command: str
    requests: int
    attainment: float
    limit_s: float
    arrivals: str
    price_per_hour: float | None
    rows: list[LoadRow] = field(default_factory=list)
    early_stopping: bool = False
    interference: float | None = None

    def wanted(self, requests: int) -> float:
        """Returns the share of a window's requests that must be in time."""
        return wanted_share(self.attainment, requests, self.early_stopping)

    def disturbed(self, windows: Sequence[Window]) -> list[float]:
        """Returns of the windows that count as disturbed which share of the processor time other work took."""
        shares = [window.disturbed or 0.0 for window in windows]
        return [share for share in shares if 0 < (self.interference or 0) < share]

    @property
    def windows(self) -> list[Window]:
        """Those of all rows."""
        return list(chain.from_iterable(row.windows for row in self.rows))

    @property
    def figures(self) -> list["RowFigures"]:
        """The figures of the measured rows; the baseline first."""
        measured = [row for row in self.rows if row.replicates]
        return [figures_of(row, measured[0], self.wanted) for row in measured]

    def write(self, folder: Path) -> None:
        """Writes it to a folder. Raises OSError."""
        (folder / RECORD).write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, folder: Path) -> "LoadRecord":
        """Reads it from a folder. Raises UsageError."""
        try:
            return TypeAdapter(cls).validate_json((folder / RECORD).read_bytes())
        except (OSError, ValidationError) as error:
            raise UsageError(
                f"{folder / RECORD}: is no load test that can be read: {first_line(error)}"
            ) from error


@dataclass(frozen=True)
class RowFigures:
    """The figures of a row over its replicates.

    Attributes:
        most: the highest rate at which enough requests are in time.
        bound: `=`, or `>` or `<` if it lies beyond the measured rates in some replicate.
        ratio: `most` over the baseline's, of the same traces; None for the baseline, and where two bounds say nothing.
        ratio_bound: `=`, or `>` or `<` if it is only a bound.
        windows: by rate, those of all replicates that count.
    """

    row: LoadRow
    most: Interval
    bound: str
    ratio: Interval | None
    ratio_bound: str
    windows: dict[float, list[Window]]

    def mean(self, rate: float, key: str) -> float | None:
        """Returns the mean of a figure at a rate over the replicates; None if one has none."""
        values = [getattr(window, key) for window in self.windows[rate]]
        return None if not values or None in values else sum(values) / len(values)

    @property
    def typical(self) -> float:
        """The rate whose figures are shown: not above `most`, and the highest that most replicates had."""
        most = self.most.estimate * (1 + _ROUNDED)
        below = [rate for rate in self.windows if rate <= most] or [min(self.windows)]
        return max(below, key=lambda rate: (len(self.windows[rate]), rate))

    def cost(self, price_per_hour: float | None) -> float | None:
        """Returns what 1,000 images cost at `typical`, idle time included, in the unit of the price."""
        achieved = self.mean(self.typical, "achieved")
        return (
            None
            if price_per_hour is None or not achieved
            else 1000 / achieved * price_per_hour / 3600
        )

    @property
    def gap(self) -> float | None:
        """Measured over predicted 95th percentile at `typical`; None where there is none."""
        logs = []
        for replicate in self.row.replicates:
            windows = zip(replicate.windows, replicate.predicted, strict=False)
            for window, predicted in windows:
                if window.rate != self.typical or window.p95_s is None:
                    continue
                if math.isfinite(predicted.p95_s):
                    logs.append(math.log(window.p95_s / predicted.p95_s))
        return math.exp(sum(logs) / len(logs)) if logs else None


def figures_of(
    row: LoadRow, baseline: LoadRow, wanted: Callable[[int], float]
) -> RowFigures:
    """Returns the figures of a row, beside those of the baseline in the same replicates; `wanted` as in `max_rate`."""
    mine, base = _max_rates(row, wanted), _max_rates(baseline, wanted)
    most, bound = _over(
        [rate for rate, _ in mine.values()], [each for _, each in mine.values()]
    )
    ratios, relations = [], []
    for number in mine.keys() & base.keys() if row is not baseline else ():
        (rate, mine_is), (base_rate, base_is) = mine[number], base[number]
        ratios.append(rate / base_rate)
        relations += [mine_is, {"<": ">", ">": "<"}.get(base_is, base_is)]
    ratio, ratio_bound = _over(ratios, relations) if ratios else (None, "=")
    windows: dict[float, list[Window]] = {}
    for window in row.windows:
        windows.setdefault(window.rate, []).append(window)
    return RowFigures(
        row, most, bound, None if ratio_bound == "?" else ratio, ratio_bound, windows
    )


def shared_rate(figures: Sequence[RowFigures]) -> float | None:
    """Returns the highest rate that all rows had in all replicates and carried; if they carried none, the lowest.

    None if they had none in common, as where each has rates of its own.
    """
    in_common: set[float] | None = None
    for of_row in figures:
        count = len(of_row.row.replicates)
        rates = {rate for rate, each in of_row.windows.items() if len(each) == count}
        in_common = rates if in_common is None else in_common & rates
    if not in_common:
        return None
    most = min(of_row.most.estimate for of_row in figures) * (1 + _ROUNDED)
    carried = [rate for rate in in_common if rate <= most]
    return max(carried, default=min(in_common))


def _max_rates(
    row: LoadRow, wanted: Callable[[int], float]
) -> dict[int, tuple[float, str]]:
    """Returns the highest rate of each replicate by its number, as `max_rate` does."""
    return {
        replicate.number: max_rate(replicate.windows, wanted)
        for replicate in row.replicates
    }


def _over(values: Sequence[float], relations: Sequence[str]) -> tuple[Interval, str]:
    """Returns the mean of figures, and how it relates to the true one; of bounds without an interval."""
    bounds, found = set(relations) - {"="}, interval_of(values)
    if not bounds:
        return found, "="
    return Interval(found.estimate), bounds.pop() if len(bounds) == 1 else "?"


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
    """Yields what images came instead of whole ones, and of those that requests named."""
    cut = sum(window.cut for window in row.windows)
    if cut:
        yield f"{row.name}: {cut} of {row.images} images end before they are whole, and count as images all the same"
    for asked, came, unit in (
        (row.asked_size, row.came("sizes"), " pixels"),
        (row.asked_kind, row.came("kinds"), ""),
    ):
        if asked not in ("", "auto") and came not in ([], [asked]):
            yield f"{row.name}: its images are {' and '.join(came)}{unit}, although requests ask for {asked}"


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
    told = f"{baseline.row.name} carries {rate_text(baseline)} requests/s {within}"
    compared = [
        (each.ratio, each)
        for each in others
        if each.ratio is not None and each.ratio_bound != "<"
    ]
    if not compared:
        doubts = "".join(_doubts(record, [baseline]))
        return f"{told}{_of_others(others)}{doubts}."
    ratio, best = max(compared, key=lambda pair: pair[0].estimate)
    carries = "carries" if best.ratio_bound == "=" else "carries at least"
    few = (
        min(len(best.row.replicates), len(baseline.row.replicates)) < MINIMUM_PROCESSES
    )
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
        requests = sum(each.requests for each in of_row.windows[of_row.typical])
        # Where a single late one misses the share; early stopping says itself how many it needs.
        needed = math.ceil(1 / (1 - record.attainment) - _ROUNDED)
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


def _of_others(others: Sequence[RowFigures]) -> str:
    """Returns what is known of rows that all carry less than some share of the baseline's requests; "" without any."""
    bounds = [each.ratio.estimate for each in others if each.ratio is not None]
    if len(bounds) < len(others) or max(bounds, default=0.0) > 1:
        return "; whether another row carries more cannot be told from these rates"
    return "; no other row carries more" if others else ""


_SIGNS = {"=": "", ">": "more than ", "<": "less than ", "?": "about "}


def rate_text(figures: RowFigures) -> str:
    """Returns the highest rate, with a sign if it is only a bound."""
    most = figures.most
    return f"{_SIGNS[figures.bound]}{most.estimate:.3g}" + (
        "" if most.low is None else f" [{most.low:.3g}, {most.high:.3g}]"
    )


def _header_texts(record: LoadRecord) -> Sequence[str]:
    """Returns what the figures of a record rest on."""
    replicates = max((len(row.replicates) for row in record.rows), default=0)
    windows = record.windows
    most = max((window.requests for window in windows), default=0)
    disturbed = record.disturbed(windows)
    requests = f"{record.requests}" + (f" to {most}" if most > record.requests else "")
    told = (
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
        *([told] if disturbed else []),
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
        windows, images = row.windows, row.images
        fetched_s = [window.link_s for window in windows if window.link_s is not None]
        if fetched_s:
            mean_s = sum(fetched_s) / len(fetched_s)
            yield (
                f"{row.name} answers with links: an image counts once it is fetched, which takes {mean_s:.3g} s of its "
                "latency"
            )
        repeated = sum(window.repeated for window in windows)
        if repeated:
            why = (
                "though each request has a seed of its own: it ignores seeds, answers from a cache, which generates "
                "nothing, or returns an empty picture"
                if row.own_seeds
                else "and load.fields gives requests no seeds of their own: it may answer them from a cache, which "
                "generates nothing"
            )
            yield f"{row.name}: {repeated} of {images} images are the same as another one, {why}"
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


def _replicates_text(count: int, arrivals: str) -> str:
    if count == 1:
        return "1 replicate, with the same trace for all rows"
    if arrivals != "poisson":
        return f"{count} replicates, all with the same trace"
    return f"{count} replicates, each with a fresh trace, the same for all rows"


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


def rows_table(record: LoadRecord) -> Table:
    """Returns a table with a line for each row: the highest rate, and figures at the highest measured one below it."""
    headings = [
        "variant, policy",
        "most requests/s",
        "of the baseline's",
        "at",
        "p50",
        "p95",
        "p99",
        "queue",
        "call",
    ]
    headings += [
        "batch",
        "refused",
        "measured/simulated",
        "memory",
        "energy per 1,000",
        "cost per 1,000",
    ]
    further = further_columns(OF_ONE_STUDY)
    for column in further:
        headings += column.headings(TableView())
    lines = []
    for figures in record.figures:
        cells = [value_cell(figures.row.columns.get(column.name)) for column in further]
        lines.append([*_line(record, figures), *cells])
    return Table(
        headings,
        lines,
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


def _line(record: LoadRecord, figures: RowFigures) -> list[Cell | str]:
    rate = figures.typical
    seconds = [
        figures.mean(rate, key)
        for key in ("p50_s", "p95_s", "p99_s", "queue_s", "compute_s")
    ]
    lost = (figures.mean(rate, "rejected") or 0) + (figures.mean(rate, "errors") or 0)
    return [
        figures.row.name,
        _with_bounds(rate_text(figures)),
        _with_bounds(f"{_SIGNS[figures.ratio_bound]}{ratio_text(figures.ratio)}")
        if figures.ratio
        else "",
        f"{rate:.3g}/s",
        *(_shown("{:.3g} s", value) for value in seconds),
        _shown("{:.2f}", figures.mean(rate, "batch")),
        _shown("{:.3g}", lost or None),
        _shown("{:.2f}", figures.gap),
        _shown("{:.2f} GiB", figures.row.memory_gib),
        _shown("{:.3g} kJ", figures.mean(rate, "image_j")),
        _shown("{:.3g}", figures.cost(record.price_per_hour)),
    ]


def _with_bounds(text: str) -> Cell:
    """Returns a cell of a figure, whose bounds a narrow terminal leaves out."""
    figure, _, bounds = text.partition(" [")
    return Cell(figure, f"[{bounds}" if bounds else "")


def windows_table(figures: Sequence[RowFigures]) -> Table:
    """Returns a table of all windows."""
    headings = [
        "variant, policy",
        "offered/s",
        "images/s",
        "in time/s",
        "in time",
        "p50",
        "p95",
        "p99",
    ]
    headings += ["refused", "errors", "sent late by", "disturbed"]
    rows = []
    for of_row in figures:
        for _, windows in sorted(of_row.windows.items()):
            rows += [[of_row.row.name, *_window_cells(window)] for window in windows]
    return Table(headings, rows, numbers=headings[1:])


def _window_cells(window: Window) -> list[str]:
    return [
        f"{window.rate:.3g}",
        f"{window.achieved:.3g}",
        f"{window.goodput:.3g}",
        f"{100 * window.attainment:.1f} %",
        _shown("{:.3g} s", window.p50_s),
        _shown("{:.3g} s", window.p95_s),
        _shown("{:.3g} s", window.p99_s),
        str(window.rejected),
        str(window.errors),
        f"{1000 * window.lag_s:.1f} ms",
        "" if window.disturbed is None else f"{100 * window.disturbed:.0f} %",
    ]


def _shown(form: str, value: float | None) -> str:
    """Returns a figure in some form; "" if there is none."""
    return "" if value is None else form.format(value)
