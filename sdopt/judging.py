"""Judges finished results by a gate, or compares them with an earlier one, and records the verdicts."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from sdopt.config.parse import RunConfig
from sdopt.errors import UsageError, print_problems
from sdopt.gate.calibration import calibration_for
from sdopt.gate.drift import judge_drift
from sdopt.gate.judge import exit_code, judge, judged_comparisons, worst_code
from sdopt.record.files import read_result, write_result
from sdopt.record.records import StudyResult
from sdopt.record.verdicts import Judgement
from sdopt.report.answer import answer_shown
from sdopt.report.blocks import Prose
from sdopt.report.catalog import write_reports
from sdopt.report.summary import Summary, summary_of
from sdopt.report.terminal import shown
from sdopt.report.verdicts import (
    against_sentence,
    summary_markdown,
    verdict_blocks,
    write_verdicts,
)
from sdopt.schema import Gate
from sdopt.step_summary import append_step_summary, report_problems
from sdopt.terminal import console as terminal
from sdopt.terminal import print_line
from sdopt.tracking.client import TrackingError
from sdopt.tracking.finding import Found, find_result
from sdopt.tracking.runs import update_verdicts
from sdopt.tracking.store import store_of


@dataclass(frozen=True)
class Judging:
    """How finished results are judged, and where the verdicts go.

    Attributes:
        config: the gate, and the tracker that may hold the results.
        own_gate: whether a study that has a gate of its own is judged by that instead.
        against: the earlier result to compare with, as `find_result` takes it; None to judge each result by itself.
        waived: names from `sdopt.gate.drift.WAIVERS`: differences to the earlier result that are allowed.
        thresholds: what is to count from now on, by the keys of `THRESHOLDS`; what a result recorded, without one.
        output: the folder for `verdicts.{json,md,xml}`; None for that of each result.
        console: prints tables and paths.
    """

    config: RunConfig
    against: str | None = None
    waived: Sequence[str] = ()
    thresholds: Mapping[str, float] = field(default_factory=dict)
    output: Path | None = None
    console: Console = field(default_factory=terminal)
    own_gate: bool = False

    def judge_all(self, found: Found) -> tuple[int, list[StudyResult], list[str]]:
        """Judges the result of a run, those of a sweep, or that of an MLflow run; prints and writes the verdicts.

        Returns:
            the exit code; each judged result, with its verdicts; and a line for each job that has no result or cannot
            be judged, which is printed.

        Raises:
            UsageError: none of them has a comparison to judge.
            UnavailableError: the verdicts cannot be written, or MLflow cannot be reached.
        """
        judged: list[StudyResult] = []
        lost = found.sweep.lost if found.sweep else {}
        problems, codes = list(lost), list(lost.values())
        studies = [
            study
            for study in found.studies
            if self.against or judged_comparisons(study[0])
        ]
        if found.studies and not studies:
            raise UsageError([*problems, f"{found.name}: has no comparison to judge"])
        for result, folder in studies:
            try:
                # Each job of a sweep has verdicts of its own.
                output = (
                    self.output / found.job(folder)
                    if self.output and found.sweep
                    else self.output
                )
                judged.append(self._judge(result, folder, output))
            except UsageError as error:
                problems += error.problems
                codes.append(error.exit_code)
        report_problems(problems)
        print_problems(found.remarks)
        codes += [
            exit_code(result_judged.judgements, self._gate_of(result_judged))
            for result_judged in judged
        ]
        return worst_code(codes), judged, problems

    def _judge(
        self, result: StudyResult, folder: Path, output: Path | None
    ) -> StudyResult:
        """Returns one result with the verdicts; only those of the result by itself are recorded in its file."""
        gate = self._gate_of(result)
        protocol = replace(result.config.protocol, **dict[str, Any](self.thresholds))
        result.config = replace(result.config, protocol=protocol)
        alone = None
        if self.against is None:
            judge(result, gate, calibration_for(result, gate.calibration))
            _record(result, folder, verdicts=output is None)
        else:
            alone = summary_of(result)
            result = replace(
                result,
                gate=gate.name,
                judgements=self._drift(result, folder, self.against),
            )
        summary, width = summary_of(result), self.console.width
        if self.against is None:
            self.console.print(answer_shown(summary, width))
        against = against_sentence(result) if self.against else ""
        if against:
            self.console.print(shown([Prose(against, strong=True), Prose("")], width))
        heading = Prose(f"gate: {result.gate}", strong=True)
        self.console.print(shown([heading, *verdict_blocks(result, against)], width))
        target = output or folder
        target.mkdir(parents=True, exist_ok=True)
        write_verdicts(summary, target, gate.undecided_passes, against)
        append_step_summary(summary_markdown(summary, against, alone))
        print_line(self.console, f"verdicts: {target / 'verdicts.md'}")
        if self.against is None and output is None:
            reports = list(write_reports(summary, folder))
            rendered = {
                report.report.file: report.content
                for report in reports
                if report.content is not None
            }
            self._track(summary, folder, rendered)
        return result

    def _gate_of(self, result: StudyResult) -> Gate:
        gate = result.config.gate
        return gate if self.own_gate and gate.judges else self.config.gate

    def _drift(
        self, result: StudyResult, folder: Path, against: str
    ) -> list[Judgement]:
        earlier, then = find_result(against, self.config.tracking)
        if earlier.id == result.id:
            # It would pass, whatever has become worse.
            raise UsageError(
                f"not comparable: {against} is the result that is judged (id {result.id}); name an earlier one"
            )
        gate = self._gate_of(result)
        images = [folder / record.path for record in result.drawn_images]
        images += [then / record.path for record in earlier.drawn_images]
        folders = (folder, then) if all(image.is_file() for image in images) else None
        fit = calibration_for(result, gate.calibration)
        return judge_drift(result, earlier, gate, fit, self.waived, folders)

    def _track(
        self, summary: Summary, folder: Path, rendered: Mapping[str, bytes]
    ) -> None:
        """Updates the verdicts of the study's MLflow runs, if it was logged; a failure is printed."""
        tracking = store_of(self.config.tracking, summary.result.config.tracking)
        try:
            run = update_verdicts(summary, folder, tracking, rendered)
        except (
            TrackingError,
            UsageError,
        ) as error:  # such as a password that the result does not hold
            print_problems([f"the verdicts were not logged to MLflow: {error}"])
            return
        if run is not None:
            print_line(
                self.console, f"MLflow: the verdicts of run {run} are up to date"
            )


def _record(result: StudyResult, folder: Path, verdicts: bool) -> None:
    """Records this look in the run's `result.json`, so that a study extended later has spent it.

    Records the judgements too if `verdicts` is true, that is, unless the verdicts are written elsewhere.
    """
    if not (folder / "result.json").is_file():  # it is an MLflow run's
        return
    recorded = read_result(folder)
    if recorded.status != "finished":  # it is being extended at this moment
        return
    if recorded.looks == result.looks and not verdicts:
        return
    recorded.looks = result.looks
    if verdicts:
        recorded.judgements, recorded.gate, recorded.config = (
            result.judgements,
            result.gate,
            result.config,
        )
    with suppress(
        OSError
    ):  # a folder that cannot be written, as CI's may be, still gets its verdicts
        write_result(recorded, folder)
