"""What a part of each kind runs, and what it has found; a study of some options, each alone."""

import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from sdopt.about import CHECKOUT
from sdopt.apps.doctor.options import alternatives, compose_options, fit_on
from sdopt.apps.suite.config import INTERVALS, Part, SuiteConfig
from sdopt.apps.suite.outcomes import Standing, option_of, outcomes_of
from sdopt.apps.suite.process import PartRun
from sdopt.apps.suite.record import Ending, OptionFinding
from sdopt.config.composer import composer_of
from sdopt.config.overrides import merge_overrides
from sdopt.config.paths import options_of
from sdopt.errors import UsageError
from sdopt.hardware.device import Device
from sdopt.record.choices import quoted
from sdopt.record.files import read_result
from sdopt.record.records import Status, StudyResult, VariantResult
from sdopt.report.columns import memory_text
from sdopt.statistics.disturbance import noise_of
from sdopt.statistics.figures import rows_of
from sdopt.statistics.rows import Row
from sdopt.statistics.words import seconds_text, unit_text

ENDS_WELL = {"tests": (0, 1, 5)}
"""Exit codes of a command that did all that it could, by kind, where it is not 0 alone: of pytest, 1 and 5 say that
tests failed, or that none were left."""

_USAGE = 2
"""The exit code of `sdopt run` if it cannot begin, for example if a resumed run is of another machine."""

_TEST_S = 120
"""Seconds that one test may take, if pytest-timeout is installed: one that hangs would take the part's whole limit, and
one that compiles takes most of a minute."""

"""Where the tests are, if sdopt runs from a checkout."""

_TESTS = CHECKOUT / "tests"

BASELINE = "baseline"

Runner = Callable[..., PartRun]
"""Runs a command within what is left of the part's time; its standard output goes to the log, or to the file `out`."""


@dataclass(frozen=True)
class PartJob:
    """What a part runs.

    Attributes:
        kind: the part's kind.
        folder: the folder of its results.
        log: the file with its output.
        retry: whether what failed in an earlier call runs again.
        command: the command; empty if nothing of the part can run here.
        left_out: options that are known beforehand not to run.
        tried: the options that the command tries.
    """

    kind: str
    folder: Path
    log: Path
    retry: bool
    command: list[str]
    left_out: Sequence[OptionFinding] = ()
    tried: Sequence[str] = ()

    def run(self, run: Runner) -> PartRun:
        """Runs the command, as far as an earlier call has not done it."""
        if self.kind == "doctor":
            self.folder.mkdir(parents=True, exist_ok=True)
            return run(self.command, self.folder / "doctor.json")
        if self.kind == "tests":
            ended = tests_in(self.log).items()
            done = [
                test for test, outcome in ended if outcome == "PASSED" or not self.retry
            ]
            return run(
                [
                    *self.command,
                    *(f"--deselect={_from_checkout(test)}" for test in done),
                ]
            )
        if (self.folder / "result.json").is_file():
            # Unquoted: `sdopt run` reads this argument itself, without Hydra's grammar.
            failed = ["retry_failed=true"] if self.retry else []
            resumed = run(
                _sdopt("run", f"resume={self.folder}", "tracking=none", *failed)
            )
            if resumed.code != _USAGE:
                return resumed
            # Earlier results of another machine or other versions are kept.
            beside = self.folder.parent
            self.folder.rename(
                beside / f"earlier-{1 + sum(1 for _ in beside.glob('earlier-*'))}"
            )
        shutil.rmtree(self.folder, ignore_errors=True)
        return run([*self.command, f"hydra.run.dir={quoted(str(self.folder))}"])

    def findings(self) -> list[OptionFinding]:
        """Returns what the part has found, as far as it ran."""
        if self.kind in ("doctor", "tests"):
            with suppress(OSError, ValueError, KeyError):
                doctor = self.kind == "doctor"
                return (
                    machine_findings(self.folder / "doctor.json")
                    if doctor
                    else test_findings(self.log)
                )
            return []
        result = result_in(self.folder)
        if self.kind == "options":
            return [*self.left_out, *option_findings(result, self.tried)]
        if result is None:
            return []
        return (
            noise_findings(result) if self.kind == "noise" else study_findings(result)
        )


