"""Common parts of all charts: axes, marks, rows with names."""

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from sdopt.report.charts.spec import Spec
from sdopt.report.charts.vega import (
    Records,
    constant,
    encoding,
    expression,
    layered,
    mark,
)
from sdopt.report.tones import MUTED

ROW = 46
"""Height of a row of a chart, including the name above the marks."""

FEW_TICKS = expression("ceil(width / 90)")
"""As many ticks as have room for their labels."""

HAS_BOUNDS = "isValid(datum.low) && isValid(datum.high)"

BARS = {"symbolType": "square", "symbolStrokeWidth": 8, "symbolSize": 40}
"""The legend's symbols for bars."""

_MARKED, _NAMED = 0.18, -0.24
"""Vertical positions of the marks and of the name in a row; the middle of the row is 0."""

_PIECE = 0.22
"""Half the height of a line beside the marks of a row."""

_NAME_LENGTH = 58
"""Number of a name's letters that fit on a phone."""

_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)

_TICKS = 5

_TEXT: Spec = {"align": "left", "baseline": "middle", "clip": False, "aria": False}
"""Properties of a name or a figure: hides it from screen readers, because the chart's description repeats it."""


SideText = tuple[str, str, int]
"""Text beside the rows: its heading, the field of the data that holds it, and its width in pixels."""


class Rows:
    """A chart with one row per item: its name stands above the marks, its figures beside them.

    Args:
        data: a record for each row, top first; `name` is its name, `figure` its main figure.
        columns: the figures beside the rows.
    """

    def __init__(
        self, data: Sequence[Mapping[str, Any]], columns: Sequence[SideText] = ()
    ) -> None:
        self.columns = columns
        self.placed: list[dict[str, Any]] = []
        for number, row in enumerate(data):
            places = {"at": number + _MARKED, "named": number + _NAMED}
            aria_text = f"{row['name']}: {row.get('figure', '')}"
            label = shortened(row["name"])
            self.placed.append(
                {**row, **places, "label": label, "aria_text": aria_text}
            )

    @property
    def y(self) -> Spec:
        """The vertical encoding of the marks in a row."""
        return self.vertical("at")

    def vertical(self, name: str) -> Spec:
        """The vertical encoding of a field of the data that holds places of rows."""
        domain = [-0.5, len(self.placed) - 0.5]
        scale = {"domain": domain, "reverse": True, "nice": False, "zero": False}
        return encoding(f"{name}:Q", scale=scale, axis=None)

    def bars(
        self,
        x: Spec,
        x2: str,
        tooltip: Mapping[str, str],
        data: Records | None = None,
        **channels: Any,
    ) -> Spec:
        """Returns the layer of a bar for each row, from `x` to the field `x2`; `data` are others than the rows'."""
        look = {"strokeWidth": 14, "clip": True}
        more = {**facts(tooltip), **channels}
        zooms = [zoom()]
        return mark("rule", look, data=data, params=zooms, x=x, x2=x2, y=self.y, **more)

    def grid(
        self,
        x: str,
        axis: Mapping[str, Any],
        ticks: Sequence[float],
        color: str,
    ) -> Spec:
        """Returns the layer of lines at ticks of an axis, in pieces beside the marks, so that they cross no name.

        `x` is the field of the axis, whose arguments are those of `ratio_axis`.
        """
        pieces = []
        for row in self.placed:
            ends = {"from": row["at"] - _PIECE, "to": row["at"] + _PIECE}
            pieces += [{x: tick, **ends} for tick in ticks]
        look = {"color": color, "clip": True, "aria": False}
        across = encoding(f"{x}:Q", **axis)
        y = self.vertical("from")
        return mark("rule", look, data=pieces, x=across, y=y, y2="to")

    def spec(self, layers: Sequence[Spec], summary: str = "") -> Spec:
        """Returns the specification of layers, the lowest one first, with the names and figures of the rows.

        `summary` tells screen readers what the chart shows; the name and the figure of each row are added.
        """
        y, end = self.vertical("named"), constant("width")
        texts = [mark("text", _TEXT, x=constant(0), y=y, text="label:N")]
        offset = 10
        for heading, name, width in self.columns:
            look = {**_TEXT, "dx": offset}
            texts.append(mark("text", look, x=end, y=self.y, text=f"{name}:N"))
            look |= {"dy": -10, "color": MUTED, "fontSize": 12}
            head = constant(heading)
            texts.append(mark("text", look, data=[{}], x=end, y=constant(0), text=head))
            offset += width
        described = [f"{row['name']} {row['figure']}" for row in self.placed]
        return built(
            layered([*layers, *texts]),
            f"{summary}: {'; '.join(described)}",
            ROW * len(self.placed),
            self.placed,
            {"left": 6, "right": 6, "top": 22 if self.columns else 6, "bottom": 6},
        )


