"""Common parts of all plots: colours, axes, rows with names, and drawing a specification as a PNG.

A specification holds no colour of the page around it: text and lines have the colours `INK`, `MUTED` and `LINE`, which
the report's style sheet replaces where the reader's screen is dark.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sdopt.limits import require_address_space

VEGA_LITE = "6.4"
"""The version that specifications are written for."""

INK, MUTED, LINE = "#1f2933", "#5d6b79", "#d5dbe1"

BLUE, VERMILION, GREY, PURPLE, GREEN, AMBER, SKY = (
    "#0072b2", "#d55e00", "#868e96", "#cc79a7", "#009e73", "#e69f00", "#56b4e9",
)  # fmt: skip
"""Colours that differ for every kind of colour vision (Okabe and Ito 2008), and by 3:1 from white and from black."""

Spec = dict[str, Any]

ARIA_TEXT: Spec = {"field": "aria_text"}
"""The encoding of a screen reader's text for a mark: a field of all data that are drawn as marks with figures."""

ROW = 46
"""Height of a row of a plot, including the name above the marks."""

_V8_BYTES = 80 * 2**30
"""V8 reserves 64 GiB of address space, however little it uses."""

_DRAWN, _NAMED = 0.18, -0.24
"""Vertical positions of the marks and of the name in a row; the middle of the row is 0."""

_NAME_LENGTH = 58
"""Number of a name's letters that fit on a phone."""

_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)

_TICKS = 5

_CONFIG: Spec = {
    "font": "system-ui, 'Liberation Sans', sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": INK,
        "titleColor": MUTED,
        "titleFontWeight": "normal",
        "titleFontSize": 12,
        "labelFontSize": 12,
        "gridColor": LINE,
        "domain": False,
        "tickColor": LINE,
    },
    # Beside columns of figures, a title is longer than its axis.
    "axisX": {"titleAnchor": "start"},
    "legend": {
        "labelColor": INK,
        "titleColor": MUTED,
        "titleFontWeight": "normal",
        "titleFontSize": 12,
        "labelFontSize": 12,
        "orient": "top",
        "labelLimit": 300,
        "symbolOpacity": 1,
        "layout": {"top": {"direction": "vertical", "margin": 4}},
    },
    "text": {"color": INK, "fontSize": 13},
    "header": {"labelColor": INK, "titleColor": MUTED},
}

FEW_TICKS: Spec = {"expr": "ceil(width / 90)"}
"""As many ticks as have room for their labels."""

ZOOM: Spec = {
    "name": "zoom",
    "select": {"type": "interval", "encodings": ["x"], "zoom": "wheel![event.ctrlKey || event.shiftKey]"},
    "bind": "scales",
}
"""Ctrl or Shift and the wheel zoom, dragging moves, a double click undoes both: the wheel alone scrolls the page."""


_TEXT: Spec = {"type": "text", "align": "left", "baseline": "middle", "clip": False, "aria": False}
"""Properties of a name or a figure: hides it from screen readers, because the plot's description repeats it."""

BARS: Spec = {"symbolType": "square", "symbolStrokeWidth": 8, "symbolSize": 40}
"""The legend's symbols for bars."""


@dataclass(frozen=True)
class Column:
    """Text beside the rows: its heading, the field of the data that holds it, and its width in pixels."""

    heading: str
    field: str
    width: int


