"""The record of a search, which files store and trackers log; and its report: the answer and all combinations."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import TypeAdapter, ValidationError

from sdopt.errors import UsageError
from sdopt.record.comparisons import BreakEven, Interval
from sdopt.record.files import first_problem
from sdopt.report.blocks import (
    Block,
    Cell,
    Chart,
    Code,
    Fold,
    Notes,
    Page,
    Prose,
    Section,
    Table,
)
from sdopt.report.columns import (
    OF_ONE_STUDY,
    Cells,
    TableView,
    further_columns,
    ratio_cell,
    value_cell,
)
from sdopt.report.markdown import written
from sdopt.report.tones import Tone
from sdopt.statistics.words import (
    gib_text,
    seconds_text,
    shortened,
    start_words,
    times_text,
    unit_text,
)

if TYPE_CHECKING:
    from sdopt.search.space import Space

RECORD, TABLES, PLOT, PAGE = (
    "search.json",
    "search.md",
    "search.png",
    "report.html",
)

FINAL = "final"
"""The folder of the study that judges the finalists, within that of the search."""


def start_said(start: BreakEven | None) -> str:
    """Returns a start-up cost in words, as in "+31.2 s, repaid after 310 images"; "" if it is no more than a call."""
    words = start_words(start)
    return "" if words is None else f"+{words[0]}, {words[2]}"


Fate = Literal[
    "winner",
    "pass",  # the gate passes it, but another one that passes was ranked higher
    "undecided",
    "not judged",
    "beaten",
    "fail",
    "not enough runs",  # the search has not ended
]
"""How far a candidate came in the search, the best first; `_MEANING` says more of some."""


@dataclass(frozen=True)
class SearchEntry:
    """One candidate. If it was judged, its figures are those of that study; else the means over its studies."""

    name: str
    overrides: list[str]
    fate: Fate
    because: str
    speedup: float | None = None
    memory_ratio: float | None = None
    latency_s: float | None = None
    memory_gib: float | None = None
    distance: float | None = None
    processes: int = 0
    low: float | None = None
    """Lower bound of the speed-up's interval, which only the final study gives; `high` is the upper one."""
    high: float | None = None
    start: BreakEven | None = None
    """The start-up cost before its first image, in the last study that measured it."""
    recompiles: float | None = None
    """Graphs compiled after the first call; None if nothing is compiled."""
    on_front: bool = False
    """Whether no other candidate that was judged and passed is better in all objectives."""
    image_s: float | None = None
    """The time of one image; `latency_s` is that of a call."""
    per_image: bool = False
    """Whether a study of it had calls that make different numbers of images."""
    command: str = ""
    """The command that measures the candidate again; "" if none is known to, as of those that were not judged."""
    judged: bool = False
    """Whether it was measured in a judged study, with the full protocol."""
    study: str = FINAL
    """The folder of the study that judged it."""
    baseline_s: float | None = None
    """The time of a call of the baseline in the study that `latency_s` is of; `baseline_image_s` is that of one image."""
    baseline_image_s: float | None = None
    columns: dict[str, float | str] = field(default_factory=dict)
    """What further columns of tables have, by their names, in the last study that measured it."""


@dataclass(frozen=True)
class SearchRecord:
    """A search as a whole; `search.json` holds it."""

    name: str
    folder: str
    started: str
    header: list[str]
    objectives: list[str]
    distance: str
    """The metric of `SearchEntry.distance`."""
    sentence: str
    entries: list[SearchEntry]
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
    program_run: str = ""
    """Whether the code of the winner, or of what is undecided, was run, and what it generated."""
    judged: list[str] = field(default_factory=list)
    """The folders of the judged studies, the newest first."""
    remarks: list[str] = field(default_factory=list)
    """What speaks for other steps or another scale of guidance than the model was tried with."""
    config_dir: str = ""
    """The folder with groups of the user's own; "" without one."""
    loads: bool = True
    """Whether `sdopt.load` takes the winner, or what is undecided: it refuses code that a result names."""

    @property
    def best(self) -> SearchEntry | None:
        """The winner, or else what is undecided."""
        name = self.winner or self.undecided
        return next((entry for entry in self.entries if entry.name == name), None)

    @property
    def first_judged(self) -> SearchEntry | None:
        """The first that was judged, whatever became of it."""
        return next((entry for entry in self.entries if entry.judged), None)

    @property
    def per_image(self) -> bool:
        """Whether times are shown per image, because calls of candidates make different numbers of images."""
        return any(entry.per_image for entry in self.entries)


