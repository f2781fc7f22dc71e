"""One study from plan to report: plan, measure, evaluate, judge, report, track.

The command line, a Python program, a launcher in another process and a test all run a study through this module.
"""

import errno
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.markup import escape

from sdopt.analysis.figures import metrics_of
from sdopt.config.command import Folders, add_working_folder, current_folders, is_informative, run_hydra
from sdopt.config.composer import HydraComposer
from sdopt.config.groups import data_sheets, reject_null_groups
from sdopt.config.hydra_job import in_sweep, job_folder, with_resumed
from sdopt.config.messages import explain
from sdopt.config.parse import RunConfig
from sdopt.errors import ConflictError, OccupiedError, UnavailableError, UsageError
from sdopt.gate.calibration import calibration_for
from sdopt.gate.judge import judge
from sdopt.gate.rules import require_measured
from sdopt.locks import lock_folder
from sdopt.pipelines.components import require_parts
from sdopt.pipelines.hub import fetch_models
from sdopt.quality.evaluation import EvaluationError, Settings, evaluate_apart
from sdopt.report.catalog import write_reports
from sdopt.report.dry_run import show_plan
from sdopt.report.header import announce
from sdopt.report.outcome import Outcome, load_result
from sdopt.report.table import answer_group, show, terminal_table
from sdopt.report.verdicts import append_step_summary, verdict_table
from sdopt.results.files import read_result, write_at_last, write_result
from sdopt.results.folders import JobError, write_error
from sdopt.results.records import Status, StudyResult
from sdopt.study.designs import Plan
from sdopt.study.forecast import forecast
from sdopt.study.missing import missing_of
from sdopt.study.plan import plan_result, require_room
from sdopt.study.progress import Progress
from sdopt.study.resume import merge_resumed
from sdopt.study.run import run_study
from sdopt.study.timeline import Timeline, process_begun
from sdopt.tracking.runs import log_study, log_sweep
from sdopt.tracking.store import TrackingError, import_in_background, page_of, require_mlflow, require_store
from sdopt.variant import Variant
from sdopt.worker.calls import in_process
from sdopt.worker.forkserver import StartContext, independent_children, start_fork_server
from sdopt.worker.machine import Machine, find_machine, planned_machine


def run(*overrides: str, config_dir: str | Path | None = None) -> Outcome:
    """Measures a study, as `sdopt run` does, and returns its result.

    The result, plots and images are also in a folder of their own below `outputs/runs/`, and in MLflow, as with the
    command; `tracking=none` and `hydra.run.dir=…` change that. A variant that fails is a row with a status and a
    reason, not an exception.

    Args:
        overrides: as on the command line, for example `"experiment=quickstart"` and `"protocol.rounds=20"`.
        config_dir: a folder with groups of your own, as `--config-dir` names it.

    Raises:
        UsageError: the overrides cannot be composed, or the study cannot run here; `problems` has a line for each.
        UnavailableError: the study broke off, for example because the disk is full; nothing measured is lost.
        KeyboardInterrupt: what was measured until then is kept in the folder.
    """
    argv = [*(("--config-dir", str(config_dir)) if config_dir is not None else ()), *overrides]
    if is_informative(argv) or {"-m", "--multirun"} & set(argv):
        raise UsageError("sdopt.run measures one study; sweeps, --help and --cfg belong to the command `sdopt run`")
    folder = launch(argv).run
    if folder is None or not (folder / "result.json").is_file():
        raise UsageError("dry_run=true: a dry run leaves no result; use the command `sdopt run … dry_run=true`")
    return load_result(folder)


