"""Plots speed against the loss of image quality, with the verdict as colour."""

import math
from collections.abc import Sequence
from typing import Any

from sdopt.quality.metrics import family_of, known_family
from sdopt.report.blocks import Cell, Chart
from sdopt.report.charts.labels import MOST_NAMES, named_layers
from sdopt.report.charts.parts import (
    FEW_TICKS,
    built,
    facts,
    kinds,
    ratio_axis,
    zoom,
)
from sdopt.report.charts.spec import Spec, study_picture
from sdopt.report.charts.vega import encoding, layered, mark
from sdopt.report.summary import Summary
from sdopt.report.tables import metric_text, quality_columns, quality_heading
from sdopt.report.tones import BASELINE, COLOUR, MUTED, TONES
from sdopt.statistics.rows import Row
from sdopt.statistics.scale import Images, Speed
from sdopt.statistics.words import gib_text, seconds_text, unit_text

_SHAPES: dict[str, str] = {
    BASELINE: "square",
    Images.EQUAL: "circle",
    Images.WITHIN: "diamond",
    Images.WORSE: "cross",
    Images.NOT_JUDGED: "triangle-up",
}
"""Shape by what is known of the images: two may have one colour."""

_HEIGHT, _PADDING = 380, 26
_FACTS = {
    "name": "variant",
    "kind": "images",
    "speed_text": "speed-up",
    "latency": "time",
    "loss_text": "figure",
    "memory": "memory",
}
"""Tooltip of a point: titles by field of the data."""


_FRONT = "The dashed line joins the variants that no other one beats in both, without those too close to call."


def tradeoffs(summary: Summary, named: bool = False) -> Chart | None:
    """Draws speed over the baseline against each quality metric, a view each; None if there is none.

    Points bear numbers, which the legend explains; in a picture (`named`) their names, or where there are many numbers
    with a key beside them.
    """
    rows: list[Row] = []
    steps: list[str] = []
    for row in summary.rows:
        if not row.latency or not row.status.measured:
            continue
        if row.is_step:
            steps.append(row.name)
        else:
            rows.append(row)
    remarks = [_FRONT, *_left_out(steps)]
    unit = unit_text(summary.result.per_image)
    views = []
    legend: dict[int, tuple[int, str, Cell]] = {}
    for metric in quality_columns(summary.result):
        family = known_family(metric)
        if family is None or family.higher_is_better is None:
            continue
        points = _points(rows, metric, named)
        if all(point["kind"] == BASELINE for point in points):
            continue
        heading = quality_heading(metric)
        x = _loss_axis(points, metric, heading, remarks if named else [])
        front = _front(points, family.higher_is_better)
        views.append((heading, _spec(points, x, front, unit, named)))
        for point in points:
            number = point["number"]
            kind = Cell(point["kind"], tone=TONES[point["kind"]])
            legend[number] = (number, point["name"], kind)
    if not views:
        return None
    return Chart(
        views,
        " ".join(["Up is faster.", *remarks]),
        "quality as",
        [legend[number] for number in sorted(legend)],
        "tradeoff.png",
    )


def _left_out(names: Sequence[str]) -> list[str]:
    """Returns which variants have no point, because their images were compared with those of another variant."""
    if not names:
        return []
    return [
        f"Left out, as their images were not compared with the baseline's: {', '.join(names)}."
    ]


def tradeoff_picture(summary: Summary) -> bytes | None:
    """Draws speed against quality as a PNG; None if there are no images to judge quality by."""
    plots = tradeoffs(summary, named=True)
    return study_picture(summary, plots.views[0][1] if plots else None)


def _points(rows: Sequence[Row], metric: str, named: bool) -> list[dict[str, Any]]:
    points: list[dict[str, Any]] = []
    for number, row in enumerate(rows, 1):
        loss = _loss(row, metric)
        speed = 1.0 if row.is_baseline else None
        if speed is None and row.speedup:
            speed = row.speedup.interval.estimate
        if loss is None or speed is None:
            continue
        itself = row.is_baseline and metric not in row.scores
        kind = BASELINE if row.images is None else str(row.images)
        time = row.time
        points.append({
            "number": number,
            "name": row.name,
            "aria_text": f"{number} {row.name}: {kind}",
            "label": row.name if named and len(rows) <= MOST_NAMES else str(number),
            "loss": loss,
            "speed": speed,
            "open": row.speed is Speed.CLOSE,
            "kind": kind,
            "memory": "" if row.peak_gib is None else gib_text(row.peak_gib),
            "speed_text": row.speedup.text if row.speedup else "",
            "latency": f"{seconds_text(time)}{unit_text(row.per_image)}" if time else "",
            "loss_text": "the reference itself" if itself else metric_text(row, metric),
        })  # fmt: skip
    return points


