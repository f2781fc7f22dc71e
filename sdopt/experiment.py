"""Runs one study from plan to report: plan, measure, evaluate, judge, report, track.

The command line, the Python API, launchers in other processes and tests all run studies through this module.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from urllib.parse import quote

from rich.console import Console

from sdopt.conclusion import Conclusion
from sdopt.config.again import note_commands
from sdopt.config.composer import HydraComposer
from sdopt.config.groups import data_sheets
from sdopt.config.models import named_again
from sdopt.config.parse import RunConfig
from sdopt.errors import (
    ConflictError,
    OccupiedError,
    UsageError,
    command_line,
    print_problems,
    without_passwords,
)
from sdopt.forecast import foreseen
from sdopt.gate.calibration import remarks_on_calibration
from sdopt.gate.rule_checks import applicable, remarks_on_rules, require_measured
from sdopt.locks import reserve
from sdopt.pipelines.prompts import remarks_on_length, remarks_on_prompts
from sdopt.pipelines.tasks import remarks_on
from sdopt.preparation import (
    awaits_clip,
    check_models,
    check_sampling,
    fetch,
    fetch_clip,
    remarks_on_variants,
)
from sdopt.quality.available import fetch_features
from sdopt.quality.metrics import features_of
from sdopt.record.files import read_result, write_at_last, write_result
from sdopt.record.images import remarks_on_images
from sdopt.record.records import Status, StudyResult, append_reason
from sdopt.report.answer import answer_shown
from sdopt.report.header import announce, show_plan
from sdopt.report.notes import lora_apart
from sdopt.report.summary import Summary, summary_of
from sdopt.study.cost import cost_of
from sdopt.study.designs import Plan
from sdopt.study.plan import (
    plan_result,
    refused,
    require_judged,
    require_room,
    require_same_task,
    runnable_of,
    unused_options,
)
from sdopt.study.progress import Progress
from sdopt.study.resume import is_elsewhere, merge_resumed, missing_of
from sdopt.study.run import run_study
from sdopt.study.timeline import WAITING, Timeline
from sdopt.study.work import LEAST_REPORT_S, LOAD_S, Sharing
from sdopt.terminal import console as terminal
from sdopt.terminal import print_line
from sdopt.tracking.store import (
    require_mlflow,
    require_store,
    start_ahead,
    store_exists,
)
from sdopt.variant import Variant
from sdopt.worker.child import in_process
from sdopt.worker.forkserver import StartContext
from sdopt.worker.machine import Machine, find_machine
from sdopt.worker.process import WorkerProcess

_UNTRAINED = (
    "model.weights=random: untrained weights draw nothing that a prompt names, so CLIP score and all metrics of what "
    "images show are left out; leave model.weights away to fetch trained ones"
)


_POLL_S = 1.0
"""Seconds between two looks whether a device that another study measures on is free."""


@dataclass
class Experiment:
    """One study in one folder. `run` executes the steps in order; each step is a method.

    Attributes:
        composer: composes variants from the job's overrides.
        folder: the run's folder, which the caller has locked.
        context: starts worker processes.
        timeline: records the duration of each step.
        in_sweep: whether the study is a job of a sweep; else it is an error if all its candidates have conflicts.
        console: prints progress and tables.
        brief: whether to skip tables and reports, because another program reads the result.
        command: the command that runs the study, as recorded in the result.
        deadline: when the study ends with what is measured, in seconds of the monotonic clock.
        within: when the search that the study is part of began, and when it ends: see `Progress`.
        ready: called before the study prints for the first time, to end the display of its start.
        foreseen_s: what a dry run says that the study would take; None where that is not known.
    """

    composer: HydraComposer
    folder: Path
    context: StartContext
    timeline: Timeline
    in_sweep: bool = False
    console: Console = field(default_factory=terminal)
    brief: bool = False
    command: Sequence[str] = ()
    deadline: float = math.inf
    within: tuple[float, float] | None = None
    ready: Callable[[], None] = lambda: None
    foreseen_s: float | None = field(default=None, init=False)

    @property
    def config(self) -> RunConfig:
        """The configuration common to all variants."""
        return self.composer.current

    @property
    def _conclusion(self) -> Conclusion:
        again = ""
        if not self.in_sweep:
            functions = named_again(self.command)
            again = command_line("run", f"resume={self.folder}", *functions)
        return Conclusion(
            self.config, self.folder, self.context, self.console, self.brief, again
        )

    @property
    def _left_s(self) -> float:
        """Seconds of `protocol.budget_s` that are left before the reports; infinite without one."""
        budget_s = self.config.protocol.budget_s
        return (
            math.inf
            if budget_s is None
            else budget_s - self.timeline.elapsed_s - LEAST_REPORT_S
        )

    def run(self) -> StudyResult | None:
        """Runs all steps; returns the result, or None for a dry run.

        Raises:
            UsageError: the study cannot run as configured; nothing was measured.
            OSError: the result could not be written; the message names its alternative location.
        """
        self._prepare_folder()
        self.timeline.enter("composing and planning")
        with ExitStack() as until_done:
            plan, result, machine = self.plan(until_done)
            if self.config.dry_run:
                self._foretell(plan, result, machine)
                return None
            if (self.folder / "result.json").is_file():
                result = self._continued(result, plan)
                if result.status == "finished" and not missing_of(result).variants:
                    self._complete(result, plan, machine)
                    return result
            if warning := require_store(self.config.tracking, result.name):
                print_problems([warning])
            if self._all_refused(plan, machine):
                self._record_skipped(result)
                return result
            require_room(plan, result, self.folder, machine, self.context)
            if not self.brief:
                announce(result, self.console)
            write_result(
                result, self.folder
            )  # a full disk should fail before measuring, not after
            end, summary = self._conclusion, None
            try:
                with Progress(self.console, self.timeline, self.within) as progress:
                    workers = partial(
                        WorkerProcess,
                        self.context,
                        machine.device,
                        self.config.protocol.timeout_s,
                        deadline=self.deadline,
                    )
                    run_study(plan, result, machine, workers, self.folder, progress)
                if time.monotonic() < self.deadline:
                    self.timeline.enter("quality and verdicts")
                    start_ahead(self.config.tracking)
                    end.evaluate(result, machine.device.torch_name)
                    end.judge(result)
                    summary = self._with_commands(result, plan)
                    end.run_programs(
                        summary, plan.variants, machine.device, self._left_s
                    )
                elif (
                    result.status == "finished"
                ):  # a later call goes on with scores and verdicts
                    result.status = "interrupted"
                    write_at_last(result, self.folder)
            finally:
                summary = summary or summary_of(result)
                self.timeline.enter("table and pictures")
                rendered = end.report(summary)
                self.timeline.enter("logging to MLflow")
                end.track(summary, rendered)
                with suppress(OSError):  # the result itself is already written
                    self.timeline.write(self.folder)
            return result

    def _foretell(self, plan: Plan, result: StudyResult, machine: Machine) -> None:
        """Says what a study would measure, and what it would take as far as that is known."""
        # The baseline is measured twice.
        measured = [*runnable_of(plan, result), plan.baseline]
        sharing = Sharing.of(machine.device, machine.cpu, plan.baseline)
        begun_after_s = self.timeline.elapsed_s
        cost = cost_of(measured, result, Path("outputs"), sharing, begun_after_s)
        lines: list[str] = []
        call_s = None
        unknown = cost.seconds is None
        if machine.sheet is not None or (unknown and not machine.device.is_cuda):
            call_s, lines, too_large = foreseen(plan.variants, machine, self.context)
            _skip_too_large(result, too_large)
        if result.baseline_variant.status is Status.SKIPPED:
            cost = replace(cost, seconds=None)
        elif unknown and call_s is not None:
            protocol = self.config.protocol
            seconds = cost.time_s(protocol, call_s, LOAD_S, begun_after_s)
            based_on = f"predicted; {cost.based_on}"
            cost = replace(cost, seconds=seconds, based_on=based_on)
        self.foreseen_s = cost.seconds
        if cost.seconds is not None and self.config.protocol.budget_s:
            self.foreseen_s = min(cost.seconds, self.config.protocol.budget_s)
        if self.in_sweep and self._all_refused(plan, machine):
            self.foreseen_s = 0.0
        show_plan(result, cost, self.console)
        for line in lines:
            print_line(self.console, line)

    def _continued(self, fresh: StudyResult, plan: Plan) -> StudyResult:
        """Returns the folder's result to continue; a sweep job restarted on another host starts over."""
        file = self.folder / "result.json"
        previous = read_result(file)
        print_problems(remarks_on_images(previous, self.folder))
        if self.in_sweep and is_elsewhere(previous, fresh):
            host = previous.environment.host
            file.rename(self.folder / f"result.{quote(host, safe='')}.json")
            print_problems(
                [
                    f"{self.folder}: measured on {host} before; starts over on {fresh.environment.host}"
                ]
            )
            return fresh
        # A cluster that ends a job may kill its workers first, and these are then recorded as failed.
        cut_off = not self.config.resume and (
            previous.status != "finished" or "SLURM_RESTART_COUNT" in os.environ
        )
        try:
            return merge_resumed(
                previous, fresh, plan, self.folder, self.config.retry_failed or cut_off
            )
        except UsageError as error:
            if self.config.resume:
                raise
            raise OccupiedError(error.problems) from error

    def _prepare_folder(self) -> None:
        (self.folder / "error.json").unlink(missing_ok=True)
        # Left by a process that was killed while writing; a user's own files may lie beside it.
        for outdated in self.folder.glob("result.json????????.tmp"):
            outdated.unlink(missing_ok=True)
        if self.config.tracking.kind == "mlflow":
            require_mlflow()
            if not self.config.dry_run and store_exists(
                self.config.tracking
            ):  # which MLflow checks
                start_ahead(self.config.tracking)

    def plan(self, until_done: ExitStack) -> tuple[Plan, StudyResult, Machine]:
        """Returns the plan of variants and comparisons, the still empty result, and the machine to measure on.

        Args:
            until_done: holds the reservation of the device until the study ends.

        Raises:
            UsageError: the design, the device or a model does not match the configuration, or the gate has a rule for a
                metric that will not be measured.
        """
        config = self.config
        plan = config.study.plan(self.composer)
        require_same_task(plan)
        if not self.in_sweep:  # a sweep's grid may contain the baseline itself
            require_judged(plan, config.gate)
        awaits = not config.dry_run and awaits_clip(self.composer)
        if not awaits:
            require_measured(plan, config.gate, config.quality, config.model)
        self.timeline.enter("waiting for the fork server, and asking for the device")
        machine = self._find_machine(plan, until_done)
        self.ready()
        if not config.dry_run:
            self.timeline.enter("fetching models")
            runnable = [
                variant
                for variant in plan.variants
                if not variant.conflicts(machine.device)
            ]
            fetch(runnable, self.context)
            if config.quality.metrics:
                for name in features_of(config.quality, config.model):
                    fetch_features(name)
            check_models(runnable, ("hub",), self.context)
            check_sampling(runnable, self.context)
            if awaits:
                fetch_clip(self.composer)
                config = self.config
                plan = config.study.plan(self.composer)
                require_measured(plan, config.gate, config.quality, config.model)
        self.timeline.enter("composing and planning")
        remarks = (
            *unused_options(
                config.study, plan, self.composer.chosen(), self.composer.changed
            ),
            *remarks_on_variants(plan.variants, machine),
            *self._remarks(plan.variants),
        )
        machine = replace(machine, warnings=(*machine.warnings, *remarks))
        print_problems(machine.warnings)
        design = type(config.study).__name__.lower()
        command = [without_passwords(word) for word in self.command]
        result = plan_result(
            plan, config.study.name, design, config.recorded, machine, command
        )
        print_problems(lora_apart(result))
        return plan, result, machine

    def _remarks(self, variants: Sequence[Variant]) -> list[str]:
        """Returns what of models, prompts, images and masks is not used as a user may think, each once."""
        config = self.config
        lines = dict.fromkeys(
            remarks_on_rules(config.gate, config.quality, config.model)
        )
        if config.gate.judges and config.quality.metrics:
            gate = applicable(config.gate, config.quality, config.model)
            contracts = dict.fromkeys(variant.contract for variant in variants)
            drawn = min(len(variant.pictured) for variant in variants)
            lines |= dict.fromkeys(
                remarks_on_calibration(gate, contracts, variants[0].config, drawn)
            )
        if config.quality.metrics and config.model.weights == "random":
            lines[_UNTRAINED] = None
        for variant in variants:
            drawn, asked = len(variant.pictured), config.quality.prompt_count or 0
            if drawn < asked:
                lines[
                    f"quality.prompt_count={asked}: there are {drawn} prompts, and images are judged by these "
                    "alone; workload.prompts=FILE may hold more"
                ] = None
            count = max(len(variant.prompts), drawn)
            workload, model = (
                replace(variant.workload, prompt_count=count),
                variant.model,
            )
            lines |= dict.fromkeys(remarks_on_prompts(workload, model))
            lines |= dict.fromkeys(remarks_on(variant.task, model, workload))
            if workload.prompts != "packaged" or workload.negative_prompt:
                with suppress(
                    UsageError
                ):  # nothing was fetched for a variant that is only planned
                    lines |= dict.fromkeys(
                        in_process(
                            self.context,
                            remarks_on_length,
                            workload,
                            model,
                            what=f"model={model.name}",
                        )
                    )
        return list(lines)

    def _find_machine(self, plan: Plan, until_done: ExitStack) -> Machine:
        """Returns the machine to measure on, which is reserved if need be; of a dry run, that of a chosen data sheet.

        Raises:
            UsageError: the device or a local model does not match the configuration, or no candidate can run.
        """
        hardware = self.config.hardware
        dry = self.config.dry_run
        machine, self.context = find_machine(self.context, hardware, data_sheets, dry)
        check_models(plan.variants, ("path",), self.context)
        check_sampling(plan.variants, self.context)
        is_planned = dry and hardware.sheet is not None
        nothing_runs = not is_planned and self._all_refused(plan, machine)
        if self.config.dry_run or nothing_runs or not hardware.exclusive:
            return machine
        return until_done.enter_context(self.reserved(machine))

    @contextmanager
    def reserved(self, machine: Machine) -> Iterator[Machine]:
        """Keeps a device for this study, because concurrent timings disturb each other; waits until one is free.

        Yields:
            the machine; with another card of it, if that would do as well and the first one is taken.
        """
        machines, asked, announced = [machine], False, False
        while True:
            for other in machines:
                with reserve(other.device, str(self.folder)) as holder:
                    if not holder:
                        yield other
                        return
            if not asked:
                machines, asked = [machine, *self._other_cards(machine)], True
                continue
            if not announced:
                # What only the user can change ends the command now, not after hours of waiting.
                require_store(self.config.tracking, self.config.study.name)
                self._say_waiting(holder, other)
                announced = True
            time.sleep(_POLL_S)

    def _other_cards(self, machine: Machine) -> list[Machine]:
        """Returns a `Machine` for each other card that `hardware.device=auto` may use; skips unusable ones."""
        if self.config.hardware.device != "auto":
            return []
        cards = []
        for card in range(1, machine.cards):
            with suppress(UsageError):
                hardware = replace(self.config.hardware, device=f"cuda:{card}")
                cards.append(find_machine(self.context, hardware, data_sheets)[0])
        return cards

    def _say_waiting(self, holder: str, machine: Machine) -> None:
        self.timeline.enter(WAITING)
        where = f"{holder}, which measures on {machine.device.name}"
        print_problems(
            [f"waiting for {where}; hardware.exclusive=false measures concurrently"]
        )

    def _with_commands(self, result: StudyResult, plan: Plan) -> Summary:
        """Finds out which commands do what was measured: only these are shown; returns the study, summed up."""
        self.timeline.enter("commands and programs")
        note_commands(self.composer, result, plan)
        write_at_last(result, self.folder)
        return summary_of(result)

    def _complete(self, result: StudyResult, plan: Plan, machine: Machine) -> None:
        """Adds the missing scores, verdicts, plots and tracked runs to a fully measured study."""
        pictured = any(row.images for row in result.variants)
        scores = [row.quality for row in result.variants]
        scores += [edge.quality for edge in result.comparisons]
        scored = any(scores) or not (pictured and self.config.quality.metrics)
        recorded = _verdicts_in(self.folder)
        end = self._conclusion
        if not scored:
            end.evaluate(result, machine.device.torch_name)
        # By the study's own gate: `sdopt gate` may have recorded verdicts of another one.
        end.judge(result)
        complete = scored and _verdicts_in(self.folder) == recorded
        done = "complete" if complete else "measured"
        print_line(self.console, f"already {done}: {self.folder}")
        wanted = result.config.protocol.programs_s != 0
        lacking = wanted and any(
            row.program is None for row in result.candidates if row.status is Status.OK
        )
        if lacking:
            summary = self._with_commands(result, plan)
            end.run_programs(summary, plan.variants, machine.device)
        else:
            summary = summary_of(result)
        rendered = None
        if not complete:  # nobody has seen its answer
            rendered = end.report(summary)
        elif not self.brief and (lacking or not (self.folder / "plot.png").is_file()):
            rendered = end.write_reports(summary)
        end.track(summary, rendered)

    def _all_refused(self, plan: Plan, machine: Machine) -> bool:
        """Returns whether the study ends because no candidate can run; with `study.skip_conflicts` it goes on.

        Raises:
            ConflictError: no candidate can run, and the study is not a job of a sweep.
        """
        reasons = (
            [] if self.config.study.skip_conflicts else refused(plan, machine.device)
        )
        if reasons and not self.in_sweep:
            raise ConflictError(reasons)
        return bool(reasons)

    def _record_skipped(self, result: StudyResult) -> None:
        """Ends a sweep job whose candidates are all skipped, with a result that says so."""
        for row in result.variants:
            row.status, row.reason = (
                Status.SKIPPED,
                row.reason or "nothing is left to compare with it",
            )
        result.status = "finished"
        write_result(result, self.folder)
        summary = summary_of(result)
        self.console.print(answer_shown(summary, self.console.width))
        self._conclusion.track(summary)


def _verdicts_in(folder: Path) -> tuple[object, ...]:
    """Returns the verdicts that a folder's result has recorded, and by what they came about."""
    recorded = read_result(folder)
    return recorded.gate, recorded.judgements, recorded.config.protocol


def _skip_too_large(result: StudyResult, names: Set[str]) -> None:
    """Marks variants that do not fit where they would run; the repeated baseline is as large as the baseline."""
    for row in result.variants:
        if row.name in names or (row.is_control and result.baseline in names):
            row.status = Status.SKIPPED
            row.reason = append_reason(row, "does not fit in the memory of the device")