def launch(argv: Sequence[str], ready: Callable[[], None] = lambda: None) -> Folders:
    """Runs the studies that a command line asks for, and returns where they were written.

    Args:
        argv: overrides and Hydra's flags; `resume=<folder>` stands for the command line recorded there.
        ready: called when the first study is about to print, once all is imported and composed.

    Raises:
        UsageError: the command line cannot be composed; nothing was measured.
        UnavailableError: a file or a folder could not be read or written.
        InterruptedStudy: Ctrl-C, with the folders of what had begun.
    """
    argv = with_resumed(argv)
    reject_null_groups(argv)
    folders = Folders(ready=ready)
    try:
        run_hydra(job, argv, folders)
        if folders.error is not None:
            raise folders.error
    except (UsageError, UnavailableError):
        raise
    except KeyboardInterrupt as error:
        raise InterruptedStudy(folders) from error
    except Exception as error:
        # Until a job had a folder it was the command line.
        begun = any(folder.is_dir() for folder in folders.jobs)
        explained = _explained(error, folders, begun)
        if explained is error:
            raise
        raise explained from error
    if folders.dry:
        folders.remove_plans()
    return folders


def _explained(error: Exception, folders: Folders, begun: bool) -> Exception:
    """Returns the error to raise for one that ended a command line; a defect of sdopt's own stays as it is."""
    cause: BaseException | None = error
    while cause is not None:  # OmegaConf wraps what a resolver raises
        if isinstance(cause, UsageError):
            return cause
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, OSError) and error.strerror:  # Hydra's own have none
        problem = _os_problem(error, folders.run or folders.sweep)
        if begun:
            return UnavailableError(problem)
        unwritable = error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)
        key = "hydra.sweep.dir" if folders.sweep else "hydra.run.dir"
        return UsageError(problem + (f"; choose a folder that can be written with {key}=…" if unwritable else ""))
    return error if begun else UsageError(explain(error) or type(error).__name__)


class InterruptedStudy(KeyboardInterrupt):
    """Ctrl-C while studies were measured; `folders` says where they are."""

    def __init__(self, folders: Folders) -> None:
        super().__init__()
        self.folders = folders


def job(_cfg: DictConfig) -> Any:
    """Measures the study of one Hydra job, in whatever process a launcher runs it.

    What goes wrong is kept in the folder's `error.json`, so that a sweep goes on with its other jobs.

    Returns:
        The objective for a sweeper, or NaN where there is none.
    """
    folder = job_folder()
    add_working_folder()
    try:
        with independent_children(), lock_folder(folder) as ours:
            if not ours:
                raise OccupiedError(f"{folder}: another process is measuring there")
            composer = HydraComposer.of_this_job()
            # A sweep's later jobs begin where the one before them ended.
            timeline = Timeline("Python, Hydra and their imports", None if in_sweep() else process_begun())
            result = Experiment(composer, folder, start_fork_server(), timeline, alone=not in_sweep()).run()
    except Exception as error:
        _keep_error(error, folder)
        return math.nan
    return _objective(composer.current, result) if result else math.nan


def _keep_error(error: Exception, folder: Path) -> None:
    """Keeps why a job has no result; a sweep's job says it at once, a single run's error is raised by `launch`."""
    found = _job_error(error, folder, in_sweep())
    folders = current_folders()
    if isinstance(error, OccupiedError):
        # An error.json there would be taken for the other's.
        if folders is not None:
            folders.occupied = True
    else:
        with suppress(OSError):  # the disk that is full is full for this too
            write_error(found, folder)
    if folders is not None and not in_sweep():
        # Not raised here: Hydra would print the overrides of the job first.
        folders.error = error
        return
    if not isinstance(error, UsageError | OSError):
        traceback.print_exception(error)
    _print_problems(found.problems)


def _job_error(error: Exception, folder: Path, in_a_sweep: bool) -> JobError:
    """Returns what `error.json` says of an error, and how the sweep's table shows the job."""
    if isinstance(error, UsageError):
        if in_a_sweep and isinstance(error, ConflictError):
            return JobError(0, error.problems, Status.SKIPPED)
        return JobError(UsageError.exit_code, error.problems)
    if isinstance(error, OSError):
        return JobError(UnavailableError.exit_code, [_os_problem(error, folder)])
    return JobError(UnavailableError.exit_code, [f"{type(error).__name__}: {error}"])