def _loss(row: Row, metric: str) -> float | None:
    """Returns the value of a metric; infinity if the images are equal and the metric has no figure for that."""
    family = family_of(metric)
    if row.is_baseline and family.needs_pair:
        if family.equal_text:
            return math.inf
        return 1.0 if family.higher_is_better else 0.0
    score = row.scores.get(metric)
    if score is None:
        return None
    if score.estimate is None and family.equal_text:
        return math.inf
    return score.estimate


def _loss_axis(
    points: list[dict[str, Any]], metric: str, heading: str, below: list[str]
) -> Spec:
    """Returns the axis of a metric, with further lines `below` its title; "equal" stands at its end."""
    better = "better to the left"
    if family_of(metric).higher_is_better:
        better = "better to the right"
    finite = [point["loss"] for point in points if math.isfinite(point["loss"])]
    axis: dict[str, Any] = {}
    if len(finite) < len(points):
        better += "; equal lies beyond the scale"
        top = 1.15 * max(finite, default=60.0)
        for point in points:
            point["loss"] = top if math.isinf(point["loss"]) else point["loss"]
        axis["labelExpr"] = f"datum.value >= {0.99 * top} ? 'equal' : datum.label"
        low = min(finite, default=top)
        high = 0.95 * top
        # At most four figures.
        steps = [step for step in (1, 2, 5, 10, 20, 50) if (high - low) / step <= 4]
        step = min(steps, default=100)
        first = step * math.ceil(low / step)
        figures = range(first, math.floor(high) + 1, step)
        axis["values"] = [*map(float, figures), top]
    axis |= {"tickCount": FEW_TICKS, "grid": True, "titleAnchor": "middle"}
    return encoding(
        "loss:Q",
        title=[f"{heading.rstrip(' ↑↓')} ({better})", *below],
        scale={"zero": False, "padding": _PADDING, "nice": False},
        axis=axis,
    )


def _spec(
    points: list[dict[str, Any]],
    x: Spec,
    front: list[dict[str, float]],
    unit: str,
    named: bool,
) -> Spec:
    speeds = [point["speed"] for point in points]
    y = encoding(
        "speed:Q", **ratio_axis(f"speed-up{unit}, log scale (up is faster)", speeds)
    )
    labels, height = named_layers(
        points,
        [point["loss"] for point in points],
        [math.log(speed) for speed in speeds],
        (x, y),
        height=_HEIGHT,
        padding=_PADDING,
        named=named,
    )
    shown = {point["kind"] for point in points}
    looks = {
        kind: (COLOUR[TONES[kind]], shape)
        for kind, shape in _SHAPES.items()
        if kind in shown
    }
    described = "; ".join(
        f"{p['name']} {p['speed_text']} {p['loss_text']} {p['kind']}" for p in points
    )
    dashed = {
        "strokeDash": [4, 4],
        "color": MUTED,
        "interpolate": "step-after",
        "strokeWidth": 1.2,
        "clip": True,
        "aria": False,
    }
    dot = {"filled": True, "opacity": 0.85, "clip": True, "size": 250}
    zooms = [zoom("x", "y")]
    channels = {**kinds("kind", looks), **facts(_FACTS)}
    layers = [
        mark("line", dashed, data=front, x=x, y=y, order="place:Q"),
        mark("point", dot, params=zooms, x=x, y=y, **channels),
        *labels,
    ]
    return built(layered(layers), f"Speed against quality: {described}", height, points)


def _front(
    points: list[dict[str, Any]], higher_is_better: bool
) -> list[dict[str, float]]:
    """Returns the Pareto front, from the best images on: the points for which no other is both faster and better."""
    sign = -1 if higher_is_better else 1
    ranked = sorted(points, key=lambda point: (sign * point["loss"], -point["speed"]))
    front: list[dict[str, float]] = []
    fastest = 0.0
    for point in ranked:
        loss = point["loss"]
        speed = point["speed"]
        if speed > fastest and not point["open"]:
            fastest = speed
            front.append({"loss": loss, "speed": speed, "place": len(front)})
    return front
