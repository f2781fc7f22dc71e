"""What a search found, as it is shown, written and logged."""

from dataclasses import asdict, dataclass, field
from enum import StrEnum

from sdopt.results.records import BreakEven


def shortened(reasons: str) -> str:
    """Returns the first of several reasons, and how many there are beside it."""
    first, *others = reasons.split("; ")
    return f"{first} (and {len(others)} more)" if others else first


class Fate(StrEnum):
    """How far a candidate came."""

    WINNER = "winner"
    PASSED = "passed"
    """The gate passes it, and another one was ahead of it."""
    NOT_PASSED = "not passed"
    """The gate judged it, and does not pass it."""
    LEFT_OUT = "left out"
    """It could have been the best one, and others came first."""
    DROPPED = "dropped"
    """It cannot win any more."""
    RULED_OUT = "ruled out"
    """It failed, it exceeds a limit, or a rule of the gate."""
    OPEN = "open"
    """The search has not ended."""


@dataclass(frozen=True)
class Entry:
    """One candidate. Figures are those of the judging where it came so far, else the means of what was measured."""

    name: str
    overrides: list[str]
    fate: Fate
    because: str
    speedup: float | None
    memory_ratio: float | None
    latency_s: float | None
    memory_gib: float | None
    distance: float | None
    processes: int
    low: float | None = None
    """Of the interval of the speed-up, which only the judging gives."""
    high: float | None = None
    start: BreakEven | None = None
    """What it costs before its first image, in the last study that it was measured in."""
    start_said: str = ""
    """The same in words, where it is more than a call of the baseline."""
    recompiles: float | None = None
    """Graphs that were compiled after the first call; None where nothing is compiled."""
    on_front: bool = False
    """Whether no other candidate that was judged and passed is better in all objectives."""
    command: str = ""
    """What measures it again, of those that were judged."""


@dataclass(frozen=True)
class SearchRecord:
    """A search as a whole; `search.json` holds it."""

    name: str
    folder: str
    started: str
    header: list[str]
    objectives: list[str]
    distance: str
    """The metric of `Entry.distance`."""
    sentence: str
    entries: list[Entry]
    conflicts: dict[str, str]
    """Why combinations cannot run, by their overrides."""
    left_out: list[str]
    """Why options cannot run even alone."""
    notes: list[str]
    winner: str | None = None
    lines: list[str] = field(default_factory=list)
    """Code that turns the winner on for a pipeline `pipe` of diffusers."""

    @property
    def plain(self) -> dict[str, object]:
        """As JSON takes it."""
        return asdict(self)