def facts(titles: Mapping[str, str]) -> dict[str, Any]:
    """Returns the encodings of a mark's tooltip, from titles by field of the data, and of a screen reader's text.

    That text is the field `aria_text` of all data that are drawn as marks with figures.
    """
    tooltip = [encoding(f"{name}:N", title=title) for name, title in titles.items()]
    return {"tooltip": tooltip, "description": encoding("aria_text:N")}


def zoom(*encodings: str) -> Spec:
    """Zooms with Ctrl or Shift and the wheel, which alone scrolls the page; dragging moves, a double click resets."""
    wheel = "wheel![event.ctrlKey || event.shiftKey]"
    channels = list(encodings or ("x",))
    select = {"type": "interval", "encodings": channels, "zoom": wheel}
    return {"name": "zoom", "select": select, "bind": "scales"}


def kinds(
    field: str, looks: Mapping[str, tuple[str, str]], **legend: Any
) -> dict[str, Any]:
    """Returns the encodings of a mark's colour and shape, which say the same, from both by value of a field."""
    colours, shapes = zip(*looks.values(), strict=True)
    encodings = {}
    for channel, values in (("color", colours), ("shape", shapes)):
        scale = {"domain": list(looks), "range": list(values)}
        encodings[channel] = encoding(f"{field}:N", title=None, scale=scale, **legend)
    return encodings


def shortened(name: str) -> str:
    """Returns a name as a row shows it, cut if it is wider than a phone."""
    if len(name) <= _NAME_LENGTH:
        return name
    return name[: _NAME_LENGTH - 1].rstrip() + "…"


def ratio_axis(
    title: str,
    values: Sequence[float | None],
    grid: bool = True,
) -> dict[str, Any]:
    """Returns the arguments of an encoding of ratios around 1: logarithmic, so that a gain and a loss are as long."""
    bounds = [value for value in values if value is not None]
    low, high = min([*bounds, 1.0]), max([*bounds, 1.0])
    margin = max(0.08 * math.log(high / low), 0.02)
    domain = [low * math.exp(-margin), high * math.exp(margin)]
    label = "format(datum.value, '~g') + '×'"
    return {
        "title": title,
        "scale": {"type": "log", "domain": domain, "nice": False},
        "axis": {
            "values": ratio_ticks(low, high),
            "labelExpr": label,
            "tickCount": _TICKS,
            "grid": grid,
        },
    }


_MARKS = ((1.0, 1.5, 2.0, 3.0, 5.0), (1.0, 2.0, 5.0), (1.0, 3.0), (1.0,))
"""Figures of each decade of a logarithmic axis, the more of them the fewer decades there are."""

_MOST_MARKS = 8


def ratio_ticks(low: float, high: float) -> list[float]:
    """Returns round figures for a logarithmic axis, including 1; 1, 1.5, 2, 3, 5 beyond a factor of 2."""
    if high / low <= 2:
        step = next(
            (step for step in _STEPS if (high - low) / step <= _TICKS), _STEPS[-1]
        )
        ticks = [
            step * number
            for number in range(
                math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1
            )
        ]
        return sorted({*(round(tick, 6) for tick in ticks if tick > 0), 1.0})
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    within: list[float] = []
    for marks in _MARKS:
        every = [round(m * 10.0**decade, 9) for decade, m in product(decades, marks)]
        within = [
            mark for mark in every if low * (1 - 1e-9) <= mark <= high * (1 + 1e-9)
        ]
        if len(within) <= _MOST_MARKS:
            break
    return sorted({*within, 1.0})


def built(
    chart: Spec, description: str, height: int, data: Records, padding: Any = 8
) -> Spec:
    """Returns the specification of a chart of data, which its layers draw unless they have others."""
    return {
        "data": {"values": [*data]},
        "description": description,
        "height": height,
        "padding": padding,
        **chart,
    }