def obstacle_to(part: Part, device: Device) -> str:
    """Says why a part is left out on this machine; "" if it is not."""
    if part.cuda and not device.is_cuda:
        return "needs a CUDA device"
    there = {"pytest": find_spec("pytest") is not None, "tests": _TESTS.is_dir()}
    lacking = [what for what, present in there.items() if not present]
    return (
        f"no {' and no '.join(lacking)} here ({CHECKOUT})"
        if lacking and part.kind == "tests"
        else ""
    )


def job_of(part: Part, config: SuiteConfig, device: Device, folder: Path) -> PartJob:
    """Returns what a part runs, with its files in `folder`. Raises UsageError if its configuration is not valid."""
    place = (part.kind, folder / "run", folder / "log.txt", config.retry)
    if part.kind == "doctor":
        return PartJob(
            *place, _sdopt("doctor", "--json", f"hardware.device={device.torch_name}")
        )
    if part.kind == "tests":
        return PartJob(*place, _pytest())
    overrides = study_overrides(part, config, device)
    if part.kind != "options":
        return PartJob(*place, _sdopt("run", *overrides))
    of_study, left_out, tried = option_study(part, overrides, device)
    command = _sdopt("run", *overrides, *of_study) if of_study else []
    return PartJob(*place, command, left_out, tried)


def _pytest() -> list[str]:
    # A warning of a library of another version is no failure.
    plain = [
        "-v",
        "--tb=short",
        "-o",
        "addopts=",
        "-W",
        "default",
        "-p",
        "no:cacheprovider",
    ]
    limit = [f"--timeout={_TEST_S}"] if find_spec("pytest_timeout") else []
    # To import all other files takes longer than some of these tests. Those that compile come last: a limit then costs
    # none of the short ones.
    files = [
        path
        for path in _TESTS.rglob("test_*.py")
        if "mark.gpu" in path.read_text(encoding="utf-8")
    ]
    files.sort(key=lambda path: (path.name == "test_compilers.py", path))
    # Slow ones compile kernels; the options that they test have parts of their own.
    chosen = ["--continue-on-collection-errors", "-m", "gpu and not slow"]
    return [sys.executable, "-m", "pytest", *plain, *limit, *chosen, *map(str, files)]


def _from_checkout(test: str) -> str:
    """Returns a test's id as pytest compares it, relative to the checkout; a log has it relative to a folder."""
    path, mark, rest = test.partition("::")
    return f"{_TESTS.name}/{path.rpartition(f'{_TESTS.name}/')[2]}{mark}{rest}"


def study_overrides(part: Part, config: SuiteConfig, device: Device) -> list[str]:
    """Returns the overrides of a part's study."""
    overrides = merge_overrides(
        [f"hardware.device={device.torch_name}", *config.common], part.overrides
    )
    if part.name.endswith(INTERVALS):
        overrides = merge_overrides(overrides, config.precise)
    elif part.kind != "noise":
        overrides = merge_overrides(
            merge_overrides(overrides, config.first), part.first
        )
    return overrides if device.is_cuda else merge_overrides(overrides, config.on_cpu)


def _sdopt(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "sdopt.cli", *arguments]