def read_record(folder: Path) -> SearchRecord:
    """Reads the record of a search from its folder.

    Raises:
        UsageError: there is none, or another version of sdopt wrote it.
    """
    try:
        written = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return TypeAdapter(SearchRecord).validate_python(written, extra="forbid")
    except (OSError, ValueError) as error:
        wrong = first_problem(error) if isinstance(error, ValidationError) else error
        raise UsageError(f"{folder / RECORD}: cannot be read: {wrong}") from error


_MEANING = {
    "undecided": "it was judged, and a gain without harm is neither shown nor excluded",
    "not judged": "it has no gain, or others were chosen to be judged",
    "beaten": "another one is better by more than chance explains",
    "fail": "it cannot run, exceeds a limit, or its images, speed or memory are worse than is allowed",
}

_TONES: dict[Fate, Tone] = {
    "winner": "good",
    "pass": "good",
    "fail": "bad",
}

_SHOWN = 15
"""Number of combinations that a terminal shows; the page has all."""


def blocks_of(record: SearchRecord, brief: bool = False) -> list[Block]:
    """Returns the answer, the combinations, how to use the winner, and what the figures rest on.

    `brief` is as a terminal shows it: the best combinations, without the reasons why others cannot run.
    """
    entries = record.entries[:_SHOWN] if brief else record.entries
    blocks: list[Block] = [Prose(record.sentence, strong=True)]
    if entries:
        blocks.append(_table(record, entries, brief))
    if brief:
        blocks.append(Notes(list(_reasons(entries, len(record.entries)))))
    if record.winner:
        if record.lines:
            blocks.append(
                Code(
                    "To use it in a pipeline `pipe` of diffusers",
                    record.lines,
                    "python",
                )
            )
        blocks += [Notes([record.program_run])] if record.program_run else []
        if record.loads:
            how = "Or, as it was measured" if record.lines else "As it was measured"
            blocks.append(Code(how, [load_line(record, record.winner)], "python"))
    if judged := [entry.command for entry in record.entries if entry.command]:
        blocks.append(Code("To measure the judged combinations again", judged, "bash"))
    blocks.append(Notes([*_words(record), *record.remarks, *record.notes]))
    why = [
        *record.left_out,
        *(f"{name}: {reason}" for name, reason in record.conflicts.items()),
    ]
    if why and not brief:
        blocks.append(Fold("What cannot run here", [Notes(why)]))
    return blocks


def markdown_of(record: SearchRecord) -> str:
    """Returns a search as Markdown."""
    return written([*blocks_of(record), Prose(" · ".join(record.header))])


def page_of(record: SearchRecord, charts: Sequence[Chart]) -> Page:
    """Returns the page of a search, with its plot if there is one."""
    answer, *others = blocks_of(record)
    facts = (
        [
            ("model", record.header[0]),
            *(("", line) for line in record.header[1:]),
        ]
        if record.header
        else []
    )
    return Page(
        f"{record.name}: search",
        facts,
        [Section("answer", "Answer", [answer, *charts, *others])],
    )


def load_line(record: SearchRecord, variant: str | None) -> str:
    """Returns the line of Python that loads the pipeline of a judged candidate."""
    study = next(
        (entry.study for entry in record.entries if entry.name == variant), FINAL
    )
    arguments = [repr(f"{record.folder}/{study}"), f"variant={variant!r}"]
    if record.config_dir:
        arguments.append(f"config_dir={record.config_dir!r}")
    return f"pipe = sdopt.load({', '.join(arguments)})"


