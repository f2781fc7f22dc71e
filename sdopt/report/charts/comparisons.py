"""Plots of how variants compare: speed-ups, the waterfall of a cumulative study, effects, and break-even."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sdopt.analysis.answer import answer_of
from sdopt.analysis.break_even import images_text
from sdopt.analysis.figures import Ratio, figures_of, floor_range, ratio_text
from sdopt.analysis.measures import SPEEDUP, smallest_change
from sdopt.report.charts.spec import (
    ARIA_TEXT,
    BARS,
    BLUE,
    FEW_TICKS,
    GREY,
    INK,
    MUTED,
    ROW,
    VERMILION,
    ZOOM,
    Column,
    Rows,
    Spec,
    ratio_axis,
    shortened,
    tooltips,
)
from sdopt.report.quality import metric_text, pair_metric, quality_heading
from sdopt.report.words import memory_text, seconds_text
from sdopt.results.comparisons import Effect, Interval
from sdopt.results.records import StudyResult

_SPEEDS = {1: "faster", 0: "no difference shown", -1: "slower"}

_SPEED_SCALES: Spec = {
    "color": {
        "field": "speed",
        "type": "nominal",
        "title": None,
        "scale": {"domain": list(_SPEEDS.values()), "range": [BLUE, GREY, VERMILION]},
    },
    "shape": {
        "field": "speed",
        "type": "nominal",
        "title": None,
        "scale": {"domain": list(_SPEEDS.values()), "range": ["triangle-right", "circle", "triangle-left"]},
    },
}
"""Colour and shape encode the same."""

_NUMBERS = (Column("speed-up", "figure", 136),)

_DETAILS = (*_NUMBERS, Column("memory", "memory", 128), Column("images", "quality", 96), Column("verdict", "worth", 80))
"""Texts that a picture shows beside the plot, because it stands alone."""


@dataclass(frozen=True)
class Step:
    """One comparison of a cumulative study: a bar from `start` by its speed-up, both as ratios."""

    name: str
    reference: str
    ratio: Ratio
    start: float = 1.0

    @property
    def end(self) -> float:
        """The speed-up of all steps so far."""
        return self.start * self.ratio.interval.estimate

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The bounds of the end, from the interval of this step alone."""
        low, high = self.ratio.interval.low, self.ratio.interval.high
        return None if low is None or high is None else (self.start * low, self.start * high)


def forest(result: StudyResult, detailed: bool = False) -> Spec | None:
    """Draws the speed-ups at each shape with their intervals, the largest first; None if no comparison has one.

    Args:
        result: the study.
        detailed: whether to show memory, images and verdict beside the speed-up.
    """
    rows = [at for row in figures_of(result) for at in row.shapes if at.speedup]
    if not rows:
        return None
    answer = answer_of(result)
    references, several = {row.reference for row in rows}, len(result.shapes) > 1
    metric = pair_metric(result)
    data = []
    for row in sorted(rows, key=lambda row: (row.variant.role == "control", -_estimate(row.speedup))):
        assert row.speedup is not None
        verdict = answer.on(row)
        against = "" if len(references) == 1 else f" against {row.reference}"
        data.append({
            "name": f"{row.variant.name}{f', {row.shape}' if several else ''}{against}",
            **_bounds(row.speedup.interval),
            "speed": _SPEEDS[row.speedup.gain],
            "figure": row.speedup.text,
            "latency": seconds_text(row.latency) if row.latency else "",
            "memory": memory_text(row),
            "quality": metric_text(row, metric),
            "worth": str(verdict.worth) if verdict else "",
        })  # fmt: skip
    heading = Column(quality_heading(metric), "quality", 96)
    columns = (*_DETAILS[:2], *([heading] if metric else []), _DETAILS[-1]) if detailed else _NUMBERS
    against = f" against {shortened(references.pop())}" if len(references) == 1 else ""
    ends = [end for row in data for end in (row["estimate"], row["low"], row["high"]) if isinstance(end, float)]
    # Each shape, and each set of sessions, has a floor of its own, which decides the colours: no band fits several.
    floors = floor_range(result)
    floor = floors[0] if floors and floors[0] == floors[1] and not several else None
    layers = _floor_layers(floor) if floor else []
    encoding = {"x": ratio_axis(f"speed-up{against}, log scale (right is faster)", [*ends, *_band_ends(floor)])}
    tooltip = {"name": "variant", "figure": "speed-up", "latency": "latency", "memory": "memory"}
    layers += _dots(Rows(data), encoding["x"], tooltip)
    return Rows(data, columns).spec(layers, f"Speed-ups with intervals{against}: {_listed(data)}")


