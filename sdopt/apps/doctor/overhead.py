"""Reports sdopt's own time beside the pipelines that it measures, from the timeline of a finished command."""

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from sdopt.record.files import write_atomically
from sdopt.report.blocks import Block, Notes, Table
from sdopt.study.timeline import Span, read_timeline

EXIT = "starting Python, and ending the process"

TARGETS = {"wall_over_calls": 1.2, "worker_start_s": 0.1, "first_timed_call_s": 20.0}
"""Targets on an idle machine, with an existing database."""


@dataclass
class Overhead:
    """Seconds of one command; its phases add up to its wall time."""

    command: list[str]
    wall_s: float
    calls_s: float
    """The sum of all calls of a pipeline: cold, warm, timed, instrumented, traced, and those that make the images."""
    wall_over_calls: float
    first_timed_call_s: float
    """From the start of the command to the first call of the first round, when all workers are loaded and warm."""
    worker_start_s: list[float]
    """Start of each worker but the first: from starting its process to its first answer."""
    phases: list[Span]
    """Each over all variants."""


def read_overhead(folder: Path, wall_s: float, command: list[str]) -> Overhead:
    """Reads the timeline in a run's folder, of a command whose wall time was `wall_s` seconds.

    Raises:
        OSError: the run left no timeline.
        ValueError: it timed nothing.
    """
    spans = read_timeline(folder)
    outside = wall_s - sum(span.seconds for span in spans)
    phases: dict[str, Span] = {}
    for span in [*spans, Span(EXIT, "", wall_s, outside, 0.0, 1)]:
        phase = phases.setdefault(span.phase, Span(span.phase, "", span.begun_s))
        phase.seconds += span.seconds
        phase.in_calls_s += span.in_calls_s
        phase.entered += span.entered
    begun = next((span.begun_s for span in spans if span.phase == "timing"), None)
    if begun is None:
        raise ValueError(f"{folder}: nothing was timed")
    # Spans without a variant are those of several workers side by side.
    _, *later = (
        span.seconds / span.entered
        for span in spans
        if span.phase == "starting" and span.variant
    )
    calls_s = sum(span.in_calls_s for span in spans)
    return Overhead(
        command=command,
        wall_s=wall_s,
        calls_s=calls_s,
        wall_over_calls=wall_s / calls_s,
        first_timed_call_s=begun,
        worker_start_s=later,
        phases=list(phases.values()),
    )


def write_overhead(found: Overhead, folder: Path) -> Path:
    """Writes `overhead.json`. Raises OSError."""
    path = folder / "overhead.json"
    write_atomically(
        path, json.dumps(asdict(found) | {"targets": TARGETS}, indent=1).encode()
    )
    return path


def overhead_blocks(found: Overhead) -> list[Block]:
    """Returns tables of the time by phase, and of the figures that have a target."""
    whole = Span("wall time", "", 0.0, found.wall_s, found.calls_s, 1)
    phases = []
    for phase in (*found.phases, whole):
        share = f"{100 * phase.seconds / found.wall_s:.1f} %"
        in_calls = f"{phase.in_calls_s:.2f}" if phase.in_calls_s else ""
        rest = f"{phase.seconds - phase.in_calls_s:.2f}"
        phases.append((phase.phase, f"{phase.seconds:.2f}", share, in_calls, rest))
    start = (
        f"{statistics.median(found.worker_start_s):.3f} s"
        if found.worker_start_s
        else ""
    )
    figures = [
        (
            "wall time over all pipeline calls",
            f"{found.wall_over_calls:.2f}",
            f"≤ {TARGETS['wall_over_calls']}",
        ),
        (
            "worker start after the first (median)",
            start,
            f"≤ {TARGETS['worker_start_s']} s",
        ),
        (
            "command to first timed call",
            f"{found.first_timed_call_s:.1f} s",
            f"≤ {TARGETS['first_timed_call_s']:g} s",
        ),
    ]
    headings = ("where the time went", "seconds", "share", "in calls", "besides")
    note = "A worker's start: from starting its process to its first answer. Calls: all of the pipeline, timed or not."
    return [
        Table(headings, phases, headings[1:]),
        Table(
            ("", "found", "target on an idle machine"),
            figures,
            ("found", "target on an idle machine"),
        ),
        Notes([note]),
    ]
