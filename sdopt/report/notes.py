"""Derives the notes below a result table: what its figures include, and what disturbed or limits them."""

from collections import Counter
from collections.abc import Iterator

from sdopt.gate.trust import doubts_of
from sdopt.record.choices import NONE, difference, option_name
from sdopt.record.comparisons import Interval
from sdopt.record.records import Status, StudyResult, VariantResult
from sdopt.record.samples import GpuState
from sdopt.report.columns import compared
from sdopt.report.summary import Summary
from sdopt.statistics.break_even import compiled_earlier_s
from sdopt.statistics.disturbance import count_rounds, unsettled
from sdopt.statistics.figures import floor_range
from sdopt.statistics.measures import TAIL_RATIO
from sdopt.statistics.precision import kept_going
from sdopt.statistics.row_figures import LAUNCH_BOUND, busy_share
from sdopt.statistics.words import (
    sampling_text,
    seconds_text,
    shortened,
    start_words,
)


def notes_of(summary: Summary) -> Iterator[str]:
    """Yields all notes that a reader of the tables needs."""
    result = summary.result
    if len(result.shapes) > 1:
        yield (
            f"Shapes: each process runs all {len(result.shapes)} in every round. The first call of a shape comes after "
            "the first calls of the shapes before it, so it includes only the start-up work that they left to do. "
            f"Images, stages and energy are those of {result.shapes[0]}."
        )
    yield from caveats_of(summary)
    if any(row.speedup for row in summary.rows):
        yield _speedup_note(result)
    tails = "; ".join(_tails(summary))
    if tails:
        yield f"Slowest call of a process (tail latency), over that of the reference's: {tails}."
    for peak in sorted(
        {process.peak[0] for process in result.measurements if process.peak}
    ):
        what = (
            "memory_gib of the folders' tables" if result.is_imported else _MEMORY[peak]
        )
        yield f"Memory: {what}; the geometric mean of a variant's processes."
    reached = _reached(summary)
    if reached:
        yield reached
    yield from gpu_notes(result)
    yield from _effects_notes(result)


def _speedup_note(result: StudyResult) -> str:
    """Returns what a speed-up is a ratio of."""
    sessions = len(result.sessions)
    where = ""
    rounds = "the same rounds"
    if sessions > 1:
        where = f"Measured in {sessions} sessions with processes of their own. "
        rounds = "rounds of the same session"
    if result.is_imported:
        rounds = "calls for the same images"
    return (
        f"{where}A speed-up is a ratio of geometric means over {rounds}, "
        "so it need not be the ratio of the two latencies shown."
    )


def _tails(summary: Summary) -> Iterator[str]:
    """Yields the ratios of the slowest calls that are shown to differ."""
    for row in summary.figures:
        if row.variant.is_control:
            continue
        for at_shape in row.shapes:
            ratio = at_shape.beside_reference.get(TAIL_RATIO.name)
            if ratio is None or not ratio.gain:
                continue
            shape = f" at {at_shape.shape}" if row.further else ""
            yield f"{compared(summary.result, row)} {ratio.text}{shape}"


def _effects_notes(result: StudyResult) -> Iterator[str]:
    if not result.effects:
        return
    untimed = [variant.name for variant in result.variants if variant.given_up]
    if untimed:
        yield (
            f"Effects without {'; '.join(untimed)}, which were clearly slower and not timed further "
            "(protocol.give_up=null times them): what the others cannot tell apart is aliased, and has no figure."
        )
    yield (
        "Effects: a main effect is averaged over the other options; an interaction above 1 means that two options "
        "are faster (or larger) together than the product of their separate effects."
    )


_MEMORY = {
    "peak_allocated_gib": "peak that PyTorch allocated on the device, including that of CUDA graphs and DeepSpeed",
    "peak_process_gib": "peak resident set of the process and its child processes during a call, minus that before "
    "loading",
}