@dataclass(frozen=True)
class Rows:
    """A plot with one row per item: its name stands above the marks, its figures beside them.

    Attributes:
        data: a record for each row, top first; `name` is its name.
        columns: the figures beside the rows.
    """

    data: Sequence[Mapping[str, Any]]
    columns: Sequence[Column] = ()
    placed: list[dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        placed = [
            {
                **row,
                "at": number + _DRAWN,
                "named": number + _NAMED,
                "label": shortened(row["name"]),
                "aria_text": f"{row['name']}: {row.get('figure', '')}",
            }
            for number, row in enumerate(self.data)
        ]
        object.__setattr__(self, "placed", placed)

    @property
    def y(self) -> Spec:
        """The vertical encoding of the marks in a row."""
        return self._y("at")

    def _y(self, name: str) -> Spec:
        scale = {"domain": [-0.5, len(self.data) - 0.5], "reverse": True, "nice": False, "zero": False}
        return {"field": name, "type": "quantitative", "scale": scale, "axis": None}

    def spec(self, layers: Sequence[Spec], summary: str) -> Spec:
        """Returns the specification of layers, the lowest one first, with the names and figures of the rows."""
        name: Spec = {
            "mark": _TEXT,
            "encoding": {"x": {"value": 0}, "y": self._y("named"), "text": {"field": "label"}},
        }
        texts, heads, offset = [name], [], 10
        for column in self.columns:
            mark = _TEXT | {"dx": offset}
            texts.append(
                {
                    "mark": mark,
                    "encoding": {"x": {"value": "width"}, "y": self.y, "text": {"field": column.field}},
                }
            )
            heads.append(
                {
                    "data": {"values": [{}]},
                    "mark": mark | {"dy": -10, "color": MUTED, "fontSize": 12},
                    "encoding": {"x": {"value": "width"}, "y": {"value": 0}, "text": {"value": column.heading}},
                }
            )
            offset += column.width
        return {
            "data": {"values": self.placed},
            "description": summary,
            "height": ROW * len(self.data),
            "padding": {"left": 6, "right": 6, "top": 22 if self.columns else 6, "bottom": 6},
            "layer": [*layers, *texts, *heads],
        }


def tooltips(titles: Mapping[str, str]) -> list[Spec]:
    """Returns the encoding of a mark's tooltip, from titles by field of the data."""
    return [{"field": name, "title": title} for name, title in titles.items()]


def shortened(name: str) -> str:
    """Returns a name as a row shows it, cut if it is wider than a phone."""
    return name if len(name) <= _NAME_LENGTH else name[: _NAME_LENGTH - 1].rstrip() + "…"


def ratio_axis(title: str, values: Sequence[float], unit: str = "×") -> Spec:
    """Returns a logarithmic scale and axis of ratios around 1: a gain and a loss of one factor are equally long."""
    low, high = min([*values, 1.0]), max([*values, 1.0])
    margin = max(0.08 * math.log(high / low), 0.02)
    return {
        "type": "quantitative",
        "title": title,
        "scale": {
            "type": "log",
            "domain": [low * math.exp(-margin), high * math.exp(margin)],
            "nice": False,
        },
        "axis": {
            "values": ratio_ticks(low, high),
            "labelExpr": f"format(datum.value, '~g') + '{unit}'",
            "tickCount": 5,
        },
    }


def ratio_ticks(low: float, high: float) -> list[float]:
    """Returns round figures for a logarithmic axis, including 1; powers of ten if it spans more than a decade."""
    if math.log10(high / low) > 1:
        return [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    step = next((step for step in _STEPS if (high - low) / step <= _TICKS), _STEPS[-1])
    ticks = [step * number for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    return sorted({*(round(tick, 6) for tick in ticks if tick > 0), 1.0})


def whole(spec: Spec, width: int | None = None) -> Spec:
    """Returns a complete specification, as wide as its container or as the given number of pixels."""
    return {
        "$schema": f"https://vega.github.io/schema/vega-lite/v{VEGA_LITE.partition('.')[0]}.json",
        "width": "container" if width is None else width,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "background": None if width is None else "white",
        "config": _CONFIG,
        **spec,
    }


def picture(spec: Spec, width: int = 900) -> bytes:
    """Draws a specification as a PNG. Raises UnavailableError as `engine` does."""
    content: bytes = engine().vegalite_to_png(whole(spec, width), vl_version=VEGA_LITE, scale=1.5)
    return content


def engine() -> Any:
    """Returns vl-convert. Raises UnavailableError if its V8 would end this process for lack of address space."""
    require_address_space("plots", _V8_BYTES)
    import vl_convert  # large: a machine that only measures may do without

    return vl_convert
