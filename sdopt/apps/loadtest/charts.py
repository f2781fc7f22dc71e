"""Draws a load test: its plots, and the page that holds them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import altair as alt

from sdopt.apps.loadtest.record import LoadRecord, RowFigures, blocks_of, windows_table
from sdopt.report.blocks import Chart, Fold, Page, Section, charts_of
from sdopt.report.charts.parts import built, inline, zoom
from sdopt.report.charts.spec import Spec, picture
from sdopt.report.page.html import html_page
from sdopt.report.tones import BLUE, INK, SKY

_RATE = "requests offered a second"
_COLOR = alt.Color("variant:N", title=None)
_LOOK: dict[str, Any] = {
    "color": _COLOR,
    "shape": alt.Shape("policy:N", title=None),
    "detail": "row:N",
}
"""A colour for each variant, and a shape for each policy: a dozen colours cannot be told apart."""


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
    x = alt.X("rate:Q", title=_RATE)
    y = alt.Y(
        "seconds:Q",
        title="seconds, log scale",
        scale=alt.Scale(type="log", nice=False, padding=10),
    )
    every = inline(points).encode(x=x, y=y, **_LOOK)
    limit = (
        inline([{"seconds": record.limit_s}])
        .mark_rule(color=INK, strokeDash=[2, 2])
        .encode(y=y)
    )
    most = inline([
        _named(each) | {"rate": each.most.estimate, "low": each.most.low, "high": each.most.high,
                        "seconds": record.limit_s}
        for each in figures
        if each.bound == "="
    ])  # fmt: skip
    interval = most.mark_rule(strokeWidth=4, opacity=0.5).encode(
        x=alt.X("low:Q"), x2="high:Q", y=y, color=_COLOR
    )
    top = most.mark_point(filled=True, size=140).encode(x=x, y=y, **_LOOK)
    measured, simulated = (
        every.transform_filter(f"datum.simulated == {word}")
        for word in ("false", "true")
    )
    lines = [
        simulated.mark_line(strokeDash=[6, 4], opacity=0.7),
        measured.mark_line(point=True).add_params(zoom()),
    ]
    return built(
        alt.layer(*lines, limit, interval, top), "latency by offered rate", 320
    )


def _named(figures: RowFigures) -> dict[str, Any]:
    row = figures.row
    return {"row": row.name, "variant": row.variant, "policy": row.policy}


def _latencies(figures: Sequence[RowFigures], key: str) -> Iterator[dict[str, Any]]:
    for each in figures:
        for rate in sorted(each.windows):
            seconds = each.mean(rate, key)
            if seconds is not None:
                yield _named(each) | {
                    "rate": rate,
                    "seconds": seconds,
                    "simulated": False,
                }
            predicted = [
                p
                for replicate in each.row.replicates
                for p in replicate.predicted
                if p.rate == rate
            ]
            if predicted:
                mean = sum(getattr(p, key) for p in predicted) / len(predicted)
                yield _named(each) | {"rate": rate, "seconds": mean, "simulated": True}


_GOODPUT = "Images within the limit a second. The dotted line is all that is asked for."


def goodput_plot(figures: Sequence[RowFigures]) -> Spec | None:
    """Plots images within the limit a second, by the rate of requests; None without a window."""
    points = [
        _named(each) | {"rate": rate, "images": each.mean(rate, "goodput")}
        for each in figures
        for rate in sorted(each.windows)
    ]
    x, y = (
        alt.X("rate:Q", title=_RATE),
        alt.Y("images:Q", title="images in time a second"),
    )
    most = max((rate for each in figures for rate in each.windows), default=0.0)
    asked = inline([{"rate": rate, "images": rate} for rate in (0, most)])
    lines = [
        asked.mark_line(color=INK, strokeDash=[2, 2], strokeWidth=1).encode(x=x, y=y),
        inline(points).mark_line(point=True).encode(x=x, y=y, **_LOOK),
    ]
    return (
        built(alt.layer(*lines), "images in time, by offered rate", 280)
        if points
        else None
    )


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
            color = alt.Color(
                "part:N",
                title=None,
                scale=alt.Scale(domain=["queue", "call"], range=[SKY, BLUE]),
            )
            bars = inline(points).mark_bar(size=40).encode(
                x=alt.X("rate:N", title=_RATE, sort=None, axis=alt.Axis(labelAngle=0)),
                y=alt.Y("seconds:Q", title="seconds"), color=color, order="order:O",
            )  # fmt: skip
            views.append(
                (
                    each.row.name,
                    built(
                        alt.layer(bars),
                        f"queue and call of {each.row.name} by rate",
                        240,
                    ),
                )
            )
    return views


_BATCHES = "Calls of each batch size, one after the other, before the load: a line for each variant."


def batch_plots(figures: Sequence[RowFigures]) -> Views:
    """Plots images a second and seconds of a call by batch size, of each variant, without load."""
    services = {
        each.row.variant: each.row.service_s
        for each in figures
        if len(each.row.service_s) > 1
    }
    points = [
        {
            "variant": variant,
            "batch": size,
            "images": size / seconds,
            "seconds": seconds,
        }
        for variant, service_s in services.items()
        for size, seconds in service_s.items()
    ]
    x, lines = (
        alt.X("batch:O", title="batch size", axis=alt.Axis(labelAngle=0)),
        inline(points).mark_line(point=True),
    )
    titles = {"images": "images a second", "seconds": "seconds of a call"}
    return [
        (
            title,
            built(
                alt.layer(
                    lines.encode(x=x, y=alt.Y(f"{field}:Q", title=title), color=_COLOR)
                ),
                title,
                280,
            ),
        )
        for field, title in titles.items()
        if points
    ]
