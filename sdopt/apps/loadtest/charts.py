"""Draws a load test: its plots, and the page that holds them."""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from sdopt.apps.loadtest.record import LoadRecord, RowFigures
from sdopt.apps.loadtest.report import blocks_of, windows_table
from sdopt.report.blocks import Chart, Fold, Page, Section, charts_of
from sdopt.report.charts.parts import built, zoom
from sdopt.report.charts.spec import Spec, picture
from sdopt.report.charts.vega import encoding, layered, mark
from sdopt.report.page.html import html_page
from sdopt.report.tones import BLUE, INK, SKY

_RATE = "requests offered a second"
_COLOR = encoding("variant:N", title=None)
_LOOK: dict[str, Any] = {
    "color": _COLOR,
    "shape": encoding("policy:N", title=None),
    "detail": "row:N",
}
"""A colour for each variant, and a shape for each policy: a dozen colours cannot be told apart."""

_DOTTED = {"color": INK, "strokeDash": [2, 2]}
_DOTS_JOINED = {"point": True}


def draw(record: LoadRecord, folder: Path) -> None:
    """Writes the page, and the first view of each of its plots, to a folder."""
    page = page_of(record)
    (folder / "report.html").write_bytes(html_page(page))
    for section in page.sections:
        for chart in section.blocks:
            if isinstance(chart, Chart):
                (folder / f"{section.key}.png").write_bytes(picture(chart.views[0][1]))


def page_of(record: LoadRecord) -> Page:
    """Returns the page of a load test."""
    figures = record.figures
    latencies = [
        (f"{percent}th", latency_plot(record, figures, f"p{percent}_s"))
        for percent in (99, 95, 50)
    ]
    plots = [
        (
            "latency",
            "Latency by rate",
            charts_of(latencies, _LATENCY, choice="percentile"),
        ),
        (
            "goodput",
            "Images in time, by rate",
            charts_of([("", goodput_plot(figures))], _GOODPUT),
        ),
        (
            "parts",
            "Queue and call, by rate",
            charts_of(parts_plots(figures), _PARTS, choice="of"),
        ),
        (
            "batches",
            "Batches without load",
            charts_of(batch_plots(figures), _BATCHES, choice="as"),
        ),
    ]
    sections = [Section("answer", "Answer", blocks_of(record))]
    sections += [Section(key, title, blocks) for key, title, blocks in plots if blocks]
    sections.append(
        Section("windows", "Every window", [Fold("Table", [windows_table(figures)])])
    )
    return Page(
        f"{record.name}: under load",
        [("command", record.command), ("began", record.began)],
        sections,
    )


Views = list[tuple[str, Spec]]

_LATENCY = (
    "Counted from the scheduled arrival. The dotted rule is the limit; on it, the highest rate of each row, "
    "larger, with its interval. A dashed line is the same percentile of the simulated queue."
)


def latency_plot(
    record: LoadRecord, figures: Sequence[RowFigures], key: str
) -> Spec | None:
    """Plots one percentile, a key of `Window`, by rate; None if no window has it."""
    points = list(_latencies(figures, key))
    if all(point["simulated"] for point in points):
        return None
    x = encoding("rate:Q", title=_RATE)
    scale = {"type": "log", "nice": False, "padding": 10}
    title = f"{key[1:-2]}th percentile in seconds, log scale"
    y = encoding("seconds:Q", title=title, scale=scale)
    limit = mark("rule", _DOTTED, data=[{"seconds": record.limit_s}], y=y)
    most = [
        _named(each) | {"rate": each.most.estimate, "low": each.most.low, "high": each.most.high,
                        "seconds": record.limit_s}
        for each in figures
        if each.bound == "="
    ]  # fmt: skip
    wide = {"strokeWidth": 4, "opacity": 0.5}
    ends: dict[str, Any] = {"x": "low:Q", "x2": "high", "y": y, "color": _COLOR}
    dot = {"filled": True, "size": 140}
    dashed = {"strokeDash": [6, 4], "opacity": 0.7}
    of_simulated, of_measured = (
        [f"datum.simulated == {word}"] for word in ("true", "false")
    )
    where: dict[str, Any] = {"x": x, "y": y, **_LOOK}
    layers = [
        mark("line", dashed, where=of_simulated, **where),
        mark("line", _DOTS_JOINED, where=of_measured, params=[zoom()], **where),
        limit,
        mark("rule", wide, data=most, **ends),
        mark("point", dot, data=most, **where),
    ]
    return built(layered(layers), "latency by offered rate", 320, points)