def caveats_of(summary: Summary) -> Iterator[str]:
    """Yields what the verdicts rest on, and what speaks against them: the notes that come first."""
    result = summary.result
    if result.is_imported:
        yield (
            "Imported: other programs made these images and times. sdopt saw neither what ran nor how it was timed; "
            "seeds, prompts and versions are as the folders say."
        )
        yield from _programs_note(result)
        yield from _untold_note(result)
    sampling = sampling_text(result)
    if sampling:
        yield f"{sampling}.{_drift_text(result)}"
    yield from filter(
        None, [_floor_note(result), _rounds_note(result), _precision_note(result)]
    )
    restless = unsettled(result)
    if restless:
        warm = "raise protocol.warmup"
        if result.is_imported:
            warm = "make more calls before the first that counts"
        way_out = f"{warm}, or let the machine reach a steady temperature"
        yield f"Never settled: {shortened('; '.join(restless))}: {way_out}."
    yield from _start_notes(summary)
    for doubt in doubts_of(result):
        yield f"Doubtful: {doubt}."
    hardware = result.config.hardware
    if hardware.emulate_memory and hardware.sheet is not None:
        yield (
            f"Memory of an {hardware.sheet.name} ({hardware.sheet.memory_gib:g} GiB) emulated: PyTorch's allocator was "
            f"capped; times are those of {result.environment.device['name']}."
        )
    yield from _random_weights_note(result)
    for line in lora_apart(result):
        yield f"Unlike images: {line}."
    if any(variant.status is Status.NOT_ENGAGED for variant in result.variants):
        yield "not_engaged: the option ran, and nothing shows that it was active; its figures are not attributed to it."


def lora_apart(result: StudyResult) -> list[str]:
    """Returns that the candidate of a pair has a LoRA beside other options, and its baseline none; [] if not so."""
    baseline = result.baseline_variant.choices
    if result.design != "pair" or baseline.get("lora", NONE) != NONE:
        return []
    lines = []
    for variant in result.candidates:
        changed = difference(variant.choices, baseline)
        lora = option_name(changed.pop("lora", NONE))
        changed.pop("scheduler", None)  # of a LoRA that was distilled to a few steps
        if lora != NONE and changed:
            lines.append(
                f"the LoRA is in '{variant.name}' alone, so that its style counts as a difference of images, too: "
                f"study.baseline=[lora:{lora}] gives it to the baseline"
            )
    return lines


def _random_weights_note(result: StudyResult) -> Iterator[str]:
    """Yields what figures of untrained weights hold for; what images decide is not that of a trained model."""
    timed = []
    deciding = []
    for variant in result.variants:
        if variant.config.random_weights and variant.status.timed:
            timed.append(variant.name)
            if variant.skips_by_image:
                deciding.append(variant.name)
    if not timed:
        return
    apart = ""
    if deciding:
        apart = (
            f", but for the speed of {', '.join(deciding)}: how many steps are skipped there depends on the images, and "
            "untrained weights make others"
        )
    yield (
        f"Random weights: speed and memory are those of the real model{apart}; images show only how far variants agree."
    )


def _drift_text(result: StudyResult) -> str:
    drifts = [abs(drift - 1) for drift in result.schedule.drift.values()]
    if not drifts:
        return ""
    return f" Drift of the baseline over a block: at most {100 * max(drifts):.1f} %."


def _programs_note(result: StudyResult) -> Iterator[str]:
    """Yields which variants another program made than the baseline, as far as their images say it."""
    baseline = result.baseline_variant
    program, version = baseline.made_by, baseline.made_by_version
    others = []
    updated = []
    for variant in result.candidates:
        if variant.made_by and variant.made_by != program:
            others.append(f"{variant.name} by {variant.made_by}")
        elif variant.made_by and variant.made_by_version not in ("", version):
            updated.append(f"{variant.name} by {variant.made_by_version}")
    if version and updated:
        yield (
            f"Two versions of {program}: the baseline's images are by {version}, {', '.join(updated)}. What the program "
            "itself has changed counts as a difference, of images and of times."
        )
    if program and others:
        yield (
            f"Two programs: the baseline's images are by {program}, {', '.join(others)}. Programs weigh words in "
            "brackets and draw noise in ways of their own, which counts as a difference."
        )


def _untold_note(result: StudyResult) -> Iterator[str]:
    """Yields for each variant that the settings of some images were not compared, since one side does not tell them."""
    for variant in result.variants:
        if variant.untold:
            yield f"Settings not compared: of the images of {variant.name}, {variant.untold}."


