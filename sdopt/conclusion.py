"""Ends a study whose images and times are there: scores, verdicts, reports, and the tracker."""

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from sdopt.config.parse import RunConfig
from sdopt.errors import (
    UnavailableError,
    UsageError,
    print_problems,
    with_type,
)
from sdopt.gate.calibration import calibration_for
from sdopt.gate.judge import judge, left_unjudged
from sdopt.gate.trust import error_limit
from sdopt.hardware.device import Device
from sdopt.programs.running import run_program, time_limit
from sdopt.quality.evaluation import EvaluationError, Settings, evaluate_apart
from sdopt.record.configuration import RecordedConfig
from sdopt.record.files import write_at_last
from sdopt.record.records import Status, StudyResult
from sdopt.report.answer import answer_shown
from sdopt.report.catalog import HTML, write_reports
from sdopt.report.summary import Summary
from sdopt.report.verdicts import summary_markdown
from sdopt.scratch import scratch_folder
from sdopt.step_summary import append_step_summary
from sdopt.terminal import console as terminal
from sdopt.terminal import print_line, working
from sdopt.tracking.client import TrackingError
from sdopt.tracking.runs import log_study
from sdopt.tracking.store import shown_by, sync_command, sync_here
from sdopt.variant import Variant
from sdopt.worker.forkserver import StartContext

_PROGRAMS_S, _PROGRAMS_SHARE = 180.0, 0.1
"""Time for running programs at least, in seconds, and as a share of the time that the study took."""


@dataclass(frozen=True)
class Conclusion:
    """The last steps of a study, in the order of its methods.

    Attributes:
        config: how to score, judge and log.
        folder: the study's folder.
        context: starts the process that scores.
        console: prints progress and tables.
        brief: whether to skip tables and reports, because another program reads the result.
        again: the command that continues the study; "" if there is none.
    """

    config: RunConfig | RecordedConfig
    folder: Path
    context: StartContext
    console: Console = field(default_factory=terminal)
    brief: bool = False
    again: str = ""

    def evaluate(self, result: StudyResult, device: str) -> None:
        """Scores the images in a process of its own, on a device of PyTorch; a failure leaves the measurements."""
        config = self.config
        if not config.quality.metrics:
            return
        settings = Settings.of(
            config.quality, config.model, device, config.hardware.threads
        )
        try:
            with working(self.console, "quality") as say:
                evaluate_apart(result, self.folder, settings, self.context, say)
        except (EvaluationError, UsageError) as error:
            again = (
                f"; `{self.again}` computes it without measuring again"
                if self.again
                else ""
            )
            print_problems([f"quality could not be computed: {error}{again}"])
        write_at_last(result, self.folder)

    def judge(self, result: StudyResult) -> None:
        """Applies the gate's rules, if there are any."""
        gate = self.config.gate
        if not (gate.judges and self.config.quality.metrics):
            return
        judge(result, gate, calibration_for(result, gate.calibration))
        if left_unjudged(result):
            print_problems([f"gate={gate.name}: has no comparison to judge"])
        write_at_last(result, self.folder)

    def run_programs(
        self,
        summary: Summary,
        variants: Sequence[Variant],
        device: Device,
        left_s: float = math.inf,
    ) -> None:
        """Runs the programs of the variants that have none yet, the best one's first, as long as there is time.

        What goes wrong with one is its reason for not being shown: no measurement depends on it.

        Args:
            summary: the study.
            variants: all that it has.
            device: what they ran on.
            left_s: seconds until the study shall end; the first program has its own limit.
        """
        result = summary.result
        # The recommended one first, whose code is shown: what is faster may have failed the gate.
        candidates = sorted(summary.candidates, key=lambda row: row is not summary.best)
        ran = [row.variant for row in candidates if row.status is Status.OK]
        lacking = [variant for variant in ran if variant.program is None]
        budget_s = result.config.protocol.programs_s
        if budget_s is None:
            budget_s = max(_PROGRAMS_S, _PROGRAMS_SHARE * result.seconds)
        if not (lacking and budget_s):
            return
        named = {variant.name: variant for variant in variants}
        ends = time.monotonic() + min(budget_s, max(left_s, 0.0))
        try:
            with (
                scratch_folder("programs") as scratch,
                working(self.console, "programs") as say,
            ):
                for row in lacking:
                    seconds = time_limit(row)
                    if row is not lacking[0]:
                        seconds = min(seconds, ends - time.monotonic())
                    if seconds <= 0:
                        break  # what has none is run when the study is resumed
                    say(row.name)
                    number = list(named).index(row.name)
                    row.program = run_program(
                        row,
                        named[row.name],
                        device,
                        self.folder,
                        self.folder / "logs" / f"program-{number:02d}.log",
                        scratch,
                        self.context,
                        error_limit(result, row),
                        seconds,
                    )
        finally:
            write_at_last(result, self.folder)

    def report(self, summary: Summary) -> dict[str, bytes] | None:
        """Prints the answer and writes all reports to the run's folder; a page of CI is shown the verdicts.

        Returns:
            the reports by their files; None if it is `brief`, and none was made.
        """
        if summary.result.judgements or self.config.gate.judges:
            append_step_summary(summary_markdown(summary))
        if self.brief:
            return None
        self.console.print()
        self.console.print(answer_shown(summary, self.console.width, self.folder))
        rendered = self.write_reports(summary)
        failed = [
            variant.name for variant in summary.result.variants if variant.to_retry
        ]
        if failed and self.again:
            print_problems(
                [
                    f"`{self.again} retry_failed=true` measures again: {', '.join(failed)}"
                ]
            )
        return rendered

    def write_reports(self, summary: Summary) -> dict[str, bytes]:
        """Writes all reports to the study's folder, names those that people open, and returns them by their files."""
        rendered: dict[str, bytes] = {}
        missing: dict[str, list[str]] = {}
        for report, content, error in write_reports(summary, self.folder):
            if content is not None:
                rendered[report.file] = content
            if error is not None:
                reason = (
                    str(error)
                    if isinstance(error, UnavailableError)
                    else with_type(error)
                )
                missing.setdefault(reason, []).append(report.name)
            elif (
                report.file == HTML
            ):  # the page, which people open first, has all pictures
                path = self.folder / report.file
                print_line(self.console, f"{report.name}: {path}")
        print_problems(
            f"no {', '.join(names)}: {reason}" for reason, names in missing.items()
        )
        return rendered

    def track(
        self, summary: Summary, rendered: Mapping[str, bytes] | None = None
    ) -> None:
        """Logs the study to MLflow if tracking is enabled; a failure is printed and not raised.

        `rendered` are its reports by their files; None to render those that are texts.
        """
        if self.config.tracking.kind == "none":
            return
        try:
            with working(self.console, "logging to MLflow"):
                logged = log_study(
                    summary.result, self.folder, self.config.tracking, summary, rendered
                )
        except (TrackingError, UsageError) as error:
            print_problems(
                [
                    f"not logged to {error}"
                    if isinstance(error, TrackingError)
                    else f"not logged: {error}"
                ]
            )
            there = sync_command(self.folder, self.config.tracking)
            here = sync_here(self.folder, self.config.tracking)
            first = f"`{here}` logs it here, " if here else ""
            what = "to that store" if here else "logs it"
            print(f"Nothing is lost: {first}`{there}` {what} later.", file=sys.stderr)
            return
        command = shown_by(self.config.tracking, logged)
        print_line(self.console, f"MLflow: {command}")
