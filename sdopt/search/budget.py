"""Estimates how long the next studies of a search will take, from those already measured: calls, loading, compiling."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from sdopt.analysis.break_even import first_image_s
from sdopt.analysis.ratios import latency
from sdopt.config.parse import RunConfig
from sdopt.results.records import StudyResult
from sdopt.search.findings import Finding
from sdopt.search.studies import Studies
from sdopt.study.forecast import calls_ahead
from sdopt.variant import Variant


@dataclass
class Budget:
    """Estimates how long studies will take, and learns from each measured study.

    Attributes:
        studies: the search's studies.
        beside_s: seconds that the last study took besides its calls and the start of its processes.
    """

    studies: Studies
    beside_s: float = 0.0
    _composed: dict[str, tuple[RunConfig, Variant]] = field(default_factory=dict)

    def seconds(self, stage: str, starts: Sequence[float], screened: StudyResult) -> float:
        """Returns how many seconds a study will take.

        Args:
            stage: `screen`, `race` or `final`.
            starts: the extra start-up time of each candidate, see `start_s`.
            screened: a measured study, which gives the time of one call of the baseline.
        """
        if stage not in self._composed:
            self._composed[stage] = self.studies.composed(stage)
        run, baseline = self._composed[stage]
        replicates = run.protocol.replicates or 1
        count = len(starts) + 2  # the baseline and its control
        calls = calls_ahead([baseline] * count, count * replicates, run.protocol.rounds, run.protocol, None)
        one = latency(screened.variant(screened.baseline), "median", 0.95)
        start_up_s = first_image_s(screened.variant(screened.baseline)) or 0.0
        return calls * (one.estimate if one else 0.0) + replicates * (count * start_up_s + sum(starts)) + self.beside_s

    def learn(self, stage: str, found: Sequence[Finding], measured: StudyResult, took_s: float) -> None:
        """Records how long a study took, right after it was measured."""
        self.beside_s = 0.0
        self.beside_s = max(0.0, took_s - self.seconds(stage, [start_s(finding) for finding in found], measured))


def start_s(finding: Finding) -> float:
    """Returns how many seconds longer than the baseline's a candidate's process loads and makes its first calls."""
    return max(0.0, finding.start.extra_s) if finding.start else 0.0
