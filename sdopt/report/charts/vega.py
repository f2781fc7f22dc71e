"""Vega-Lite as plain values: encodings, marks with their data, and layers of marks."""

from collections.abc import Mapping, Sequence
from typing import Any

from sdopt.report.charts.spec import Spec

Records = Sequence[Mapping[str, Any]]

_TYPES = {"Q": "quantitative", "N": "nominal", "O": "ordinal"}


def encoding(shorthand: str, **settings: Any) -> Spec:
    """Returns the encoding of a field, as `speed:Q`; without a letter, the type is that of the channel beside it."""
    field, _, letter = shorthand.partition(":")
    kind = {"type": _TYPES[letter]} if letter else {}
    return {"field": field, **kind, **settings}


def constant(value: Any) -> Spec:
    """Returns the encoding of a value that is the same for all data, such as a place in pixels."""
    return {"value": value}


def expression(text: str) -> Spec:
    """Returns a property that Vega computes."""
    return {"expr": text}


def mark(
    kind: str,
    look: Mapping[str, Any],
    *,
    data: Records | None = None,
    where: Sequence[str] = (),
    params: Sequence[Spec] = (),
    **channels: Any,
) -> Spec:
    """Returns a layer: a mark for each of the data, or for each of the chart's.

    Args:
        kind: the mark.
        look: properties that are the same for all data.
        data: others than those of the chart.
        where: expressions that hold for what is drawn.
        params: selections that begin in this layer.
        channels: encodings, or shorthands of fields.
    """
    spec: Spec = {} if data is None else {"data": {"values": [*data]}}
    if where:
        spec["transform"] = [{"filter": condition} for condition in where]
    if params:
        spec["params"] = [*params]
    spec["mark"] = {"type": kind, **look}
    spec["encoding"] = {name: _encoded(value) for name, value in channels.items()}
    return spec


def _encoded(channel: Any) -> Any:
    return encoding(channel) if isinstance(channel, str) else channel


def layered(layers: Sequence[Spec], params: Sequence[Spec] = ()) -> Spec:
    """Returns the chart of layers, the lowest one first, whose selections are the chart's: a layer has a name for that."""
    layers_shown: list[Spec] = []
    selections = [*params]
    for number, layer in enumerate(layers):
        shown = dict(layer)
        begun = shown.pop("params", [])
        if begun:
            shown["name"] = f"view_{number}"
        for param in begun:
            selections.append({**param, "views": [shown["name"]]})
        layers_shown.append(shown)
    spec: Spec = {"layer": layers_shown}
    if selections:
        spec["params"] = selections
    return spec
