"""Runs the parts of the suite in their order, each within its time limit and the budget."""

import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import sdopt
from sdopt.analysis.outcomes import Standing
from sdopt.config.composer import composer_of
from sdopt.config.overrides import merge_overrides, quoted
from sdopt.errors import UsageError
from sdopt.hardware.device import Device
from sdopt.results.files import read_result
from sdopt.results.records import StudyResult
from sdopt.suite.archive import SUFFIX, pack, unpack
from sdopt.suite.config import Part, SuiteConfig
from sdopt.suite.findings import (
    machine_findings,
    noise_findings,
    option_findings,
    result_in,
    study_findings,
    test_findings,
    tests_in,
)
from sdopt.suite.options import option_study
from sdopt.suite.process import PATIENCE_S, Run, last_words, run_limited
from sdopt.suite.record import Ending, Entry, Finding, Record, read_record, write_record

AGAIN = "_again"
"""Suffix of the name of a part that measures a study again, with three processes."""

_PROCESSES = 3
_FEWEST_ROUNDS = 2
_UNTIMED = 2
"""Calls of a process before its rounds: the cold start and the discarded round."""
_USAGE = 2
"""The exit code of `sdopt run` if it cannot begin, for example if a resumed run is of another machine."""

_TEST_S = 120
"""Seconds that one test may take, if pytest-timeout is installed: one that hangs would take the part's whole limit, and
one that compiles takes most of a minute."""

CHECKOUT = Path(sdopt.__file__).parents[1]
"""Where the tests are, if sdopt runs from a checkout."""


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


def run_suite(suite: Suite) -> Record:
    """Runs every part that is not done, and writes the record after each; returns it.

    With an archive, the results are also written to it after each, and a missing folder is made from it. An archive of
    another device is renamed.

    Raises:
        UsageError: the folder holds the record of another device, or one that cannot be read, or the archive none.
        OSError: the folder or the archive cannot be written.
    """
    archive = None if suite.config.archive is None else Path(suite.config.archive)
    suite.folder.parent.mkdir(parents=True, exist_ok=True)
    if archive is not None and archive.is_file() and not suite.folder.exists():
        device = unpack(archive, suite.folder, suite.device.name)
        if device != suite.device.name:
            kept = archive.with_name(f"{archive.name.removesuffix(SUFFIX)}-{slug_of(device)}{SUFFIX}")
            archive.rename(kept)
            suite.tell(f"archive={archive}: held the record of {device}, which is now in {kept}")
    suite.folder.mkdir(exist_ok=True)
    record = read_record(suite.folder) or Record(suite.device.name, sdopt.__version__)
    if record.device != suite.device.name:
        raise UsageError(f"{suite.folder}: holds the record of {record.device}; choose another folder")
    names = [part.name for part in suite.config.parts]
    order = [*names, *(name + AGAIN for name in names)]
    for part, obstacle in chain(((part, "") for part in suite.config.chosen), _again(suite, record)):
        before = record.entry(part.name)
        if not _is_due(suite, part.name, before):
            continue
        for entry in [Entry(part.name, Ending.NOT_RUN, obstacle)] if obstacle else _entries(suite, part, before):
            record.put(entry, order)
            write_record(record, suite.folder)
            if archive is not None and entry.ending not in (Ending.NOT_RUN, Ending.LEFT_OUT):
                pack(suite.folder, archive)
        suite.tell(f"{part.name}: {entry.ending}{f' ({entry.reason})' if entry.reason else ''}")
    if archive is not None:
        pack(suite.folder, archive)
    return record


def _is_due(suite: Suite, name: str, before: Entry | None) -> bool:
    """Returns whether a part has not ended yet, or runs again because the user asks for it."""
    if before is None or not before.ending.final or name.removesuffix(AGAIN) in suite.config.again:
        return True
    return suite.config.retry and (before.ending is not Ending.DONE or _failed_in(suite, before))


def _failed_in(suite: Suite, entry: Entry) -> bool:
    """Returns whether a test, a ceiling or a variant failed in a part that was done."""
    result = result_in(suite.folder / entry.folder)
    if result is not None and any(row.status.failure for row in result.variants):
        return True
    return any(finding.state in ("failed", "error") for finding in entry.findings)


def _again(suite: Suite, record: Record) -> Iterator[tuple[Part, str]]:
    """Yields the studies to measure again, each when its turn comes: its rounds depend on its earlier times.

    With each comes why it cannot be planned, or "".
    """
    for part in suite.config.chosen:
        first = record.entry(part.name)
        if part.again_s is None or first is None or first.ending is not Ending.DONE or not first.command:
            continue  # without a command, nothing in it can run here
        again = replace(part, name=part.name + AGAIN, limit_s=part.again_s)
        if not _is_due(suite, again.name, record.entry(again.name)):
            continue
        if suite.left_s < part.least_s:
            yield again, ""  # to plan it takes time, too
            continue
        try:
            yield _planned(suite, again, first, read_result(suite.folder / first.folder)), ""
        except UsageError as error:
            yield again, f"cannot be planned: {'; '.join(error.problems)}"


