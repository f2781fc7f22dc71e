"""Plots a search: speed-up against image distance, for every measured candidate."""

import math
from itertools import product
from typing import Any

from sdopt.report.blocks import Cell, Chart
from sdopt.report.charts.labels import MOST_NAMES, named_layers
from sdopt.report.charts.parts import built, facts, kinds, ratio_axis
from sdopt.report.charts.spec import Spec
from sdopt.report.charts.vega import encoding, layered, mark
from sdopt.report.tones import AMBER, BLUE, GREEN, GREY, INK, MUTED, VERMILION
from sdopt.search.record import SearchEntry, SearchRecord
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

_ALL_LABELLED = 30
"""Up to how many points all bear a label; of more, the first dozen do. The table has all, and a page's tooltips."""


def search_chart(record: SearchRecord) -> Chart | None:
    """Returns the plot of a page: points bear numbers, which the legend explains; None if there are none."""
    points = _points(record)
    if not points:
        return None
    legend = [
        (point["number"], point["name"], Cell(point["kind"]))
        for point in _label(points, "number")
    ]
    return Chart([("", _spec(record, points, named=False))], legend=legend)


def search_plot(record: SearchRecord) -> Spec | None:
    """Returns the plot of a picture: points bear their names, or numbers with a key beside them; None without any."""
    points = _points(record)
    if not points:
        return None
    _label(points, "name" if len(points) <= MOST_NAMES else "number")
    return _spec(record, points, named=True)


def _label(points: list[dict[str, Any]], by: str) -> list[dict[str, Any]]:
    """Labels points by their name or number, and returns them: all, or the judged and the fastest ones of many."""
    labelled = points if len(points) <= _ALL_LABELLED else points[:MOST_NAMES]
    for point in labelled:
        point["label"] = str(point[by])
    return labelled


def _points(record: SearchRecord) -> list[dict[str, Any]]:
    """Returns every candidate with a speed-up, against the distance of its images or against memory, the best first.

    Memory is the x axis if no distance was measured, or if memory is an objective and distance is not. A line joins the
    front if the two axes are exactly the objectives.
    """
    by_distance = _by_distance(record)
    across = "distance" if by_distance else "memory"
    joined = set(record.objectives) == {"latency", across}
    points: list[dict[str, Any]] = []
    for entry in record.entries:
        x = entry.distance if by_distance else _memory(record, entry)
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
    points.sort(key=_rank)
    for number, point in enumerate(points, 1):
        point["number"] = number
        point["label"] = ""
        point["figure"] = f"{point['speed']:.2f}×"
        point["aria_text"] = f"{point['name']}: {point['figure']}, {point['kind']}"
    return points


def _rank(point: dict[str, Any]) -> tuple[bool, float]:
    """Returns by what points are sorted: judged ones first, and the fastest first."""
    return not point.get("judged", True), -point["speed"]


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


def _memory(record: SearchRecord, entry: SearchEntry) -> float | None:
    """Returns the memory of a candidate in the unit of its axis; None if it was not measured."""
    if entry.memory_gib is None:
        return None
    _, scale = _unit(record)
    return scale * entry.memory_gib


def _spec(record: SearchRecord, points: list[dict[str, Any]], named: bool) -> Spec:
    by_distance = _by_distance(record)
    x = _distance_axis(record, points) if by_distance else _memory_axis(record)
    speeds: list[float | None] = []
    for point in points:
        speeds += [point["speed"], point.get("low"), point.get("high")]
    title = f"speed-up{unit_text(record.per_image)}, log scale (up is faster)"
    axis = ratio_axis(title, speeds)
    y = encoding("speed:Q", **axis)
    along = [point["x"] for point in points]
    if by_distance:
        near = _small(points)
        along = [math.log1p(distance / near) for distance in along]
    across = [math.log(point["speed"]) for point in points]
    labels, height = named_layers(
        points,
        along,
        across,
        (x, y),
        height=_HEIGHT,
        padding=_PADDING,
        named=named,
    )
    present = {point["kind"] for point in points}
    looks = {kind: look for kind, look in _KINDS.items() if kind in present}
    bounds = {"color": MUTED, "strokeWidth": 2}
    low = encoding("low:Q", **axis)
    joined = {"color": GREEN, "interpolate": "step-after", "opacity": 0.6}
    dot = {"filled": True, "size": 90, "opacity": 0.9}
    tooltip = facts({"name": "options", "figure": "speed-up", "kind": "outcome"})
    layers = [
        mark("rule", bounds, where=["isValid(datum.low)"], x=x, y=low, y2="high"),
        mark("line", joined, where=["datum.front"], x=x, y=y),
        mark("point", dot, x=x, y=y, **kinds("kind", looks), **tooltip),
        *labels,
    ]
    heading = record.header or [record.name]
    spec = built(layered(layers), " · ".join(heading), height, points)
    if not named:  # the page has it, and the plot of a phone would be as narrow as a long title leaves it
        return spec
    look = {"text": heading, "anchor": "start", "fontSize": 12, "offset": 8}
    return {**spec, "title": look}


def _distance_axis(record: SearchRecord, points: list[dict[str, Any]]) -> Spec:
    return encoding(
        "x:Q",
        # On a phone there is no room for one line.
        title=[
            "how far images are from the baseline's",
            f"({record.distance}; left is better;",
            "linear near 0, then logarithmic)",
        ],
        scale={
            "type": "symlog",
            "constant": _small(points),
            "padding": _PADDING,
            "nice": False,
        },
        axis={"values": _ticks(points), "format": "~g"},
    )


def _memory_axis(record: SearchRecord) -> Spec:
    unit, _ = _unit(record)
    return encoding(
        "x:Q",
        title=[f"memory ({unit}), better to the left"],
        scale={"zero": False, "padding": _PADDING},
        axis={"tickCount": 6},
    )


_APART = 0.17
"""Share of the axis that two ticks are apart at least, so that their labels have room on a phone."""


def _ticks(points: list[dict[str, Any]]) -> list[float]:
    """Returns zero and round figures: 1, 2 and 5 of each decade where there is room, else some powers of ten."""
    near = _small(points)
    most = max(point["x"] for point in points) or near
    first, last = math.floor(math.log10(near / 4)), math.ceil(math.log10(most))
    decades = [10.0**decade for decade in range(first, last + 1)]
    steps = [round(m * decade, 15) for decade, m in product(decades, (1, 2, 5))]
    ticks = _apart(steps, near, most)
    every = 1
    while ticks is None:
        ticks = _apart(decades[::every], near, most)
        every += 1
    return [0.0, *ticks]


def _apart(steps: list[float], near: float, most: float) -> list[float] | None:
    """Returns those steps of the axis that are within it and have room beside zero; None if others overlap."""
    whole = math.log1p(most / near)
    ticks = []
    before = 0.0
    for step in steps:
        place = math.log1p(step / near) / whole
        if place < _APART or step > most:
            continue
        if place - before < _APART:
            return None
        ticks.append(step)
        before = place
    return ticks


def _small(points: list[dict[str, Any]]) -> float:
    """Returns what counts as near zero on the axis: the smallest figure that is not zero."""
    return min((point["x"] for point in points if point["x"] > 0), default=1.0)
