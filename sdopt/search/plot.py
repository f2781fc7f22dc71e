"""Plots a search: speed-up against image distance, for every measured candidate."""

import math
from typing import Any

from sdopt.report.charts.spec import BLUE, GREEN, GREY, INK, MUTED, VERMILION, Spec, picture, ratio_axis
from sdopt.search.record import Fate, SearchRecord

_KINDS: dict[str, tuple[str, str]] = {
    "baseline": (INK, "square"),
    Fate.WINNER: (GREEN, "circle"),
    Fate.PASSED: (BLUE, "circle"),
    Fate.NOT_PASSED: (VERMILION, "triangle-down"),
    Fate.LEFT_OUT: (GREY, "diamond"),
    Fate.DROPPED: (GREY, "triangle-down"),
    Fate.RULED_OUT: (VERMILION, "cross"),
    Fate.OPEN: (GREY, "circle"),
}
"""Colour and shape by fate."""

_JUDGED = (Fate.WINNER, Fate.PASSED, Fate.NOT_PASSED)


def search_plot(record: SearchRecord) -> bytes | None:
    """Plots every candidate with a speed-up, against the distance of its images or against memory.

    Memory is the x axis if no distance was measured, or if memory is an objective and distance is not. A line joins the
    front if the two axes are exactly the objectives.

    Returns:
        the plot as a PNG; None if no candidate can be shown.
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
            "label": entry.name if entry.fate in _JUDGED else "",
            "front": joined and entry.on_front,
        }
        for entry in measured
        if (entry.distance if by_distance else entry.memory_gib) is not None
    ]
    if not points:
        return None
    if by_distance:
        points.append({"x": 0.0, "speed": 1.0, "kind": "baseline", "label": "baseline"})
    # Every second label goes below its point, so that labels of neighbouring points do not overlap.
    named = sorted((point for point in points if point["label"]), key=lambda point: -point["speed"])
    for index, point in enumerate(named):
        point["below"] = bool(index % 2)
    return picture(_spec(record, points, record.distance if by_distance else ""))


def _spec(record: SearchRecord, points: list[dict[str, Any]], distance: str) -> Spec:
    speeds = [end for point in points for end in (point["speed"], point.get("low"), point.get("high")) if end]
    y = {"field": "speed", **ratio_axis("speed-up, log scale (up is faster)", speeds)}
    x: Spec = {
        "field": "x",
        "type": "quantitative",
        "title": f"{distance or 'memory (GiB)'}, better to the left",
        "scale": {"zero": False, "padding": 20},
        "axis": {"tickCount": 6},
    }
    if distance:
        x["scale"] = {"type": "symlog", "constant": _small(points), "padding": 20, "nice": False}
        x["axis"] = {"values": _ticks(points), "format": "~g"}
    kinds = [kind for kind in _KINDS if any(point["kind"] == kind for point in points)]
    colour = {"field": "kind", "type": "nominal", "title": None,
              "scale": {"domain": kinds, "range": [_KINDS[kind][0] for kind in kinds]}}  # fmt: skip
    shape = {**colour, "scale": {"domain": kinds, "range": [_KINDS[kind][1] for kind in kinds]}}
    return {
        "data": {"values": points},
        "title": {"text": " · ".join(record.header) or record.name, "anchor": "start", "fontSize": 12, "offset": 8},
        "height": 420,
        "padding": 8,
        "layer": [
            {
                "transform": [{"filter": "isValid(datum.low)"}],
                "mark": {"type": "rule", "color": MUTED, "strokeWidth": 2},
                "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}},
            },
            {
                "transform": [{"filter": "datum.front"}],
                "mark": {"type": "line", "color": GREEN, "interpolate": "step-after", "opacity": 0.6},
                "encoding": {"x": x, "y": y},
            },
            {
                "mark": {"type": "point", "filled": True, "size": 90, "opacity": 0.9},
                "encoding": {"x": x, "y": y, "color": colour, "shape": shape},
            },
            *(_labels(points, x, y, right, below) for right in (False, True) for below in (False, True)),
        ],
    }


def _labels(points: list[dict[str, Any]], x: Spec, y: Spec, on_the_right: bool, below: bool) -> Spec:
    """Returns a layer with the names of points, written towards the middle of the plot."""
    small, distances = _small(points), [point["x"] for point in points]
    is_distance = x["scale"].get("type") == "symlog"

    def along(value: float) -> float:
        return math.log1p(value / small) if is_distance else value

    middle = (along(min(distances)) + along(max(distances))) / 2
    shown = [
        point
        for point in points
        if point["label"] and point.get("below") is below and (along(point["x"]) > middle) is on_the_right
    ]
    align = {"align": "right", "dx": -9} if on_the_right else {"align": "left", "dx": 9}
    return {
        "data": {"values": shown},
        "mark": {"type": "text", **align, "dy": 11 if below else -9, "fontWeight": "bold", "limit": 420},
        "encoding": {"x": x, "y": y, "text": {"field": "label"}},
    }


def _ticks(points: list[dict[str, Any]]) -> list[float]:
    """Returns zero and some powers of ten; with many, omits the one below the smallest figure, which overlaps zero."""
    low, high = math.log10(_small(points)), math.log10(max(point["x"] for point in points) or 1.0)
    step = max(1, math.ceil((high - low) / 6))
    first = math.floor(low) + (step if high - low > 1 else 0)
    return [0.0, *(10.0**power for power in range(first, math.ceil(high) + 1, step))]


def _small(points: list[dict[str, Any]]) -> float:
    """Returns what counts as near zero on the axis: the smallest figure that is not zero."""
    return min((point["x"] for point in points if point["x"] > 0), default=1.0)