def _planned(suite: Suite, again: Part, first: Entry, result: StudyResult) -> Part:
    """Returns a part that is measured again with its protocol: a study with longer calls gets fewer rounds.

    Raises:
        UsageError: its configuration is not valid, or its first result has no times.
    """
    call_s = _round_s(result)
    if first.seconds is None or not call_s > 0:
        raise UsageError("nothing was timed the first time")
    with composer_of(study_overrides(suite, again)) as composer:
        later = composer.current
    # The first time, there may have been fewer steps, and no energy was measured.
    longer = later.workload.steps / result.config.workload.steps
    beginning_s = _PROCESSES * max(0.0, first.seconds - result.config.protocol.rounds * call_s)
    beginning_s += _PROCESSES * _UNTIMED * max(0.0, longer - 1) * call_s
    beginning_s += later.protocol.energy_s * len(result.variants) if suite.device.is_cuda else 0.0
    round_s = _PROCESSES * longer * call_s
    room_s = min(again.limit_s, max(suite.left_s, 0)) - beginning_s
    rounds = min(again.rounds, max(_FEWEST_ROUNDS, int(room_s / round_s)))
    return replace(
        again,
        overrides=merge_overrides(again.overrides, [f"protocol.replicates={_PROCESSES}", f"protocol.rounds={rounds}"]),
        settled=[found.name for found in first.findings if found.state != Standing.PROVEN],
        least_s=beginning_s + _FEWEST_ROUNDS * round_s,
    )


def _round_s(result: StudyResult) -> float:
    """Returns how long one round takes: a call of every variant at every shape."""
    measured = [shape for variant in result.variants for m in variant.measurements for shape in m.shapes]
    return sum(max(shape.latency_s) for shape in measured if shape.latency_s)


def _entries(suite: Suite, part: Part, before: Entry | None) -> Iterator[Entry]:
    """Yields a part as it begins, unless it is not run, and as it ends."""
    if reason := _says_nothing(suite, part):
        yield Entry(part.name, Ending.LEFT_OUT, reason)
        return
    limit_s = min(part.limit_s, suite.left_s)
    if limit_s < part.least_s:
        room = "is its limit" if limit_s == part.limit_s else "of the budget were left"
        reason = f"needs at least {part.least_s:.0f} s; {max(limit_s, 0):.0f} s {room}"
        # Measurements from before the end of the budget are kept.
        yield before if before is not None and before.ending is Ending.CUT else Entry(part.name, Ending.NOT_RUN, reason)
        return
    subfolder = f"parts/{part.name}"
    entry = Entry(part.name, Ending.RUNNING, limit_s=round(limit_s, 1), began=_now(), folder=f"{subfolder}/run")
    suite.tell(f"{part.name}: at most {limit_s:.0f} s")
    (suite.folder / subfolder).mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    try:
        command, entry.findings, tried = _command(suite, part)
    except UsageError as error:
        entry.ending, entry.reason = Ending.FAILED, "; ".join(error.problems)
        yield entry
        return
    entry.command = command
    if not command:
        entry.ending, entry.reason, entry.seconds = Ending.DONE, "nothing in this part can run here", 0.0
        yield entry
        return
    yield entry
    log = suite.folder / subfolder / "log.txt"
    folder = suite.folder / entry.folder
    try:
        run = _run(suite, part, command, folder, log, began + limit_s)
    except KeyboardInterrupt:
        entry.ending, entry.reason = Ending.CUT, "interrupted"
        entry.findings += _findings(part, folder, log, tried)
        yield entry
        raise
    entry.seconds = round(time.monotonic() - began, 1)
    entry.ending, entry.reason = _ending(part, run, limit_s, folder, log)
    entry.findings += _findings(part, folder, log, tried)
    yield entry


def _says_nothing(suite: Suite, part: Part) -> str:
    """Says why a part is left out on this machine; "" if it is not."""
    if part.cuda and not suite.device.is_cuda:
        return "needs a CUDA device"
    if part.kind == "tests":
        lacking = [what for what, there in (("pytest", find_spec("pytest")), ("tests", _tests().is_dir())) if not there]
        if lacking:
            return f"no {' and no '.join(lacking)} here ({CHECKOUT})"
    return ""


def _tests() -> Path:
    return CHECKOUT / "tests"


def _gpu_tests() -> list[str]:
    """Returns the files with tests for a GPU, those that compile last: a limit then costs none of the short ones.

    To import all other files takes longer than some of these tests.
    """
    found = [path for path in _tests().rglob("test_*.py") if "mark.gpu" in path.read_text(encoding="utf-8")]
    return [str(path) for path in sorted(found, key=lambda path: (path.name == "test_compilers.py", path))]


