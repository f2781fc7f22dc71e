"""The record of the suite on one device: written after every part, and read by the next call."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from sdopt.errors import UsageError
from sdopt.record.files import write_atomically
from sdopt.report.markdown import markdown

FILE, PAGE = "suite.json", "suite.md"


class Ending(StrEnum):
    """How a part ended."""

    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"
    """The part was ended at its own limit; its measurements so far count."""
    CUT = "cut off"
    """The part was ended because the budget was used up, or the suite was ended; the next call continues it."""
    RUNNING = "running"
    """The part is running, or the suite was killed meanwhile."""
    NOT_RUN = "not run"
    """The budget had no time for the part."""
    LEFT_OUT = "left out"
    """The part does not apply to this machine."""

    @property
    def well(self) -> bool:
        """Whether nothing is left to do."""
        return self in (Ending.DONE, Ending.LEFT_OUT)

    @property
    def final(self) -> bool:
        """Whether a later call leaves the part as it is."""
        return self in (Ending.DONE, Ending.FAILED, Ending.STOPPED)


@dataclass
class Finding:
    """One finding of a part: one line of its table."""

    name: str
    """An option, a variant, a kind of work, a test."""
    state: str
    """`proven`, `refuted` or `cannot run` for an option; for others, how they ended."""
    said: str


@dataclass
class Entry:
    """The latest run of one part."""

    part: str
    ending: Ending
    reason: str = ""
    """Why the part did not end well, or was not run."""
    limit_s: float | None = None
    seconds: float | None = None
    began: str = ""
    command: list[str] = field(default_factory=list)
    folder: str = ""
    """The folder of its files, relative to the record's folder."""
    findings: list[Finding] = field(default_factory=list)


@dataclass
class Record:
    """All findings of the suite on one device."""

    device: str
    sdopt: str
    entries: list[Entry] = field(default_factory=list)

    def entry(self, part: str) -> Entry | None:
        """Returns how a part last ended; None if it is not listed."""
        return next((entry for entry in self.entries if entry.part == part), None)

    def put(self, entry: Entry, order: Sequence[str]) -> None:
        """Records how a part ended, replacing its earlier entry; parts that are not in `order` stay at the end."""
        others = [other for other in self.entries if other.part != entry.part]
        rank = {part: number for number, part in enumerate(order)}
        self.entries = sorted([*others, entry], key=lambda entry: rank.get(entry.part, len(rank)))


_ADAPTER = TypeAdapter(Record)


def read_record(folder: Path) -> Record | None:
    """Reads a folder's record; None if there is none.

    Raises:
        UsageError: the record cannot be read.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{part}: " for part in first["loc"])
        raise UsageError(
            f"{path}: not the record of a suite: {where}{first['msg']}; remove it, or choose another folder"
        ) from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error


def write_record(record: Record, folder: Path) -> None:
    """Writes the record and its page. Raises OSError where the folder cannot be written."""
    write_atomically(folder / FILE, _ADAPTER.dump_json(record, indent=1))
    write_atomically(folder / PAGE, page_of(record).encode())


def page_of(record: Record) -> str:
    """Returns the record as Markdown: a table of the parts, then what each of them found."""
    rows = [
        (entry.part, str(entry.ending), "" if entry.seconds is None else f"{entry.seconds:.0f} s", entry.reason)
        for entry in record.entries
    ]
    parts = [f"# The suite on {record.device}\n", markdown(("part", "", "took", "why"), rows, [])]
    for entry in record.entries:
        if entry.findings:
            found = [(finding.name, finding.state, finding.said) for finding in entry.findings]
            parts += [f"## {entry.part}\n", markdown(("", "", ""), found, [])]
    return "\n".join(parts)
