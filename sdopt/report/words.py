"""Puts figures into words, alike in every report: times, memory, the sampling of a study, and start-up."""

from sdopt.analysis.break_even import break_even_text, start_text
from sdopt.analysis.figures import Figures
from sdopt.analysis.measures import MEMORY_RATIO
from sdopt.analysis.ratios import MINIMUM_PROCESSES
from sdopt.results.comparisons import BreakEven, Interval
from sdopt.results.records import StudyResult


def seconds_text(interval: Interval) -> str:
    """Returns a time with its bounds, in milliseconds below one second, to three digits."""
    unit, scale = ("ms", 1e3) if interval.estimate < 1 else ("s", 1.0)
    digits = max(0, 3 - len(str(int(interval.estimate * scale))))
    text = f"{interval.estimate * scale:.{digits}f} {unit}"
    if interval.low is None or interval.high is None:
        return text
    return f"{text} [{interval.low * scale:.{digits}f}, {interval.high * scale:.{digits}f}]"


def gib_text(gib: float) -> str:
    """Returns an amount of memory, in MiB below one GiB."""
    return f"{1024 * gib:.0f} MiB" if gib < 1 else f"{gib:.2f} GiB"


def memory_text(figures: Figures) -> str:
    """Returns the peak of memory, with its ratio; "" if it was not measured."""
    if figures.headline_memory is None:
        return ""
    ratio = figures.ratios.get(MEMORY_RATIO.name)
    return gib_text(figures.headline_memory[1]) + (f" ({ratio.interval.estimate:.2f}×)" if ratio else "")


def compared(result: StudyResult, figures: Figures) -> str:
    """Returns the variant's name, with that of its reference where this is not the baseline."""
    against = f" against {figures.reference}" if figures.reference not in ("", result.baseline) else ""
    return f"{figures.variant.name}{against}"


def has_intervals(result: StudyResult) -> bool:
    """Returns whether there are enough processes of each variant for an interval."""
    return result.config.replicates >= MINIMUM_PROCESSES


def intervals_text(result: StudyResult) -> str:
    """Returns which intervals the figures of a study have."""
    if has_intervals(result):
        return f"two-sided {100 * result.confidence:g} % intervals"
    return f"no intervals (needs protocol.replicates={MINIMUM_PROCESSES} or more)"


def sampling_text(result: StudyResult) -> str:
    """Returns the rounds and processes of a study, and the intervals that they give; "" if nothing was timed."""
    samples = [len(times) for variant in result.variants for times in variant.samples.values()]
    if not samples:
        return ""
    processes, most = result.config.replicates, max(len(variant.samples) for variant in result.variants)
    processes_text = "1 process" if most == 1 else f"{processes}{f' to {most}' if most > processes else ''} processes"
    rounds = f"{max(samples)} interleaved rounds"
    if result.schedule.kind != "interleaved":
        rounds = f"Measured in blocks ({result.schedule.reason}), {max(samples)} rounds"
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
