"""Puts figures into words, alike in every report: times, memory, the sampling of a study, and start-up."""

from typing import TYPE_CHECKING

from sdopt.record.comparisons import BreakEven, Interval
from sdopt.record.records import StudyResult
from sdopt.statistics.break_even import break_even_text, start_text
from sdopt.statistics.measures import MEMORY_RATIO, Ratio
from sdopt.statistics.ratios import MINIMUM_PROCESSES

if TYPE_CHECKING:
    from sdopt.statistics.rows import Row


def seconds_text(interval: Interval) -> str:
    """Returns a time with its bounds, in milliseconds below one second, to three digits."""
    return " ".join(filter(None, seconds_parts(interval)))


def seconds_parts(interval: Interval) -> tuple[str, str]:
    """Returns a time and its bounds ("" if it has none) like `seconds_text`."""
    unit, scale = ("ms", 1e3) if interval.estimate < 1 else ("s", 1.0)
    digits = max(0, 3 - len(str(int(interval.estimate * scale))))
    text = f"{interval.estimate * scale:.{digits}f} {unit}"
    if interval.low is None or interval.high is None:
        return text, ""
    return text, f"[{interval.low * scale:.{digits}f}, {interval.high * scale:.{digits}f}]"


def times_text(before: float, after: float) -> str:
    """Returns two times, as in `501 → 260 ms` or `1.25 s → 640 ms`."""
    first, last = seconds_text(Interval(before)), seconds_text(Interval(after))
    same = first.split()[1] == last.split()[1]
    return f"{first.split()[0] if same else first} → {last}"


def unit_text(per_image: bool) -> str:
    """Returns what follows a time or a speed-up that is that of one image; "" for one that is that of a call."""
    return " per image" if per_image else ""


def change_text(speedup: Ratio) -> str:
    """Returns a speed-up in words, as in `1.92× faster` or `2.30× slower`."""
    found = speedup.interval.estimate
    return f"{found:.2f}× faster" if found >= 1 else f"{1 / found:.2f}× slower"


def gib_text(gib: float) -> str:
    """Returns an amount of memory, in MiB below one GiB."""
    return f"{1024 * gib:.0f} MiB" if gib < 1 else f"{gib:.2f} GiB"


def share_text(ratio: float) -> str:
    """Returns a ratio of amounts as what is added or saved, as in `+2 %`, `−22 %` or `8.2×`."""
    if not ratio < 2:
        return f"{ratio:.1f}×"
    change = round(100 * (ratio - 1))
    return f"{'−' if change < 0 else '+'}{abs(change)} %"


def memory_text(row: "Row") -> str:
    """Returns the peak of memory, and by how much it differs from the baseline's; "" if it was not measured."""
    if row.headline_memory is None:
        return ""
    _, peak = row.headline_memory
    ratio = row.over_baseline.get(MEMORY_RATIO.name)
    return f"{gib_text(peak)} ({share_text(ratio.interval.estimate)})" if ratio else gib_text(peak)


def compared(result: StudyResult, row: "Row") -> str:
    """Returns the variant's name, with that of its reference where this is not the baseline."""
    if row.reference in ("", result.baseline):
        return row.name
    return f"{row.name} against {row.reference}"


def has_intervals(result: StudyResult) -> bool:
    """Returns whether some variant ran in enough processes for an interval."""
    return max((len(variant.samples) for variant in result.variants), default=0) >= MINIMUM_PROCESSES


def intervals_text(result: StudyResult) -> str:
    """Returns which intervals the figures of a study have."""
    if has_intervals(result):
        return f"two-sided {100 * result.confidence:g} % intervals"
    needed = (
        f"times of {MINIMUM_PROCESSES} replicates" if result.is_imported else f"protocol.replicates={MINIMUM_PROCESSES}"
    )
    return f"no intervals (needs {needed} or more)"


def sampling_text(result: StudyResult) -> str:
    """Returns the rounds and processes of a study, and the intervals that they give; "" if nothing was timed."""
    calls_of = [max(map(len, variant.samples.values())) for variant in result.variants if variant.samples]
    if not calls_of:
        return ""
    fewest_calls, most_calls = min(calls_of), max(calls_of)
    if result.is_imported:
        return f"up to {most_calls} calls of each process, {intervals_text(result)}"
    counts = [len(variant.samples) for variant in result.variants if variant.samples]
    least, most = min(counts), max(counts)
    processes_text = "1 process" if most == 1 else f"{least}{f' to {most}' if most > least else ''} processes"
    # Within a budget, a variant that is shown to be faster or slower is not timed in further rounds.
    count = str(most_calls) if fewest_calls == most_calls else f"{fewest_calls} to {most_calls}"
    plural = "s" if most_calls > 1 else ""
    rounds = f"{count} interleaved round{plural}"
    if result.schedule.kind != "interleaved":
        rounds = f"Measured in blocks ({result.schedule.reason}), {count} round{plural}"
    return f"{rounds}, {processes_text} per variant, {intervals_text(result)}"


def start_words(level: BreakEven | None) -> tuple[str, str, str] | None:
    """Returns in words a variant's extra start-up time, when it is spent, and after how many images it is repaid.

    Returns:
        such as "31.2 s", "before the first image" and "repaid after 310 images"; None if the time is no more than a
        call of the reference, or was not measured.
    """
    if level is None or not level.is_slower:
        return None
    return seconds_text(Interval(level.extra_s)), start_text(level), break_even_text(level)


def shortened(reasons: str) -> str:
    """Returns the first of several reasons, and how many more there are."""
    first, *others = reasons.split("; ")
    return f"{first} (and {len(others)} more)" if others else first