def option_study(
    part: Part, overrides: Sequence[str], device: Device
) -> tuple[tuple[str, ...], list[OptionFinding], list[str]]:
    """Returns the study of each option of a part against the configuration without it, which overrides compose.

    An option that needs another one is compared with that one alone.

    Returns:
        the overrides of the study, () where nothing is left to measure; the options that it leaves out; and those that
        it measures, as in `memory=vae_tiling`.

    Raises:
        UsageError: the configuration is not valid, or there is no such option.
    """
    options = _options_beside(part)
    with composer_of(overrides) as composer:
        made = compose_options(composer, options, part.settings)
        baseline = composer.variant(BASELINE)
    others = alternatives(made)
    beside: dict[str, str] = {}
    left_out: list[OptionFinding] = []
    for (group, option), variant in made.items():
        name = f"{group}={option}"
        if name not in part.options and group not in part.options:
            continue
        if isinstance(variant, list):
            reasons = variant
        elif variant.choices == baseline.choices:
            continue  # the baseline's own trace proves what it has
        else:
            fit = fit_on(device, group, variant, others)
            reasons = fit.remarks
            if fit.runs and not fit.reasons:
                beside[name] = fit.beside
                continue
        why = "; ".join(reasons)
        left_out.append(OptionFinding(name, str(Standing.CANNOT_RUN), why))
    study = _study_of(beside, part.settings) if beside else ()
    return study, left_out, [*beside]


def _options_beside(part: Part) -> list[tuple[str, str]]:
    """Returns all options of the groups of a part, because one may need another beside it, without settled ones.

    Raises:
        UsageError: the part names an option or a group that is not there.
    """
    options: dict[str, tuple[str, str]] = {}
    for named in part.options:
        group, _, _ = named.partition("=")
        for option in options_of(group):
            options[f"{group}={option}"] = (group, option)
    problems = []
    for named in part.options:
        if named not in options and not options_of(named):
            problems.append(f"{named}: no option or group of options")
    if problems:
        raise UsageError(problems)
    return [pair for name, pair in options.items() if name not in part.settled]


def _study_of(
    beside: Mapping[str, str], settings: Mapping[str, Sequence[str]]
) -> tuple[str, ...]:
    """Returns the overrides of a study of options, each with the one that it needs beside it ("" for none)."""
    variants: dict[str, list[str]] = {BASELINE: []}
    edges: dict[str, str] = {}
    references = {"": BASELINE}
    for other in filter(None, beside.values()):
        references[other] = f"with {row_of(other)}"
        variants[references[other]] = [other]
        edges[references[other]] = BASELINE
    for name, other in beside.items():
        needed = [other] if other else []
        variants[row_of(name)] = [*needed, name, *settings.get(name, ())]
        edges[row_of(name)] = references[other]
    written = []
    for name, overrides in variants.items():
        written.append(f"{name}: {json.dumps(overrides, ensure_ascii=False)}")
    compared = []
    for name, reference in edges.items():
        compared.append(f"{{candidate: {name}, reference: {reference}}}")
    return (
        "study=explicit",
        "study.name=options",
        "study.skip_conflicts=true",
        f"study.variants={{{', '.join(written)}}}",
        f"study.edges=[{', '.join(compared)}]",
    )