def _estimate(ratio: Ratio | None) -> float:
    return ratio.interval.estimate if ratio else 0.0


def _bounds(found: Interval) -> dict[str, float | None]:
    return {"estimate": found.estimate, "low": found.low, "high": found.high}


def _band_ends(floor: float | None) -> tuple[float, ...]:
    return (1 / floor, floor) if floor else ()


def _listed(data: Sequence[Mapping[str, object]]) -> str:
    """Returns the figures of a plot in one line, for screen readers."""
    return "; ".join(f"{row['name']} {row['figure']}" for row in data)


def _floor_layers(floor: float) -> list[Spec]:
    """Returns the layers of a band: the range by which two identical baselines differed."""
    band = {"low": 1 / floor, "high": floor, "floor": f"±{100 * (floor - 1):.1f} %"}
    return [
        {
            "data": {"values": [band]},
            "mark": {"type": "rect", "color": GREY, "opacity": 0.22, "clip": True},
            "encoding": {
                "x": {"field": "low", "type": "quantitative"},
                "x2": {"field": "high"},
                "tooltip": [{"field": "floor", "title": "A/A floor: two identical baselines differed by"}],
            },
        }
    ]


def _dots(rows: Rows, x: Spec, columns: Mapping[str, str]) -> list[Spec]:
    """Returns the layers of a line at 1, and of an interval and a dot for each row."""
    return [
        {
            "data": {"values": [{"one": 1}]},
            "mark": {"type": "rule", "color": MUTED, "clip": True, "aria": False},
            "encoding": {"x": {"field": "one", "type": "quantitative"}},
        },
        {
            "transform": [{"filter": "isValid(datum.low) && isValid(datum.high)"}],
            "mark": {"type": "rule", "strokeWidth": 2, "clip": True, "aria": False},
            "encoding": {"x": {**x, "field": "low"}, "x2": {"field": "high"}, "y": rows.y,
                         "color": _SPEED_SCALES["color"]},
        },
        {
            "params": [ZOOM],
            "mark": {"type": "point", "filled": True, "size": 130, "opacity": 1, "clip": True},
            "encoding": {"x": {**x, "field": "estimate"}, "y": rows.y, **_SPEED_SCALES,
                         "tooltip": tooltips(columns), "description": ARIA_TEXT},
        },
    ]  # fmt: skip


def steps_of(result: StudyResult) -> list[Step]:
    """Returns the steps of a cumulative study: each begins where the previous one ended, if that was measured."""
    steps: list[Step] = []
    for row in figures_of(result):
        if row.speedup is not None and row.variant.role != "control":
            before = steps[-1] if steps else None
            start = before.end if before and before.name == row.reference else 1.0
            steps.append(Step(row.variant.name, row.reference, row.speedup, start))
    return steps


