"""Derives the notes below a result table: what its figures include, and what disturbed or limits them."""

from collections import Counter
from collections.abc import Iterator

from sdopt.gate.trust import doubts_of
from sdopt.record.comparisons import Interval
from sdopt.record.records import Status, StudyResult
from sdopt.statistics.break_even import compiled_earlier_s
from sdopt.statistics.disturbance import count_rounds, unsettled
from sdopt.statistics.figures import floor_range
from sdopt.statistics.measures import TAIL_RATIO
from sdopt.statistics.outcomes import LAUNCH_BOUND, busy_share
from sdopt.statistics.ratios import kept_going
from sdopt.statistics.summary import Summary
from sdopt.statistics.words import compared, sampling_text, seconds_text, shortened, start_words


def notes_of(summary: Summary) -> Iterator[str]:
    """Yields all notes that a reader of the tables needs."""
    result, sessions = summary.result, len(summary.result.sessions)
    if len(result.shapes) > 1:
        yield (
            f"Shapes: each process runs all {len(result.shapes)} in every round. The first call of a shape comes after "
            "the first calls of the shapes before it, so it includes only the start-up work that they left to do. "
            f"Images, stages and energy are those of {result.shapes[0]}."
        )
    yield from caveats_of(summary)
    if any(row.speedup for row in summary.rows):
        where = "" if sessions <= 1 else f"Measured in {sessions} sessions with processes of their own. "
        rounds = "the same rounds" if sessions <= 1 else "rounds of the same session"
        rounds = "calls for the same images" if result.is_imported else rounds
        yield (
            f"{where}A speed-up is a ratio of geometric means over {rounds}, so it need not be the ratio of the two "
            "latencies shown."
        )
    tails = [
        f"{compared(result, row)} {ratio.text}{f' at {at.shape}' if row.further else ''}"
        for row in summary.figures
        for at in row.shapes
        if (ratio := at.beside_reference.get(TAIL_RATIO.name)) and ratio.gain and not row.variant.is_control
    ]
    if tails:
        yield f"Slowest call of a process (tail latency), over that of the reference's: {'; '.join(tails)}."
    for name in sorted({m.peak[0] for variant in result.variants for m in variant.measurements if m.peak}):
        what = "memory_gib of the folders' tables" if result.is_imported else _MEMORY[name]
        yield f"Memory: {what}; the geometric mean of a variant's processes."
    if reached := _reached(summary):
        yield reached
    yield from gpu_notes(result)
    untimed = [variant.name for variant in result.variants if variant.given_up]
    if result.effects and untimed:
        yield (
            f"Effects without {'; '.join(untimed)}, which were clearly slower and not timed further "
            "(protocol.give_up=null times them): what the others cannot tell apart is aliased, and has no figure."
        )
    if result.effects:
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
    result, sampling = summary.result, sampling_text(summary.result)
    if result.is_imported:
        yield (
            "Imported: other programs made these images and times. sdopt saw neither what ran nor how it was timed; "
            "seeds, prompts and versions are as the folders say."
        )
        yield from _programs_note(result)
    if sampling:
        drifts = [abs(drift - 1) for drift in result.schedule.drift.values()]
        drift = f" Drift of the baseline over a block: at most {100 * max(drifts):.1f} %." if drifts else ""
        yield f"{sampling}.{drift}"
    yield from filter(None, (_floor_note(result), _rounds_note(result), _precision_note(result)))
    if restless := unsettled(result):
        way_out = "raise protocol.warmup, or let the machine reach a steady temperature"
        yield f"Never settled: {shortened('; '.join(restless))}: {way_out}."
    yield from _start_notes(summary)
    yield from (f"Doubtful: {doubt}." for doubt in doubts_of(result))
    hardware = result.config.hardware
    if hardware.emulate_memory and hardware.sheet is not None:
        yield (
            f"Memory of an {hardware.sheet.name} ({hardware.sheet.memory_gib:g} GiB) emulated: PyTorch's allocator was "
            f"capped; times are those of {result.environment.device['name']}."
        )
    if any(variant.config.random_weights and variant.status.timed for variant in result.variants):
        yield "Random weights: speed and memory are those of the real model; images show only how far variants agree."
    if any(variant.status is Status.NOT_ENGAGED for variant in result.variants):
        yield "not_engaged: the option ran, and nothing shows that it was active; its figures are not attributed to it."


def _programs_note(result: StudyResult) -> Iterator[str]:
    """Yields which variants another program made than the baseline, as far as their images say it."""
    own = result.variant(result.baseline).made_by
    others = [f"{row.name} by {row.made_by}" for row in result.candidates if row.made_by and row.made_by != own]
    if own and others:
        yield (
            f"Two programs: the baseline's images are by {own}, {', '.join(others)}. Programs weigh words in brackets "
            "and draw noise in ways of their own, which counts as a difference."
        )