def _os_problem(error: OSError, folder: Path | None) -> str:
    return f"{error.filename or folder}: {error.strerror or error}"


def _print_problems(problems: Sequence[str]) -> None:
    for problem in problems:
        print(f"sdopt: {problem}", file=sys.stderr)


def _objective(run_config: RunConfig, result: StudyResult) -> Any:
    """Returns the metric, or the tuple of metrics, that the last variant of a study has for a sweeper."""
    candidate = [row for row in result.variants if row.role != "control"][-1]
    # An option that failed, or that took no effect, has nothing that a sweeper should prefer.
    metrics = metrics_of(result, candidate) if candidate.status is Status.OK else {}
    missing = [name for name in run_config.objective if name not in metrics]
    if missing and metrics:
        _print_problems([f"objective={','.join(missing)}: there are {', '.join(sorted(metrics))}"])
    values = tuple(metrics.get(name, math.nan) for name in run_config.objective)
    return values if len(values) > 1 else values[0]


@dataclass
class Experiment:
    """One study in one folder. `run` takes its steps in order; each step can be read by itself.

    Attributes:
        composer: composes variants from the overrides of the job.
        folder: the run's folder, locked by the caller.
        context: starts worker processes.
        timeline: books the time of each step.
        alone: whether this is no job of a sweep: then a conflict of all candidates is an error.
        console: shows progress and tables.
    """

    composer: HydraComposer
    folder: Path
    context: StartContext
    timeline: Timeline
    alone: bool = True
    console: Console = field(default_factory=Console)

    @property
    def config(self) -> RunConfig:
        """The configuration that is common to all variants."""
        return self.composer.current

    def run(self) -> StudyResult | None:
        """Takes all steps; returns the result, or None for a dry run.

        Raises:
            UsageError: the study cannot run as it is configured; nothing was measured.
            OSError: the result could not be written; the message says where it is instead.
        """
        self._require_free_folder()
        self.timeline.enter("composing and planning")
        plan, result, machine = self.plan()
        if self.config.dry_run:
            runnable = [variant for variant in plan.variants if not variant.conflicts(machine.device)]
            # The baseline is measured twice.
            show_plan(result, forecast([*runnable, plan.baseline], result, Path("outputs")), self.console)
            if (folders := current_folders()) is not None:
                folders.dry = True
            return None
        if (self.folder / "result.json").is_file():
            result = merge_resumed(read_result(self.folder), result, plan, self.folder, self.config.retry_failed)
            if result.status == "finished" and not missing_of(result).variants:
                self._complete(result, machine)
                return result
        if self.config.tracking.kind == "mlflow" and (warning := require_store(self.config.tracking)):
            _print_problems([warning])
        if self._nothing_to_compare(plan, result, machine):
            return result
        require_room(plan, self.folder)
        announce(result, self.console)
        write_result(result, self.folder)  # a disk that is full is better found before measuring than after it
        try:
            self.measure(plan, result, machine)
            self.timeline.enter("quality and verdicts")
            import_in_background(self.config.tracking)
            self.evaluate(result, machine)
            self.judge(result)
        finally:
            self.timeline.enter("table and pictures")
            self.report(result)
            self.timeline.enter("logging to MLflow")
            self.track(result)
            with suppress(OSError):  # the result is what counts, and it is written
                self.timeline.write(self.folder)
        self.console.print(answer_group(result))
        return result

    def _require_free_folder(self) -> None:
        if (self.folder / "result.json").is_file() and not self.config.resume:
            raise OccupiedError(
                f"{self.folder}: holds a result; `sdopt run resume={self.folder}` goes on with it, or choose another"
            )
        (self.folder / "error.json").unlink(missing_ok=True)
        for left in self.folder.glob("*.tmp"):  # of a process that was killed while it wrote; the folder is ours now
            left.unlink(missing_ok=True)
        if self.config.tracking.kind == "mlflow":
            require_mlflow()

    def plan(self) -> tuple[Plan, StudyResult, Machine]:
        """Returns the variants and comparisons, the result before anything is measured, and the machine it is for.

        Raises:
            UsageError: the design, the device or a model is not what the configuration says, or the gate judges what
                will not be measured.
        """
        config = self.config
        plan = config.study.plan(self.composer)
        require_measured(plan, config.gate, config.quality, config.model)
        self.timeline.enter("waiting for the fork server, and asking for the device")
        if config.dry_run and config.hardware.sheet is not None:
            machine = planned_machine(config.hardware.sheet)
        else:
            machine, self.context = find_machine(self.context, config.hardware, data_sheets)
        if (folders := current_folders()) is not None:
            folders.ready()
        for warning in machine.warnings:
            print(f"sdopt: {warning}", file=sys.stderr)
        self._check_models(plan.variants, "path")
        if not config.dry_run:
            self.timeline.enter("fetching models")
            runnable = [variant for variant in plan.variants if not variant.conflicts(machine.device)]
            fetch_models(variant.model for variant in runnable)
            for variant in runnable:
                variant.files(fetch=True)
            self._check_models(runnable, "hub")
        self.timeline.enter("composing and planning")
        command = ["sdopt", "run", *sys.argv[1:]]
        design = type(config.study).__name__.lower()
        return plan, plan_result(plan, config.study.name, design, config.recorded, machine, command), machine

    def _check_models(self, variants: Sequence[Variant], weights: str) -> None:
        """Raises UsageError where a model that is there by now cannot be built; options ask for its configuration."""
        for model in dict.fromkeys(variant.model for variant in variants if variant.model.weights == weights):
            in_process(self.context, require_parts, model, what=f"model={model.name}")

    def _complete(self, result: StudyResult, machine: Machine) -> None:
        """Does what was not done when a study that is measured whole ended: scores, verdicts, pictures, runs."""
        self.console.print(f"nothing is missing: {self.folder}", markup=False, highlight=False, soft_wrap=True)
        scored = any(row.quality for row in result.variants)
        complete = scored and (result.gate or not self.config.gate.judges)
        if not complete:
            self.evaluate(result, machine)
            self.judge(result)
        if not (complete and (self.folder / "plot.png").is_file()):
            self._write_reports(result)
        self.track(result)

    def _nothing_to_compare(self, plan: Plan, result: StudyResult, machine: Machine) -> bool:
        """Ends a study whose candidates were all skipped: with an error, or in a sweep with a result that says so.

        With `study.skip_conflicts` it goes on with the baseline.
        """
        candidates = [row for row in result.variants if row.role != "control"][1:]
        some = any(row.status is not Status.SKIPPED for row in candidates)
        if some or not candidates or self.config.study.skip_conflicts:
            return False
        if self.alone:
            raise ConflictError([reason for variant in plan.variants for reason in variant.conflicts(machine.device)])
        for row in result.variants:
            row.status, row.reason = Status.SKIPPED, row.reason or "nothing is left to compare with it"
        result.status = "finished"
        write_result(result, self.folder)
        self.console.print(terminal_table(result, self.console.width))
        self.track(result)
        return True

    def measure(self, plan: Plan, result: StudyResult, machine: Machine) -> None:
        """Measures what is missing, in worker processes, and keeps `result.json` up to date meanwhile."""
        config = self.config
        with Progress(self.console, self.timeline) as progress:
            run_study(plan, result, config.protocol, machine, self.context, self.folder, progress, config.quality)

    def evaluate(self, result: StudyResult, machine: Machine) -> None:
        """Scores the images in a process of its own; what was measured is kept whatever happens there."""
        config = self.config
        if not config.quality.metrics:
            return
        settings = Settings.of(config.quality, config.model, machine.device.torch_name)
        try:
            with self.console.status("quality") as status:
                evaluate_apart(
                    result,
                    self.folder,
                    settings,
                    self.context,
                    lambda name: status.update(f"quality: {escape(name)}"),
                )
        except (EvaluationError, UsageError) as error:
            _print_problems([f"quality could not be computed: {error}"])
        write_at_last(result, self.folder)

    def judge(self, result: StudyResult) -> None:
        """Applies the gate's rules, where a gate is chosen."""
        gate = self.config.gate
        if not (gate.judges and self.config.quality.metrics):
            return
        judge(result, gate, calibration_for(result, gate.calibration))
        write_at_last(result, self.folder)
        append_step_summary(result, result.judgements)

    def report(self, result: StudyResult) -> None:
        """Shows the tables, and writes all reports to the run's folder."""
        show(result, self.console, self.folder)
        if result.judgements:
            self.console.print(verdict_table(result, result.judgements))
        self._write_reports(result)
        failed = [row.name for row in result.variants if row.status.failure]
        if failed and self.alone:
            _print_problems([f"`sdopt run resume={self.folder} retry_failed=true` measures again: {', '.join(failed)}"])

    def _write_reports(self, result: StudyResult) -> None:
        for report, error in write_reports(result, self.folder):
            if error is not None:
                _print_problems([f"no {report.name}: {type(error).__name__}: {error}"])
            elif report.is_looked_at:
                path = self.folder / report.file
                self.console.print(f"{report.name}: {path}", markup=False, highlight=False, soft_wrap=True)

    def track(self, result: StudyResult) -> None:
        """Logs the result to MLflow, where that is chosen; a server that is down costs nothing but the log."""
        if self.config.tracking.kind == "none":
            return
        try:
            with self.console.status("logging to MLflow"):
                run, _ = log_study(result, self.folder, self.config.tracking)
        except (TrackingError, UsageError) as error:
            _print_problems([f"not logged to {error}" if isinstance(error, TrackingError) else f"not logged: {error}"])
            print(f"Nothing is lost: `sdopt sync {self.folder}` logs it later.", file=sys.stderr)
            return
        page = page_of(self.config.tracking, run)
        self.console.print(f"MLflow: {page or 'sdopt ui'}", markup=False, highlight=False, soft_wrap=True)