def waterfall(result: StudyResult) -> Spec | None:
    """Draws how the speed-ups of a cumulative study add up, each with its own interval; None if none was timed."""
    steps = steps_of(result)
    if not steps:
        return None
    data = []
    for number, step in enumerate(steps):
        low, high = step.bounds or (None, None)
        data.append({
            "name": step.name,
            "start": step.start,
            "end": step.end,
            "low": low,
            "high": high,
            "next": number + 1 if number + 1 < len(steps) and steps[number + 1].start == step.end else None,
            "speed": _SPEEDS[step.ratio.gain],
            "figure": step.ratio.text,
            "total": f"{step.end:.2f}×",
            "reference": step.reference,
        })  # fmt: skip
    rows = Rows(data, (Column("this step", "figure", 132), Column("in all", "total", 50)))
    for row in rows.placed:
        row["below"] = None if row["next"] is None else row["at"] + 1
    ends = [end for row in data for end in (row["start"], row["end"], row["low"], row["high"])]
    x = ratio_axis("speed-up over the baseline so far, log scale", [end for end in ends if isinstance(end, float)])
    tooltip = {"name": "step", "reference": "against", "figure": "this step", "total": "in all"}
    color = _SPEED_SCALES["color"] | {"legend": BARS}
    connectors: Spec = {
        "transform": [{"filter": "isValid(datum.below)"}],
        "mark": {"type": "rule", "color": MUTED, "strokeDash": [3, 3], "clip": True, "aria": False},
        "encoding": {"x": {**x, "field": "end"}, "y": rows.y, "y2": {"field": "below"}},
    }
    bars: Spec = {
        "params": [ZOOM],
        "mark": {"type": "rule", "strokeWidth": 14, "clip": True},
        "encoding": {
            "x": {**x, "field": "start"}, "x2": {"field": "end"}, "y": rows.y, "color": color,
            "tooltip": tooltips(tooltip), "description": ARIA_TEXT,
        },
    }  # fmt: skip
    whiskers: list[Spec] = [
        {
            "transform": [{"filter": "isValid(datum.low) && isValid(datum.high)"}],
            "mark": {"type": "rule", "color": INK, "strokeWidth": 1.5, "clip": True, "aria": False},
            "encoding": {"x": {**x, "field": "low"}, "x2": {"field": "high"}, "y": rows.y},
        },
        *(
            {
                "transform": [{"filter": f"isValid(datum.{end})"}],
                "mark": {"type": "tick", "color": INK, "thickness": 1.5, "size": 10, "clip": True, "aria": False},
                "encoding": {"x": {**x, "field": end}, "y": rows.y},
            }
            for end in ("low", "high")
        ),
    ]
    listed = "; ".join(f"{row['name']} {row['figure']}, {row['total']} in all" for row in data)
    return rows.spec([connectors, bars, *whiskers], f"Waterfall of the steps: {listed}")


def main_effects(result: StudyResult) -> Spec | None:
    """Draws the main effects of a factorial study, the largest first; None if there is none."""
    found = [(effect, effect.speedup) for effect in result.effects if effect.speedup and len(effect.options) == 1]
    if not found:
        return None
    smallest = smallest_change(SPEEDUP, result.config.gate, result.variant(result.baseline))
    data = [
        {
            "name": effect.options[0],
            **_bounds(speedup),
            "speed": _SPEEDS[Ratio(SPEEDUP, speedup, result.floor, *smallest).gain],
            "figure": ratio_text(speedup),
            "memory": ratio_text(effect.memory_ratio) if effect.memory_ratio else "",
        }
        for effect, speedup in sorted(found, key=lambda pair: -pair[1].estimate)
    ]
    ends = [end for row in data for end in (row["estimate"], row["low"], row["high"]) if isinstance(end, float)]
    x = ratio_axis("speed-up by the option, averaged over the others, log scale", ends)
    tooltip = {"name": "option", "figure": "speed-up", "memory": "memory"}
    return Rows(data, _NUMBERS).spec(_dots(Rows(data), x, tooltip), f"Main effects: {_listed(data)}")


def interactions(result: StudyResult) -> Spec | None:
    """Draws the map of a factorial study's interactions, main effects on the diagonal; None if there is none."""
    effects = [effect for effect in result.effects if effect.speedup or effect.aliased_with]
    names = list(dict.fromkeys(name for effect in effects for name in effect.options))
    if not any(len(effect.options) == 2 for effect in effects):
        return None
    data = [_map_cell(effect, names) for effect in effects]
    spread = max([abs(cell["log"]) for cell in data if isinstance(cell["log"], float)] or [0.0]) or 0.01
    axis = {"labelLimit": 130, "title": None, "ticks": False, "grid": False}
    scale = {"domain": list(map(shortened, names)), "paddingInner": 0.04}
    tooltip = {"of": "effect of", "figure": "speed-up", "memory": "memory"}
    place: Spec = {
        "x": {"field": "column", "type": "ordinal", "scale": scale, "axis": axis | {"labelAngle": -40}},
        "y": {"field": "row", "type": "ordinal", "scale": scale, "axis": axis},
    }
    colour = {
        "field": "log", "type": "quantitative", "title": "ratio",
        "scale": {"domain": [-spread, 0, spread], "range": ["#f0a35e", "#f5f5f5", "#7db8de"]},
        "legend": {"format": ".2f", "labelExpr": "format(exp(datum.value), '.2f') + '×'", "gradientLength": 160,
                   "tickCount": 3},
    }  # fmt: skip
    label = {"type": "text", "fontSize": 12, "color": "#111111", "aria": False}
    return {
        "data": {"values": data},
        "description": "Interactions: " + "; ".join(f"{cell['of']} {cell['figure']}" for cell in data),
        "height": max(2, len(names)) * (ROW + 6),
        "padding": 6,
        "layer": [
            {
                "mark": {"type": "rect", "cornerRadius": 3},
                "encoding": {**place, "color": colour,
                             "tooltip": tooltips(tooltip)},
            },
            {"mark": label | {"dy": -7}, "encoding": {**place, "text": {"field": "estimate"}}},
            {"mark": label | {"dy": 9, "fontSize": 10}, "encoding": {**place, "text": {"field": "bounds"}}},
        ],
    }  # fmt: skip


