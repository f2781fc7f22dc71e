"""Records how a command spends its time: phases that follow one another without a gap, and the calls in them."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from sdopt.record.files import write_atomically

FILE = "timeline.json"

WAITING = "waiting for another study on this device"
"""The phase in which a study does nothing."""


@dataclass
class Span:
    """One phase of one variant, summed over all its entries; a phase of the whole study has an empty variant name."""

    phase: str
    variant: str
    begun_s: float
    """When it was first entered, in seconds since the command began."""
    seconds: float = 0.0
    in_calls_s: float = 0.0
    """The part of these seconds in which a worker was within a call of its pipeline."""
    entered: int = 0


class Timeline:
    """Assigns all time since the start to phases; `begun` is the start of the first, by `time.monotonic`."""

    def __init__(self, phase: str = "start", begun: float | None = None) -> None:
        self._begun = self._booked = time.monotonic() if begun is None else begun
        self._spans: dict[tuple[str, str], Span] = {}
        self._open = self._span(phase, "")

    def enter(self, phase: str, variant: str = "") -> None:
        """Assigns the time from now on to another phase."""
        self._book()
        self._open = self._span(phase, variant)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Assigns the time of a block to a phase of its own; the phase around it continues afterwards."""
        outer = self._open
        self.enter(phase)
        try:
            yield
        finally:
            self._book()
            self._open = outer

    def called(self, seconds: float) -> None:
        """Adds to the seconds of the current phase that were spent in calls of a pipeline."""
        self._open.in_calls_s += seconds

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start, without those in which the study waited for another one."""
        waited = sum(span.seconds for span in self.spans if span.phase == WAITING)
        return time.monotonic() - self._begun - waited

    @property
    def spans(self) -> list[Span]:
        """All phases so far, in the order in which they were first entered."""
        self._book()
        return list(self._spans.values())

    def write(self, folder: Path) -> Path:
        """Writes `timeline.json`. Raises OSError."""
        path = folder / FILE
        write_atomically(
            path, json.dumps([asdict(span) for span in self.spans], indent=1).encode()
        )
        return path

    def _book(self) -> None:
        now = time.monotonic()
        self._open.seconds += now - self._booked
        self._booked = now

    def _span(self, phase: str, variant: str) -> Span:
        span = self._spans.setdefault(
            (phase, variant), Span(phase, variant, self._booked - self._begun)
        )
        span.entered += 1
        return span


def read_timeline(folder: Path) -> list[Span]:
    """Reads the file that `Timeline.write` wrote. Raises OSError if there is none."""
    return [
        Span(**span) for span in json.loads((folder / FILE).read_text(encoding="utf-8"))
    ]


def waited_s(folder: Path) -> float:
    """Returns for how long the last command of a study waited for another one, in seconds; 0 where none is told."""
    try:
        return sum(
            span.seconds for span in read_timeline(folder) if span.phase == WAITING
        )
    except (OSError, ValueError, TypeError):
        return 0.0


def process_begun() -> float:
    """Returns when this process was started, by `time.monotonic`, to a hundredth of a second."""
    started = int(
        Path("/proc/self/stat")
        .read_text(encoding="utf-8")
        .rpartition(")")[2]
        .split()[19]
    ) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - started)