def _floor_note(result: StudyResult) -> str:
    """Returns by how much two identical baselines differed."""
    known = floor_range(result)
    if result.control is not None and known is not None:
        floors = "; ".join(_floors_at_shapes(result))
        smallest = result.config.protocol.smallest_speedup
        unless = ""
        if smallest >= min(known) - 1:
            unless = f", or not shown to be above {100 * smallest:g} % (protocol.smallest_speedup),"
        return f"Two identical baselines differed by {floors}; a speed-up that is no larger{unless} is too close to call."
    if not any(variant.status.timed and variant.samples for variant in result.variants):
        return ""
    if result.is_imported and result.control is None:
        return "Without the baseline's images and times once more (--again), nothing says which difference is chance."
    if result.baseline_variant.status.failure:
        return ""  # which the answer says
    ended = (
        f"it ended as {result.control.status}" if result.control else "there is none"
    )
    return f"No times of a repeated baseline ({ended}), so that no speed-up can be told from chance."


def _floors_at_shapes(result: StudyResult) -> Iterator[str]:
    for index, shape in enumerate(result.shapes):
        floors = floor_range(result.at(index))
        if floors is not None:
            where = f" at {shape}" if len(result.shapes) > 1 else ""
            yield f"{_floor_text(*floors)}{where}"


def _floor_text(low: float, high: float) -> str:
    """Returns the floors of all comparisons; they differ between sessions."""
    least = f"{100 * (low - 1):.1f}"
    most = f"{100 * (high - 1):.1f}"
    if least == most:
        return f"{least} %"
    return f"{least} to {most} %, by the sessions of a comparison"


def _precision_note(result: StudyResult) -> str:
    """Returns which speed-ups needed more processes for `protocol.precision`, and whether all reached it; or ""."""
    precision = result.config.protocol.precision
    if precision is None or result.precision is None:
        return ""
    short = []
    needing = []
    for name, (processes, needed) in kept_going(result).items():
        if processes < needed:
            short.append(name)
            needing.append(f"{name} ({processes} of {needed} processes)")
        else:
            needing.append(f"{name} ({needed} processes)")
    added = (
        f"more processes were needed for {', '.join(needing)}"
        if needing
        else "no more processes were needed"
    )
    ending = ""
    if short:
        stopped = f": {result.precision.stopped}" if result.precision.stopped else ""
        ending = f"; not reached by {', '.join(short)}{stopped}"
    return (
        f"Precision: ±{100 * precision:g} % for every speed-up, from the deviation of "
        f"{result.config.replicates} processes; {added}{ending}."
    )


def _rounds_note(result: StudyResult) -> str:
    """Returns how many rounds other work on the machine disturbed, and how they were handled; "" if none was."""
    counts = count_rounds(result)
    limit = result.config.protocol.interference
    if counts is None or limit is None or not counts.disturbed:
        return ""
    causes = {
        "waiting for a core": counts.waited,
        "time that the hypervisor gave to other machines": counts.stolen,
        "other processes on the GPU": counts.on_gpu,
    }
    # Several causes together may exceed the limit that none of them does alone.
    least = limit if max(causes.values()) > limit else 0.0
    reasons = []
    for cause, share in causes.items():
        if share > least:
            reasons.append(f"{cause} up to {100 * share:.{int(share < 0.1)}f} %")
    reasons.append(f"limit {100 * limit:g} %")
    uses = []
    if counts.left_out:
        uses.append(f"{counts.left_out} left out")
    if counts.undecided:
        uses.append(f"{counts.undecided} used anyway, because too few were undisturbed")
    return (
        f"Disturbed by other work: {counts.disturbed} of {counts.timed} rounds "
        f"({', '.join(reasons)}); {', '.join(uses)}."
    )


_MOST_STARTS = 8
"""Start-ups that a note tells of, in the order of the study."""


