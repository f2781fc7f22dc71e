"""The record of the suite on one device: written after every part, and read by the next call; packed, and unpacked."""

import io
import lzma
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from sdopt.errors import UsageError
from sdopt.record.files import first_problem, write_atomically
from sdopt.report.markdown import markdown

FILE, PAGE = "suite.json", "suite.md"

SUFFIX = ".tar.xz"

_PACKED = (
    FILE,
    PAGE,
    "parts/*/*/result.json",
    "parts/*/*/.hydra/*",
    "parts/*/*/doctor.json",
)
"""What a later call reads, and what `sdopt show` and `sdopt report` make everything else from."""

_LOGS = ("parts/*/log.txt", "parts/*/*/logs/*.log")
_LOG_BYTES = 64 * 1024
"""How much of each log is kept, from its end."""


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
class OptionFinding:
    """One finding of a part: one line of its table."""

    name: str
    """An option, a variant, a kind of work, a test."""
    state: str
    """`took effect`, `no gain` or `cannot run` for an option; for others, how they ended."""
    said: str


@dataclass
class PartEntry:
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
    findings: list[OptionFinding] = field(default_factory=list)


@dataclass
class SuiteRecord:
    """All findings of the suite on one device."""

    device: str
    sdopt: str
    entries: list[PartEntry] = field(default_factory=list)

    def entry(self, part: str) -> PartEntry | None:
        """Returns how a part last ended; None if it is not listed."""
        return next((entry for entry in self.entries if entry.part == part), None)

    def put(self, entry: PartEntry, order: Sequence[str]) -> None:
        """Records how a part ended, replacing its earlier entry; parts that are not in `order` stay at the end."""
        others = [other for other in self.entries if other.part != entry.part]
        rank = {part: number for number, part in enumerate(order)}
        self.entries = sorted(
            [*others, entry], key=lambda entry: rank.get(entry.part, len(rank))
        )


_ADAPTER = TypeAdapter(SuiteRecord)


def read_record(folder: Path) -> SuiteRecord | None:
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
        raise UsageError(
            f"{path}: not the record of a suite: {first_problem(error)}; remove it, or choose another folder"
        ) from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error


def write_record(record: SuiteRecord, folder: Path) -> None:
    """Writes the record and its page. Raises OSError where the folder cannot be written."""
    write_atomically(folder / FILE, _ADAPTER.dump_json(record, indent=1))
    write_atomically(folder / PAGE, page_of(record).encode())


def page_of(record: SuiteRecord) -> str:
    """Returns the record as Markdown: a table of the parts, then what each of them found."""
    rows = []
    for entry in record.entries:
        took = "" if entry.seconds is None else f"{entry.seconds:.0f} s"
        rows.append((entry.part, str(entry.ending), took, entry.reason))
    parts = [
        f"# The suite on {record.device}\n",
        markdown(("part", "", "took", "why"), rows),
    ]
    for entry in record.entries:
        if entry.findings:
            found = [
                (finding.name, finding.state, finding.said)
                for finding in entry.findings
            ]
            parts += [f"## {entry.part}\n", markdown(("", "", ""), found)]
    return "\n".join(parts)


def pack(folder: Path, archive: Path) -> None:
    """Writes the results in a folder of the suite to an archive, which is replaced in one step; leaves images out.

    Raises OSError where the archive cannot be written.
    """
    packed = io.BytesIO()
    # The lowest level: it is written before and after every part, and text becomes small at any level.
    with tarfile.open(fileobj=packed, mode="w:xz", preset=1) as tar:
        for path in chain.from_iterable(
            sorted(folder.glob(pattern)) for pattern in (*_PACKED, *_LOGS)
        ):
            content = path.read_bytes()
            content = (
                content[-_LOG_BYTES:] if path.suffix in (".txt", ".log") else content
            )
            member = tarfile.TarInfo(str(path.relative_to(folder)))
            member.size, member.mtime = len(content), int(path.stat().st_mtime)
            tar.addfile(member, io.BytesIO(content))
    write_atomically(archive, packed.getvalue())


def unpack(archive: Path, folder: Path, device: str) -> str:
    """Makes the folder of the suite from an archive, whole or not at all; returns the device that the results are of.

    Of another device than the one that is named, no folder is made, nor is a folder replaced that exists.

    Raises:
        UsageError: it is no such file, or holds more than files within the folder.
        OSError: the folder cannot be written.
    """
    with tempfile.TemporaryDirectory(dir=folder.parent) as beside:
        made = Path(beside) / "made"
        try:
            with tarfile.open(archive) as tar:
                tar.extractall(made, filter="data")
        except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
            raise UsageError(
                f"archive={archive}: not an archive of the suite ({error})"
            ) from error
        record = read_record(made)
        if record is None:
            raise UsageError(
                f"archive={archive}: not an archive of the suite (it has no {FILE})"
            )
        if record.device == device and not folder.exists():
            made.rename(folder)
        return record.device
