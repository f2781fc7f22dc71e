"""Progress of a study while it runs: a live display in a terminal, one line in a notebook, plain lines elsewhere."""

import math
import os
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import (
    BarColumn,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
)
from rich.progress import Progress as RichProgress
from rich.table import Column
from rich.text import Text
from typing_extensions import override

from sdopt.study.cost import PATIENCE_S, SHORTER
from sdopt.study.timeline import Timeline
from sdopt.terminal import OVERWRITES, print_line

_SILENCE_S = 30
"""Seconds after which a line is printed where there is no live display, although the phase is the same."""


_REFRESH_S = 0.5
"""Seconds between two states of a notebook's line."""

_WIDTH = 110
"""Columns of a notebook's line, which replaces the last one whole."""


def _in_words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


class _TimeLeft(ProgressColumn):
    """The remaining time, in words; empty while it is unknown."""

    def __init__(self, left_s: Callable[[], float | None]) -> None:
        super().__init__()
        self._left_s = left_s

    @override
    def render(self, task: Task) -> Text:
        left_s = self._left_s()
        return Text(
            "" if left_s is None else f"{_in_words(left_s)} left",
            style="progress.remaining",
        )


class Progress:
    """Shows variant, phase, round and time left. Use as a context manager around a study."""

    def __init__(
        self,
        console: Console,
        timeline: Timeline,
        within: tuple[float, float] | None = None,
    ) -> None:
        """Prepares the display.

        Of a study within a search it is that of the search, which began and ends at `within`, in seconds of the
        monotonic clock; a search that ends with this study ends at minus infinity.
        """
        self.timeline = timeline
        self._console = console
        self._overwrites = os.environ.get(OVERWRITES) == "1"
        self._rounds = 0
        self._last = ""
        self._line = "starting"
        self._said = time.monotonic()
        self._begun, self._whole_ends = within or (self._said, -math.inf)
        self._ends = -math.inf
        self._long_told = within is not None
        self._bar = RichProgress(
            SpinnerColumn(),
            # A line too long for the terminal is cut here, so that the remaining time always shows.
            TextColumn(
                "{task.fields[phase]} [bold]{task.fields[variant]}[/]",
                table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
            ),
            BarColumn(bar_width=12),
            _TimeLeft(self._left_s),
            console=console,
            expand=True,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None, variant="", phase="starting")

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        self._clear()

    def _clear(self) -> None:
        if self._overwrites:
            print(f"\r{'':{_WIDTH}}\r", end="", flush=True)

    def start(self, rounds: int) -> None:
        """Sets how many rounds are to come."""
        self._rounds = rounds

    def expect(self, seconds: float) -> None:
        """Sets in how many seconds the command is expected to end."""
        self._ends = time.monotonic() + seconds
        self._move()

    def _move(self) -> None:
        """Moves the bar to the share of the time that is over; it only pulses while the end is not known."""
        over_s, left_s = time.monotonic() - self._begun, self._left_s()
        task = self._bar.tasks[self._task]
        task.total = None if left_s is None else over_s + left_s
        task.completed = over_s

    def _left_s(self) -> float | None:
        """Returns the seconds that are expected to be left; None while they are unknown, or were too few."""
        left_s = max(self._ends, self._whole_ends) - time.monotonic()
        return left_s if left_s > 0 else None

    def tell_if_long(self, seconds: float) -> None:
        """Says once that a study without a budget takes long, and what ends it earlier."""
        if seconds < PATIENCE_S or self._long_told:
            return
        self._long_told = True
        self.tell(
            f"About {_in_words(seconds)} are left. {SHORTER} Ctrl-C keeps what is measured, and resume=… goes on."
        )

    def tell(self, line: str) -> None:
        """Prints what a user should know before the end of the study."""
        self._clear()
        print_line(self._console, line)

    def together(self, variants: Sequence[str], phase: str) -> None:
        """Shows the phase that processes of these variants enter side by side; the time is assigned to none of them."""
        names = list(dict.fromkeys(variants))
        self.phase(
            "; ".join(names), phase, booked="" if len(variants) > 1 else names[0]
        )

    def phase(
        self,
        variant: str,
        phase: str,
        number: int | None = None,
        booked: str | None = None,
    ) -> None:
        """Shows the phase that a variant enters; `number` is the round. Assigns the time to it, or to `booked`."""
        self.timeline.enter(phase, variant if booked is None else booked)
        text = f"{phase}, round {number} of {self._rounds}" if number else phase
        self._bar.update(self._task, variant=variant.replace("[", r"\["), phase=text)
        self._move()
        # Without a terminal, one line per variant and per round is enough.
        self._line = text if number else f"{variant}: {phase}"
        counts = number is not None or phase in ("loading", "evidence", "images")
        if counts and self._line != self._last:
            self._say()

    def _say(self) -> None:
        """Prints a line where there is no live display: what is worked on, and what remains."""
        if self._console.is_terminal:
            return
        self._last, self._said = self._line, time.monotonic()
        over_s, left_s = self._said - self._begun, self._left_s()
        left = "" if left_s is None else f" (about {_in_words(left_s)} left)"
        if self._overwrites:
            full = 0 if left_s is None else round(12 * over_s / (over_s + left_s))
            line = f"{'█' * full}{'░' * (12 - full)} {self._line}{left}"
            print(f"\r{line[:_WIDTH]:{_WIDTH}}", end="", flush=True)
            return
        print_line(self._console, f"[{over_s:6.1f} s] {self._line}{left}")

    def warn(self, text: str) -> None:
        """Prints a warning that cannot wait until the end of the study."""
        self._clear()
        print_line(self._console, f"warning: {text}", "yellow")

    def advance(self) -> None:
        """Notes that a call of the pipeline has ended."""
        self._move()
        if time.monotonic() - self._said > (
            _REFRESH_S if self._overwrites else _SILENCE_S
        ):
            self._say()
