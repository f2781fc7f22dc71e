"""Derives the rows of the result tables, and the notes below them; other modules format them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sdopt.analysis.answer import REPEATS, OptionAnswer
from sdopt.analysis.break_even import break_even_text, compiled_earlier_s, start_text
from sdopt.analysis.disturbance import count_rounds
from sdopt.analysis.doubts import doubts_of
from sdopt.analysis.figures import Figures, figures_by_variant, figures_of, floor_range, ratio_text
from sdopt.analysis.gpu import gpu_notes
from sdopt.analysis.measures import MEMORY_RATIO, TAIL_RATIO
from sdopt.analysis.precision import kept_going
from sdopt.analysis.ratios import MINIMUM_PROCESSES
from sdopt.errors import UsageError
from sdopt.quality.metrics import Family, family_of
from sdopt.results.records import BreakEven, Effect, Interval, Status, StudyResult
from sdopt.study.designs import difference


@dataclass(frozen=True)
class Row:
    """One variant against one reference, in words."""

    variant: str
    status: Status
    latency: str
    speedups: Mapping[str, str]
    """By heading of its column: one for each shape of the study."""
    reference: str
    memory: str
    evidence: str

    @property
    def speedup(self) -> str:
        """The speed-up at the main shape; "" for none."""
        return next(iter(self.speedups.values()), "")


SPEEDUP_HEADING = "speed-up"


def rows_of(result: StudyResult) -> list[Row]:
    """Returns a row for the baseline, then one for each comparison; variants without a comparison last."""
    return [_row(result, figures) for figures in figures_of(result)]


def _row(result: StudyResult, figures: Figures) -> Row:
    return Row(
        variant=figures.variant.name,
        status=figures.variant.status,
        latency=seconds_text(figures.latency) if figures.latency else "",
        speedups={
            f"{SPEEDUP_HEADING}, {at.shape}" if figures.further else SPEEDUP_HEADING: (
                at.speedup.text if at.speedup else ""
            )
            for at in figures.shapes
        },
        reference=figures.reference,
        memory=memory_text(figures),
        evidence=_explanation(result, figures),
    )


def seconds_text(interval: Interval) -> str:
    """Writes a time with its bounds, in milliseconds below one second, to three digits."""
    unit, scale = ("ms", 1e3) if interval.estimate < 1 else ("s", 1.0)
    digits = max(0, 3 - len(str(int(interval.estimate * scale))))
    text = f"{interval.estimate * scale:.{digits}f} {unit}"
    if interval.low is None or interval.high is None:
        return text
    return f"{text} [{interval.low * scale:.{digits}f}, {interval.high * scale:.{digits}f}]"


def gib_text(gib: float) -> str:
    """Writes an amount of memory, in MiB below one GiB."""
    return f"{1024 * gib:.0f} MiB" if gib < 1 else f"{gib:.2f} GiB"


def memory_text(figures: Figures) -> str:
    """Writes the peak of memory, with its ratio; "" if it was not measured."""
    if figures.headline_memory is None:
        return ""
    ratio = figures.ratios.get(MEMORY_RATIO.name)
    return gib_text(figures.headline_memory[1]) + (f" ({ratio.interval.estimate:.2f}×)" if ratio else "")


def _explanation(result: StudyResult, figures: Figures) -> str:
    """Returns why there is no figure; else the evidence that the options in which the two sides differ took effect."""
    variant, edge = figures.variant, figures.comparison
    shown = [variant.reason] if variant.reason else []
    if edge is not None and variant.measurements and variant.status is Status.OK:
        reference = result.variant(edge.reference)
        axes = difference(variant.choices, reference.choices)
        same = not axes and variant.config == reference.config
        shown += [REPEATS] if same and variant.role != "control" else []
        shown += [item.summary for item in variant.measurements[0].evidence if item.axis in axes]
    return "; ".join([*shown, *([edge.note] if edge and edge.note and variant.status.timed else [])])


def notes_of(result: StudyResult) -> list[str]:
    """Returns the notes that a reader of the table needs."""
    notes = [
        *_shape_notes(result),
        *_floor_notes(result),
        *_sampling_notes(result),
        *_start_notes(result),
        *_tail_notes(result),
        *_memory_notes(result),
        *(f"Doubtful: {doubt}." for doubt in doubts_of(result)),
        *_card_notes(result),
        *gpu_notes(result),
    ]
    if result.effects:
        notes.append(
            "Effects: a main effect is averaged over the other options; an interaction above 1 means that two options "
            "are faster (or larger) together than the product of their separate effects."
        )
    if any(variant.config.random_weights for variant in result.variants):
        notes.append(
            "Random weights: speed and memory are those of the real model; images show only how far variants agree."
        )
    if any(variant.status is Status.NOT_ENGAGED for variant in result.variants):
        notes.append(
            "not_engaged: the option ran without evidence of taking effect; its figures are not credited to the option."
        )
    return notes


def _shape_notes(result: StudyResult) -> list[str]:
    """Returns notes on the figures that a study with several shapes has only for the main one."""
    if len(result.shapes) == 1:
        return []
    note = (
        f"Shapes: each process runs all {len(result.shapes)} in every round. The first call of a shape comes after the "
        "first calls of the shapes before it, so it includes only the start-up work that they left to do. Images, "
        f"stages and energy are those of {result.shapes[0]}."
    )
    return [note]


def _floor_notes(result: StudyResult) -> list[str]:
    if result.control is not None and floor_range(result) is not None:
        several = len(result.shapes) > 1
        floors = [(shape, floor_range(result.at(index))) for index, shape in enumerate(result.shapes)]
        share = "; ".join(
            f"{_floor_text(*ends)}{f' at {shape}' if several else ''}" for shape, ends in floors if ends is not None
        )
        return [
            f"A/A floor: two identical baselines differed by {share}; ≈ marks a speed-up that is no larger than that."
        ]
    if any(variant.status.timed and variant.samples for variant in result.variants):
        return ["No A/A floor: the control or the baseline failed; no speed-up can be told from chance (≈)."]
    return []


def _floor_text(low: float, high: float) -> str:
    """Writes the floors of all comparisons; they differ between sessions."""
    first, last = (f"{100 * (floor - 1):.1f}" for floor in (low, high))
    return f"{first} %" if first == last else f"{first} to {last} %, by the sessions of a comparison"


def has_intervals(result: StudyResult) -> bool:
    """Returns whether there are enough processes of each variant for an interval."""
    return result.config.replicates >= MINIMUM_PROCESSES


def intervals_text(result: StudyResult) -> str:
    """Writes which intervals the figures of a study have."""
    if has_intervals(result):
        return f"two-sided {100 * result.confidence:g} % intervals"
    return f"no intervals: protocol.replicates={MINIMUM_PROCESSES} would give some"


def sampling_text(result: StudyResult) -> str:
    """Writes the rounds and processes of a study, and the intervals that they give; "" if nothing was timed."""
    samples = [len(times) for variant in result.variants for times in variant.samples.values()]
    if not samples:
        return ""
    processes, most = result.config.replicates, max(len(variant.samples) for variant in result.variants)
    processes_text = "1 process" if most == 1 else f"{processes}{f' to {most}' if most > processes else ''} processes"
    rounds = f"{max(samples)} interleaved rounds"
    if result.schedule.kind != "interleaved":
        rounds = f"Measured in blocks ({result.schedule.reason}), {max(samples)} rounds"
    return f"{rounds}, {processes_text} per variant, {intervals_text(result)}"


def _sampling_notes(result: StudyResult) -> list[str]:
    """Returns notes on the samples behind the intervals, and on disturbances of the measurement."""
    notes = []
    if samples := sampling_text(result):
        drift = "".join(f" Drift of the baseline over a block: at most {100 * d:.1f} %." for d in _worst(result))
        notes.append(f"{samples}.{drift}")
        sessions = len(result.sessions)
        where = "" if sessions <= 1 else f"Measured in {sessions} sessions with processes of their own. "
        rounds = "the same rounds" if sessions <= 1 else "rounds of the same session"
        notes.append(
            f"{where}A speed-up is a ratio of geometric means over {rounds}, "
            "so it need not be the ratio of the two latencies shown."
        )
    notes += [note] if (note := _rounds_note(result)) else []
    notes += [note] if (note := _precision_note(result)) else []
    disturbing = sorted({other for session in result.sessions for other in session.disturbed_by})
    if disturbing:
        notes.append(
            f"Disturbed: other studies were measured on this device at the same time: {', '.join(disturbing)}."
        )
    return notes


def _precision_note(result: StudyResult) -> str:
    """Returns which speed-ups needed more processes for `protocol.precision`, and whether all reached it; or ""."""
    precision, found = result.config.protocol.precision, result.precision
    if precision is None or found is None:
        return ""
    going = kept_going(result)
    listed = ", ".join(
        f"{name} ({there} of {needed} processes)" if there < needed else f"{name} ({needed} processes)"
        for name, (there, needed) in going.items()
    )
    short = [name for name, (there, needed) in going.items() if there < needed]
    asked = f"±{100 * precision:g} % for every speed-up, from the deviation of {result.config.replicates} processes"
    kept = f"more processes were needed for {listed}" if going else "no more processes were needed"
    ended = f"; not reached by {', '.join(short)}{f': {found.stopped}' if found.stopped else ''}" if short else ""
    return f"Precision: {asked}; {kept}{ended}."


def _rounds_note(result: StudyResult) -> str:
    """Returns how many rounds other work on the machine disturbed, and how they were handled; "" if none was."""
    counts, limit = count_rounds(result), result.config.protocol.interference
    if counts is None or limit is None or not counts.disturbed:
        return ""
    causes = {
        "waiting for a core": counts.waited,
        "time that the hypervisor gave to other machines": counts.stolen,
        "time outside the worker's clock": counts.unaccounted,
        "other processes on the GPU": counts.on_gpu,
    }
    # Several causes together may exceed the limit that none of them does alone.
    least = limit if max(causes.values()) > limit else 0.0
    named = [f"{cause} up to {100 * share:.{int(share < 0.1)}f} %" for cause, share in causes.items() if share > least]
    uses = [
        f"{number} {use}"
        for number, use in (
            (counts.left_out, "left out"),
            (counts.undecided, "used anyway, because too few were undisturbed (raise protocol.extra_rounds)"),
        )
        if number
    ]
    return (
        f"Disturbed by other work: {counts.disturbed} of {counts.timed} rounds "
        f"({', '.join([*named, f'limit {100 * limit:g} %'])}); {', '.join(uses)}."
    )


def start_words(level: BreakEven | None) -> tuple[str, str, str] | None:
    """Returns in words a variant's extra time at the start, when it is spent, and after how many images it is repaid.

    Returns:
        such as "31.2 s", "before the first image" and "repaid after 310 images"; None if the time is no more than a
        call of the reference, or was not measured.
    """
    if level is None or not level.is_slower:
        return None
    return seconds_text(Interval(level.extra_s)), start_text(level), break_even_text(level)


def _start_notes(result: StudyResult) -> list[str]:
    """Returns notes on the extra time of options at the start, if it is large."""
    starts = [
        f"{row.variant.name} {start[0]} more than {row.reference} {start[1]}, {start[2]}"
        for row in figures_of(result)
        if (start := start_words(row.break_even)) and row.variant.role != "control"
    ]
    notes = [f"Start: {'; '.join(starts)}."] if starts else []
    packages = {variant.name: compiled_earlier_s(variant) for variant in result.variants}
    loaded = [f"{name} in {seconds_text(Interval(spent_s))}" for name, spent_s in packages.items() if spent_s]
    if loaded:
        notes.append(f"Earlier runs compiled packages that were loaded here: {'; '.join(loaded)}. The start counts it.")
    return notes


def _tail_notes(result: StudyResult) -> list[str]:
    """Returns a note on largest calls that are shown to differ from those of the reference, at any shape."""
    shown = [
        f"{compared(result, row)} {ratio.text}{f' at {at.shape}' if row.further else ''}"
        for row in figures_of(result)
        for at in row.shapes
        if (ratio := at.ratios.get(TAIL_RATIO.name)) and ratio.gain and row.variant.role != "control"
    ]
    return [f"Largest call of a process, over that of the reference's: {'; '.join(shown)}."] if shown else []


def _memory_notes(result: StudyResult) -> list[str]:
    names = {m.peak[0] for variant in result.variants for m in variant.measurements if m.peak}
    memory = {
        "peak_allocated_gib": "peak that PyTorch allocated on the device, including that of CUDA graphs and DeepSpeed",
        "peak_process_gib": "peak resident set of the process and its child processes during a call, minus that "
        "before loading",
    }
    return [f"Memory: {memory[name]}; the geometric mean of a variant's processes." for name in sorted(names)]


def _card_notes(result: StudyResult) -> list[str]:
    """Returns notes on the card whose memory was emulated, and on the share of its peak rate that variants reached."""
    notes = []
    hardware, sheet = result.config.hardware, result.environment.sheet
    if hardware.emulate_memory and hardware.sheet is not None:
        notes.append(
            f"Memory of an {hardware.sheet.name} ({hardware.sheet.memory_gib:g} GiB) emulated: PyTorch's allocator was "
            f"capped; times are those of {result.environment.device['name']}."
        )
    shares: dict[tuple[str, float], list[str]] = {}
    for name, figures in figures_by_variant(result).items():
        compute = figures.compute
        if compute is not None and compute.peak is not None and figures.variant.status.measured:
            shares.setdefault(compute.peak, []).append(f"{name} {100 * (compute.of_peak or 0):.0f} %")
    if shares and sheet is not None:
        reached = "; ".join(
            f"of {kind}'s {rate:g} TFLOP/s {', '.join(variants)}" for (kind, rate), variants in shares.items()
        )
        notes.append(f"Reached of the dense peak of {sheet.name}, denoiser, VAE and text encoder together: {reached}.")
    return notes


def _worst(result: StudyResult) -> list[float]:
    return [max(abs(drift - 1) for drift in result.schedule.drift.values())] if result.schedule.drift else []


def speedup_headings(rows: Sequence[Row]) -> list[str]:
    """Returns all columns of speed-ups that occur in the rows."""
    return list(dict.fromkeys(heading for row in rows for heading in row.speedups)) or [SPEEDUP_HEADING]


def shape_of(heading: str) -> str:
    """Returns the shape of a column of speed-ups; "" in a study with one shape."""
    return heading.removeprefix(SPEEDUP_HEADING).removeprefix(", ")


def table_of(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Returns the headings and cells of a table. Latency and memory at several shapes have a table below."""
    speedups = speedup_headings(rows)
    one = len(speedups) == 1
    cells = [
        {
            "variant": row.variant,
            "status": str(row.status),
            **({"latency": row.latency} if one else {}),
            **{heading: row.speedups.get(heading, "") for heading in speedups},
            "against": row.reference,
            **({"memory": row.memory} if one else {}),
            "evidence": row.evidence,
        }
        for row in rows
    ]
    return list(cells[0]), [list(row.values()) for row in cells]


