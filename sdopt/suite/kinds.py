"""What a part of each kind runs, and how its findings are read."""

import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

import sdopt
from sdopt.config.overrides import merge_overrides, quoted
from sdopt.hardware.device import Device
from sdopt.results.records import StudyResult
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
from sdopt.suite.process import Run
from sdopt.suite.record import Finding

AGAIN = "_again"
"""Suffix of the name of a part that measures a study again, with three processes."""

_USAGE = 2
"""The exit code of `sdopt run` if it cannot begin, for example if a resumed run is of another machine."""

_TEST_S = 120
"""Seconds that one test may take, if pytest-timeout is installed: one that hangs would take the part's whole limit, and
one that compiles takes most of a minute."""

CHECKOUT = Path(sdopt.__file__).parents[1]
"""Where the tests are, if sdopt runs from a checkout."""

Runner = Callable[..., Run]
"""Runs a command within what is left of the part's time; its standard output goes to the log, or to the file `out`."""


@dataclass(frozen=True)
class Job:
    """What a part runs.

    Attributes:
        command: the command; empty if nothing of the part can run here.
        findings: what is known beforehand.
        tried: the options that the command tries.
    """

    command: list[str]
    findings: list[Finding] = field(default_factory=list)
    tried: Sequence[str] = ()


class Kind(ABC):
    """A kind of part."""

    ends_well: ClassVar[tuple[int, ...]] = (0,)
    """Exit codes of a command that did all that it could."""

    def obstacle(self) -> str:
        """Says why a part of this kind is left out on this machine; "" if it is not."""
        return ""

    @abstractmethod
    def job(self, part: Part, config: SuiteConfig, device: Device) -> Job:
        """Returns what a part runs. Raises UsageError if its configuration is not valid."""

    @abstractmethod
    def run(self, job: Job, folder: Path, log: Path, run: Runner, anew: bool, retry: bool) -> Run:
        """Runs a part.

        Args:
            job: what it runs.
            folder: the folder of its results.
            log: the file with its output so far.
            run: runs a command.
            anew: whether earlier results do not count.
            retry: whether what failed runs again.
        """

    @abstractmethod
    def findings(self, folder: Path, log: Path, tried: Sequence[str]) -> list[Finding]:
        """Returns the findings of a part, as far as it ran."""


class _Doctor(Kind):
    """Describes the machine and its ceilings."""

    @override
    def job(self, part: Part, config: SuiteConfig, device: Device) -> Job:
        return Job(_sdopt("doctor", "--json", f"hardware.device={device.torch_name}"))

    @override
    def run(self, job: Job, folder: Path, log: Path, run: Runner, anew: bool, retry: bool) -> Run:
        folder.mkdir(parents=True, exist_ok=True)
        return run(job.command, folder / "doctor.json")

    @override
    def findings(self, folder: Path, log: Path, tried: Sequence[str]) -> list[Finding]:
        with suppress(OSError, ValueError, KeyError):
            return machine_findings(folder / "doctor.json")
        return []


