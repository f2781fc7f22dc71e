"""Charts of times: call by call, and by stage."""

import json
from collections.abc import Sequence
from itertools import chain
from typing import Any

from sdopt.record.records import StudyResult
from sdopt.report.charts.parts import (
    BARS,
    FEW_TICKS,
    Rows,
    built,
    facts,
    zoom,
)
from sdopt.report.charts.spec import Spec, study_picture
from sdopt.report.charts.vega import encoding, layered, mark
from sdopt.report.summary import Summary
from sdopt.report.tones import AMBER, BLUE, GREEN, GREY, INK, PURPLE, SKY, VERMILION
from sdopt.statistics.words import unit_text

_DECIDES, _DISTURBED, _LEFT_OUT = (
    "decides",
    "disturbed, but decides",
    "disturbed, left out",
)

_CALL_KINDS = {_DECIDES: "circle", _DISTURBED: "diamond", _LEFT_OUT: "cross"}
"""Shapes of calls, by whether they decide."""

_CALL_FACTS = {
    "variant": "variant",
    "process": "process",
    "round": "round",
    "text": "latency",
    "others": "taken by others",
    "kind": "the call",
}
"""Tooltip of a call: titles by field of the data."""

_WHO = {"chosen variant": VERMILION, "baseline": INK, "others": GREY}

_STAGES = {
    "text_encoder": ("text encoder", AMBER),
    "vae_encoder": ("VAE encoder", SKY),
    "denoiser": ("denoiser", BLUE),
    "vae_decoder": ("VAE decoder", GREEN),
}

_CLIP = {"clip": True}

_FURTHER = (PURPLE, VERMILION, GREY)
"""Colours of further stages, which a user's own pipeline may have."""


