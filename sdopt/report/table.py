"""The result table: rows made once, shown in a terminal or as Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sdopt.designs import difference
from sdopt.measure.metrics import metrics_of, peak_rate
from sdopt.results import Comparison, Effect, Interval, Status, StudyResult, VariantResult
from sdopt.statistics import MINIMUM_ROUNDS, latency, within_floor

_STYLES = {
    Status.OK: "green",
    Status.NOT_ENGAGED: "yellow",
    Status.SKIPPED: "dim",
    Status.PENDING: "dim",
    Status.INTERRUPTED: "yellow",
}


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
            f"{percent} intervals" if processes > 1 or max(samples) >= MINIMUM_ROUNDS else "too few for intervals"
        )
        each = "1 process" if processes == 1 else f"{processes} processes"
        notes.append(f"{max(samples)} interleaved rounds, {each} per variant, {intervals}.")
    elif samples:
        drift = "".join(f" Drift of the baseline over a block: at most {100 * d:.1f} %." for d in _worst(result))
        notes.append(f"Measured in blocks ({result.schedule.reason}), {percent} intervals.{drift}")
    if len(result.sittings) > 1:
        notes.append(
            f"Measured in {len(result.sittings)} sittings with processes of their own: a speed-up pairs rounds of the "
            "same sitting alone, so it need not be the ratio of two latencies shown."
        )
    disturbing = sorted({other for sitting in result.sittings for other in sitting.disturbed_by})
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


_HEADINGS = ("variant", "status", "latency", "speed-up", "against", "memory", "evidence")


def terminal_table(result: StudyResult, width: int) -> Group:
    """The table and its notes, for a terminal of that many columns."""
    title = f"{result.name} on {result.environment.device['name']}"
    effects = [effects_table(result.effects)] if result.effects else []
    effects += [quality_table(result)] if _quality_columns(result) else []
    notes = [Text(f"  {note}", "dim") for note in notes_of(result)]
    return Group(*_table(title, rows_of(result), width), *effects, *notes)


def quality_table(result: StudyResult) -> Table:
    """What the images are worth: the variant's own scores, and how far they are from the reference's."""
    table = Table(title="quality", title_justify="left", box=box.SIMPLE_HEAD)
    # The terminal shows those that are asked for first; the Markdown and MLflow have them all.
    headings = [name for name in _quality_columns(result) if name.startswith(_FIRST)]
    for heading in ("variant", *headings):
        table.add_column(heading.replace("_", " "), justify="left" if heading == "variant" else "right")
    for cells in _quality_rows(result, headings):
        table.add_row(*map(escape, cells))
    return table


_FIRST = ("clip_score", "cmmd", "psnr_db", "perceptual", "lpips", "broken")


def _quality_columns(result: StudyResult) -> list[str]:
    """Every metric that some variant has; of pixels the PSNR alone, which says the same as the squared error."""
    names = [name for v in result.variants for name in v.quality] + [n for c in result.comparisons for n in c.quality]
    shown = [name for name in dict.fromkeys(names) if name not in ("mse", "brightness", "contrast")]
    return [*shown, "broken"] if shown else []


def _quality_rows(result: StudyResult, headings: Sequence[str]) -> list[tuple[str, ...]]:
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


def effects_table(effects: Sequence[Effect]) -> Table:
    """Main effects and interactions of a factorial study."""
    table = Table(title="effects", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in _EFFECT_HEADINGS:
        table.add_column(heading, justify="left" if heading in ("effect", "of") else "right")
    for cells in map(_effect_cells, effects):
        table.add_row(*map(escape, cells))
    return table


_EFFECT_HEADINGS = ("effect", "of", "speed-up", "memory")


def _effect_cells(effect: Effect) -> tuple[str, ...]:
    kind = "main" if len(effect.options) == 1 else "interaction"
    if effect.aliased_with:
        return kind, " × ".join(effect.options), f"aliased with {', '.join(effect.aliased_with)}", ""
    figures = [_ratio(figure, "") if figure else "" for figure in (effect.speedup, effect.memory_ratio)]
    return kind, " × ".join(effect.options), *figures


def sweep_table(rows: Sequence[tuple[str, Row]], width: int) -> Group:
    """One table of the candidates of a sweep, each with the number of its job."""
    numbers = [number for number, _ in rows]
    table = _table(f"sweep of {len(rows)} jobs", [row for _, row in rows], width, numbers)
    return Group(*table, Text(f"  {SWEEP_NOTE}", "dim"))


SWEEP_NOTE = "Each job is a study of its own: a speed-up is against the baseline measured in the same job."


def _table(title: str, rows: Sequence[Row], width: int, jobs: Sequence[str] | None = None) -> list[Table | Text]:
    """A table; where the terminal is narrow, intervals go below their figures, and evidence below the table."""
    wide = width >= 130
    references = {row.reference for row in rows if row.reference}
    against = f"\nagainst {escape(references.pop())}" if len(references) == 1 else ""
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD)
    if jobs is not None:
        table.add_column("job", justify="right")
    table.add_column("variant", min_width=16, overflow="fold")
    table.add_column("status", no_wrap=True)
    table.add_column("latency", justify="right", no_wrap=True)
    table.add_column(f"speed-up{against}", justify="right", no_wrap=True)
    if not against:
        table.add_column("against")
    table.add_column("memory", justify="right", no_wrap=True)
    if wide:
        table.add_column("evidence")
    for number, row in enumerate(rows):
        latency, speedup, memory = (
            escape(figure if wide else figure.replace(" [", "\n[").replace(" (", "\n("))
            for figure in (row.latency, row.speedup, row.memory)
        )
        table.add_row(
            *([] if jobs is None else [jobs[number]]),
            escape(row.variant),
            Text(str(row.status), _STYLES.get(row.status, "red")),
            latency,
            speedup,
            *([] if against else [escape(row.reference)]),
            memory,
            *([escape(row.evidence)] if wide else []),
        )
    if wide:
        return [table]
    return [table, *(Text(f"  {row.variant}: {row.evidence}") for row in rows if row.evidence)]


def markdown_table(result: StudyResult) -> str:
    """The same as Markdown."""
    columns = _quality_columns(result)
    quality = markdown(("variant", *columns), _quality_rows(result, columns), []) if columns else ""
    effects = markdown(_EFFECT_HEADINGS, list(map(_effect_cells, result.effects)), []) if result.effects else ""
    return markdown(_HEADINGS, [_cells(row) for row in rows_of(result)], notes_of(result)) + "\n" + effects + quality


def sweep_markdown(rows: Sequence[tuple[str, Row]]) -> str:
    """The table of a sweep as Markdown."""
    return markdown(("job", *_HEADINGS), [(number, *_cells(row)) for number, row in rows], [SWEEP_NOTE])


def _cells(row: Row) -> tuple[str, ...]:
    return row.variant, str(row.status), row.latency, row.speedup, row.reference, row.memory, row.evidence


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """A Markdown table with notes below it; cells are escaped."""
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    lines += ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)]) + "\n"


def _cell(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("|", "\\|").replace("\n", " ")


def show(result: StudyResult, console: Console, folder: Path) -> None:
    """Prints the table, and where to look next."""
    console.print(terminal_table(result, console.width))
    console.print(f"result: {folder / 'result.json'}", markup=False, highlight=False, soft_wrap=True)
