"""Plots a search: speed-up against image distance, for every measured candidate."""

import math
from typing import Any

from sdopt.report.blocks import Cell, Chart
from sdopt.report.charts.labels import MOST_NAMES, named_layers
from sdopt.report.charts.parts import built, kinds, ratio_axis
from sdopt.report.charts.spec import Spec
from sdopt.report.charts.vega import encoding, layered, mark
from sdopt.report.tones import AMBER, BLUE, GREEN, GREY, INK, MUTED, VERMILION
from sdopt.search.record import SearchRecord
from sdopt.statistics.words import unit_text

_KINDS: dict[str, tuple[str, str]] = {
    "baseline": (INK, "square"),
    "winner": (GREEN, "circle"),
    "pass": (BLUE, "circle"),
    "undecided": (AMBER, "triangle-up"),
    "not judged": (GREY, "diamond"),
    "beaten": (GREY, "triangle-down"),
    "fail": (VERMILION, "cross"),
    "not enough runs": (GREY, "circle"),
}
"""Colour and shape by fate."""

_HEIGHT, _PADDING = 420, 20


def search_chart(record: SearchRecord) -> Chart | None:
    """Returns the plot of a page: points bear numbers, which the legend explains; None if there are none."""
    points = _points(record)
    if not points:
        return None
    for point in points:
        point["label"] = str(point["number"])
    legend = [(point["number"], point["name"], Cell(point["kind"])) for point in points]
    return Chart([("", _spec(record, points, named=False))], legend=legend)


def search_plot(record: SearchRecord) -> Spec | None:
    """Returns the plot of a picture: points bear their names, or numbers with a key beside them; None without any."""
    points = _points(record)
    for point in points:
        point["label"] = (
            point["name"] if len(points) <= MOST_NAMES else str(point["number"])
        )
    return _spec(record, points, named=True) if points else None


def _points(record: SearchRecord) -> list[dict[str, Any]]:
    """Returns every candidate with a speed-up, against the distance of its images or against memory, the best first.

    Memory is the x axis if no distance was measured, or if memory is an objective and distance is not. A line joins the
    front if the two axes are exactly the objectives.
    """
    by_distance = _by_distance(record)
    _, scale = _unit(record)
    across = "distance" if by_distance else "memory"
    joined = set(record.objectives) == {"latency", across}
    points: list[dict[str, Any]] = []
    for entry in record.entries:
        x = entry.distance if by_distance else entry.memory_gib
        if x is not None and not by_distance:
            x *= scale
        if x is None or entry.speedup is None:
            continue
        points.append(
            {
                "x": x,
                "speed": entry.speedup,
                "low": entry.low,
                "high": entry.high,
                "kind": str(entry.fate),
                "name": entry.name,
                "judged": entry.judged,
                "front": joined and entry.on_front,
            }
        )
    if points and by_distance:
        points.append({"x": 0.0, "speed": 1.0, "kind": "baseline", "name": "baseline"})
    ranked = sorted(
        points, key=lambda point: (not point.get("judged", True), -point["speed"])
    )
    for number, point in enumerate(ranked, 1):
        point["number"] = number
    return ranked


def _by_distance(record: SearchRecord) -> bool:
    """Returns whether the x axis is the distance of images; else it is memory, which more candidates have."""
    if "distance" not in record.objectives and "memory" in record.objectives:
        return False
    shown = [entry for entry in record.entries if entry.speedup is not None]
    known = [entry for entry in shown if entry.distance is not None]
    return bool(known) and 2 * len(known) >= len(shown)


def _unit(record: SearchRecord) -> tuple[str, float]:
    """Returns the unit of the memory axis, and how many of it are a GiB."""
    most = max((entry.memory_gib or 0.0 for entry in record.entries), default=0.0)
    return ("GiB", 1.0) if most >= 1 else ("MiB", 1024.0)


def _spec(record: SearchRecord, points: list[dict[str, Any]], named: bool) -> Spec:
    distance = record.distance if _by_distance(record) else ""
    speeds: list[float] = []
    for point in points:
        speeds += filter(None, (point["speed"], point.get("low"), point.get("high")))
    axis = ratio_axis(
        f"speed-up{unit_text(record.per_image)}, log scale (up is faster)", speeds
    )
    scale: Spec = {"zero": False, "padding": 20}
    ticks: Spec = {"tickCount": 6}
    if distance:
        near = _small(points)
        scale = {"type": "symlog", "constant": near, "padding": 20, "nice": False}
        ticks = {"values": _ticks(points), "format": "~g"}
    unit, _ = _unit(record)
    title = [f"memory ({unit}), better to the left"]
    if distance:  # on a phone there is no room for one line
        title = [
            "how far images are from the baseline's",
            f"({distance}; left is better)",
        ]
    x = encoding("x:Q", title=title, scale=scale, axis=ticks)
    y = encoding("speed:Q", **axis)
    shown = {point["kind"] for point in points}
    looks = {kind: look for kind, look in _KINDS.items() if kind in shown}
    along = [point["x"] for point in points]
    if distance:
        along = [math.log1p(x / _small(points)) for x in along]
    across = [math.log(point["speed"]) for point in points]
    labels, height = named_layers(
        points, (along, across), (x, y), height=_HEIGHT, padding=_PADDING, named=named
    )
    bounds, low = {"color": MUTED, "strokeWidth": 2}, encoding("low:Q", **axis)
    joined = {"color": GREEN, "interpolate": "step-after", "opacity": 0.6}
    dot = {"filled": True, "size": 90, "opacity": 0.9}
    layers = [
        mark("rule", bounds, where=["isValid(datum.low)"], x=x, y=low, y2="high"),
        mark("line", joined, where=["datum.front"], x=x, y=y),
        mark("point", dot, x=x, y=y, **kinds("kind", looks)),
        *labels,
    ]
    heading = record.header or [record.name]
    look = {"text": heading, "anchor": "start", "fontSize": 12, "offset": 8}
    spec = built(layered(layers), " · ".join(heading), height, points)
    return {**spec, "title": look}


def _ticks(points: list[dict[str, Any]]) -> list[float]:
    """Returns zero and some powers of ten; with many, omits the one below the smallest figure, which overlaps zero."""
    largest = max(point["x"] for point in points) or 1.0
    low = math.log10(_small(points))
    high = math.log10(largest)
    step = max(1, math.ceil((high - low) / 6))
    first = math.floor(low) + (step if high - low > 1 else 0)
    return [0.0, *(10.0**power for power in range(first, math.ceil(high) + 1, step))]


def _small(points: list[dict[str, Any]]) -> float:
    """Returns what counts as near zero on the axis: the smallest figure that is not zero."""
    return min((point["x"] for point in points if point["x"] > 0), default=1.0)
