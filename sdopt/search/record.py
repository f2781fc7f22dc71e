"""The record of a search: what tables show, files store and trackers log."""

from dataclasses import dataclass, field
from enum import StrEnum

from sdopt.record.comparisons import BreakEven
from sdopt.statistics.words import start_words

RECORD, TABLES, PLOT, PAGE = "search.json", "search.md", "search.png", "report.html"

FINAL = "final"
"""The folder of the study that judges the finalists, within that of the search."""


def start_said(start: BreakEven | None) -> str:
    """Returns a start-up cost in words, as in "+31.2 s, repaid after 310 images"; "" if it is no more than a call."""
    words = start_words(start)
    return "" if words is None else f"+{words[0]}, {words[2]}"


class Fate(StrEnum):
    """How far a candidate came in the search."""

    WINNER = "winner"
    PASSED = "passed"
    """The gate passes the candidate, but another one that passes was ranked higher."""
    NOT_PASSED = "not passed"
    """The gate judged the candidate and does not pass it."""
    LEFT_OUT = "left out"
    """The candidate might have been the best, but others were ranked higher."""
    DROPPED = "dropped"
    """The candidate cannot win any more."""
    RULED_OUT = "ruled out"
    """The candidate failed, exceeds a limit, or breaks a rule of the gate."""
    OPEN = "open"
    """The search has not ended."""


@dataclass(frozen=True)
class Entry:
    """One candidate. If it was judged, its figures are those of that study; else the means over its studies."""

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
    """Lower bound of the speed-up's interval, which only the final study gives; `high` is the upper one."""
    high: float | None = None
    start: BreakEven | None = None
    """The start-up cost before its first image, in the last study that measured it."""
    recompiles: float | None = None
    """Graphs compiled after the first call; None if nothing is compiled."""
    on_front: bool = False
    """Whether no other candidate that was judged and passed is better in all objectives."""
    command: str = ""
    """The command that measures the candidate again; only judged candidates have one."""


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
    undecided: str | None = None
    """Without a winner, the first judged candidate that was faster, and of which nothing bad is shown."""
    lines: list[str] = field(default_factory=list)
    """Code that turns the winner on for a pipeline `pipe` of diffusers."""
