"""Plots of times: call by call, their distribution, by stage, and how far from the hardware's limit they are."""

from collections.abc import Sequence

from sdopt.analysis.disturbance import shares
from sdopt.analysis.figures import Figures, figures_by_variant
from sdopt.report.charts.spec import (
    AMBER,
    ARIA_TEXT,
    BARS,
    BLUE,
    FEW_TICKS,
    GREEN,
    GREY,
    INK,
    PURPLE,
    SKY,
    VERMILION,
    ZOOM,
    Column,
    Rows,
    Spec,
    tooltips,
)
from sdopt.report.words import seconds_text
from sdopt.results.records import StudyResult

_DECIDES, _DISTURBED, _LEFT_OUT = "decides", "disturbed, but decides", "disturbed, left out"

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

_FURTHER = (PURPLE, VERMILION, GREY)
"""Colours of further stages, which a user's own pipeline may have."""


def rounds_plot(result: StudyResult) -> Spec | None:
    """Draws every timed call by its round: the baseline, a variant that the reader chooses, and the others behind.

    Returns:
        None if nothing was timed.
    """
    calls = _calls(result)
    if not calls:
        return None
    names = list(dict.fromkeys(str(call["variant"]) for call in calls))
    others = [name for name in names if name != result.baseline]
    unit, scale = _unit([float(str(call["seconds"])) for call in calls])
    for call in calls:
        call["time"] = float(str(call["seconds"])) * scale
    y: Spec = {
        "field": "time",
        "type": "quantitative",
        "title": f"latency of one call ({unit})",
        "scale": {"zero": False},
    }
    last = max(int(str(call["round"])) for call in calls)
    x: Spec = {
        "field": "round",
        "type": "quantitative",
        "title": "round",
        "scale": {"nice": False, "padding": 14},
        "axis": {
            "values": list(range(1, last + 1, 1 + last // 12)),
            "format": "d",
            "grid": False,
            "titleAnchor": "middle",
        },
    }
    kinds: Spec = {
        "field": "kind",
        "type": "nominal",
        "title": None,
        "scale": {"domain": list(_CALL_KINDS), "range": list(_CALL_KINDS.values())},
        "legend": {"symbolFillColor": GREY, "symbolStrokeColor": GREY},
    }
    who: Spec = {
        "field": "who",
        "type": "nominal",
        "title": None,
        "scale": {"domain": list(_WHO), "range": list(_WHO.values())},
    }
    picked: Spec = {"name": "picked", "value": others[0] if others else ""}
    if others:
        picked["bind"] = {"input": "select", "options": others, "name": "compare the baseline with "}
    layers: list[Spec] = []
    # A layer without a mark would be an image without a description.
    shown = {"others": 0.28} if len(others) > 1 else {}
    shown |= {"baseline": 1.0} | ({"chosen variant": 0.9} if others else {})
    for name, opacity in shown.items():
        only = [{"filter": f"datum.who === {_quoted(name)}"}]
        line = {"type": "line", "strokeWidth": 1.3, "opacity": 0.6 * opacity, "clip": True, "aria": False}
        point = {"type": "point", "filled": True, "size": 70, "opacity": opacity, "clip": True}
        layers += [
            {
                "transform": only,
                "mark": line,
                "encoding": {"x": x, "y": y, "detail": {"field": "worker"}, "color": who},
            },
            {
                "transform": only,
                "mark": point,
                "encoding": {
                    "x": x,
                    "y": y,
                    "color": who,
                    "shape": kinds,
                    "tooltip": tooltips(_CALL_FACTS),
                    "description": ARIA_TEXT,
                },
            },
        ]
    layers[-1]["params"] = [ZOOM]
    return {
        "data": {"values": calls},
        "params": [picked],
        "transform": [{"calculate": _who(result.baseline), "as": "who"}],
        "description": f"Latency of {len(calls)} calls of {len(names)} variants, by round",
        "height": 320,
        "padding": 8,
        "layer": layers,
    }


def _who(baseline: str) -> str:
    chosen, plain, others = _WHO
    return (
        f"datum.variant === {_quoted(baseline)} ? {_quoted(plain)} : "
        f"datum.variant === picked ? {_quoted(chosen)} : {_quoted(others)}"
    )


def _quoted(text: str) -> str:
    """Returns a text as a string of Vega's expression language."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"'{escaped}'"


def _calls(result: StudyResult) -> list[dict[str, object]]:
    """Returns a record for each timed call, in the order of sessions and rounds."""
    timed = [(variant, m) for variant in result.variants for m in variant.measurements if m.latency_s]
    begins, total = {}, 0
    for session in sorted({measurement.session for _, measurement in timed}):
        begins[session] = total
        total += max(len(measurement.latency_s) for _, measurement in timed if measurement.session == session)
    limit = result.config.protocol.interference
    calls: list[dict[str, object]] = []
    for variant, measurement in timed:
        for round_index, (seconds, share) in enumerate(zip(measurement.latency_s, shares(measurement), strict=True)):
            disturbed = share is not None and limit is not None and share > limit
            left_out = round_index in measurement.left_out
            calls.append({
                "variant": variant.name,
                "process": measurement.replicate + 1,
                "worker": f"{variant.name} {measurement.replicate} {measurement.session}",
                "round": begins[measurement.session] + round_index + 1,
                "seconds": seconds,
                "text": f"{seconds:.3f} s",
                "aria_text": f"{variant.name}, round {begins[measurement.session] + round_index + 1}: {seconds:.3f} s",
                "others": "" if share is None else f"{100 * share:.1f} %",
                "kind": _LEFT_OUT if left_out else _DISTURBED if disturbed else _DECIDES,
            })  # fmt: skip
    return calls


def _unit(seconds: Sequence[float]) -> tuple[str, float]:
    return ("ms", 1e3) if max(seconds) < 1 else ("s", 1.0)


def distribution_plot(result: StudyResult) -> Spec | None:
    """Draws the calls that count, and the latency with its interval, the shortest first; None if none was timed."""
    rows = [row for row in figures_by_variant(result).values() if row.latency and row.variant.samples]
    if not rows:
        return None
    rows.sort(key=lambda row: row.latency.estimate if row.latency else 0.0)
    every = [seconds for row in rows for times in row.variant.samples.values() for seconds in times]
    bounds = [bound for row in rows if row.latency for bound in (row.latency.low, row.latency.high) if bound]
    unit, scale = _unit([*every, *bounds])
    data, calls = [], []
    for number, row in enumerate(rows):
        assert row.latency is not None
        low, high = row.latency.low, row.latency.high
        data.append({
            "name": row.variant.name,
            "estimate": row.latency.estimate * scale,
            "low": None if low is None else low * scale,
            "high": None if high is None else high * scale,
            "figure": seconds_text(row.latency),
        })  # fmt: skip
        times = [time for replicate in row.variant.samples.values() for time in replicate]
        calls += [{"number": number, "time": time * scale} for time in times]
    x: Spec = {
        "type": "quantitative",
        "title": f"latency of one call ({unit})",
        "scale": {"zero": False, "padding": 12},
        "axis": {"tickCount": FEW_TICKS},
    }
    plot = Rows(data, (Column("latency", "figure", 150),))
    at = plot.y | {"field": "at"}
    for call in calls:
        call["at"] = plot.placed[int(call["number"])]["at"]
    layers: list[Spec] = [
        {
            "data": {"values": calls},
            "mark": {"type": "tick", "thickness": 1.5, "size": 16, "color": GREY, "opacity": 0.7, "clip": True,
                     "aria": False},
            "encoding": {"x": {**x, "field": "time"}, "y": at},
        },
        {
            "transform": [{"filter": "isValid(datum.low) && isValid(datum.high)"}],
            "mark": {"type": "rule", "strokeWidth": 2, "color": BLUE, "clip": True, "aria": False},
            "encoding": {"x": {**x, "field": "low"}, "x2": {"field": "high"}, "y": at},
        },
        {
            "params": [ZOOM],
            "mark": {"type": "point", "filled": True, "shape": "diamond", "size": 120, "color": BLUE, "opacity": 1,
                     "clip": True},
            "encoding": {"x": {**x, "field": "estimate"}, "y": at,
                         "tooltip": tooltips({"name": "variant", "figure": "latency"}), "description": ARIA_TEXT},
        },
    ]  # fmt: skip
    listed = "; ".join(f"{row['name']} {row['figure']}" for row in data)
    return plot.spec(layers, f"Distribution of latencies: {listed}")


def stages_plot(result: StudyResult) -> Spec | None:
    """Draws the times of the stages of a call, one after the other; None if stages were not measured."""
    rows = [row for row in figures_by_variant(result).values() if row.stages_ms and row.variant.role != "control"]
    if not rows:
        return None
    known = list(dict.fromkeys([*_STAGES, *(stage for row in rows for stage in row.call_ms)]))
    present = [stage for stage in known if any(stage in row.call_ms for row in rows)]
    names = {stage: _STAGES.get(stage, (stage.replace("_", " "), ""))[0] for stage in present}
    spare = iter(_FURTHER * len(present))
    colours = [_STAGES[stage][1] if stage in _STAGES else next(spare) for stage in present]
    unit, scale = _unit([sum(row.call_ms.values()) / 1e3 for row in rows])
    data = [{"name": row.variant.name, "figure": _stage_total(row)} for row in rows]
    plot = Rows(data, (Column("stages together", "figure", 116),))
    parts = []
    for number, row in enumerate(rows):
        start, total = 0.0, sum(row.call_ms.values())
        for stage in present:
            value = row.call_ms.get(stage, 0.0)
            parts.append({
                "name": row.variant.name,
                "stage": names[stage],
                "from": start / 1e3 * scale,
                "to": (start + value) / 1e3 * scale,
                "text": f"{value:.3g} ms, {100 * value / total:.0f} %" if total else "",
                "at": plot.placed[number]["at"],
            })  # fmt: skip
            start += value
    bars: Spec = {
        "data": {"values": parts},
        "params": [ZOOM],
        "mark": {"type": "rule", "strokeWidth": 16, "clip": True},
        "encoding": {
            "x": {"field": "from", "type": "quantitative", "title": f"time of one call by stage ({unit})",
                  "scale": {"domainMin": 0, "nice": False}, "axis": {"tickCount": FEW_TICKS}},
            "x2": {"field": "to"},
            "y": plot.y,
            "color": {"field": "stage", "type": "nominal", "title": None,
                      "scale": {"domain": list(names.values()), "range": colours}, "legend": BARS},
            "tooltip": tooltips({"name": "variant", "stage": "stage", "text": "takes"}),
            "description": {"field": "text"},
        },
    }  # fmt: skip
    listed = "; ".join(f"{row['name']} {row['figure']}" for row in plot.placed)
    return plot.spec([bars], f"Time by stage: {listed}")


def _stage_total(row: Figures) -> str:
    total = sum(row.call_ms.values())
    return f"{total:.0f} ms" if total < 1000 else f"{total / 1e3:.2f} s"


def limit_plot(result: StudyResult) -> Spec | None:
    """Draws the share of the device's peak rate that each variant reached, or the rate where the peak is not known.

    Returns:
        None if operations were not counted.
    """
    found = [
        (row.variant, row.compute)
        for row in figures_by_variant(result).values()
        if row.compute is not None and row.variant.status.measured and row.variant.role != "control"
    ]
    if not found:
        return None
    shares_known = all(compute.peak is not None for _, compute in found)
    data = []
    for variant, compute in found:
        rate = f"{compute.achieved_tflops:.3g} TFLOP/s"
        of_peak = f"{100 * (compute.of_peak or 0):.1f} %" if compute.peak else ""
        data.append({
            "name": variant.name,
            "zero": 0,
            "value": 100 * (compute.of_peak or 0) if shares_known else compute.achieved_tflops,
            "figure": of_peak if shares_known else rate,
            "rate": rate,
            "peak": f"{compute.peak[1]:g} TFLOP/s ({compute.peak[0]})" if compute.peak else "not known",
            "work": f"{compute.tflop_per_image:.3g} TFLOP",
        })  # fmt: skip
    title = "share of the device's peak rate (%)" if shares_known else "achieved rate (TFLOP/s)"
    domain = {"domain": [0, 100]} if shares_known else {"domainMin": 0}
    plot = Rows(data, (Column("of the peak" if shares_known else "achieved", "figure", 116),))
    tooltip = {"name": "variant", "rate": "achieved", "peak": "peak", "work": "work per image"}
    bars: Spec = {
        "mark": {"type": "rule", "strokeWidth": 14, "color": BLUE},
        "encoding": {
            "x": {
                "field": "zero",
                "type": "quantitative",
                "title": title,
                "scale": {**domain, "nice": False},
                "axis": {"tickCount": FEW_TICKS},
            },
            "x2": {"field": "value"},
            "y": plot.y,
            "tooltip": tooltips(tooltip),
            "description": ARIA_TEXT,
        },
    }
    return plot.spec([bars], "Rates: " + "; ".join(f"{row['name']} {row['figure']}" for row in data))