_TEST = re.compile(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")


def machine_findings(diagnosis: Path) -> list[OptionFinding]:
    """Returns the machine and its ceilings, from the output of `sdopt doctor --json`. Raises ValueError, OSError."""
    found = json.loads(diagnosis.read_text(encoding="utf-8"))
    device, packages = found["device"], found["packages"]
    facts = [f"driver {device['driver']}"] if device["driver"] else []
    facts += [
        f"Python {found['python']}",
        *(f"{name} {packages[name]}" for name in ("torch",) if name in packages),
    ]
    findings = [
        OptionFinding(
            device["name"],
            found["start_method"],
            ", ".join([*facts, found["platform"]]),
        )
    ]
    for ceiling in found["ceilings"]:
        rate = ceiling["failure"] or f"{ceiling['rate']:.4g} {ceiling['unit']}"
        findings.append(
            OptionFinding(
                ceiling["kind"], "failed" if ceiling["failure"] else "ok", rate
            )
        )
    runs = [option["runs"] for option in found["options"]]
    said = f"{sum(runs)} of {len(runs)} should run here, by what is known beforehand"
    return [*findings, OptionFinding("options", "ok", said)]


def tests_in(log: Path) -> dict[str, str]:
    """Returns the outcome of each test in a log of pytest, by its id; {} if there is none."""
    lines = (
        log.read_text(encoding="utf-8", errors="replace").splitlines()
        if log.is_file()
        else []
    )
    return {match[1]: match[2] for line in lines if (match := _TEST.match(line))}


def test_findings(log: Path) -> list[OptionFinding]:
    """Returns the number of tests by outcome, and each failed test; also of a run that was stopped on the way."""
    ended = tests_in(log)
    counts = ", ".join(
        f"{n} {state.lower()}" for state, n in Counter(ended.values()).items()
    )
    found = [OptionFinding("tests", "", counts or "none ran")]
    return found + [
        OptionFinding(test, state.lower(), "")
        for test, state in ended.items()
        if state in ("FAILED", "ERROR")
    ]


_NOISE = {
    "between_rounds": "standard deviation between the rounds of one process",
    "between_processes": "standard deviation between processes, beyond that of their rounds",
    "of_ratio": "standard deviation of the speed-up of one process over an equal one",
    "first_round": "the first round takes longer by",
    "memory": "the largest peak memory is larger than the smallest by",
}


def noise_findings(result: StudyResult) -> list[OptionFinding]:
    """Returns how much identical processes differed."""
    noise = noise_of(result)
    if not noise:
        return []
    of = (
        f"{noise['processes']:g} equal processes, {noise['rounds']:g} rounds, "
        f"{result.schedule.kind}"
    )
    findings = [OptionFinding(of, "ok", "")]
    for name, text in _NOISE.items():
        if name in noise:
            findings.append(OptionFinding(text, "ok", f"{100 * noise[name]:.3g} %"))
    return findings


def row_of(option: str) -> str:
    """Returns the name of an option's variant in a study of options."""
    return option.replace("=", " ")


def option_findings(
    result: StudyResult | None, tried: Sequence[str]
) -> list[OptionFinding]:
    """Returns what the study shows of each option, and why it shows nothing of those in `tried` that are left."""
    shown = [] if result is None else outcomes_of(result)
    found = [
        OptionFinding(option_of(outcome), str(outcome.standing), outcome.why)
        for outcome in shown
    ]
    rows = {} if result is None else {row.name: row for row in result.variants}
    known = {finding.name for finding in found}
    return found + [
        _nothing_of(option, rows.get(row_of(option)))
        for option in tried
        if option not in known
    ]


def _nothing_of(option: str, row: VariantResult | None) -> OptionFinding:
    if row is None or row.status in (Status.PENDING, Status.INTERRUPTED):
        return OptionFinding(
            option, str(Ending.NOT_RUN), "the part ended before it was measured"
        )
    if row.status is Status.TIMEOUT:
        return OptionFinding(option, str(Ending.NOT_RUN), f"time limit: {row.reason}")
    return OptionFinding(option, str(row.status), row.reason)


def study_findings(result: StudyResult) -> list[OptionFinding]:
    """Returns a line for each row of a study's table."""
    return [
        OptionFinding(row.variant.name, str(row.variant.status), _shown(row))
        for row in rows_of(result)
    ]


def _shown(row: Row) -> str:
    unit = unit_text(row.per_image)
    time = "" if row.time is None else f"{seconds_text(row.time)}{unit}"
    gained = row.speedup_beside if row.status.timed else None
    speedup = f"{gained.text}{unit} of {row.reference}" if gained else ""
    return "; ".join(
        filter(None, (time, speedup, memory_text(row), row.variant.reason))
    )


def result_in(folder: Path) -> StudyResult | None:
    """Returns the result in a run's folder; None if there is none that can be read."""
    try:
        return read_result(folder)
    except UsageError:
        return None
