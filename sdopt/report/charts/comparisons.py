"""Charts of how variants compare: speed-ups, the waterfall of a cumulative study, and interactions."""

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from sdopt.record.comparisons import Effect
from sdopt.report.charts.parts import (
    BARS,
    HAS_BOUNDS,
    ROW,
    Rows,
    SideText,
    built,
    facts,
    kinds,
    ratio_axis,
    shortened,
    zoom,
)
from sdopt.report.charts.spec import Spec, study_picture
from sdopt.report.charts.vega import encoding, layered, mark
from sdopt.report.columns import TableView, images_cell, memory_cell, slower_cell
from sdopt.report.summary import Summary
from sdopt.report.tones import BLUE, GREY, INK, LINE, MUTED, VERMILION
from sdopt.statistics.figures import floor_range
from sdopt.statistics.measures import SPEEDUP, Ratio, ratio_text
from sdopt.statistics.rows import Row
from sdopt.statistics.scale import Speed, speed_of
from sdopt.statistics.words import seconds_text, unit_text

_LOOKS = {
    str(Speed.FASTER): (BLUE, "triangle-right"),
    str(Speed.CLOSE): (GREY, "circle"),
    str(Speed.FEW): (GREY, "diamond"),
    str(Speed.SLOWER): (VERMILION, "triangle-left"),
}


def forest(summary: Summary, detailed: bool = False) -> Spec | None:
    """Draws the speed-ups over the baseline at each shape with their intervals; None if there is none.

    A `detailed` one, which stands alone, has memory and images beside them.
    """
    result, several = summary.result, len(summary.result.shapes) > 1
    judged = any(row.decision for row in summary.rows)
    data: list[dict[str, Any]] = []
    for row in [
        row for row in summary.candidates if row.speedup or row.variant.given_up
    ]:
        tooltip = {
            "memory": str(memory_cell(row)),
            "images": str(images_cell(row, TableView(judged))),
            "gate": str(row.decision or ""),
        }
        if row.variant.given_up:
            data += [
                _arrow(at, several) | tooltip for at in row.shapes if at.at_least_slower
            ]
            continue
        for at, speed in zip(row.shapes, row.speeds, strict=False):
            data.append(
                _point(at, at.over_baseline[SPEEDUP.name], speed, several) | tooltip
            )
    data.sort(key=lambda each: -each["estimate"])
    # The repeated baseline, whose speed-up is 1 but for chance.
    nothing = dict.fromkeys(("memory", "images", "gate"), "")
    controls = [row for row in summary.figures if row.variant.is_control]
    for at in chain.from_iterable(row.shapes for row in controls):
        again = at.speedup_beside
        if again:
            data.append(_point(at, again, speed_of(again), several) | nothing)
    if not data:
        return None
    columns: list[SideText] = [
        (f"speed-up{unit_text(result.per_image)}", "figure", 136)
    ]
    if detailed:
        columns += [("memory", "memory", 108)]
        columns += (
            [("images", "images", 190)] if any(each["images"] for each in data) else []
        )
        columns += [("gate", "gate", 80)] if judged else []
    # Each shape, and each set of sessions, has a floor of its own, which decides the colours: no band fits several.
    floors = floor_range(result)
    band = None
    if floors and floors[0] == floors[1] and not several:
        band = max(floors[0], 1 + result.config.protocol.smallest_speedup)
    axis = ratio_axis(
        f"speed-up{unit_text(result.per_image)} over {shortened(result.baseline)}, log scale (right is faster)",
        [
            *_ends(data, "estimate", "low", "high"),
            *((1 / band, band) if band else ()),
        ],
        grid=False,
    )
    rows = Rows(data, columns)
    layers = [*([_close_band(band)] if band else []), *_speedups(rows, axis)]
    return rows.spec(layers, f"Speed-ups over {result.baseline}, with intervals")


def _ends(data: Sequence[dict[str, Any]], *names: str) -> list[float | None]:
    """Returns the figures of some names, which an axis has to show."""
    ends: list[float | None] = []
    for row in data:
        ends += [row[name] for name in names]
    return ends


def _point(at: Row, ratio: Ratio, speed: Speed, several: bool) -> dict[str, Any]:
    """Returns the record of a speed-up at one of the shapes."""
    return {
        "name": f"{at.variant.name}{f', {at.shape}' if several else ''}",
        "estimate": ratio.interval.estimate,
        "low": ratio.interval.low,
        "high": ratio.interval.high,
        "speed": str(speed),
        "figure": ratio.text,
        "latency": f"{seconds_text(at.time)}{unit_text(at.per_image)}"
        if at.time
        else "",
    }