def _map_cell(effect: Effect, names: Sequence[str]) -> dict[str, object]:
    first, last = (shortened(name) for name in sorted((effect.options[0], effect.options[-1]), key=names.index))
    found = effect.speedup
    return {
        "column": first,
        "row": last,
        "of": " × ".join(effect.options),
        "log": math.log(found.estimate) if found else 0.0,
        "estimate": f"{found.estimate:.2f}×" if found else "aliased",
        "bounds": f"{found.low:.2f}–{found.high:.2f}" if found and found.low and found.high else "",
        "figure": ratio_text(found) if found else f"aliased with {', '.join(effect.aliased_with)}",
        "memory": ratio_text(effect.memory_ratio) if effect.memory_ratio else "",
    }


def break_even_plot(result: StudyResult) -> Spec | None:
    """Draws after how many images each variant has repaid its start; None if no variant with a slower start ever does.

    A variant whose start costs no more than a call of its reference is left out.
    """
    data = []
    for row in figures_of(result):
        level = row.break_even
        if level is not None and level.images and level.is_slower and row.variant.role != "control":
            data.append({
                "name": row.variant.name,
                "estimate": level.images,
                "low": level.images_low or None,
                "high": level.images_high,
                "open": level.images_high if level.images_high or level.confidence is None else math.inf,
                "figure": images_text(level),
                "extra": f"{level.extra_s:.1f} s",
            })  # fmt: skip
    return _break_even_rows(data) if data else None


def _break_even_rows(data: list[dict[str, object]]) -> Spec:
    data.sort(key=lambda row: float(str(row["estimate"])))
    ends = [end for row in data for end in (row["estimate"], row["low"], row["high"]) if isinstance(end, float)]
    top = 2 * max(ends)
    for row in data:
        # An interval that includes a ratio of 1 has no upper end: it reaches the edge of the plot.
        row["reach"] = top if row.pop("open") == math.inf else row["high"]
    x: Spec = {
        "type": "quantitative",
        "title": "images until its start is repaid, log scale (left is sooner)",
        "scale": {"type": "log", "domain": [min(1.0, *ends), top], "nice": False},
        "axis": {"tickCount": FEW_TICKS, "format": "~s"},
    }
    rows = Rows(data, (Column("images", "figure", 136),))
    tooltip = {"name": "variant", "figure": "repaid after", "extra": "extra start-up time"}
    layers: list[Spec] = [
        {
            "transform": [{"filter": "isValid(datum.reach)"}, {"calculate": "datum.low || 1", "as": "from"}],
            "mark": {"type": "rule", "strokeWidth": 2, "color": BLUE, "clip": True, "aria": False},
            "encoding": {"x": {**x, "field": "from"}, "x2": {"field": "reach"}, "y": rows.y},
        },
        {
            "params": [ZOOM],
            "mark": {"type": "point", "filled": True, "size": 130, "opacity": 1, "color": BLUE, "clip": True},
            "encoding": {"x": {**x, "field": "estimate"}, "y": rows.y,
                         "tooltip": tooltips(tooltip), "description": ARIA_TEXT},
        },
    ]  # fmt: skip
    return rows.spec(layers, f"Break-even: {_listed(data)}")
