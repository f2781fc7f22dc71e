"""Counts false alarms: in independent A/A trials, each a study of its own with one harmless option.

Each trial has processes and noise of its own, so that a rate with a bound can be given. Trials that share a pool of
processes are not independent: three processes a side can be labelled in eight ways, however often they are drawn; nor
are several candidates that share a baseline.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from sdopt.analysis.bounds import share_bounds
from sdopt.results.files import read_result
from sdopt.results.records import Verdict

CANDIDATES = ('["+trial=nothing"]', '["+trial=reordered"]', '["+trial=reordered","trial.promise=lossy"]')
"""The options of the trials, in turn, as Hydra overrides: each declares itself exact, equivalent, or lossy."""


@dataclass(frozen=True)
class Alarms:
    """Verdicts of the trials of one contract, or of all."""

    contract: str
    verdicts: tuple[Verdict, ...]
    reasons: tuple[str, ...]
    """The trials that failed, each with its folder."""

    def count(self, verdict: Verdict) -> int:
        """Returns how many trials ended with a verdict."""
        return self.verdicts.count(verdict)

    @property
    def highest_rate(self) -> float:
        """The one-sided 95 % bound of the rate of false alarms (Clopper and Pearson); 1 if no trial was judged."""
        if not self.verdicts:
            return 1.0
        high = share_bounds(self.count(Verdict.FAIL), len(self.verdicts), 0.95).high
        assert high is not None
        return high


def count_alarms(folders: Sequence[Path]) -> list[Alarms]:
    """Returns a gate's verdicts on the A/A trials in some folders, by declared contract, and for all."""
    verdicts: dict[str, list[Verdict]] = {}
    reasons: dict[str, list[str]] = {}
    for folder in folders:
        for judgement in read_result(folder).judgements:
            verdicts.setdefault(judgement.contract, []).append(judgement.verdict)
            reasons.setdefault(judgement.contract, []).extend(
                f"{folder.name}: {ruling.metric or ruling.rule}: {ruling.reason}"
                for ruling in judgement.rulings
                if ruling.verdict is Verdict.FAIL
            )
    by_contract = [Alarms(contract, tuple(found), tuple(reasons[contract])) for contract, found in verdicts.items()]
    every = Alarms("all", tuple(chain(*verdicts.values())), tuple(chain(*reasons.values())))
    return [*by_contract, every]
