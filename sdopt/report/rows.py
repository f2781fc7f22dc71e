"""Derives the rows of the result tables, and the notes below them; how they are shown is decided elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass

from sdopt.analysis.figures import metrics_of, peak_rate
from sdopt.analysis.timing import MINIMUM_PROCESSES, latency, within_floor
from sdopt.results.records import Comparison, Effect, Interval, Status, StudyResult, VariantResult
from sdopt.study.designs import difference


@dataclass(frozen=True)
class Row:
    """One variant against one reference, in words."""

    variant: str
    status: Status
    latency: str
    speedup: str
    reference: str
    memory: str
    evidence: str


def rows_of(result: StudyResult) -> list[Row]:
    """A row for the baseline, then one for each comparison; variants without a comparison last."""
    compared = [comparison.candidate for comparison in result.comparisons]
    alone = [variant for variant in result.variants if variant.name not in compared]
    rows = [_row(result, variant, None) for variant in alone if variant.name == result.baseline]
    rows += [_row(result, result.variant(edge.candidate), edge) for edge in result.comparisons]
    return rows + [_row(result, variant, None) for variant in alone if variant.name != result.baseline]


def _row(result: StudyResult, variant: VariantResult, edge: Comparison | None) -> Row:
    timed = variant.status.timed
    time = latency(variant, result.config["protocol"]["estimator"], result.confidence) if timed else None
    speed = edge.speedup if edge else None
    return Row(
        variant=variant.name,
        status=variant.status,
        latency=_seconds(time) if time else "",
        speedup=_ratio(speed, "≈" if edge and within_floor(edge) else "") if speed else "",
        reference=edge.reference if edge else "",
        memory=_memory(variant, edge),
        evidence=_explanation(result, variant, edge),
    )


def _seconds(interval: Interval) -> str:
    unit, scale = ("ms", 1e3) if interval.estimate < 1 else ("s", 1.0)
    digits = 0 if interval.estimate * scale >= 100 else 1 if interval.estimate * scale >= 10 else 2
    text = f"{interval.estimate * scale:.{digits}f} {unit}"
    if interval.low is None or interval.high is None:
        return text
    return f"{text} [{interval.low * scale:.{digits}f}, {interval.high * scale:.{digits}f}]"


def _ratio(interval: Interval, mark: str) -> str:
    bounds = "" if interval.low is None else f" [{interval.low:.2f}, {interval.high:.2f}]"
    return f"{mark}{interval.estimate:.2f}×{bounds}"


def _memory(variant: VariantResult, edge: Comparison | None) -> str:
    peaks = [measurement.memory.headline[1] for measurement in variant.measurements if measurement.memory]
    if not peaks:
        return ""
    ratio = f" ({edge.memory_ratio.estimate:.2f}×)" if edge and edge.memory_ratio else ""
    return f"{max(peaks):.2f} GiB{ratio}"


def _explanation(result: StudyResult, variant: VariantResult, edge: Comparison | None) -> str:
    """Why there is no figure; else what shows that the options took effect by which the two sides differ."""
    shown = [variant.reason] if variant.reason else []
    if edge is not None and variant.measurements and variant.status is Status.OK:
        axes = difference(variant.choices, result.variant(edge.reference).choices)
        shown += [item.summary for item in variant.measurements[0].evidence if item.axis in axes]
    return "; ".join([*shown, *([edge.note] if edge and edge.note and variant.status.timed else [])])


def notes_of(result: StudyResult) -> list[str]:
    """What a reader needs to know beside the table."""
    control = next((c for c in result.comparisons if result.variant(c.candidate).role == "control"), None)
    notes = []
    if result.floor is not None and control is not None:
        notes.append(
            f"A/A floor: two identical baselines differed by {100 * (result.floor - 1):.1f} %; "
            "≈ marks a speed-up that is no larger than that."
        )
    elif any(variant.status.timed and variant.samples for variant in result.variants):
        notes.append("No A/A floor: the control or the baseline failed; no speed-up can be told from chance (≈).")
    samples = [len(times) for variant in result.variants for times in variant.samples.values()]
    protocol = result.config["protocol"]
    percent = f"{100 * result.confidence:g} %"
    if samples and result.schedule.kind == "interleaved":
        processes = protocol["replicates"]
        intervals = (
            f"{percent} two-sided intervals"
            if processes >= MINIMUM_PROCESSES
            else f"no intervals: protocol.replicates={MINIMUM_PROCESSES} would give some"
        )
        each = "1 process" if processes == 1 else f"{processes} processes"
        notes.append(f"{max(samples)} interleaved rounds, {each} per variant, {intervals}.")
    elif samples:
        drift = "".join(f" Drift of the baseline over a block: at most {100 * d:.1f} %." for d in _worst(result))
        notes.append(f"Measured in blocks ({result.schedule.reason}), {percent} two-sided intervals.{drift}")
    if len(result.sessions) > 1:
        notes.append(
            f"Measured in {len(result.sessions)} sessions with processes of their own: a speed-up pairs rounds of the "
            "same session alone, so it need not be the ratio of two latencies shown."
        )
    disturbing = sorted({other for session in result.sessions for other in session.disturbed_by})
    if disturbing:
        notes.append(f"Disturbed: also measured on this device meanwhile: {', '.join(disturbing)}.")
    names = {m.memory.headline[0] for v in result.variants for m in v.measurements if m.memory}
    memory = {
        "peak_allocated_gib": "peak that PyTorch allocated on the device",
        "peak_process_gib": "peak resident set of the process during a call, beyond its state before loading",
    }
    notes += [f"Memory: {memory[name]}." for name in sorted(names)]
    notes += _card_notes(result)
    if result.effects:
        notes.append(
            "Effects: a main effect is averaged over the other options; an interaction above 1 means that two options "
            "are faster (or larger) together than each by itself would make them."
        )
    if any(v.config.get("model", {}).get("weights") == "random" for v in result.variants):
        notes.append("Random weights: speed and memory are the model's; images show only how far variants agree.")
    if any(v.status is Status.NOT_ENGAGED for v in result.variants):
        notes.append("not_engaged: the option ran without evidence of taking effect; its figures credit nothing.")
    return notes


def _card_notes(result: StudyResult) -> list[str]:
    """Which card's memory was emulated, and what share of the data sheet's peak the variants reached."""
    notes = []
    hardware, sheet = result.config["hardware"], result.environment.sheet
    if hardware.get("emulate_memory"):  # results of earlier versions have no such key
        card = hardware["sheet"]
        notes.append(
            f"Memory of an {card['name']} ({card['memory_gib']:g} GiB) emulated: PyTorch's allocator was capped; "
            f"times are those of {result.environment.device['name']}."
        )
    shares: dict[tuple[str, float], list[str]] = {}
    for variant in result.variants:
        found = metrics_of(result, variant)
        peak = peak_rate(result, variant)
        if peak is not None and "compute/of_peak" in found:
            shares.setdefault(peak, []).append(f"{variant.name} {100 * found['compute/of_peak']:.0f} %")
    if shares and sheet is not None:
        reached = "; ".join(
            f"of {kind}'s {rate:g} TFLOP/s {', '.join(variants)}" for (kind, rate), variants in shares.items()
        )
        notes.append(f"Reached of the dense peak of {sheet.name}, denoiser, VAE and text encoder together: {reached}.")
    return notes


def _worst(result: StudyResult) -> list[float]:
    return [max(abs(drift - 1) for drift in result.schedule.drift.values())] if result.schedule.drift else []


HEADINGS = ("variant", "status", "latency", "speed-up", "against", "memory", "evidence")

FIRST_METRICS = ("clip_score", "cmmd", "psnr_db", "perceptual", "lpips", "broken")


def quality_columns(result: StudyResult) -> list[str]:
    """Every metric that some variant has; of pixels the PSNR alone, which says the same as the squared error."""
    names = [name for v in result.variants for name in v.quality] + [n for c in result.comparisons for n in c.quality]
    shown = [name for name in dict.fromkeys(names) if name not in ("mse", "brightness", "contrast")]
    return [*shown, "broken"] if shown else []


def quality_rows(result: StudyResult, headings: Sequence[str]) -> list[tuple[str, ...]]:
    rows = []
    for variant in result.variants:
        if not variant.images:
            continue
        edge = next((edge for edge in result.comparisons if edge.candidate == variant.name), None)
        scores = variant.quality | (edge.quality if edge else {})
        cells = []
        for name in headings:
            score = scores.get(name)
            if name == "broken":
                cells.append(f"{variant.broken_images} of {len(variant.images)}" if variant.trips else "")
            elif score is None:
                cells.append("")
            else:
                cells.append("same" if name == "psnr_db" and score.estimate is None else _score(score.estimate))
        rows.append((variant.name, *cells))
    return rows


def _score(value: float | None) -> str:
    return "?" if value is None else f"{value:.3g}"


EFFECT_HEADINGS = ("effect", "of", "speed-up", "memory")


def effect_cells(effect: Effect) -> tuple[str, ...]:
    kind = "main" if len(effect.options) == 1 else "interaction"
    if effect.aliased_with:
        return kind, " × ".join(effect.options), f"aliased with {', '.join(effect.aliased_with)}", ""
    figures = [_ratio(figure, "") if figure else "" for figure in (effect.speedup, effect.memory_ratio)]
    return kind, " × ".join(effect.options), *figures


SWEEP_NOTE = "Each job is a study of its own: a speed-up is against the baseline measured in the same job."


def cells_of(row: Row) -> tuple[str, ...]:
    return row.variant, str(row.status), row.latency, row.speedup, row.reference, row.memory, row.evidence
