"""Draws a load test: its plots, and the page that holds them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import altair as alt

from sdopt.loadtest.record import LoadRecord, RowFigures
from sdopt.loadtest.report import blocks_of, windows_table
from sdopt.report.blocks import Chart, Page, Section
from sdopt.report.charts.parts import built, inline
from sdopt.report.charts.spec import Spec, picture
from sdopt.report.page.html import html_page
from sdopt.report.tones import INK

PLOT = "load.png"

_CAPTION = (
    "The 95th percentile (with fewer than 59 requests the median), counted from the scheduled arrival. The rule is the "
    "limit, and a dashed line the same percentile of the simulated queue."
)


def draw(record: LoadRecord, folder: Path) -> None:
    """Writes the page and its first plot to a folder."""
    (folder / "report.html").write_bytes(html_page(page_of(record)))
    if (plot := latency_plot(record, record.figures)) is not None:
        (folder / PLOT).write_bytes(picture(plot))


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