def space_table(space: "Space") -> list[Block]:
    """Returns a table of the variables to search, and the options that cannot run here."""
    rows = [
        [variable.name, ", ".join(map(str, variable.values)), variable.plain or ""]
        for variable in space.variables
    ]
    table = Table(["varied", "values", "of the baseline"], rows)
    return [
        table,
        Notes([f"cannot run: {reason}" for reason in space.left_out]),
    ]


def _table(record: SearchRecord, entries: Sequence[SearchEntry], brief: bool) -> Table:
    """Returns the table of combinations, without columns that none of them has a figure for."""
    unit = unit_text(record.per_image)
    table: list[Cells] = [
        ("options", [entry.name for entry in entries]),
        ("outcome", [_outcome_cell(entry) for entry in entries]),
        (f"speed-up{unit}", [_speedup_cell(entry) for entry in entries]),
        (
            f"latency{unit}",
            [_time_text(entry, record.per_image) for entry in entries],
        ),
        (
            "memory",
            [_text(gib_text, entry.memory_gib) for entry in entries],
        ),
        (
            record.distance,
            [_text("{:.2g}".format, entry.distance) for entry in entries],
        ),
    ]
    numbers = [heading for heading, _ in table[2:]]
    for column in further_columns(OF_ONE_STUDY):
        [heading] = column.headings(TableView(per_image=record.per_image))
        table.append(
            (
                heading,
                [value_cell(entry.columns.get(column.name)) for entry in entries],
            )
        )
        numbers += [heading] if column.number else []
    table.append(("start", [_start_text(entry, brief) for entry in entries]))
    if not brief:
        table.append(("because", [entry.because for entry in entries]))
    rows = list(zip(*(cells for _, cells in table), strict=True))
    return Table([heading for heading, _ in table], rows, numbers).filled()


def _text(written: Callable[[float], str], figure: float | None) -> str:
    return "" if figure is None else written(figure)


def _outcome_cell(entry: SearchEntry) -> Cell:
    front = "on the front" if entry.on_front else ""
    return Cell(str(entry.fate), front, tone=_TONES.get(entry.fate))


def _speedup_cell(entry: SearchEntry) -> Cell:
    return ratio_cell(
        None
        if entry.speedup is None
        else Interval(entry.speedup, entry.low, entry.high)
    )


def _time_text(entry: SearchEntry, per_image: bool) -> str:
    before, after = entry.baseline_s, entry.latency_s
    if per_image:
        before, after = entry.baseline_image_s, entry.image_s
    if after is None:
        return ""
    return (
        seconds_text(Interval(after)) if before is None else times_text(before, after)
    )


def _start_text(entry: SearchEntry, brief: bool) -> str:
    words = start_words(entry.start)
    if brief and words:
        return f"+{words[0]}"
    again = f"{entry.recompiles:g} compiled again later" if entry.recompiles else ""
    return "; ".join(filter(None, (start_said(entry.start), again)))


def _reasons(entries: Sequence[SearchEntry], count: int) -> Iterator[str]:
    """Yields all reasons of judged combinations, and the first one of those that failed."""
    for entry in entries:
        if entry.judged:
            said = start_said(entry.start)
            yield f"{entry.name}: {entry.because}" + (f"; start {said}" if said else "")
        elif entry.fate == "fail":
            yield f"{entry.name}: {shortened(entry.because)}"
    if count > len(entries):
        yield f"and {count - len(entries)} more"


def _words(record: SearchRecord) -> Iterator[str]:
    """Yields what the words of the table mean."""
    if any(entry.baseline_s is not None for entry in record.entries):
        yield (
            "latency: from the baseline's to the option's, in the last study that measured it. A speed-up is a ratio of "
            "geometric means over the same rounds of all its studies, so it need not be the ratio of the two latencies"
        )
    if any(entry.distance is not None for entry in record.entries):
        yield f"{record.distance}: how far images are from the baseline's; 0 means that they are the same"
    for fate in dict.fromkeys(entry.fate for entry in record.entries):
        if fate in _MEANING:
            yield f"{fate}: {_MEANING[fate]}"
