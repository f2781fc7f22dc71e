"""What the studies of a search will take, from those that were measured: calls, loading, and what is compiled."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from sdopt.analysis.break_even import first_image_s
from sdopt.analysis.timing import latency
from sdopt.config.parse import RunConfig
from sdopt.results.records import StudyResult
from sdopt.search.findings import Finding
from sdopt.search.studies import Studies
from sdopt.study.forecast import calls_ahead
from sdopt.variant import Variant


@dataclass
class Budget:
    """Estimates studies, and learns from each that was measured.

    Attributes:
        studies: of the search.
        beside_s: what the last study took beside its calls and the start of its processes, in seconds.
    """

    studies: Studies
    beside_s: float = 0.0
    _composed: dict[str, tuple[RunConfig, Variant]] = field(default_factory=dict)

    def seconds(self, stage: str, starts: Sequence[float], screened: StudyResult) -> float:
        """Returns what a study will take.

        Args:
            stage: `screen`, `race` or `final`.
            starts: of each candidate, see `start_s`.
            screened: a study that tells how long a call of the baseline is.
        """
        if stage not in self._composed:
            self._composed[stage] = self.studies.composed(stage)
        run, baseline = self._composed[stage]
        replicates = run.protocol.replicates or 1
        count = len(starts) + 2  # the baseline and its control
        calls = calls_ahead([baseline] * count, count * replicates, run.protocol.rounds, run.protocol, None)
        one = latency(screened.variant(screened.baseline), "median", 0.95)
        each = first_image_s(screened.variant(screened.baseline)) or 0.0
        return calls * (one.estimate if one else 0.0) + replicates * (count * each + sum(starts)) + self.beside_s

    def learn(self, stage: str, found: Sequence[Finding], measured: StudyResult, took_s: float) -> None:
        """Notes what a study took that was just measured."""
        self.beside_s = 0.0
        self.beside_s = max(0.0, took_s - self.seconds(stage, [start_s(finding) for finding in found], measured))


def start_s(finding: Finding) -> float:
    """Returns what each process of a candidate takes more than the baseline's before its second call, in seconds."""
    return max(0.0, finding.start.extra_s) if finding.start else 0.0