def _start_notes(summary: Summary) -> Iterator[str]:
    """Yields notes on the extra start-up time of options, if it is large."""
    starts = []
    for row in summary.figures:
        words = start_words(row.break_even)
        if words is not None and not row.variant.is_control:
            extra, when, repaid = words
            starts.append(
                f"{row.variant.name} takes {extra} longer than {row.reference} {when}, {repaid}"
            )
    if starts:
        more = len(starts) - _MOST_STARTS
        rest = f"; and {more} more, in table.csv (start/extra_s)" if more > 0 else ""
        yield f"Start-up: {'; '.join(starts[:_MOST_STARTS])}{rest}."
    packages = []
    for variant in summary.result.variants:
        seconds = compiled_earlier_s(variant)
        if seconds:
            packages.append(f"{variant.name} in {seconds_text(Interval(seconds))}")
    if packages:
        listed = "; ".join(packages)
        yield f"Earlier runs compiled packages that were loaded here: {listed}. The start-up includes this."


def _reached(summary: Summary) -> str:
    """Returns the share of the card's peak rate that variants reached; "" without a data sheet."""
    sheet = summary.result.environment.sheet
    if sheet is None:
        return ""
    shares: dict[tuple[str, float], list[str]] = {}
    for name, row in summary.first.items():
        share = row.flat.get("compute/of_peak")
        if row.peak_rate is not None and share is not None:
            shares.setdefault(row.peak_rate, []).append(f"{name} {100 * share:.0f} %")
    if not shares:
        return ""
    reached = []
    for (kind, rate), names in shares.items():
        reached.append(f"of {kind}'s {rate:g} TFLOP/s {', '.join(names)}")
    return f"Reached of the dense peak of {sheet.name}, denoiser, VAE and text encoder together: {'; '.join(reached)}."


_ROUNDED = (
    "products and convolutions of float32 were rounded where no option asked for it"
)

_DISTORTING = {
    "CUDA_LAUNCH_BLOCKING": "each kernel was waited for before the next was launched",
    "DIFFUSERS_ATTN_BACKEND": "it replaces the attention of transformers where no option names one",
    "DNNL_DEFAULT_FPMATH_MODE": _ROUNDED,
    "ONEDNN_DEFAULT_FPMATH_MODE": _ROUNDED,
    "NVIDIA_TF32_OVERRIDE": "it overrides whether products and convolutions are rounded to TF32",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "each tensor was allocated by the driver",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "it allows TF32 in matrix products where no option asked for it",
}
"""Environment variables that make timings and images unrepresentative of other machines."""


def gpu_notes(result: StudyResult) -> list[str]:
    """Returns what a reader needs to know beside the table: of the GPU, and of variables that change results."""
    environment = result.environment
    notes = list(filter(None, [throttling_note(result), busy_note(result)]))
    for name, effect in _DISTORTING.items():
        value = environment.variables.get(name)
        if value:
            notes.append(f"{name}={value} was set: {effect}.")
    processes = environment.gpu.get("processes", [])
    if processes:
        gib = sum(process["gib"] or 0.0 for process in processes)
        notes.append(
            f"{len(processes)} other processes were on the GPU when the study began, with {gib:.1f} GiB."
        )
    return notes


def throttling_note(result: StudyResult) -> str:
    """Returns which of the timed calls were throttled, and by what; "" where none was."""
    causes: Counter[str] = Counter()
    rounds = []
    for variant in result.variants:
        states = _gpu_states(variant)
        throttled = [state for state in states if state.throttled]
        for state in throttled:
            causes.update(state.throttled)
        if throttled:
            rounds.append(f"{variant.name} {len(throttled)} of {len(states)}")
    if not rounds:
        return ""
    names = ", ".join(name for name, _ in causes.most_common())
    return f"Rounds in which the GPU was throttled ({names}): {', '.join(rounds)}."


def _gpu_states(variant: VariantResult) -> list[GpuState]:
    """Returns the state of the GPU after each timed call, as far as it is known."""
    states = []
    for measurement in variant.measurements:
        for samples in measurement.shapes:
            states += [call.gpu for call in samples.calls if call.gpu]
    return states


def busy_note(result: StudyResult) -> str:
    """Returns which variants leave the GPU idle between kernels; "" where none does."""
    idle = []
    for variant in result.variants:
        share = busy_share(variant)
        if share is not None and share < LAUNCH_BOUND:
            idle.append(f"{variant.name} {100 * share:.0f} %")
    if not idle:
        return ""
    return (
        f"GPU busy during a denoiser step: {', '.join(idle)}. The rest of the time it waited for Python to launch "
        "kernels, so that faster kernels gain little there; compilers, CUDA graphs, larger batches and larger images "
        "gain more."
    )