def _named(figures: RowFigures) -> dict[str, Any]:
    row = figures.row
    return {"row": row.name, "variant": row.variant, "policy": row.policy}


def _by_rate(figures: Sequence[RowFigures]) -> Iterator[tuple[RowFigures, float]]:
    """Yields the figures of each row with each of its rates."""
    for of_row in figures:
        for rate in sorted(of_row.windows):
            yield of_row, rate


def _latencies(figures: Sequence[RowFigures], key: str) -> Iterator[dict[str, Any]]:
    for of_row, rate in _by_rate(figures):
        at = _named(of_row) | {"rate": rate}
        seconds = of_row.mean(rate, key)
        if seconds is not None:
            yield at | {"seconds": seconds, "simulated": False}
        windows = chain.from_iterable(
            replicate.predicted for replicate in of_row.row.replicates
        )
        predicted = [getattr(window, key) for window in windows if window.rate == rate]
        if predicted:
            mean = sum(predicted) / len(predicted)
            yield at | {"seconds": mean, "simulated": True}


_GOODPUT = "Images within the limit a second. The dotted line is all that is asked for."


def goodput_plot(figures: Sequence[RowFigures]) -> Spec | None:
    """Plots images within the limit a second, by the rate of requests; None without a window."""
    points = [
        _named(of_row) | {"rate": rate, "images": of_row.mean(rate, "goodput")}
        for of_row, rate in _by_rate(figures)
    ]
    x = encoding("rate:Q", title=_RATE)
    y = encoding("images:Q", title="images in time a second")
    most = max((rate for _, rate in _by_rate(figures)), default=0.0)
    if not points:
        return None
    asked = [{"rate": rate, "images": rate} for rate in (0, most)]
    lines = [
        mark("line", {**_DOTTED, "strokeWidth": 1}, data=asked, x=x, y=y),
        mark("line", _DOTS_JOINED, x=x, y=y, **_LOOK),
    ]
    return built(layered(lines), "images in time, by offered rate", 280, points)


_PARTS = "Means over requests that got their image: in the queue, and in the call that drew it."


def parts_plots(figures: Sequence[RowFigures]) -> Views:
    """Plots the mean time in queue and call by rate, stacked, a view for each row."""
    views = []
    for each in reversed(figures):
        points = []
        for rate in sorted(each.windows):
            at: dict[str, Any] = {"rate": f"{rate:.3g}"}
            call_s = each.mean(rate, "compute_s")
            if call_s is not None:
                points.append(at | {"part": "call", "seconds": call_s, "order": 0})
            queue_s = each.mean(rate, "queue_s")
            if queue_s is not None:
                points.append(at | {"part": "queue", "seconds": queue_s, "order": 1})
        if points:
            scale = {"domain": ["queue", "call"], "range": [SKY, BLUE]}
            bars = mark(
                "bar",
                {"size": 40},
                x=encoding("rate:N", title=_RATE, sort=None, axis={"labelAngle": 0}),
                y=encoding("seconds:Q", title="seconds"),
                color=encoding("part:N", title=None, scale=scale),
                order="order:O",
            )
            told = f"queue and call of {each.row.name} by rate"
            views.append((each.row.name, built(layered([bars]), told, 240, points)))
    return views


_BATCHES = "Calls of each batch size, one after the other, before the load: a line for each variant."


def batch_plots(figures: Sequence[RowFigures]) -> Views:
    """Plots images a second and seconds of a call by batch size, of each variant, without load."""
    services = {
        each.row.variant: each.row.service_s
        for each in figures
        if len(each.row.service_s) > 1
    }
    points = []
    for variant, service_s in services.items():
        for size, seconds in service_s.items():
            point = {"variant": variant, "batch": size, "seconds": seconds}
            points.append(point | {"images": size / seconds})
    if not points:
        return []
    x = encoding("batch:O", title="batch size", axis={"labelAngle": 0})
    titles = {"images": "images a second", "seconds": "seconds of a call"}
    views = []
    for field, title in titles.items():
        y = encoding(f"{field}:Q", title=title)
        line = mark("line", _DOTS_JOINED, x=x, y=y, color=_COLOR)
        views.append((title, built(layered([line]), title, 280, points)))
    return views