class _Tests(Kind):
    """Runs the tests that need a GPU."""

    ends_well = (0, 1, 5)  # tests failed, or none were left

    @override
    def obstacle(self) -> str:
        there = {"pytest": find_spec("pytest") is not None, "tests": _tests().is_dir()}
        lacking = [what for what, found in there.items() if not found]
        return f"no {' and no '.join(lacking)} here ({CHECKOUT})" if lacking else ""

    @override
    def job(self, part: Part, config: SuiteConfig, device: Device) -> Job:
        # Without a GPU, the tests are only collected, which imports them. Slow ones compile kernels; the options that
        # they test have parts of their own.
        shown = ["-v", "--tb=short"] if device.is_cuda else ["--collect-only", "-q"]
        if find_spec("pytest_timeout"):
            shown.append(f"--timeout={_TEST_S}")
        # A warning of a library of another version is no failure.
        plain = ["-o", "addopts=", "-W", "default", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
        return Job([sys.executable, "-m", "pytest", *plain, "-m", "gpu and not slow", *shown, *_gpu_tests()])

    @override
    def run(self, job: Job, folder: Path, log: Path, run: Runner, anew: bool, retry: bool) -> Run:
        if anew:
            log.unlink(missing_ok=True)
        done = [test for test, outcome in tests_in(log).items() if outcome == "PASSED" or not retry]
        return run([*job.command, *(f"--deselect={_from_checkout(test)}" for test in done)])

    @override
    def findings(self, folder: Path, log: Path, tried: Sequence[str]) -> list[Finding]:
        with suppress(OSError):
            return test_findings(log)
        return []


class _Study(Kind):
    """Runs a study; one that was begun is resumed or, if that is impossible, begins anew."""

    @override
    def job(self, part: Part, config: SuiteConfig, device: Device) -> Job:
        return Job(_sdopt("run", *study_overrides(part, config, device)))

    @override
    def run(self, job: Job, folder: Path, log: Path, run: Runner, anew: bool, retry: bool) -> Run:
        if (folder / "result.json").is_file():
            if not anew:
                # Unquoted: `sdopt run` reads this argument itself, without Hydra's grammar.
                failed = ["retry_failed=true"] if retry else []
                resumed = run(_sdopt("run", f"resume={folder}", "tracking=none", *failed))
                if resumed.code != _USAGE:
                    return resumed
            _move_away(folder)
        shutil.rmtree(folder, ignore_errors=True)
        return run([*job.command, f"hydra.run.dir={quoted(str(folder))}"])

    @override
    def findings(self, folder: Path, log: Path, tried: Sequence[str]) -> list[Finding]:
        result = result_in(folder)
        return [] if result is None else self._shown(result)

    def _shown(self, result: StudyResult) -> list[Finding]:
        return study_findings(result)


class _Noise(_Study):
    """Runs a study of identical variants."""

    @override
    def _shown(self, result: StudyResult) -> list[Finding]:
        return noise_findings(result)


class _Options(_Study):
    """Runs a study of each option of some groups."""

    @override
    def job(self, part: Part, config: SuiteConfig, device: Device) -> Job:
        overrides = study_overrides(part, config, device)
        study = option_study(overrides, part.options, part.settings, device, part.settled)
        command = _sdopt("run", *overrides, *study.overrides) if study.overrides else []
        return Job(command, list(study.left_out), study.tried)

    @override
    def findings(self, folder: Path, log: Path, tried: Sequence[str]) -> list[Finding]:
        return option_findings(result_in(folder), tried)


KINDS: Mapping[str, Kind] = {
    "doctor": _Doctor(),
    "tests": _Tests(),
    "noise": _Noise(),
    "options": _Options(),
    "study": _Study(),
}
"""By the name in `Part.kind`."""


def study_overrides(part: Part, config: SuiteConfig, device: Device) -> list[str]:
    """Returns the overrides of a part's study. A part that is measured again keeps its own processes and rounds."""
    overrides = merge_overrides([f"hardware.device={device.torch_name}", *config.common], part.overrides)
    if part.kind != "noise" and not part.name.endswith(AGAIN):
        overrides = merge_overrides(merge_overrides(overrides, config.first), part.first)
    return overrides if device.is_cuda else merge_overrides(overrides, config.on_cpu)


def _sdopt(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "sdopt.cli", *arguments]


def _move_away(folder: Path) -> None:
    """Moves earlier results of another machine or other versions aside, so that they are kept."""
    number = 1 + sum(1 for _ in folder.parent.glob("earlier-*"))
    folder.rename(folder.parent / f"earlier-{number}")


def _tests() -> Path:
    return CHECKOUT / "tests"


def _from_checkout(test: str) -> str:
    """Returns a test's id as pytest compares it, relative to the checkout; a log has it relative to a folder."""
    path, mark, rest = test.partition("::")
    return f"{_tests().name}/{path.rpartition(f'{_tests().name}/')[2]}{mark}{rest}"


def _gpu_tests() -> list[str]:
    """Returns the files with tests for a GPU, those that compile last: a limit then costs none of the short ones.

    To import all other files takes longer than some of these tests.
    """
    found = [path for path in _tests().rglob("test_*.py") if "mark.gpu" in path.read_text(encoding="utf-8")]
    return [str(path) for path in sorted(found, key=lambda path: (path.name == "test_compilers.py", path))]