BROKEN = "broken"
"""The column that counts broken images."""


def quality_columns(result: StudyResult) -> list[str]:
    """Returns the metrics that some variant has. The PSNR stands for the squared error, from which it is computed."""
    names = [name for v in result.variants for name in v.quality] + [n for c in result.comparisons for n in c.quality]
    shown = [name for name in dict.fromkeys(names) if name not in ("mse", "brightness", "contrast")]
    return [*shown, BROKEN] if shown else []


def headline_columns(result: StudyResult) -> list[str]:
    """Returns the metrics that the terminal and the page show, and the count of broken images if there are any."""
    broken = any(variant.trips for variant in result.variants)
    columns = {name: known_family(name) for name in quality_columns(result)}
    return [name for name, family in columns.items() if (broken if name == BROKEN else family and family.headline)]


def quality_heading(name: str) -> str:
    """Returns a column's heading: the metric, its unit, and the better direction (↑ or ↓)."""
    family = known_family(name)
    if family is None:
        return name
    unit = f" ({family.unit})" if family.unit else ""
    arrow = {True: " ↑", False: " ↓", None: ""}[family.higher_is_better]
    return name.removesuffix(f"_{family.unit.lower()}") + unit + arrow


def quality_notes(names: Sequence[str]) -> list[str]:
    """Returns notes that explain the metrics and the arrows."""
    families = {family.name: family for name in names if (family := known_family(name)) is not None}
    meanings = "; ".join(f"{family.name}: {family.meaning}" for family in families.values())
    return [f"↑ more is better, ↓ less is better. {meanings}."] if families else []