_ARROW = 1.3
"""Length of the arrow at a bound, as a factor on the log scale."""


def _arrow(at: Row, several: bool) -> dict[str, Any]:
    """Returns the record of a variant that is slower than a bound: an arrow from there to the left."""
    assert at.at_least_slower is not None
    bound = 1 / at.at_least_slower
    return {
        "name": f"{at.variant.name}{f', {at.shape}' if several else ''}",
        "estimate": bound / _ARROW,
        "low": bound / _ARROW,
        "high": bound,
        "speed": str(Speed.SLOWER),
        "figure": str(slower_cell(at)),
        "latency": "",
    }


def _close_band(factor: float) -> Spec:
    """Returns the layer of a band: speed-ups up to a factor, in either direction, are too close to call."""
    band = {"low": 1 / factor, "high": factor, "range": f"±{100 * (factor - 1):.1f} %"}
    tooltip = encoding("range:N", title="too close to call")
    look = {"color": GREY, "opacity": 0.22, "clip": True}
    return mark("rect", look, data=[band], x="low:Q", x2="high", tooltip=tooltip)


def _speedups(rows: Rows, axis: dict[str, Any]) -> list[Spec]:
    """Returns the layers of a line at 1, and of an interval and a dot for each row."""
    ticks = axis["axis"]["values"]
    looks = kinds("speed", _LOOKS)
    tooltip = {
        "name": "variant",
        "figure": "speed-up",
        "speed": "shown",
        "latency": "time",
        "memory": "memory",
    }
    interval = mark(
        "rule",
        {"strokeWidth": 2, "clip": True, "aria": False},
        where=[HAS_BOUNDS],
        x=encoding("low:Q", **axis),
        x2="high",
        y=rows.y,
        color=looks["color"],
    )
    dot = mark(
        "point",
        {"filled": True, "size": 130, "opacity": 1, "clip": True},
        params=[zoom()],
        x=encoding("estimate:Q", **axis),
        y=rows.y,
        **facts(tooltip),
        **looks,
    )
    return [
        rows.grid("low", axis, ticks, LINE),
        rows.grid("low", axis, [1.0], MUTED),
        interval,
        dot,
    ]


def waterfall(summary: Summary) -> Spec | None:
    """Draws how the speed-ups of a cumulative study add up, each with its own interval; None if none was timed.

    Each step begins where the one before it ended, if it was compared with that one.
    """
    data = _steps(summary)
    if not data:
        return None
    rows = Rows(data, [("this step", "figure", 132), ("in all", "total", 50)])
    for placed in rows.placed:
        placed["below"] = placed["at"] + 1 if placed["joined"] else None
    axis = ratio_axis(
        f"speed-up{unit_text(summary.result.per_image)} over the baseline so far, log scale",
        _ends(data, "start", "end", "low", "high"),
        grid=False,
    )
    tooltip = {
        "name": "step",
        "reference": "against",
        "figure": "this step",
        "total": "in all",
    }
    connectors = mark(
        "rule",
        {"color": MUTED, "strokeDash": [3, 3], "clip": True, "aria": False},
        where=["isValid(datum.below)"],
        x=encoding("end:Q", **axis),
        y=rows.y,
        y2="below",
    )
    bars = rows.bars(
        encoding("start:Q", **axis),
        "end",
        tooltip,
        color=kinds("speed", _LOOKS, legend=BARS)["color"],
    )
    grid = rows.grid("start", axis, axis["axis"]["values"], LINE)
    ink = {"color": INK, "clip": True, "aria": False}
    ends = {end: encoding(f"{end}:Q", **axis) for end in ("low", "high")}
    line = {**ink, "strokeWidth": 1.5}
    whiskers = [
        mark("rule", line, where=[HAS_BOUNDS], x=ends["low"], x2="high", y=rows.y)
    ]
    for x in ends.values():
        cap = {**ink, "thickness": 1.5, "size": 10}
        whiskers.append(mark("tick", cap, where=[HAS_BOUNDS], x=x, y=rows.y))
    return rows.spec(
        [grid, connectors, bars, *whiskers],
        "Waterfall of the steps",
    )


