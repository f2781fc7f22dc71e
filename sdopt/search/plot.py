"""Plots a search: speed-up against image distance, for every measured candidate."""

import math
from typing import Any

import altair as alt

from sdopt.report.charts.parts import built, kinds, ratio_axis
from sdopt.report.charts.spec import Spec
from sdopt.report.tones import AMBER, BLUE, GREEN, GREY, INK, MUTED, VERMILION
from sdopt.search.record import Fate, SearchRecord
from sdopt.statistics.words import unit_text

_KINDS: dict[str, tuple[str, str]] = {
    "baseline": (INK, "square"),
    Fate.WINNER: (GREEN, "circle"),
    Fate.PASSED: (BLUE, "circle"),
    Fate.UNDECIDED: (AMBER, "triangle-up"),
    Fate.LEFT_OUT: (GREY, "diamond"),
    Fate.DROPPED: (GREY, "triangle-down"),
    Fate.FAILED: (VERMILION, "cross"),
    Fate.OPEN: (GREY, "circle"),
}
"""Colour and shape by fate."""

_NAMED = 12
"""How many points bear their names: those that were judged, and then the fastest."""


def search_plot(record: SearchRecord) -> Spec | None:
    """Plots every candidate with a speed-up, against the distance of its images or against memory.

    Memory is the x axis if no distance was measured, or if memory is an objective and distance is not. A line joins the
    front if the two axes are exactly the objectives.

    Returns:
        the plot; None if no candidate can be shown.
    """
    measured = [entry for entry in record.entries if entry.speedup is not None]
    wanted = "distance" in record.objectives or "memory" not in record.objectives
    by_distance = wanted and any(entry.distance is not None for entry in measured)
    joined = set(record.objectives) == {"latency", "distance" if by_distance else "memory"}
    points: list[dict[str, Any]] = [
        {
            "x": entry.distance if by_distance else entry.memory_gib,
            "speed": entry.speedup,
            "low": entry.low,
            "high": entry.high,
            "kind": str(entry.fate),
            "label": entry.name,
            "judged": entry.judged,
            "front": joined and entry.on_front,
        }
        for entry in measured
        if (entry.distance if by_distance else entry.memory_gib) is not None
    ]
    if not points:
        return None
    if by_distance:
        points.append({"x": 0.0, "speed": 1.0, "kind": "baseline", "label": "baseline"})
    ranked = sorted(points, key=lambda point: (not point.get("judged", True), -point["speed"]))
    for point in ranked[_NAMED:]:
        point["label"] = ""
    named = sorted((point for point in points if point["label"]), key=lambda point: -point["speed"])
    for index, point in enumerate(named):
        point["below"] = bool(index % 2)
    return _spec(record, points, record.distance if by_distance else "")


def _spec(record: SearchRecord, points: list[dict[str, Any]], distance: str) -> Spec:
    speeds = [end for point in points for end in (point["speed"], point.get("low"), point.get("high")) if end]
    axis = ratio_axis(f"speed-up{unit_text(record.per_image)}, log scale (up is faster)", speeds)
    scale, ticks = alt.Scale(zero=False, padding=20), alt.Axis(tickCount=6)
    if distance:
        scale = alt.Scale(type="symlog", constant=_small(points), padding=20, nice=False)
        ticks = alt.Axis(values=_ticks(points), format="~g")
    x = alt.X("x:Q", title=f"{distance or 'memory (GiB)'}, better to the left", scale=scale, axis=ticks)
    y = alt.Y("speed:Q", **axis)
    looks = {kind: look for kind, look in _KINDS.items() if any(point["kind"] == kind for point in points)}
    every = alt.Chart().encode(x=x)
    bounds = every.transform_filter("isValid(datum.low)").mark_rule(color=MUTED, strokeWidth=2)
    front = every.transform_filter("datum.front").mark_line(color=GREEN, interpolate="step-after", opacity=0.6)
    # Written towards the middle of the chart; every second one is below, so that neighbours do not overlap.
    places = [math.log1p(point["x"] / _small(points)) if distance else point["x"] for point in points]
    middle = (min(places) + max(places)) / 2
    for point, place in zip(points, places, strict=True):
        point["right"] = place > middle
    labels = alt.Chart().mark_text(
        align=alt.ExprRef("datum.right ? 'right' : 'left'"),
        dx=alt.ExprRef("datum.right ? -9 : 9"),
        dy=alt.ExprRef("datum.below ? 11 : -9"),
        fontWeight="bold",
        limit=420,
    )
    chart = alt.layer(
        bounds.encode(y=alt.Y("low:Q", **axis), y2="high"),
        front.encode(y=y),
        every.mark_point(filled=True, size=90, opacity=0.9).encode(y=y, **kinds("kind", looks)),
        labels.encode(x=x, y=y, text="label:N"),
        data=alt.InlineData(values=points),
    )
    title = record.header or [record.name]
    look = {"text": title, "anchor": "start", "fontSize": 12, "offset": 8}
    return {**built(chart, " · ".join(title), 420), "title": look}


def _ticks(points: list[dict[str, Any]]) -> list[float]:
    """Returns zero and some powers of ten; with many, omits the one below the smallest figure, which overlaps zero."""
    low, high = math.log10(_small(points)), math.log10(max(point["x"] for point in points) or 1.0)
    step = max(1, math.ceil((high - low) / 6))
    first = math.floor(low) + (step if high - low > 1 else 0)
    return [0.0, *(10.0**power for power in range(first, math.ceil(high) + 1, step))]


def _small(points: list[dict[str, Any]]) -> float:
    """Returns what counts as near zero on the axis: the smallest figure that is not zero."""
    return min((point["x"] for point in points if point["x"] > 0), default=1.0)
