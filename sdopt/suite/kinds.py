"""What a part of each kind runs, and how its findings are read."""

import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import sdopt
from sdopt.config.overrides import merge_overrides, quoted
from sdopt.hardware.device import Device
from sdopt.suite import findings as found
from sdopt.suite.config import INTERVALS, Part, SuiteConfig
from sdopt.suite.options import option_study
from sdopt.suite.process import Run
from sdopt.suite.record import Finding

ENDS_WELL = {"tests": (0, 1, 5)}
"""Exit codes of a command that did all that it could, by kind, where it is not 0 alone: of pytest, 1 and 5 say that
tests failed, or that none were left."""

_USAGE = 2
"""The exit code of `sdopt run` if it cannot begin, for example if a resumed run is of another machine."""

_TEST_S = 120
"""Seconds that one test may take, if pytest-timeout is installed: one that hangs would take the part's whole limit, and
one that compiles takes most of a minute."""

CHECKOUT = Path(sdopt.__file__).parents[1]
"""Where the tests are, if sdopt runs from a checkout."""

_TESTS = CHECKOUT / "tests"

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


@dataclass(frozen=True)
class Place:
    """Where a part runs, and what of an earlier run counts.

    Attributes:
        folder: the folder of its results.
        log: the file with its output.
        retry: whether what failed runs again.
    """

    folder: Path
    log: Path
    retry: bool


def obstacle_to(part: Part, device: Device) -> str:
    """Says why a part is left out on this machine; "" if it is not."""
    if part.cuda and not device.is_cuda:
        return "needs a CUDA device"
    there = {"pytest": find_spec("pytest") is not None, "tests": _TESTS.is_dir()}
    lacking = [what for what, present in there.items() if not present]
    return f"no {' and no '.join(lacking)} here ({CHECKOUT})" if lacking and part.kind == "tests" else ""


def job_of(part: Part, config: SuiteConfig, device: Device) -> Job:
    """Returns what a part runs. Raises UsageError if its configuration is not valid."""
    if part.kind == "doctor":
        return Job(_sdopt("doctor", "--json", f"hardware.device={device.torch_name}"))
    if part.kind == "tests":
        return Job(_pytest(device))
    overrides = study_overrides(part, config, device)
    if part.kind != "options":
        return Job(_sdopt("run", *overrides))
    study = option_study(overrides, part.options, part.settings, device, part.settled)
    command = _sdopt("run", *overrides, *study.overrides) if study.overrides else []
    return Job(command, list(study.left_out), study.tried)


def run_job(kind: str, job: Job, place: Place, run: Runner) -> Run:
    """Runs a part of a kind, as far as an earlier call has not done it."""
    if kind == "doctor":
        place.folder.mkdir(parents=True, exist_ok=True)
        return run(job.command, place.folder / "doctor.json")
    if kind == "tests":
        ended = found.tests_in(place.log).items()
        done = [test for test, outcome in ended if outcome == "PASSED" or not place.retry]
        return run([*job.command, *(f"--deselect={_from_checkout(test)}" for test in done)])
    return _run_study(job, place, run)


def findings_of(kind: str, place: Place, tried: Sequence[str]) -> list[Finding]:
    """Returns the findings of a part, as far as it ran.

    Args:
        kind: of the part.
        place: where it ran.
        tried: the options that it tried.
    """
    if kind in ("doctor", "tests"):
        with suppress(OSError, ValueError, KeyError):
            doctor = kind == "doctor"
            return found.machine_findings(place.folder / "doctor.json") if doctor else found.test_findings(place.log)
        return []
    result = found.result_in(place.folder)
    if kind == "options":
        return found.option_findings(result, tried)
    if result is None:
        return []
    return found.noise_findings(result) if kind == "noise" else found.study_findings(result)


def _run_study(job: Job, place: Place, run: Runner) -> Run:
    """Runs a study; one that was begun is resumed or, if that is impossible, begins anew."""
    folder = place.folder
    if (folder / "result.json").is_file():
        # Unquoted: `sdopt run` reads this argument itself, without Hydra's grammar.
        failed = ["retry_failed=true"] if place.retry else []
        resumed = run(_sdopt("run", f"resume={folder}", "tracking=none", *failed))
        if resumed.code != _USAGE:
            return resumed
        # Earlier results of another machine or other versions are kept.
        folder.rename(folder.parent / f"earlier-{1 + sum(1 for _ in folder.parent.glob('earlier-*'))}")
    shutil.rmtree(folder, ignore_errors=True)
    return run([*job.command, f"hydra.run.dir={quoted(str(folder))}"])


def _pytest(device: Device) -> list[str]:
    # Without a GPU, the tests are only collected, which imports them. Slow ones compile kernels; the options that they
    # test have parts of their own.
    shown = ["-v", "--tb=short"] if device.is_cuda else ["--collect-only", "-q"]
    if find_spec("pytest_timeout"):
        shown.append(f"--timeout={_TEST_S}")
    # A warning of a library of another version is no failure.
    plain = ["-o", "addopts=", "-W", "default", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    # To import all other files takes longer than some of these tests. Those that compile come last: a limit then costs
    # none of the short ones.
    files = [path for path in _TESTS.rglob("test_*.py") if "mark.gpu" in path.read_text(encoding="utf-8")]
    files.sort(key=lambda path: (path.name == "test_compilers.py", path))
    return [sys.executable, "-m", "pytest", *plain, "-m", "gpu and not slow", *shown, *map(str, files)]


def _from_checkout(test: str) -> str:
    """Returns a test's id as pytest compares it, relative to the checkout; a log has it relative to a folder."""
    path, mark, rest = test.partition("::")
    return f"{_TESTS.name}/{path.rpartition(f'{_TESTS.name}/')[2]}{mark}{rest}"


def study_overrides(part: Part, config: SuiteConfig, device: Device) -> list[str]:
    """Returns the overrides of a part's study."""
    overrides = merge_overrides([f"hardware.device={device.torch_name}", *config.common], part.overrides)
    if part.name.endswith(INTERVALS):
        overrides = merge_overrides(overrides, config.precise)
    elif part.kind != "noise":
        overrides = merge_overrides(merge_overrides(overrides, config.first), part.first)
    return overrides if device.is_cuda else merge_overrides(overrides, config.on_cpu)


def _sdopt(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "sdopt.cli", *arguments]