def summarise_sweep(folder: Path, console: Console) -> int:
    """Shows the table of a sweep, writes it and the report to its folder, logs both; returns all jobs' exit code."""
    from sdopt.report.markdown import sweep_markdown
    from sdopt.report.sweep import read_sweep
    from sdopt.report.table import sweep_table
    from sdopt.tracking.finding import of_sweep
    from sdopt.tracking.reporting import write_report

    if not folder.is_dir():
        return UsageError.exit_code
    sweep = read_sweep(folder)
    if not sweep.studies:
        return sweep.exit_code
    console.print(sweep_table(sweep.rows, console.width))
    try:
        (folder / "sweep.md").write_text(sweep_markdown(sweep.rows))
    except OSError as error:
        _print_problems([f"no table: {folder / 'sweep.md'}: {error.strerror}"])
    try:
        page, *_ = write_report(of_sweep(sweep))
        console.print(f"report: {page}", markup=False, highlight=False, soft_wrap=True)
    except UnavailableError as error:
        _print_problems([f"no report: {error}"])
    console.print(f"sweep: {folder}", markup=False, highlight=False, soft_wrap=True)
    if any(row.status.failure for study in sweep.studies.values() for row in study.variants):
        _print_problems([f"`sdopt run resume={folder} retry_failed=true` measures again what failed"])
    studies = list(sweep.studies.values())
    # A sweep that is resumed may be told to track nothing, which those of its jobs say that were run then.
    if all(study.config.tracking.kind == "mlflow" for study in studies):
        try:
            log_sweep(studies, folder, sweep_markdown(sweep.rows), studies[0].config.tracking)
        except TrackingError as error:
            _print_problems([f"the sweep's own run was not logged to {error}"])
    return sweep.exit_code