def _command(suite: Suite, part: Part) -> tuple[list[str], list[Finding], Sequence[str]]:
    """Returns the command that runs a part, findings known beforehand, and the options that the command tries.

    The command is empty if nothing of the part can run here.
    """
    device = [f"hardware.device={suite.device.torch_name}"]
    if part.kind == "tests":
        # Without a GPU, the tests are only collected, which imports them. Slow ones compile DeepSpeed's kernels; it has
        # parts of its own.
        shown = ["-v", "--tb=short"] if suite.device.is_cuda else ["--collect-only", "-q"]
        if find_spec("pytest_timeout"):
            shown.append(f"--timeout={_TEST_S}")
        # A warning of a library of another version is no failure.
        plain = ["-o", "addopts=", "-W", "default", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
        return [sys.executable, "-m", "pytest", *plain, "-m", "gpu and not slow", *shown, *_gpu_tests()], [], ()
    if part.kind == "doctor":
        return _sdopt("doctor", "--json", *device), [], ()
    overrides = study_overrides(suite, part)
    if part.kind != "options":
        return _sdopt("run", *overrides), [], ()
    study = option_study(overrides, part.options, part.settings, suite.device, part.settled)
    command = _sdopt("run", *overrides, *study.overrides) if study.overrides else []
    return command, list(study.left_out), study.tried


def study_overrides(suite: Suite, part: Part) -> list[str]:
    """Returns the overrides of a part's study. A part that is measured again keeps its own processes and rounds."""
    config, again = suite.config, part.name.endswith(AGAIN)
    overrides = merge_overrides([f"hardware.device={suite.device.torch_name}", *config.common], part.overrides)
    if part.kind != "noise" and not again:
        overrides = merge_overrides(merge_overrides(overrides, config.first), part.first)
    return overrides if suite.device.is_cuda else merge_overrides(overrides, config.on_cpu)


def _sdopt(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "sdopt.cli", *arguments]


def _run(suite: Suite, part: Part, command: list[str], folder: Path, log: Path, deadline: float) -> Run:
    """Runs a part; a study that was begun is resumed or, if that is impossible or not asked for, begins anew."""
    patience_s = min(PATIENCE_S, max(2.0, suite.left_s / 10))

    def run(arguments: Sequence[str], out: Path | None = None) -> Run:
        return run_limited(arguments, log, max(1.0, deadline - time.monotonic() - patience_s), patience_s, out)

    if part.kind == "doctor":
        folder.mkdir(parents=True, exist_ok=True)
        return run(command, folder / "doctor.json")
    if part.kind == "tests":
        if part.name in suite.config.again or suite.config.retry:
            log.unlink(missing_ok=True)
        return run([*command, *(f"--deselect={test}" for test in tests_in(log))])
    if (folder / "result.json").is_file():
        if part.name.removesuffix(AGAIN) not in suite.config.again:
            # Unquoted: `sdopt run` reads this argument itself, without Hydra's grammar.
            failed = ["retry_failed=true"] if suite.config.retry else []
            resumed = run(_sdopt("run", f"resume={folder}", "tracking=none", *failed))
            if resumed.code != _USAGE:
                return resumed
        _move_away(folder)
    shutil.rmtree(folder, ignore_errors=True)
    return run([*command, f"hydra.run.dir={quoted(str(folder))}"])


def _move_away(folder: Path) -> None:
    """Moves earlier results of another machine or other versions aside, so that they are kept."""
    number = 1 + sum(1 for _ in folder.parent.glob("earlier-*"))
    folder.rename(folder.parent / f"earlier-{number}")


def _ending(part: Part, run: Run, limit_s: float, folder: Path, log: Path) -> tuple[Ending, str]:
    if run.stopped:
        if limit_s < part.limit_s:
            return Ending.CUT, f"the budget was used up after {run.seconds:.0f} s"
        return Ending.STOPPED, f"at its limit of {limit_s:.0f} s"
    if run.code == 0 or (run.code in (1, 5) and part.kind == "tests"):  # tests failed, or none were there
        return Ending.DONE, ""
    result = result_in(folder) if run.code == 3 else None
    if result is not None and any(variant.status.measured for variant in result.variants):
        return Ending.DONE, "some variants could not be measured"  # the rows say why
    message = last_words(log)
    if result is not None:
        message = next((f"{v.name}: {v.status}: {v.reason}" for v in result.variants if v.status.failure), message)
    how = f"ended with exit code {run.code}" if run.code >= 0 else f"killed by signal {-run.code}"
    return Ending.FAILED, f"{how}: {message}" if message else how


def _findings(part: Part, folder: Path, log: Path, tried: Sequence[str]) -> list[Finding]:
    """Returns the findings of a part, as far as it ran."""
    with suppress(OSError, ValueError, KeyError):
        if part.kind == "doctor":
            return machine_findings(folder / "doctor.json")
        if part.kind == "tests":
            return test_findings(log)
    result = result_in(folder)
    if part.kind == "options":
        return option_findings(result, tried)
    if result is None:
        return []
    return noise_findings(result) if part.kind == "noise" else study_findings(result)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def slug_of(device: str) -> str:
    """Returns the name of a device as a folder name."""
    return re.sub(r"[^a-z0-9.]+", "-", device.lower()).strip("-") or "device"
