"""Draws predictions: seconds with their intervals over cards, and memory against what each card has."""

import math
from collections.abc import Sequence
from typing import Any

from sdopt.apps.foresight.fitting import EXTRAPOLATED
from sdopt.apps.foresight.plan import REFUSED, Prediction, names_of
from sdopt.report.charts.spec import Spec, picture
from sdopt.report.charts.vega import constant, encoding, layered, mark
from sdopt.report.tones import BLUE, GREY, MUTED, SKY, VERMILION

_ROW = 26


def plan_chart(predictions: Sequence[Prediction]) -> Spec:
    """Returns two panels with a row for each prediction, the fastest per image first."""
    ordered = sorted(
        predictions,
        key=lambda prediction: (
            math.isnan(prediction.seconds),
            prediction.seconds / prediction.images,
        ),
    )
    names = names_of(ordered)
    rows = list(map(_record, names, ordered))
    height = _ROW * len(set(names))
    data: Spec = {"data": {"values": rows}}
    size: Spec = {"width": 430, "height": height}
    left = layered(_times(encoding("row:N", sort=names, title=None, axis=_NAMED)))
    right = layered(_memory(encoding("row:N", sort=names, title=None, axis=None)))
    panels = [{**size, **left}, {**size, "width": 290, **right}]
    return {**data, "hconcat": panels, "spacing": 18}


def _record(name: str, prediction: Prediction) -> dict[str, Any]:
    """Returns what the chart shows of a prediction; a number that is not known is null."""
    record = prediction.row()
    for key, value in record.items():
        if isinstance(value, float) and math.isnan(value):
            record[key] = None
    seconds, refused = prediction.seconds, prediction.state == REFUSED
    return record | {
        "row": name,
        "label": "" if math.isnan(seconds) else f"{seconds:.3g} s",
        "why": f"no time: {prediction.reason}"[:70] if refused else "",
    }


_NAMED = {"labelLimit": 260}


def _times(y: Spec) -> list[Spec]:
    """Returns the layers of the panel of seconds."""
    timed = f"datum.state != '{REFUSED}'"
    # Hatched: a dashed outline without a filling stands for what no figure of that generation supports.
    known = [timed, f"datum.state != '{EXTRAPOLATED}'"]
    far = [timed, f"datum.state == '{EXTRAPOLATED}'"]
    filled = {"height": 9, "color": BLUE, "opacity": 0.45}
    hatched = {
        "height": 9,
        "fill": None,
        "stroke": BLUE,
        "strokeDash": [3, 3],
        "strokeWidth": 1.5,
    }
    low = encoding(
        "low:Q",
        title="seconds of a call; four in five take between the ends of a bar",
        scale={"zero": True},
    )
    dot = {"filled": True, "size": 60, "opacity": 1, "color": BLUE}
    text = {"align": "left", "dx": 8}
    why = {"align": "left", "color": MUTED, "fontSize": 11}
    refused = [f"datum.state == '{REFUSED}'"]
    return [
        mark("bar", filled, where=known, x=low, x2="high", y=y),
        mark("bar", hatched, where=far, x=low, x2="high", y=y),
        mark("point", dot, where=[timed], x="seconds:Q", y=y),
        mark("text", text, where=[timed], x="high:Q", y=y, text="label:N"),
        mark("text", why, where=refused, x=constant(4), y=y, text="why:N"),
    ]


def _memory(y: Spec) -> list[Spec]:
    """Returns the layers of the panel of memory."""
    misfit = {"test": "datum.fits == 'does not fit'", "value": VERMILION}
    colour = {"condition": misfit, "value": GREY}
    gib = encoding(
        "at_least_gib:Q", title="GiB: at least, likely, and what the card has"
    )
    likely = {"height": 5, "color": SKY}
    limit = {"thickness": 2.5, "size": 20, "color": BLUE}
    return [
        mark("bar", {"height": 11}, x=gib, y=y, color=colour),
        mark("bar", likely, x="at_least_gib:Q", x2="likely_gib", y=y),
        mark("tick", limit, x="card_gib:Q", y=y),
    ]


def picture_of(predictions: Sequence[Prediction]) -> bytes:
    """Returns the chart as a PNG. Raises UnavailableError as `picture` does."""
    return picture(
        plan_chart(predictions) | {"autosize": {"type": "pad", "contains": "padding"}},
        width=900,
    )
