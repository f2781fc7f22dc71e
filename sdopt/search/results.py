"""Reads what the studies of a search measured: the figures of candidates, and by how much chance moves them."""

from collections.abc import Iterator, Sequence
from functools import cached_property

from sdopt.gate.rule_checks import decidable
from sdopt.record.files import read_result
from sdopt.record.records import StudyResult
from sdopt.schema import Gate
from sdopt.search.budget import Cost
from sdopt.search.findings import RATIOS, CandidateFinding, control_of, findings_of
from sdopt.search.racing import DistanceStanding, RatioStanding, Scatter, Standing
from sdopt.search.record import FINAL
from sdopt.search.studies import Studies
from sdopt.statistics.break_even import first_image_s
from sdopt.statistics.ratios import latency


class Results:
    """The results of the studies of one search."""

    def __init__(self, studies: Studies) -> None:
        self._studies = studies
        self._read: dict[str, dict[str, CandidateFinding]] = {}

    def finished(self, stage: str) -> Iterator[StudyResult]:
        """Yields the results of a stage whose studies ended, be it early."""
        for result in self.of(stage):
            if result.status in ("finished", "interrupted"):
                yield result

    def of(self, stage: str) -> Iterator[StudyResult]:
        """Yields the result of the study `stage`; if `stage` ends in a hyphen, of all studies with that prefix."""
        folders = f"{stage}*" if stage.endswith("-") else stage
        files = self._studies.folder.glob(f"{folders}/result.json")
        # The tenth study of a kind comes after the second one.
        for path in sorted(files, key=lambda path: (len(path.parent.name), path)):
            yield read_result(path)

    def judged(self) -> list[tuple[str, StudyResult]]:
        """Returns the judged studies, be they unfinished, each with the name of its folder, the oldest first."""
        judged = [(FINAL, result) for result in self.of(FINAL)]
        for number, result in enumerate(self.of(f"{FINAL}-"), start=1):
            judged.append((f"{FINAL}-{number}", result))
        return judged

    def noise(self, objective: str, stages: Sequence[str]) -> Scatter:
        """Estimates from the repeated baselines of some stages how far processes differ in time or memory."""
        controls = []
        for stage in stages:
            for result in self.finished(stage):
                control = control_of(result, objective)
                if control is not None:
                    controls.append(control)
        return Scatter.of_controls(controls)

    def all_findings(self, stages: Sequence[str]) -> dict[str, list[CandidateFinding]]:
        """Returns each candidate's findings in the studies of some stages, by name."""
        by_name: dict[str, list[CandidateFinding]] = {}
        for stage in stages:
            for result in self.finished(stage):
                if result.id not in self._read:
                    self._read[result.id] = self.findings(result)
                for name, finding in self._read[result.id].items():
                    by_name.setdefault(name, []).append(finding)
        return by_name

    def findings(self, result: StudyResult) -> dict[str, CandidateFinding]:
        """Returns each candidate's finding in one study, by name."""
        quality = result.config.quality
        prompts = quality.prompt_count or 0
        images = prompts * result.config.workload.images_per_prompt
        gate = decidable(self.gate, quality, result.config.model, images)
        return findings_of(result, self._studies.config, gate)

    @cached_property
    def gate(self) -> Gate:
        """The rules that the finalists are judged by."""
        return self._studies.composed(FINAL)[0].gate


def costs_of(result: StudyResult) -> tuple[Cost | None, dict[str, Cost]]:
    """Returns what a process of the baseline takes, if it was timed, and one of each timed candidate, by name."""
    costs = {}
    for row in result.variants:
        call = latency(row, "median", 0.95)
        if call is not None:
            first_s = first_image_s(row) or 0.0
            costs[row.name] = Cost(first_s, call.estimate)
    of_candidates = {}
    for row in result.candidates:
        if row.name in costs:
            of_candidates[row.name] = costs[row.name]
    return costs.get(result.baseline), of_candidates


def standing_of(
    findings: Sequence[CandidateFinding],
    objective: str,
    noise: Scatter,
) -> Standing:
    """Returns the estimate of a candidate in one objective, from all studies that measured it."""
    if objective in RATIOS:
        return RatioStanding.of(
            [(finding.losses[objective], finding.processes) for finding in findings],
            noise,
        )
    # Each study draws the prompts of the earlier ones, and further ones.
    last = max(findings, key=lambda finding: len(finding.distances))
    return DistanceStanding(last.losses[objective], last.distances)
