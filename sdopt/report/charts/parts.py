"""Common parts of all charts, built with Altair: axes, marks, rows with names."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import altair as alt
from altair.utils import schemapi

from sdopt.report.charts.spec import Spec
from sdopt.report.tones import MUTED

ROW = 46
"""Height of a row of a chart, including the name above the marks."""

FEW_TICKS = alt.ExprRef("ceil(width / 90)")
"""As many ticks as have room for their labels."""

LATER = alt.InlineData(values=[])
"""The data of a chart that `built` gets: Altair would copy them whenever it copies a part of the chart."""

HAS_BOUNDS = "isValid(datum.low) && isValid(datum.high)"

BARS = alt.Legend(symbolType="square", symbolStrokeWidth=8, symbolSize=40)
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


@dataclass(frozen=True)
class SideText:
    """Text beside the rows: its heading, the field of the data that holds it, and its width in pixels."""

    heading: str
    field: str
    width: int


@dataclass(frozen=True)
class Rows:
    """A chart with one row per item: its name stands above the marks, its figures beside them.

    Attributes:
        data: a record for each row, top first; `name` is its name, `figure` its main figure.
        columns: the figures beside the rows.
    """

    data: Sequence[Mapping[str, Any]]
    columns: Sequence[SideText] = ()
    placed: list[dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        placed = [
            {
                **row,
                "at": number + _MARKED,
                "named": number + _NAMED,
                "label": shortened(row["name"]),
                "aria_text": f"{row['name']}: {row.get('figure', '')}",
            }
            for number, row in enumerate(self.data)
        ]
        object.__setattr__(self, "placed", placed)

    @property
    def y(self) -> alt.Y:
        """The vertical encoding of the marks in a row."""
        return self.vertical("at")

    def vertical(self, name: str) -> alt.Y:
        """The vertical encoding of a field of the data that holds places of rows."""
        scale = alt.Scale(
            domain=[-0.5, len(self.data) - 0.5], reverse=True, nice=False, zero=False
        )
        return alt.Y(f"{name}:Q", scale=scale, axis=None)

    def bars(
        self,
        x: alt.X,
        x2: str,
        tooltip: Mapping[str, str],
        data: Any = alt.Undefined,
        **marks: Any,
    ) -> alt.Chart:
        """Returns the layer of a bar for each row, from `x` to the field `x2`; `data` are others than the rows'."""
        bar = alt.Chart(data).mark_rule(strokeWidth=14, clip=True)
        return bar.encode(x=x, x2=x2, y=self.y, **facts(tooltip), **marks).add_params(
            zoom()
        )

    def grid(
        self,
        x: str,
        axis: Mapping[str, Any],
        ticks: Sequence[float],
        color: str,
    ) -> alt.Chart:
        """Returns the layer of lines at ticks of an axis, in pieces beside the marks, so that they cross no name.

        `x` is the field of the axis, whose arguments are those of `ratio_axis`.
        """
        pieces = []
        for row in self.placed:
            ends = {"from": row["at"] - _PIECE, "to": row["at"] + _PIECE}
            pieces += [{x: tick, **ends} for tick in ticks]
        lines = inline(pieces).mark_rule(color=color, clip=True, aria=False)
        return lines.encode(x=alt.X(f"{x}:Q", **axis), y=self.vertical("from"), y2="to")

    def spec(self, layers: Sequence[alt.Chart], summary: str = "") -> Spec:
        """Returns the specification of layers, the lowest one first, with the names and figures of the rows.

        `summary` tells screen readers what the chart shows; the name and the figure of each row are added.
        """
        name = (
            alt.Chart()
            .mark_text(**_TEXT)
            .encode(x=alt.value(0), y=self.vertical("named"), text="label:N")
        )
        texts, offset = [name], 10
        for column in self.columns:
            text = alt.Chart().mark_text(**_TEXT, dx=offset)
            head = inline([{}]).mark_text(
                **_TEXT, dx=offset, dy=-10, color=MUTED, fontSize=12
            )
            texts += [
                text.encode(x=alt.value("width"), y=self.y, text=f"{column.field}:N"),
                head.encode(
                    x=alt.value("width"), y=alt.value(0), text=alt.value(column.heading)
                ),
            ]
            offset += column.width
        return built(
            alt.layer(*layers, *texts, data=LATER),
            f"{summary}: "
            + "; ".join(f"{row['name']} {row['figure']}" for row in self.data),
            ROW * len(self.data),
            {"left": 6, "right": 6, "top": 22 if self.columns else 6, "bottom": 6},
            self.placed,
        )


