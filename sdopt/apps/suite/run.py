"""Runs the parts of the suite in their order, each within its time limit and the budget."""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from sdopt.about import __version__
from sdopt.apps.suite.config import INTERVALS, Part, SuiteConfig
from sdopt.apps.suite.outcomes import Standing
from sdopt.apps.suite.parts import ENDS_WELL, PartJob, job_of, obstacle_to, result_in
from sdopt.apps.suite.process import PATIENCE_S, PartRun, last_words, run_limited
from sdopt.apps.suite.record import (
    Ending,
    PartEntry,
    SuiteRecord,
    pack,
    read_record,
    unpack,
    write_record,
)
from sdopt.errors import UsageError
from sdopt.hardware.device import Device


@dataclass(frozen=True)
class Suite:
    """One call of the suite, on one device.

    Attributes:
        config: the configuration.
        device: the device that everything runs on.
        folder: the folder of this device's results.
        deadline: when the budget is used up, by `time.monotonic`.
        tell: called with a line when a part begins or ends.
    """

    config: SuiteConfig
    device: Device
    folder: Path
    deadline: float
    tell: Callable[[str], None]

    @property
    def left_s(self) -> float:
        """Seconds left of the budget."""
        return self.deadline - time.monotonic()


def run_suite(suite: Suite) -> SuiteRecord:
    """Runs every part that is not done, and writes the record after each; returns it.

    With an archive, the results are also written to it after each, and a missing folder is made from it.

    Raises:
        UsageError: the folder or the archive holds the record of another device, or none that can be read.
        OSError: the folder or the archive cannot be written.
    """
    archive = None if suite.config.archive is None else Path(suite.config.archive)
    suite.folder.parent.mkdir(parents=True, exist_ok=True)
    if archive is not None and archive.is_file():
        device = unpack(archive, suite.folder, suite.device.name)
        if device != suite.device.name:
            raise UsageError(
                f"archive={archive}: holds the record of {device}; choose another file"
            )
    suite.folder.mkdir(exist_ok=True)
    record = read_record(suite.folder) or SuiteRecord(suite.device.name, __version__)
    if record.device != suite.device.name:
        raise UsageError(
            f"{suite.folder}: holds the record of {record.device}; choose another folder"
        )
    order = [*suite.config.parts, *(name + INTERVALS for name in suite.config.parts)]
    for part in suite.config.chosen:
        before = record.entry(part.name)
        if not _is_due(suite, before):
            continue
        for entry in _entries(suite, _unsettled(part, record), before):
            record.put(entry, order)
            write_record(record, suite.folder)
            if archive is not None and entry.ending not in (
                Ending.NOT_RUN,
                Ending.LEFT_OUT,
            ):
                pack(suite.folder, archive)
        suite.tell(
            f"{part.name}: {entry.ending}{f' ({entry.reason})' if entry.reason else ''}"
        )
    if archive is not None:
        pack(suite.folder, archive)
    return record


def _is_due(suite: Suite, before: PartEntry | None) -> bool:
    """Returns whether a part has not ended yet, or runs again because the user asks for it."""
    if before is None or not before.ending.final:
        return True
    return suite.config.retry and (
        before.ending is not Ending.DONE or _failed_in(suite, before)
    )


def _failed_in(suite: Suite, entry: PartEntry) -> bool:
    """Returns whether a test, a ceiling or a variant failed in a part that was done."""
    result = result_in(suite.folder / entry.folder)
    if result is not None and any(row.status.failure for row in result.variants):
        return True
    return any(finding.state in ("failed", "error") for finding in entry.findings)


def _unsettled(part: Part, record: SuiteRecord) -> Part:
    """Returns a part that measures once more, without the options that were tried before without effect or gain."""
    first = record.entry(part.name.removesuffix(INTERVALS))
    if first is None or not part.name.endswith(INTERVALS) or part.kind != "options":
        return part
    return replace(
        part,
        settled=[
            *part.settled,
            *(f.name for f in first.findings if f.state != Standing.TOOK_EFFECT),
        ],
    )


def _entries(suite: Suite, part: Part, before: PartEntry | None) -> Iterator[PartEntry]:
    """Yields a part as it begins, unless it is not run, and as it ends."""
    if reason := obstacle_to(part, suite.device):
        yield PartEntry(part.name, Ending.LEFT_OUT, reason)
        return
    limit_s = min(part.limit_s, suite.left_s)
    if limit_s < part.least_s:
        room = "is its limit" if limit_s == part.limit_s else "of the budget were left"
        reason = f"needs at least {part.least_s:.0f} s; {max(limit_s, 0):.0f} s {room}"
        # Measurements from before the end of the budget are kept.
        yield (
            before
            if before is not None and before.ending is Ending.CUT
            else PartEntry(part.name, Ending.NOT_RUN, reason)
        )
        return
    folder = suite.folder / "parts" / part.name
    folder.mkdir(parents=True, exist_ok=True)
    began, now = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    entry = PartEntry(
        part.name,
        Ending.RUNNING,
        limit_s=round(limit_s, 1),
        began=now,
        folder=f"parts/{part.name}/run",
    )
    suite.tell(f"{part.name}: at most {limit_s:.0f} s")
    try:
        job = job_of(part, suite.config, suite.device, folder)
    except UsageError as error:
        entry.ending, entry.reason = Ending.FAILED, "; ".join(error.problems)
        yield entry
        return
    entry.command, entry.findings = job.command, list(job.left_out)
    if not job.command:
        entry.ending, entry.reason, entry.seconds = (
            Ending.DONE,
            "nothing in this part can run here",
            0.0,
        )
        yield entry
        return
    yield entry
    patience_s = min(PATIENCE_S, max(2.0, suite.left_s / 10))

    def run(arguments: Sequence[str], out: Path | None = None) -> PartRun:
        left_s = began + limit_s - time.monotonic() - patience_s
        return run_limited(arguments, job.log, max(1.0, left_s), patience_s, out)

    try:
        ended = job.run(run)
    except KeyboardInterrupt:
        entry.ending, entry.reason, entry.findings = (
            Ending.CUT,
            "interrupted",
            job.findings(),
        )
        yield entry
        raise
    entry.seconds = round(time.monotonic() - began, 1)
    entry.ending, entry.reason = _ending(part, ended, limit_s, job)
    entry.findings = job.findings()
    yield entry


def _ending(
    part: Part, run: PartRun, limit_s: float, job: PartJob
) -> tuple[Ending, str]:
    if run.stopped:
        if limit_s < part.limit_s:
            return Ending.CUT, f"the budget was used up after {run.seconds:.0f} s"
        return Ending.STOPPED, f"at its limit of {limit_s:.0f} s"
    if run.code in ENDS_WELL.get(part.kind, (0,)):
        return Ending.DONE, ""
    result = result_in(job.folder) if run.code == 3 else None
    if result is not None and any(
        variant.status.measured for variant in result.variants
    ):
        return Ending.DONE, "some variants could not be measured"  # the rows say why
    message = last_words(job.log)
    if result is not None:
        message = next(
            (
                f"{v.name}: {v.status}: {v.reason}"
                for v in result.variants
                if v.status.failure
            ),
            message,
        )
    how = (
        f"ended with exit code {run.code}"
        if run.code >= 0
        else f"killed by signal {-run.code}"
    )
    return Ending.FAILED, f"{how}: {message}" if message else how


def slug_of(device: str) -> str:
    """Returns the name of a device as a folder name."""
    return re.sub(r"[^a-z0-9.]+", "-", device.lower()).strip("-") or "device"
