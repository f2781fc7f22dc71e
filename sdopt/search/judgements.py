"""What the judged studies of a search decided: each is a study of its own, and a later call may add another.

A candidate that passed keeps its figures. A later judgement takes only those that rank before it, on other noise and in
other processes, so more time never turns a shown gain into an open one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from sdopt.record.records import Status, StudyResult
from sdopt.record.verdicts import Verdict
from sdopt.report.summary import Summary, summary_of
from sdopt.schema import Gate
from sdopt.search.config import SearchConfig
from sdopt.search.findings import CandidateFinding, findings_of
from sdopt.statistics.rows import Row
from sdopt.statistics.scale import Speed


@dataclass(frozen=True)
class Judgements:
    """The verdicts of all judged studies.

    Attributes:
        studies: the summary of each study by the name of its folder, the newest first.
        folders: by candidate, the folder of the newest study that judged it.
        rows: by candidate, its row of that study, in the order of ranks.
        findings: by candidate, its figures in that study.
        wanted: the objective whose gain an answer tells: `memory` if it comes first, else `latency`.
    """

    studies: dict[str, Summary] = field(default_factory=dict)
    folders: dict[str, str] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    findings: dict[str, CandidateFinding] = field(default_factory=dict)
    wanted: str = "latency"

    @classmethod
    def of(
        cls, results: Sequence[tuple[str, StudyResult]], config: SearchConfig
    ) -> "Judgements":
        """Reads the studies that ended, each with the name of its folder, the oldest first."""
        of_memory = config.objectives[0] == "memory"
        judgements = cls(wanted="memory" if of_memory else "latency")
        for folder, result in reversed(results):
            summary = summary_of(result)
            judgements.studies[folder] = summary
            rows = {row.name: row for row in summary.candidates}
            for name, finding in findings_of(result, config, Gate()).items():
                if name not in judgements.rows:
                    judgements.folders[name] = folder
                    judgements.rows[name] = rows[name]
                    judgements.findings[name] = finding
        return judgements

    @property
    def passed(self) -> list[str]:
        """The candidates that are shown to be better, the best rank first."""
        return [
            name
            for name, row in self.rows.items()
            if row.pays and not self.findings[name].out
        ]

    @property
    def failed(self) -> set[str]:
        """The candidates that something speaks against."""
        return {
            name
            for name, row in self.rows.items()
            if _is_against(row) or self.findings[name].out
        }

    @property
    def undecided(self) -> list[str]:
        """The candidates that gained what is wanted, and of which neither that nor the opposite is shown."""
        decided = {*self.passed, *self.failed}
        return [
            name
            for name, finding in self.findings.items()
            if name not in decided and finding.losses.get(self.wanted, 0.0) < 0
        ]

    def baseline_of(self, name: str) -> Row | None:
        """Returns the baseline's row of the study that judged a candidate."""
        summary = self.studies[self.folders[name]]
        return summary.row(summary.result.baseline)

    def open_among(self, ranked: Sequence[str]) -> list[str]:
        """Returns the candidates left to judge: those that rank before one that passed and did not fail."""
        passed = set(self.passed)
        open_ones = []
        for name in ranked:
            if name in passed:
                break
            if name not in self.failed:
                open_ones.append(name)
        return open_ones


def _is_against(row: Row) -> bool:
    return (
        row.decision is Verdict.FAIL
        or (row.speed is Speed.SLOWER and not row.disturbance)
        or row.status is not Status.OK
    )
