"""Shows a load test: a table, plots, and a page."""

from collections.abc import Iterator, Sequence
from typing import Any

import altair as alt

from sdopt.loadtest.record import LoadRecord, RowFigures, answer_of, header_texts, rate_text
from sdopt.report.blocks import Block, Cell, Chart, Notes, Page, Prose, Section, Table
from sdopt.report.charts.parts import built, inline
from sdopt.report.charts.spec import Spec
from sdopt.report.tones import INK
from sdopt.statistics.figures import ratio_text

PLOT = "load.png"

_CAPTION = (
    "The 95th percentile (with fewer than 59 requests the median), counted from the scheduled arrival. The rule is the "
    "limit, and a dashed line the same percentile of the simulated queue."
)


def page_of(record: LoadRecord) -> Page:
    """Returns the page of a load test."""
    figures = record.figures
    plots = [
        ("latency", "Latency by rate", latency_plot(record, figures), _CAPTION),
        ("goodput", "Images in time, by rate", goodput_plot(figures), "Images within the limit a second."),
        ("batches", "Batches without load", batch_plot(figures), "Images a second in calls of a batch size."),
    ]
    sections = [Section("answer", "Answer", blocks_of(record))]
    for key, title, spec, caption in plots:
        if spec is not None:
            sections.append(Section(key, title, [Chart([(title, spec)], caption)]))
    sections.append(Section("windows", "Every window", [windows_table(figures)], folded=True))
    return Page(f"{record.name}: under load", [("command", record.command), ("began", record.began)], sections)


def blocks_of(record: LoadRecord) -> list[Block]:
    """Returns the answer, the table, and what the figures rest on."""
    missing = [f"{row.name}: not measured to the end: {row.reason}" for row in record.rows if row.reason]
    return [Prose(answer_of(record), strong=True), rows_table(record), Notes([*header_texts(record), *missing])]


def rows_table(record: LoadRecord) -> Table:
    """Returns a table with a line for each row: the highest rate, and figures at the highest measured one below it."""
    headings = ["variant, policy", "most requests/s", "of the baseline's", "at", "p50", "p95", "p99", "queue", "call"]
    headings += ["batch", "refused", "measured/simulated", "memory", "per 1,000"]
    return Table(headings, [_line(record, each) for each in record.figures], numbers=headings[1:]).filled()


def _line(record: LoadRecord, figures: RowFigures) -> list[Cell | str]:
    rate = figures.typical
    achieved = figures.mean(rate, "achieved")
    cost = None if record.price_per_hour is None or not achieved else 1000 * record.price_per_hour / 3600 / achieved
    memory = figures.row.memory_gib
    seconds = [figures.mean(rate, key) for key in ("p50_s", "p95_s", "p99_s", "queue_s", "compute_s")]
    lost = (figures.mean(rate, "rejected") or 0) + (figures.mean(rate, "errors") or 0)
    return [
        figures.row.name,
        rate_text(figures),
        ratio_text(figures.ratio) if figures.ratio else "",
        f"{rate:.3g}/s",
        *("" if value is None else f"{value:.3g} s" for value in seconds),
        _number(figures.mean(rate, "batch")),
        f"{lost:.3g}" if lost else "",
        _number(figures.gap),
        "" if memory is None else f"{memory:.2f} GiB",
        "" if cost is None else f"{cost:.3g}",
    ]


def windows_table(figures: Sequence[RowFigures]) -> Table:
    """Returns a table of all windows."""
    headings = ["variant, policy", "offered/s", "images/s", "in time/s", "in time", "p50", "p95", "p99"]
    headings += ["refused", "errors", "sent late by"]
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
        ]
        for each in figures
        for rate in sorted(each.windows)
        for window in each.windows[rate]
    ]
    return Table(headings, rows, numbers=headings[1:])


def latency_plot(record: LoadRecord, figures: Sequence[RowFigures]) -> Spec | None:
    """Plots latency by rate, with the limit and the simulated queue."""
    points = list(_latencies(figures))
    if not points:
        return None
    y = alt.Y("seconds:Q", title="seconds, log scale", scale=alt.Scale(type="log", nice=False, padding=10))
    every = inline(points).encode(x=alt.X("rate:Q", title="requests offered a second"), y=y, color=_COLOR)
    limit = inline([{"seconds": record.limit_s}]).mark_rule(color=INK, strokeDash=[2, 2]).encode(y=y)
    measured, simulated = (every.transform_filter(f"datum.simulated == {word}") for word in ("false", "true"))
    lines = [limit, simulated.mark_line(strokeDash=[6, 4], opacity=0.7), measured.mark_line(point=True)]
    return built(alt.layer(*lines), "latency by offered rate", 320)


def _latencies(figures: Sequence[RowFigures]) -> Iterator[dict[str, Any]]:
    for each in figures:
        for rate in sorted(each.windows):
            key = "p50_s" if each.mean(rate, "p95_s") is None else "p95_s"
            seconds = each.mean(rate, key)
            if seconds is not None:
                yield {"row": each.row.name, "rate": rate, "seconds": seconds, "simulated": False}
            predicted = [p for replicate in each.row.replicates for p in replicate.predicted if p.rate == rate]
            if predicted:
                mean = sum(getattr(p, key) for p in predicted) / len(predicted)
                yield {"row": each.row.name, "rate": rate, "seconds": mean, "simulated": True}


def goodput_plot(figures: Sequence[RowFigures]) -> Spec | None:
    """Plots images within the limit a second, by the rate of requests."""
    points = [
        {"row": each.row.name, "rate": rate, "images": each.mean(rate, "goodput")}
        for each in figures
        for rate in sorted(each.windows)
    ]
    return _lines(points, "rate:Q", "requests offered a second", "images in time a second") if points else None


def batch_plot(figures: Sequence[RowFigures]) -> Spec | None:
    """Plots images a second by batch size, of each variant, without load."""
    services = {each.row.variant: each.row.service_s for each in figures if len(each.row.service_s) > 1}
    points = [
        {"row": variant, "batch": size, "images": size / seconds}
        for variant, service_s in services.items()
        for size, seconds in service_s.items()
    ]
    return _lines(points, "batch:O", "batch size", "images a second") if points else None


_COLOR = alt.Color("row:N", title=None)


def _lines(points: Sequence[dict[str, Any]], field: str, x: str, y: str) -> Spec:
    lines = inline(points).mark_line(point=True)
    chart = lines.encode(x=alt.X(field, title=x), y=alt.Y("images:Q", title=y), color=_COLOR)
    return built(alt.layer(chart), f"{y}, by {x}", 280)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
