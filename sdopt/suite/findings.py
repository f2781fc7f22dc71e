"""Reads the findings of a part from its files."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from sdopt.errors import UsageError
from sdopt.record.files import read_result
from sdopt.record.records import Status, StudyResult, VariantResult
from sdopt.statistics.figures import Figures, figures_of, ratio_text
from sdopt.statistics.noise import noise_of
from sdopt.statistics.outcomes import option_of, outcomes_of
from sdopt.statistics.words import gib_text
from sdopt.suite.record import Ending, Finding

_TEST = re.compile(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")


def machine_findings(diagnosis: Path) -> list[Finding]:
    """Returns the machine and its ceilings, from the output of `sdopt doctor --json`. Raises ValueError, OSError."""
    found = json.loads(diagnosis.read_text(encoding="utf-8"))
    device, packages = found["device"], found["packages"]
    facts = [f"driver {device['driver']}"] if device["driver"] else []
    facts += [f"Python {found['python']}", *(f"{name} {packages[name]}" for name in ("torch",) if name in packages)]
    findings = [Finding(device["name"], found["start_method"], ", ".join([*facts, found["platform"]]))]
    for ceiling in found["ceilings"]:
        if ceiling["failure"]:
            findings.append(Finding(ceiling["kind"], "failed", ceiling["failure"]))
        else:
            findings.append(Finding(ceiling["kind"], "ok", f"{ceiling['rate']:.4g} {ceiling['unit']}"))
    runs = [option["runs"] for option in found["options"]]
    return [
        *findings,
        Finding("options", "ok", f"{sum(runs)} of {len(runs)} should run here, by what is known beforehand"),
    ]


def tests_in(log: Path) -> dict[str, str]:
    """Returns the outcome of each test in a log of pytest, by its id; {} if there is none."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    return {match[1]: match[2] for line in lines if (match := _TEST.match(line))}


def test_findings(log: Path) -> list[Finding]:
    """Returns the number of tests by outcome, and each failed test; also for stopped and collect-only runs."""
    lines, ended = log.read_text(encoding="utf-8", errors="replace").splitlines(), tests_in(log)
    if collected := next((line for line in lines if re.match(r"\d+(/\d+)? tests? collected", line)), None):
        return [Finding("tests", "not run", f"without a GPU: {collected}")]
    counts = {state: list(ended.values()).count(state) for state in dict.fromkeys(ended.values())}
    found = [Finding("tests", "", ", ".join(f"{n} {state.lower()}" for state, n in counts.items()) or "none ran")]
    return found + [Finding(test, state.lower(), "") for test, state in ended.items() if state in ("FAILED", "ERROR")]


def noise_findings(result: StudyResult) -> list[Finding]:
    """Returns how much identical processes differed."""
    noise = noise_of(result)
    if noise is None:
        return []
    labels = {
        "between_rounds": "standard deviation between the rounds of one process",
        "between_processes": "standard deviation between processes, beyond that of their rounds",
        "of_ratio": "standard deviation of the speed-up of one process over an equal one",
        "first_round": "the first round takes longer by",
        "memory": "the largest peak memory is larger than the smallest by",
    }
    of = f"{noise.processes} equal processes, {noise.rounds} rounds, {noise.schedule}"
    return [
        Finding(of, "ok", ""),
        *(
            Finding(text, "ok", "exactly 0" if noise.figures[name] == 0 else f"{100 * noise.figures[name]:.2f} %")
            for name, text in labels.items()
            if name in noise.figures
        ),
    ]


def row_of(option: str) -> str:
    """Returns the name of an option's variant in a study of options."""
    return option.replace("=", " ")


def option_findings(result: StudyResult | None, tried: Sequence[str]) -> list[Finding]:
    """Returns what the study shows of each option, and why it shows nothing of those in `tried` that are left."""
    shown = [] if result is None else outcomes_of(result)
    found = [Finding(option_of(outcome), str(outcome.standing), outcome.why) for outcome in shown]
    rows = {} if result is None else {row.name: row for row in result.variants}
    known = {finding.name for finding in found}
    return found + [_nothing_of(option, rows.get(row_of(option))) for option in tried if option not in known]


def _nothing_of(option: str, row: VariantResult | None) -> Finding:
    if row is None or row.status in (Status.PENDING, Status.INTERRUPTED):
        return Finding(option, str(Ending.NOT_RUN), "the part ended before it was measured")
    if row.status is Status.TIMEOUT:
        return Finding(option, str(Ending.NOT_RUN), f"time limit: {row.reason}")
    return Finding(option, str(row.status), row.reason)


def study_findings(result: StudyResult) -> list[Finding]:
    """Returns a line for each row of a study's table."""
    return [_row(row) for row in figures_of(result)]


def _row(row: Figures) -> Finding:
    parts = [] if row.latency is None else [f"{row.latency.estimate:.4g} s per call"]
    if (ratio := row.speedup) is not None:
        floor = "" if ratio.floor is None else f", two identical baselines {ratio.floor:.3f}×"
        parts.append(f"{ratio_text(ratio.interval)} of {row.reference}{floor}")
    if row.headline_memory is not None:
        parts.append(gib_text(row.headline_memory[1]))
    if row.variant.reason:
        parts.append(row.variant.reason)
    return Finding(row.variant.name, str(row.variant.status), "; ".join(parts))


def result_in(folder: Path) -> StudyResult | None:
    """Returns the result in a run's folder; None if there is none that can be read."""
    try:
        return read_result(folder)
    except UsageError:
        return None