def _steps(summary: Summary) -> list[dict[str, Any]]:
    """Returns the records of the steps of a cumulative study, each from where the one before it ended."""
    data: list[dict[str, Any]] = []
    for row in summary.figures:
        ratio = row.speedup_beside
        if ratio is None or row.variant.is_control:
            continue
        start = 1.0
        if data and data[-1]["name"] == row.reference:
            start = data[-1]["end"]
            data[-1]["joined"] = True
        interval = ratio.interval
        end = start * interval.estimate
        data.append({
            "name": row.variant.name,
            "start": start,
            "end": end,
            "low": None if interval.low is None else start * interval.low,
            "high": None if interval.high is None else start * interval.high,
            "joined": False,
            "speed": str(speed_of(ratio)),
            "figure": ratio.text,
            "total": f"{end:.2f}×",
            "reference": row.reference,
        })  # fmt: skip
    return data


def interactions(summary: Summary) -> Spec | None:
    """Draws the map of a factorial study's interactions, main effects on the diagonal; None if there is none."""
    effects = [
        effect
        for effect in summary.result.effects
        if effect.speedup or effect.aliased_with
    ]
    options = chain.from_iterable(effect.options for effect in effects)
    names = list(dict.fromkeys(options))
    if not any(len(effect.options) == 2 for effect in effects):
        return None
    data = [_map_cell(effect, names) for effect in effects]
    spread = max(abs(cell["log"]) for cell in data) or 0.01
    scale = {"domain": list(map(shortened, names)), "paddingInner": 0.04}
    axis = {"labelLimit": 130, "title": None, "ticks": False, "grid": False}
    below = {**axis, "labelAngle": -40, "title": _OF_CELLS}
    x = encoding("column:O", scale=scale, axis=below)
    y = encoding("row:O", scale=scale, axis=axis)
    legend = {
        "labelExpr": "format(exp(datum.value), '.2f') + '×'",
        "gradientLength": 160,
        "values": [-spread, 0, spread],
    }
    colours = {
        "domain": [-spread, 0, spread],
        "range": ["#f0a35e", "#f5f5f5", "#7db8de"],
    }
    colour = encoding("log:Q", title="ratio", scale=colours, legend=legend)
    tooltip = facts({"of": "effect of", "figure": "speed-up", "memory": "memory"})
    text = {"color": "#111111", "aria": False}
    figure = {**text, "fontSize": 12, "dy": -7}
    bounds = {**text, "fontSize": 10, "dy": 9}
    layers = [
        mark("rect", {"cornerRadius": 3}, x=x, y=y, color=colour, **tooltip),
        mark("text", figure, x=x, y=y, text="estimate:N"),
        mark("text", bounds, x=x, y=y, text="bounds:N"),
    ]
    described = "Interactions: " + "; ".join(cell["aria_text"] for cell in data)
    return built(layered(layers), described, max(2, len(names)) * (ROW + 6), data, 6)


_OF_CELLS = (
    "On the diagonal the main effects; below it the interactions, "
    "which two options gain beyond their main effects"
)


def _map_cell(effect: Effect, names: Sequence[str]) -> dict[str, Any]:
    first, last = (
        shortened(name)
        for name in sorted((effect.options[0], effect.options[-1]), key=names.index)
    )
    interval = effect.speedup
    of = " × ".join(effect.options)
    figure = (
        ratio_text(interval)
        if interval
        else f"aliased with {', '.join(effect.aliased_with)}"
    )
    return {
        "column": first,
        "row": last,
        "of": of,
        "log": math.log(interval.estimate) if interval else 0.0,
        "estimate": f"{interval.estimate:.2f}×" if interval else "aliased",
        "bounds": f"{interval.low:.2f}–{interval.high:.2f}"
        if interval and interval.low and interval.high
        else "",
        "figure": figure,
        "memory": ratio_text(effect.memory_ratio) if effect.memory_ratio else "",
        "aria_text": f"{of} {figure}",
    }


def main_plot(summary: Summary) -> Callable[[Summary], Spec | None]:
    """Returns which plot is the main one of a study: the map of its interactions, its waterfall, or the speed-ups."""
    if interactions(summary):
        return interactions
    if summary.result.design == "cumulative" and waterfall(summary):
        return waterfall
    return forest


def study_plot(summary: Summary) -> bytes | None:
    """Draws the main plot of a study as a PNG, the speed-ups with more details; None if no comparison has a figure."""
    plot = main_plot(summary)
    return study_picture(
        summary, forest(summary, detailed=True) if plot is forest else plot(summary)
    )
