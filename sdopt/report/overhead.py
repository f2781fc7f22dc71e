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
class Phase:
    """One phase over all variants."""

    phase: str
    seconds: float
    in_calls_s: float
    entered: int


@dataclass
class Overhead:
    """Seconds of one command; its phases add up to its wall time."""

    command: list[str]
    wall_s: float
    calls_s: float
    """The sum of all calls of a pipeline: cold, warm, timed, instrumented, traced, and those that make the images."""
    wall_over_calls: float
    first_call_s: float
    """From the start of the command to the first call of a pipeline: a cold start."""
    first_timed_call_s: float
    """From the start of the command to the first call of the first round, when all workers are loaded and warm."""
    first_worker_start_s: float
    worker_start_s: list[float]
    """Start of each later worker: from starting its process to its first answer."""
    worker_load_s: list[float]
    """Loading the model and applying the options after the start, including the first worker's."""
    phases: list[Phase]


def read_overhead(folder: Path, wall_s: float, command: list[str]) -> Overhead:
    """Reads the timeline in a run's folder, of a command whose wall time was `wall_s` seconds.

    Raises:
        OSError: the run left no timeline.
        ValueError: it timed nothing.
    """
    spans = read_timeline(folder)
    outside = wall_s - sum(span.seconds for span in spans)
    phases: dict[str, Phase] = {}
    for span in [*spans, Span(EXIT, "", wall_s, outside, 0.0, 1)]:
        phase = phases.setdefault(span.phase, Phase(span.phase, 0.0, 0.0, 0))
        phase.seconds += span.seconds
        phase.in_calls_s += span.in_calls_s
        phase.entered += span.entered
    # Spans without a variant are those of several workers side by side.
    begins = {
        phase: [span.seconds / span.entered for span in spans if span.phase == phase and span.variant]
        for phase in ("starting", "loading")
    }
    begun = {span.phase: span.begun_s for span in reversed(spans)}
    if "timing" not in begun:
        raise ValueError(f"{folder}: nothing was timed")
    calls_s = sum(span.in_calls_s for span in spans)
    return Overhead(
        command=command,
        wall_s=wall_s,
        calls_s=calls_s,
        wall_over_calls=wall_s / calls_s,
        first_call_s=begun["cold start"],
        first_timed_call_s=begun["timing"],
        first_worker_start_s=begins["starting"][0],
        worker_start_s=begins["starting"][1:],
        worker_load_s=begins["loading"],
        phases=list(phases.values()),
    )


def write_overhead(found: Overhead, folder: Path) -> Path:
    """Writes `overhead.json`. Raises OSError."""
    path = folder / "overhead.json"
    write_atomically(path, json.dumps(asdict(found) | {"targets": TARGETS}, indent=1).encode())
    return path


def overhead_blocks(found: Overhead) -> list[Block]:
    """Returns tables of the time by phase, and of the figures that have a target."""
    whole = Phase("wall time", found.wall_s, found.calls_s, 1)
    phases = [
        (
            phase.phase,
            f"{phase.seconds:.2f}",
            f"{100 * phase.seconds / found.wall_s:.1f} %",
            f"{phase.in_calls_s:.2f}" if phase.in_calls_s else "",
            f"{phase.seconds - phase.in_calls_s:.2f}",
        )
        for phase in (*found.phases, whole)
    ]
    first, later, load = found.first_worker_start_s, found.worker_start_s, statistics.median(found.worker_load_s)
    figures = [
        ("wall time over all pipeline calls", f"{found.wall_over_calls:.2f}", f"≤ {TARGETS['wall_over_calls']}"),
        (
            "worker start after the first (median)",
            f"{statistics.median(later):.3f} s" if later else "",
            f"≤ {TARGETS['worker_start_s']} s",
        ),
        ("the first worker's start", f"{first:.3f} s", ""),
        ("loading a model (median)", f"{load:.3f} s", ""),
        ("command to first call (cold)", f"{found.first_call_s:.1f} s", ""),
        ("command to first timed call", f"{found.first_timed_call_s:.1f} s", f"≤ {TARGETS['first_timed_call_s']:g} s"),
    ]
    headings = ("where the time went", "seconds", "share", "in calls", "besides")
    note = "A worker's start: from starting its process to its first answer. Calls: all of the pipeline, timed or not."
    return [
        Table(headings, phases, headings[1:]),
        Table(("", "found", "target on an idle machine"), figures, ("found", "target on an idle machine")),
        Notes([note]),
    ]