def known_family(name: str) -> Family | None:
    """Returns the family of a metric; None for the count of broken images, and for a metric unknown to this version."""
    try:
        return family_of(name)
    except UsageError:
        return None


def quality_rows(result: StudyResult, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns a row for each comparison whose variant has images: what is compared, and a score for each metric."""
    return [
        (compared(result, figures), *(metric_text(figures, name) for name in names))
        for figures in figures_of(result)
        if figures.variant.images
    ]


def compared(result: StudyResult, figures: Figures) -> str:
    """Returns the variant's name, with that of its reference where this is not the baseline."""
    against = f" against {figures.reference}" if figures.reference not in ("", result.baseline) else ""
    return f"{figures.variant.name}{against}"


def metric_text(figures: Figures, name: str) -> str:
    """Returns a comparison's score in one metric as tables show it; "" if it has none."""
    variant, score = figures.variant, figures.scores.get(name)
    if name == BROKEN:
        return f"{variant.broken_images} of {len(variant.images)}" if variant.trips else ""
    if score is None:
        return ""
    if score.estimate is not None:
        return f"{score.estimate:.3g}"
    family = known_family(name)
    return (family.equal_text if family else "") or "?"


EFFECT_HEADINGS = ("effect", "of", "speed-up", "memory")


def effect_cells(effect: Effect) -> tuple[str, ...]:
    """Returns the cells of one effect, by `EFFECT_HEADINGS`."""
    kind = "main" if len(effect.options) == 1 else "interaction"
    if effect.aliased_with:
        first, *others = effect.aliased_with
        more = f" and {len(others)} other{'s' if len(others) > 1 else ''}" if others else ""
        return kind, " × ".join(effect.options), f"aliased with {first}{more}", ""
    figures = [ratio_text(figure) if figure else "" for figure in (effect.speedup, effect.memory_ratio)]
    return kind, " × ".join(effect.options), *figures


ANSWER_HEADINGS = ("verdict", "option", "speed-up", "because")


def answer_cells(option: OptionAnswer) -> tuple[str, ...]:
    """Returns the cells of the verdict on one option, by `ANSWER_HEADINGS`."""
    images = [option.images] if option.ratios else []
    return str(option.worth), option.option, option.figure, "; ".join([*images, option.because])


SWEEP_NOTE = "Each job is a study of its own: a speed-up is against the baseline measured in the same job."
