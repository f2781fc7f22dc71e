"""Counts false alarms: in independent A/A trials, each a study of its own with one harmless option.

Each trial has processes and noise of its own, so that a rate with a bound can be given. Trials that share a pool of
processes are not independent: three processes a side can be labelled in eight ways, however often they are drawn; nor
are several candidates that share a baseline.

Two hundred trials take hours. A ledger, a CSV file with a row per trial, keeps their verdicts, so that they can be made
in several calls, from different folders and on different days.
"""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from sdopt.analysis.bounds import share_bounds
from sdopt.errors import UsageError
from sdopt.results.comparisons import Interval
from sdopt.results.files import read_result, write_atomically
from sdopt.results.verdicts import Verdict

CANDIDATES = ('["+trial=nothing"]', '["+trial=reordered"]', '["+trial=reordered","trial.promise=lossy"]')
"""The options of the trials, in turn, as Hydra overrides: each declares itself exact, equivalent, or lossy."""


@dataclass(frozen=True)
class Trial:
    """The verdict on one harmless option, and its origin; the fields are the columns of the ledger."""

    seed: int
    """The seed of the study's noise, which identifies its study."""
    contract: str
    verdict: str
    reason: str
    """The rules that failed, with their reasons; empty if none did."""
    speedup: str
    """The measured speed-up with its interval, as text; empty if there is none."""
    started: str
    device: str
    code: str
    """Digest of sdopt's own Python files."""


@dataclass(frozen=True)
class Alarms:
    """Verdicts of the trials of one contract, or of all."""

    contract: str
    trials: tuple[Trial, ...]

    def count(self, verdict: Verdict) -> int:
        """Returns how many trials ended with a verdict."""
        return [trial.verdict for trial in self.trials].count(verdict)

    @property
    def highest_rate(self) -> float:
        """The one-sided 95 % bound of the rate of false alarms (Clopper and Pearson); 1 if no trial was judged."""
        if not self.trials:
            return 1.0
        high = share_bounds(self.count(Verdict.FAIL), len(self.trials), 0.95).high
        assert high is not None
        return high

    @property
    def versions(self) -> int:
        """The number of versions of sdopt's own code that made the trials."""
        return len({trial.code for trial in self.trials})

    @property
    def reasons(self) -> list[str]:
        """The trials that failed, each with its seed and the reasons."""
        return [f"seed {trial.seed}, {trial.contract}: {trial.reason}" for trial in self.trials if trial.reason]


def trials_in(folder: Path) -> list[Trial]:
    """Returns the trials whose results lie in a folder or below it, in the order of their paths."""
    found = []
    for file in sorted(folder.rglob("result.json")):
        result = read_result(file.parent)
        for judgement in result.judgements:
            failed = [ruling for ruling in judgement.rulings if ruling.verdict is Verdict.FAIL]
            comparison = result.first_comparison(judgement.candidate)
            found.append(
                Trial(
                    seed=result.config.workload.seed,
                    contract=judgement.contract,
                    verdict=judgement.verdict,
                    reason="; ".join(f"{ruling.metric or ruling.rule}: {ruling.reason}" for ruling in failed),
                    speedup=_ratio(comparison.speedup if comparison else None),
                    started=result.started,
                    device=result.environment.device.get("name", ""),
                    code=result.environment.code or "",
                )
            )
    return found


def _ratio(interval: Interval | None) -> str:
    if interval is None:
        return ""
    bounds = [f"{bound:.4f}" for bound in (interval.low, interval.high) if bound is not None]
    return f"{interval.estimate:.4f}" + (f" [{', '.join(bounds)}]" if bounds else "")


def read_ledger(file: Path) -> list[Trial]:
    """Returns the trials in a ledger; none if there is no such file.

    Raises:
        UsageError: a line is not that of a trial.
    """
    if not file.is_file():
        return []
    expected = [field.name for field in fields(Trial)]
    trials = []
    for number, row in enumerate(csv.DictReader(io.StringIO(file.read_text(encoding="utf-8"))), start=2):
        try:
            if list(row) != expected or None in row.values():
                raise ValueError(f"{len(row)} columns")
            seed, verdict = int(row.pop("seed")), Verdict(row.pop("verdict"))
            trials.append(Trial(seed=seed, verdict=verdict.value, **row))
        except ValueError as error:
            raise UsageError(
                f"--ledger {file}: line {number} is not that of a trial; its columns are {', '.join(expected)}"
            ) from error
    return trials


def write_ledger(file: Path, trials: Iterable[Trial]) -> None:
    """Writes a ledger, in the order of the seeds. Raises OSError if the folder cannot be written."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Trial)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(trial) for trial in sorted(trials, key=lambda trial: (trial.seed, trial.contract)))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, text.getvalue().encode())


def missing_seeds(trials: Iterable[Trial], wanted: int) -> list[int]:
    """Returns the seeds whose trials of all contracts are still to be made, for at least `wanted` trials in all."""
    made: dict[int, set[str]] = {}
    for trial in trials:
        made.setdefault(trial.seed, set()).add(trial.contract)
    seeds = range(0, 1000 * -(-wanted // len(CANDIDATES)), 1000)
    return [seed for seed in seeds if len(made.get(seed, ())) < len(CANDIDATES)]


def count_alarms(trials: Sequence[Trial]) -> list[Alarms]:
    """Returns the trials by declared contract, and all of them last."""
    contracts = dict.fromkeys(trial.contract for trial in trials)
    by_contract = [Alarms(name, tuple(trial for trial in trials if trial.contract == name)) for name in contracts]
    return [*by_contract, Alarms("all", tuple(trials))]