def rounds_plot(summary: Summary, shape_index: int = 0) -> Spec | None:
    """Draws every timed call by its round: the baseline, a variant that the reader chooses, and the others behind.

    None if nothing was timed.
    """
    result = summary.result.at(shape_index)
    calls = _calls(result)
    if not calls:
        return None
    names = list(dict.fromkeys(call["variant"] for call in calls))
    others = [name for name in names if name != result.baseline]
    if (best := summary.best) is not None:
        others.sort(key=lambda name: name != best.name)  # the answer's own at first
    unit, scale = _unit([call["seconds"] for call in calls])
    for call in calls:
        call["time"] = call["seconds"] * scale
    last = max(call["round"] for call in calls)
    ticks = list(range(1, last + 1, 1 + last // 12))
    picked: Spec = {"name": "picked", "value": others[0] if others else ""}
    if others:
        picked["bind"] = {
            "input": "select",
            "options": others,
            "name": "compare the baseline with ",
        }
    axis = {"values": ticks, "format": "d", "grid": False, "titleAnchor": "middle"}
    title = f"latency of one {_what(result)} ({unit})"
    by_who = {"domain": list(_WHO), "range": list(_WHO.values())}
    every: dict[str, Any] = {
        "x": encoding("round:Q", scale={"nice": False, "padding": 14}, axis=axis),
        "y": encoding("time:Q", title=title, scale={"zero": False}),
        "color": encoding("who:N", title=None, scale=by_who),
    }
    shape = encoding(
        "kind:N",
        title=None,
        scale={"domain": list(_CALL_KINDS), "range": list(_CALL_KINDS.values())},
        legend={"symbolFillColor": GREY, "symbolStrokeColor": GREY},
    )
    # A layer without a mark would be an image without a description.
    opacities = {"others": 0.28} if len(others) > 1 else {}
    opacities |= {"baseline": 1.0} | ({"chosen variant": 0.9} if others else {})
    layers: list[Spec] = []
    for name, opacity in opacities.items():
        only = [f"datum.who === '{name}'"]
        line = {"strokeWidth": 1.3, "opacity": 0.6 * opacity, "aria": False}
        point = {"filled": True, "size": 70, "opacity": opacity}
        tooltip = facts(_CALL_FACTS)
        layers += [
            mark("line", line | _CLIP, where=only, **every, detail="worker:N"),
            mark("point", point | _CLIP, where=only, **every, shape=shape, **tooltip),
        ]
    layers[-1]["params"] = [zoom()]
    chart = layered(layers, [picked])
    baseline = json.dumps(result.baseline)  # as a string of Vega's expression language
    who = f"datum.variant === {baseline} ? 'baseline' : datum.variant === picked ? 'chosen variant' : 'others'"
    described = f"Latency of {len(calls)} calls{unit_text(result.per_image)} of {len(names)} variants, by round"
    chart["transform"] = [{"calculate": who, "as": "who"}]
    return built(chart, described, 320, calls)


def _calls(result: StudyResult) -> list[dict[str, Any]]:
    """Returns a record for each timed call, in the order of sessions and rounds."""
    timed = []
    for variant in result.variants:
        for measurement in variant.measurements:
            if measurement.main.calls:
                timed.append((variant, measurement))
    begins, total = {}, 0
    for session in sorted({measurement.session for _, measurement in timed}):
        begins[session] = total
        total += max(
            len(measurement.main.calls)
            for _, measurement in timed
            if measurement.session == session
        )
    limit = result.config.protocol.interference
    calls: list[dict[str, Any]] = []
    for variant, measurement in timed:
        images = variant.config.images_per_call if result.per_image else 1
        for call in measurement.main.calls:
            seconds = call.seconds / images
            share, number = call.disturbed, begins[measurement.session] + call.round + 1
            disturbed = share is not None and limit is not None and share > limit
            calls.append({
                "variant": variant.name,
                "process": measurement.replicate + 1,
                "worker": f"{variant.name} {measurement.replicate} {measurement.session}",
                "round": number,
                "seconds": seconds,
                "text": f"{seconds:.3f} s",
                "aria_text": f"{variant.name}, round {number}: {seconds:.3f} s",
                "others": "" if share is None else f"{100 * share:.1f} %",
                "kind": _LEFT_OUT if call.left_out else _DISTURBED if disturbed else _DECIDES,
            })  # fmt: skip
    return calls


def _what(result: StudyResult) -> str:
    """Returns what the times of a study are those of."""
    return "image" if result.per_image else "call"


def _unit(seconds: Sequence[float]) -> tuple[str, float]:
    return ("ms", 1e3) if max(seconds) < 1 else ("s", 1.0)


def stages_plot(summary: Summary) -> Spec | None:
    """Draws the times of the stages of a call, one after the other; None if stages were not measured."""
    rows = [row for row in summary.rows if row.stages_ms]
    if not rows:
        return None
    measured = dict.fromkeys(chain.from_iterable(row.call_ms for row in rows))
    stages = dict.fromkeys([*_STAGES, *measured])
    present = [stage for stage in stages if stage in measured]
    names = {
        stage: _STAGES.get(stage, (stage.replace("_", " "), ""))[0] for stage in present
    }
    spare = iter(_FURTHER * len(present))
    colours = []
    for stage in present:
        colours.append(_STAGES[stage][1] if stage in _STAGES else next(spare))
    totals = [sum(row.call_ms.values()) for row in rows]
    figures = []
    for total in totals:
        figures.append(f"{total:.0f} ms" if total < 1000 else f"{total / 1e3:.2f} s")
    unit, scale = _unit([total / 1e3 for total in totals])
    named = [
        {"name": row.variant.name, "figure": figure}
        for row, figure in zip(rows, figures, strict=True)
    ]
    plot = Rows(named, [("stages together", "figure", 116)])
    parts = []
    for row, total, placed in zip(rows, totals, plot.placed, strict=True):
        start = 0.0
        for stage in present:
            value = row.call_ms.get(stage, 0.0)
            text = f"{value:.3g} ms, {100 * value / total:.0f} %" if total else ""
            parts.append({
                "name": row.variant.name,
                "stage": names[stage],
                "from": start / 1e3 * scale,
                "to": (start + value) / 1e3 * scale,
                "text": text,
                "aria_text": f"{row.variant.name}, {names[stage]}: {text}",
                "at": placed["at"],
            })  # fmt: skip
            start += value
    x = encoding(
        "from:Q",
        title=f"time of one {_what(summary.result)} by stage ({unit}), timed apart: read shares",
        scale={"domainMin": 0, "nice": False},
        axis={"tickCount": FEW_TICKS},
    )
    scale_of_colours = {"domain": list(names.values()), "range": colours}
    bars = plot.bars(
        x,
        "to",
        {"name": "variant", "stage": "stage", "text": "takes"},
        parts,
        color=encoding("stage:N", title=None, scale=scale_of_colours, legend=BARS),
    )
    return plot.spec([bars], "Time by stage")


def stages_picture(summary: Summary) -> bytes | None:
    """Draws the time by stage as a PNG; None if stages were not measured."""
    return study_picture(summary, stages_plot(summary))