def _floor_note(result: StudyResult) -> str:
    """Returns by how much two identical baselines differed."""
    if result.control is not None and floor_range(result) is not None:
        several = len(result.shapes) > 1
        floors = [(shape, floor_range(result.at(index))) for index, shape in enumerate(result.shapes)]
        share = "; ".join(
            f"{_floor_text(*ends)}{f' at {shape}' if several else ''}" for shape, ends in floors if ends is not None
        )
        return f"Two identical baselines differed by {share}; a speed-up that is no larger is too close to call."
    if not any(variant.status.timed and variant.samples for variant in result.variants):
        return ""
    if result.is_imported and result.control is None:
        return "Without the baseline's images and times once more (--again), nothing says which difference is chance."
    if result.variant(result.baseline).status.failure:
        return ""  # which the answer says
    ended = f"it ended as {result.control.status}" if result.control else "there is none"
    return f"No times of a repeated baseline ({ended}), so that no speed-up can be told from chance."


def _floor_text(low: float, high: float) -> str:
    """Returns the floors of all comparisons; they differ between sessions."""
    first, last = (f"{100 * (floor - 1):.1f}" for floor in (low, high))
    return f"{first} %" if first == last else f"{first} to {last} %, by the sessions of a comparison"


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
        "other processes on the GPU": counts.on_gpu,
    }
    # Several causes together may exceed the limit that none of them does alone.
    least = limit if max(causes.values()) > limit else 0.0
    named = [f"{cause} up to {100 * share:.{int(share < 0.1)}f} %" for cause, share in causes.items() if share > least]
    uses = [f"{counts.left_out} left out"] if counts.left_out else []
    if counts.undecided:
        anyway = "used anyway, because too few were undisturbed"
        uses.append(f"{counts.undecided} {anyway}")
    return (
        f"Disturbed by other work: {counts.disturbed} of {counts.timed} rounds "
        f"({', '.join([*named, f'limit {100 * limit:g} %'])}); {', '.join(uses)}."
    )


def _start_notes(summary: Summary) -> Iterator[str]:
    """Yields notes on the extra start-up time of options, if it is large."""
    starts = [
        f"{row.variant.name} takes {start[0]} longer than {row.reference} {start[1]}, {start[2]}"
        for row in summary.figures
        if (start := start_words(row.break_even)) and not row.variant.is_control
    ]
    if starts:
        yield f"Start-up: {'; '.join(starts)}."
    packages = {variant.name: compiled_earlier_s(variant) for variant in summary.result.variants}
    loaded = [f"{name} in {seconds_text(Interval(spent_s))}" for name, spent_s in packages.items() if spent_s]
    if loaded:
        yield f"Earlier runs compiled packages that were loaded here: {'; '.join(loaded)}. The start-up includes this."


def _reached(summary: Summary) -> str:
    """Returns the share of the card's peak rate that variants reached; "" without a data sheet."""
    sheet, shares = summary.result.environment.sheet, dict[tuple[str, float], list[str]]()
    for name, row in summary.first.items():
        share = row.flat.get("compute/of_peak")
        if row.peak_rate is not None and share is not None:
            shares.setdefault(row.peak_rate, []).append(f"{name} {100 * share:.0f} %")
    if not shares or sheet is None:
        return ""
    told = "; ".join(f"of {kind}'s {rate:g} TFLOP/s {', '.join(names)}" for (kind, rate), names in shares.items())
    return f"Reached of the dense peak of {sheet.name}, denoiser, VAE and text encoder together: {told}."


_ROUNDED = "products and convolutions of float32 were rounded where no option asked for it"

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
    notes = [note for note in (throttling_note(result), busy_note(result)) if note]
    notes += [
        f"{name}={environment.variables[name]} was set: {what}."
        for name, what in _DISTORTING.items()
        if environment.variables.get(name)
    ]
    others = environment.gpu.get("processes", [])
    if others:
        held = sum(other["gib"] or 0.0 for other in others)
        notes.append(f"{len(others)} other processes were on the GPU when the study began, with {held:.1f} GiB.")
    return notes


def throttling_note(result: StudyResult) -> str:
    """Returns which of the timed calls were throttled, and by what; "" where none was."""
    states = {
        variant.name: [
            call.gpu for m in variant.measurements for samples in m.shapes for call in samples.calls if call.gpu
        ]
        for variant in result.variants
    }
    counts = {name: sum(bool(s.throttled) for s in of_one) for name, of_one in states.items()}
    if not any(counts.values()):
        return ""
    reasons = Counter(reason for of_one in states.values() for s in of_one for reason in s.throttled)
    rounds = ", ".join(f"{name} {count} of {len(states[name])}" for name, count in counts.items() if count)
    return f"Rounds in which the GPU was throttled ({', '.join(name for name, _ in reasons.most_common())}): {rounds}."


def busy_note(result: StudyResult) -> str:
    """Returns which variants leave the GPU idle between kernels; "" where none does."""
    shares = {variant.name: busy_share(variant) for variant in result.variants}
    idle = {name: share for name, share in shares.items() if share is not None and share < LAUNCH_BOUND}
    if not idle:
        return ""
    listed = ", ".join(f"{name} {100 * share:.0f} %" for name, share in idle.items())
    return (
        f"GPU busy during a denoiser step: {listed}. The rest of the time it waited for Python to launch kernels, so "
        f"that faster kernels gain little there; compilers, CUDA graphs, larger batches and larger images gain more."
    )
