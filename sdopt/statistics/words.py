"""Puts figures into words, alike in every report: times, memory, the sampling of a study, and start-up."""

import math
from collections.abc import Sequence

from sdopt.errors import counted
from sdopt.record.comparisons import BreakEven, Interval
from sdopt.record.records import Status, StudyResult
from sdopt.statistics.break_even import break_even_text, start_text
from sdopt.statistics.measures import Ratio
from sdopt.statistics.ratios import MINIMUM_PROCESSES, needed_processes


def seconds_text(interval: Interval) -> str:
    """Returns a time with its bounds, in milliseconds below one second, to three digits."""
    return " ".join(filter(None, seconds_parts(interval)))


def seconds_parts(interval: Interval) -> tuple[str, str]:
    """Returns a time and its bounds ("" if it has none) like `seconds_text`."""
    unit = "s"
    scale = 1.0
    if interval.estimate < 1:
        unit = "ms"
        scale = 1e3
    estimate = interval.estimate * scale
    digits = max(0, 3 - len(str(int(estimate))))
    text = f"{estimate:.{digits}f} {unit}"
    if interval.low is None or interval.high is None:
        return text, ""
    low = interval.low * scale
    high = interval.high * scale
    return text, f"[{low:.{digits}f}, {high:.{digits}f}]"


def times_text(before: float, after: float) -> str:
    """Returns two times, as in `501 → 260 ms` or `1.25 s → 640 ms`."""
    first = seconds_text(Interval(before))
    last = seconds_text(Interval(after))
    number, unit = first.split()
    if last.endswith(f" {unit}"):
        first = number
    return f"{first} → {last}"


def unit_text(per_image: bool) -> str:
    """Returns what follows a time or a speed-up that is that of one image; "" for one that is that of a call."""
    return " per image" if per_image else ""


def change_text(speedup: Ratio) -> str:
    """Returns a speed-up in words, as in `1.92× faster`, `2.30× slower`, or `0.3 % slower` of so small a change."""
    factor = speedup.interval.estimate
    way = "slower" if factor < 1 else "faster"
    times = max(factor, 1 / factor)
    if f"{times:.2f}" != "1.00":
        return f"{times:.2f}× {way}"
    share = f"{100 * (times - 1):.1f}"
    return "as fast" if share == "0.0" else f"{share} % {way}"


def gib_text(gib: float) -> str:
    """Returns an amount of memory, in MiB below one GiB."""
    if gib < 1:
        return f"{1024 * gib:.0f} MiB"
    return f"{gib:.2f} GiB"


def share_text(ratio: float) -> str:
    """Returns a ratio of amounts as what is added or saved, as in `+2 %`, `−22 %` or `8.2×`."""
    if not ratio < 2:
        return f"{ratio:.1f}×"
    change = round(100 * (ratio - 1))
    sign = "−" if change < 0 else "+"
    return f"{sign}{abs(change)} %"


def has_intervals(result: StudyResult) -> bool:
    """Returns whether some variant ran in enough processes for an interval."""
    processes = [len(variant.samples) for variant in result.variants]
    return max(processes, default=0) >= MINIMUM_PROCESSES


def intervals_text(result: StudyResult) -> str:
    """Returns which intervals the figures of a study have."""
    if has_intervals(result):
        return f"two-sided {100 * result.confidence:g} % intervals"
    return f"no intervals (needs {needed_processes(result.is_imported)} or more)"


def sampling_text(result: StudyResult) -> str:
    """Returns the rounds and processes of a study, and the intervals that they give; "" if nothing was timed."""
    calls: list[int] = []
    processes: list[int] = []
    for variant in result.variants:
        if variant.samples:
            calls.append(max(map(len, variant.samples.values())))
            processes.append(len(variant.samples))
        elif variant.status is Status.INTERRUPTED and variant.measurements:
            calls.append(0)
    if not processes:
        return ""
    intervals = intervals_text(result)
    if result.is_imported:
        return f"up to {max(calls)} calls of each process, {intervals}"
    # Within a budget, a variant that is shown to be faster or slower is not timed in further rounds.
    rounds = _counted(calls, "round", "rounds")
    # Each session that resumed or extended the study has chosen anew.
    kinds = {session.schedule for session in result.sessions}
    kinds = kinds or {result.schedule.kind}
    if kinds == {"interleaved"}:
        rounds = _counted(calls, "interleaved round", "interleaved rounds")
    elif len(kinds) == 1:
        rounds = f"Measured in blocks ({result.schedule.reason}), {rounds}"
    else:
        rounds = (
            f"Measured in blocks in some of {len(result.sessions)} sessions, {rounds}"
        )
    return f"{rounds}, {_counted(processes, 'process', 'processes')} per variant, {intervals}"


def _counted(counts: Sequence[int], singular: str, plural: str) -> str:
    """Returns how many of a thing there are, or from how many to how many."""
    least = min(counts)
    most = max(counts)
    if most == 1:
        return f"1 {singular}"
    if least == most:
        return f"{most} {plural}"
    return f"{least} to {most} {plural}"


def start_words(level: BreakEven | None) -> tuple[str, str, str] | None:
    """Returns in words a variant's extra start-up time, when it is spent, and after how many images it is repaid.

    Returns:
        such as "31.2 s", "before the first image" and "repaid after 310 images"; None if the time is no more than a
        call of the reference, or was not measured.
    """
    if level is None or not level.is_slower:
        return None
    return (
        seconds_text(Interval(level.extra_s)),
        start_text(level),
        break_even_text(level),
    )


def shortened(reasons: str) -> str:
    """Returns the first of several reasons, and how many more there are."""
    first, *rest = reasons.split("; ")
    return f"{first} ({counted(len(rest), 'more reason')})" if rest else first


def decibels_text(mse: float) -> str:
    """Returns a mean squared error of pixels between 0 and 1 as likeness in dB: more is closer."""
    return "identical" if mse <= 0 else f"{-10 * math.log10(mse):.0f} dB"
