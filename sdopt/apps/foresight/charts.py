"""Draws predictions: seconds with their intervals over cards, and memory against what each card has."""

import math
from collections.abc import Sequence

import altair as alt

from sdopt.apps.foresight.fitting import EXTRAPOLATED
from sdopt.apps.foresight.plan import REFUSED, Prediction, names_of
from sdopt.report.charts.parts import inline
from sdopt.report.charts.spec import Spec, picture
from sdopt.report.tones import BLUE, GREY, MUTED, SKY, VERMILION

_ROW = 26


def plan_chart(predictions: Sequence[Prediction]) -> Spec:
    """Returns two panels with a row for each prediction, the fastest per image first."""
    ordered = sorted(
        predictions,
        key=lambda each: (math.isnan(each.seconds), each.seconds / each.images),
    )
    names = names_of(ordered)
    rows = [
        {
            **{
                key: None if isinstance(value, float) and math.isnan(value) else value
                for key, value in each.row().items()
            },
            "row": name,
            "label": "" if math.isnan(each.seconds) else f"{each.seconds:.3g} s",
            "why": f"no time: {each.reason}"[:70] if each.state == REFUSED else "",
        }
        for name, each in zip(names, ordered, strict=True)
    ]
    y = alt.Y("row:N", sort=names, title=None, axis=alt.Axis(labelLimit=260))
    data, height = inline(rows), _ROW * len(set(names))
    # Hatched: a dashed outline without a filling stands for what no figure of that generation supports.
    times = data.transform_filter(f"datum.state != '{REFUSED}'")
    low, high = (
        alt.X(
            "low:Q",
            title="seconds of a call; four in five take between the ends of a bar",
            scale=alt.Scale(zero=True),
        ),
        "high:Q",
    )
    known = times.transform_filter(f"datum.state != '{EXTRAPOLATED}'").mark_bar(
        height=9, color=BLUE, opacity=0.45
    )
    far = times.transform_filter(f"datum.state == '{EXTRAPOLATED}'").mark_bar(
        height=9, fill=None, stroke=BLUE, strokeDash=[3, 3], strokeWidth=1.5
    )
    dot = times.mark_point(filled=True, size=60, opacity=1, color=BLUE)
    text = times.mark_text(align="left", dx=8)
    refused = data.transform_filter(f"datum.state == '{REFUSED}'").mark_text(
        align="left", color=MUTED, fontSize=11
    )
    left = alt.layer(
        known.encode(x=low, x2=high, y=y),
        far.encode(x=low, x2=high, y=y),
        dot.encode(x="seconds:Q", y=y),
        text.encode(x="high:Q", y=y, text="label:N"),
        refused.encode(x=alt.value(4), y=y, text="why:N"),
    ).properties(width=430, height=height)
    bare = y.copy(deep=True)
    bare.axis = None
    colour = alt.condition(
        "datum.fits == 'does not fit'", alt.value(VERMILION), alt.value(GREY)
    )
    gib = alt.X("at_least_gib:Q", title="GiB: at least, likely, and what the card has")
    least = data.mark_bar(height=11).encode(x=gib, y=bare, color=colour)
    likely = data.mark_bar(height=5, color=SKY).encode(
        x="at_least_gib:Q", x2="likely_gib:Q", y=bare
    )
    limit = data.mark_tick(thickness=2.5, size=20, color=BLUE).encode(
        x="card_gib:Q", y=bare
    )
    right = alt.layer(least, likely, limit).properties(width=290, height=height)
    spec: Spec = alt.hconcat(left, right, spacing=18).to_dict()
    return {
        key: value for key, value in spec.items() if key not in ("config", "$schema")
    }


def picture_of(predictions: Sequence[Prediction]) -> bytes:
    """Returns the chart as a PNG. Raises UnavailableError as `picture` does."""
    return picture(
        plan_chart(predictions) | {"autosize": {"type": "pad", "contains": "padding"}},
        width=900,
    )
