"""Names the points of a chart: places labels so that they do not overlap, or numbers the points and adds a key.

Labels are placed one after the other, each at the nearest free place around its point; one that is moved away is joined
to its point by a line. Places are pixels, computed for the narrowest width of the chart: a wider one spreads points.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from sdopt.report.charts.spec import Spec
from sdopt.report.charts.vega import constant, expression, mark
from sdopt.report.tones import MUTED

MOST_NAMES = 12
"""How many points bear their names; more are numbered."""

_KEY_ROW = 17
"""Height of a row of the key, in pixels."""

_WIDTH, _PICTURE_WIDTH, _WIDTH_WITH_KEY = 190, 800, 560
"""Widths of a plot in pixels: on a phone, in a picture, and in one with a key."""


def named_layers(
    points: list[dict[str, Any]],
    along: Sequence[float],
    across: Sequence[float],
    axes: tuple[Spec, Spec],
    *,
    height: int,
    padding: int,
    named: bool,
) -> tuple[list[Spec], int]:
    """Returns the layers of the labels of points, with a key where that is needed, and the height of the chart.

    Args:
        points: the data, each with a `label` (or "" for none), whose place is added: `dx`, `dy` and `side`, and whether
            it is `far`.
        along: where they lie from left to right, in the linear units of the axis.
        across: where they lie from bottom to top, likewise.
        axes: the encodings of both.
        height: the least.
        padding: of the axis along, in pixels.
        named: whether it is a picture, where names stand beside points or in a key.
    """
    has_key = named and len(points) > MOST_NAMES
    labelled = [point for point in points if point["label"]]
    width = _WIDTH
    if has_key:
        width = _WIDTH_WITH_KEY
        height = max(height, _KEY_ROW * len(labelled))
    elif named:
        width = _PICTURE_WIDTH
    left = _positions(along, padding, width - padding)
    top = _positions(across, 0.93 * height, 0.07 * height)
    texts = [str(point["label"]) for point in points]
    placed = places(list(zip(left, top, strict=True)), texts, width, height)
    for point, (dx, dy, side) in zip(points, placed, strict=True):
        point["dx"] = dx
        point["dy"] = dy
        point["side"] = side
        point["far"] = math.hypot(dx, dy) > 1.5 * _NEAR
    layers = _label_layers(*axes)
    if has_key:
        layers.append(_key_layer(labelled))
    return layers, height


_LETTER, _LINE = 7.4, 15.0
"""Width of a letter and height of a line, in pixels."""

_MARK = 8.0
"""Radius of the marks, which labels avoid."""

_NEAR = 13.0
"""Distance of a label from the middle of its point."""

_KEY_LENGTH = 80
"""Letters of a name in the key."""


class Box(NamedTuple):
    """A rectangle in pixels; y grows downwards."""

    left: float
    top: float
    right: float
    bottom: float


def overlap(one: Box, other: Box) -> float:
    """Returns the area that both cover."""
    width = min(one.right, other.right) - max(one.left, other.left)
    height = min(one.bottom, other.bottom) - max(one.top, other.top)
    return max(0.0, width) * max(0.0, height)


LabelPlace = tuple[float, float, str]
"""Where a label stands: its shift from the point along and down, in pixels, and the side of the text that is there."""


def box_of(place: LabelPlace, x: float, y: float, text: str) -> Box:
    """Returns what a text covers at a place beside a point."""
    dx, dy, side = place
    width = _LETTER * len(text)
    left = x + dx
    if side == "center":
        left -= width / 2
    elif side == "right":
        left -= width
    middle = y + dy
    return Box(left, middle - _LINE / 2, left + width, middle + _LINE / 2)


def _places() -> Iterator[LabelPlace]:
    """Yields places around a point, the nearest first."""
    for ring in range(1, 9):
        reach = _NEAR * ring
        count = 8 if ring == 1 else 16
        for step in range(count):
            angle = -math.pi / 4 + step * 2 * math.pi / count
            dx = reach * math.cos(angle)
            dy = reach * math.sin(angle)
            side = "left" if dx > 0 else "right"
            if abs(dx) < 0.3 * reach:
                side = "center"
            yield round(dx, 1), round(dy, 1), side


def places(
    points: Sequence[tuple[float, float]],
    texts: Sequence[str],
    width: float,
    height: float,
) -> list[LabelPlace]:
    """Returns a place for the label of each point.

    Args:
        points: in pixels from the left and from the top.
        texts: the label of each point.
        width: of the plot, in pixels; labels stay within.
        height: likewise.
    """
    plot = Box(0.0, 0.0, width, height)
    marks = [Box(x - _MARK, y - _MARK, x + _MARK, y + _MARK) for x, y in points]
    boxes: list[Box] = []
    chosen: list[LabelPlace] = []
    for (x, y), text in zip(points, texts, strict=True):
        best: LabelPlace = (_NEAR, -_NEAR, "left")
        least = math.inf
        for place in _places():
            box = box_of(place, x, y, text)
            area = (box.right - box.left) * _LINE
            covered = sum(overlap(box, other) for other in (*boxes, *marks))
            cost = area - overlap(box, plot) + covered
            if cost < least - 1e-6:
                best = place
                least = cost
            if least <= 0:
                break
        chosen.append(best)
        boxes.append(box_of(best, x, y, text))
    return chosen


def _positions(values: Sequence[float], first: float, last: float) -> list[float]:
    """Returns where values lie between two ends, the smallest at the first one; in the middle if all are equal."""
    low = min(values)
    high = max(values)
    if low == high:
        return [(first + last) / 2] * len(values)
    shares = [(value - low) / (high - low) for value in values]
    return [first + (last - first) * share for share in shares]


def _label_layers(x: Spec, y: Spec) -> list[Spec]:
    """Returns the layers of labels that are placed: lines to those that are far, and the texts."""
    text = {
        "align": expression("datum.side"),
        "baseline": "middle",
        "dx": expression("datum.dx"),
        "dy": expression("datum.dy"),
        "fontWeight": "bold",
        "clip": False,
        "aria": False,
    }
    line = {
        "color": MUTED,
        "strokeWidth": 1,
        "xOffset": 0,
        "x2Offset": expression("0.8 * datum.dx"),
        "y2Offset": expression("0.8 * datum.dy"),
        "aria": False,
    }
    ends = {"x2": x["field"], "y2": y["field"]}
    return [
        mark("rule", line, where=["datum.far"], x=x, y=y, **ends),
        mark("text", text, x=x, y=y, text="label:N"),
    ]


def _key_layer(points: Sequence[dict[str, Any]]) -> Spec:
    """Returns a layer with the number and the name of each point, beside the plot."""
    rows = []
    for row, point in enumerate(points):
        name = point["name"]
        if len(name) > _KEY_LENGTH:
            name = name[: _KEY_LENGTH - 1] + "…"
        rows.append({"text": f"{point['number']}  {name}", "row": row})
    look = {
        "align": "left",
        "baseline": "top",
        "dx": 16,
        "dy": expression(f"{_KEY_ROW} * datum.row"),
        "clip": False,
        "aria": False,
    }
    return mark(
        "text",
        look,
        data=rows,
        x=constant("width"),
        y=constant(0),
        text="text:N",
    )