def inline(values: Sequence[Mapping[str, Any]]) -> alt.Chart:
    """Returns a chart of records."""
    return alt.Chart(alt.InlineData(values=list(values)))


def facts(titles: Mapping[str, str]) -> dict[str, Any]:
    """Returns the encodings of a mark's tooltip, from titles by field of the data, and of a screen reader's text.

    That text is the field `aria_text` of all data that are drawn as marks with figures.
    """
    tooltip = [alt.Tooltip(f"{name}:N", title=title) for name, title in titles.items()]
    return {"tooltip": tooltip, "description": alt.Description("aria_text:N")}


def zoom(*encodings: str) -> alt.Parameter:
    """Zooms with Ctrl or Shift and the wheel, which alone scrolls the page; dragging moves, a double click resets."""
    wheel = "wheel![event.ctrlKey || event.shiftKey]"
    return alt.selection_interval(
        name="zoom", encodings=list(encodings or ("x",)), bind="scales", zoom=wheel
    )


def kinds(
    field: str, looks: Mapping[str, tuple[str, str]], **legend: Any
) -> dict[str, Any]:
    """Returns the encodings of a mark's colour and shape, which say the same, from both by value of a field."""
    colours, shapes = zip(*looks.values(), strict=True)
    return {
        "color": alt.Color(
            f"{field}:N",
            title=None,
            scale=alt.Scale(domain=list(looks), range=colours),
            **legend,
        ),
        "shape": alt.Shape(
            f"{field}:N",
            title=None,
            scale=alt.Scale(domain=list(looks), range=shapes),
            **legend,
        ),
    }


def shortened(name: str) -> str:
    """Returns a name as a row shows it, cut if it is wider than a phone."""
    return (
        name if len(name) <= _NAME_LENGTH else name[: _NAME_LENGTH - 1].rstrip() + "…"
    )


def ratio_axis(
    title: str,
    values: Sequence[float | None],
    grid: bool = True,
) -> dict[str, Any]:
    """Returns the arguments of an encoding of ratios around 1: logarithmic, so that a gain and a loss are as long."""
    known = [value for value in values if value is not None]
    low, high = min([*known, 1.0]), max([*known, 1.0])
    margin = max(0.08 * math.log(high / low), 0.02)
    domain = [low * math.exp(-margin), high * math.exp(margin)]
    label = "format(datum.value, '~g') + '×'"
    return {
        "title": title,
        "scale": alt.Scale(type="log", domain=domain, nice=False),
        "axis": alt.Axis(
            values=ratio_ticks(low, high), labelExpr=label, tickCount=_TICKS, grid=grid
        ),
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
    found: list[float] = []
    for marks in _MARKS:
        every = [round(m * 10.0**decade, 9) for decade, m in product(decades, marks)]
        found = [
            mark for mark in every if low * (1 - 1e-9) <= mark <= high * (1 + 1e-9)
        ]
        if len(found) <= _MOST_MARKS:
            break
    return sorted({*found, 1.0})


@contextmanager
def unchecked() -> Iterator[None]:
    """Charts are made without a look at each of their parts, which takes a third of the time; the tests look at all."""
    with schemapi.debug_mode(False):
        yield


def built(
    chart: alt.LayerChart,
    description: str,
    height: int,
    padding: Any = 8,
    data: list[dict[str, Any]] | None = None,
) -> Spec:
    """Returns the specification of a chart, with `data` in the place of `LATER`."""
    chart = chart.properties(description=description, height=height, padding=padding)
    with alt.data_transformers.enable(consolidate_datasets=False):
        spec: Spec = chart.to_dict(
            validate=False
        )  # which takes half of the time; the tests do it
    if data is not None:
        spec["data"] = {"values": data}
    return {
        key: value for key, value in spec.items() if key not in {"$schema", "config"}
    }
