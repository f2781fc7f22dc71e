"""Runs the study or the sweep of a command line, in this process or in processes of a launcher.

The command line calls `launch`, and programs do by `sdopt.guest.run`; `Experiment` runs each study.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from sdopt.config.command import CommandLine, add_working_folder, run_hydra
from sdopt.config.composed import (
    Command,
    hide_passwords,
    job_folder,
    recorded_command,
    with_resumed,
)
from sdopt.config.compositions import composition_errors, in_one_line
from sdopt.config.groups import require_overrides
from sdopt.config.models import named_again
from sdopt.config.overrides import group_of, key_of
from sdopt.errors import (
    ENDINGS,
    ConflictError,
    OccupiedError,
    SdoptError,
    UnavailableError,
    UsageError,
    command_line,
    os_problem,
    print_problems,
    way_out,
)
from sdopt.guard import explained
from sdopt.locks import lock_folder
from sdopt.scratch import scratch_folder
from sdopt.study.timeline import Timeline, process_begun
from sdopt.terminal import print_line
from sdopt.worker.forkserver import (
    independent_children,
    start_fork_server,
)

if TYPE_CHECKING:
    from rich.console import Console

    from sdopt.config.composer import HydraComposer
    from sdopt.config.parse import RunConfig
    from sdopt.record.files import JobError
    from sdopt.record.records import StudyResult
    from sdopt.report.outcome import Outcome


def run(*overrides: str, config_dir: str | Path | None = None) -> Outcome:
    """Measures a study in this process, and returns its result; see `sdopt.guest.run`, which programs call.

    Raises UsageError, UnavailableError and KeyboardInterrupt as that does.
    """
    from sdopt.report.outcome import load_result

    argv = [
        *(("--config-dir", str(config_dir)) if config_dir is not None else ()),
        *overrides,
    ]
    folder = launch(argv, one_study=True, began=process_begun()).folder
    if folder is None or not (folder / "result.json").is_file():
        raise UsageError(
            "dry_run=true: a dry run has no result; use the command `sdopt run … dry_run=true`"
        )
    return load_result(folder)


@dataclass
class Launched:
    """What a command has run.

    Attributes:
        folder: of the run or of the sweep; None if nothing was to be measured.
        sweep: whether it is a sweep's.
        lost: whether a launcher lost a job of a sweep, for example because its machine went down.
        occupied: whether a job of a sweep refused its folder, because another process writes it.
        code: the exit code of a dry run.
        functions: what names the functions of users' files once more beside `resume`.
    """

    folder: Path | None = None
    sweep: bool = False
    lost: bool = False
    occupied: bool = False
    code: int = 0
    functions: Sequence[str] = ()


def launch(
    argv: Sequence[str],
    ready: Callable[[], None] = lambda: None,
    brief: bool = False,
    one_study: bool = False,
    deadline: float = math.inf,
    began: float | None = None,
    within: tuple[float, float] | None = None,
) -> Launched:
    """Runs the studies of a command line, and returns where they are.

    Args:
        argv: overrides and Hydra's flags; `resume=<folder>` expands into the command line recorded in the folder.
        ready: called before the first study prints, after imports and composition.
        brief: whether to skip tables and reports of a single study, for a caller that reads the results.
        deadline: when a single study ends with what is measured, as `interrupted`, in seconds of the monotonic clock.
        one_study: whether a sweep, and what prints something instead of measuring, is refused.
        began: when the command began, by `time.monotonic`, from which on a single study's time and its budget count;
            None for now, as in a program that has run for long.
        within: when the search that a single study is part of began, and when it ends: see `Progress`.

    Raises:
        UsageError: the command line cannot be composed; nothing was measured.
        UnavailableError: a file or a folder could not be read or written.
        InterruptedStudy: Ctrl-C; the error has the folders of the studies that had started.
    """
    launched = Launched()
    began = time.monotonic() if began is None else began
    try:
        line = CommandLine.of(with_resumed(argv))
        launched.functions = named_again(line.overrides)
        add_working_folder()
        command = _command_of(line)
        if one_study and (command is None or command.sweep):
            raise UsageError(
                "sdopt.run measures one study; for sweeps, --help and --cfg use the command `sdopt run`"
            )
        if command is None:
            with composition_errors():
                require_overrides(line.overrides)
                run_hydra(argv)
            return launched
        if not brief:  # a search screens without its gate
            command.require_gate()
        # Begun once the command line is known to be right: it imports PyTorch while this process goes on.
        start_fork_server(command.dry)
        # What Hydra records of a dry run is no record of what was measured in its folder.
        with (
            scratch_folder("plan")
            if command.dry
            else nullcontext(command.folder) as folder
        ):
            launched.folder = None if command.dry else folder
            launched.sweep = command.sweep
            job = LaunchedJob(_this_process())
            if command.composer is not None:
                how = {
                    "command": ["sdopt", "run", *argv],
                    "ready": ready,
                    "brief": brief,
                    "deadline": deadline,
                    "within": within,
                }
                job = LaunchedJob(_this_process(), command.composer, how, began)
            _run(command, job, folder, launched, ready)
    except KeyboardInterrupt as interrupt:
        raise InterruptedStudy(launched) from interrupt
    return launched


def _run(
    command: Command,
    job: LaunchedJob,
    folder: Path,
    launched: Launched,
    ready: Callable[[], None],
) -> None:
    """Runs the jobs of a command, and notes what became of them. Raises what ended a single study."""
    from sdopt.record.files import read_error

    try:
        _require_folder(command)
        if command.sweep:
            ready()  # jobs may print from other processes
        command.run(job, folder)
        _say_effort(command, job)
        occupied = [error for error in job.errors if isinstance(error, OccupiedError)]
        launched.occupied = bool(occupied)
        if job.errors and not command.sweep:
            raise job.errors[0]
    except SdoptError:
        raise
    except Exception as error:
        _require_lost_job(error, command)
        launched.lost = True
    if command.dry:
        errors = [read_error(file.parent) for file in folder.rglob("error.json")]
        launched.code = max((error.exit_code for error in errors if error), default=0)


def _say_effort(command: Command, job: LaunchedJob) -> None:
    """Says what the jobs of a sweep would take together, of a dry run whose jobs ran in the process of the command."""
    if not (command.dry and command.sweep):
        return
    from sdopt.report.header import effort_of_sweep
    from sdopt.terminal import console

    if effort := effort_of_sweep(job.foreseen_s):
        print_line(console(), effort)


def _command_of(line: CommandLine) -> Command | None:
    """Composes a command line; returns None if it asks for nothing to be measured."""
    # Importing PyTorch takes as long as all else that a dry run does.
    if "dry_run=true" in line.task:
        start_fork_server(torch_alone=True)
    return None if line.informative else Command.of(line)


def _require_folder(command: Command) -> None:
    """Checks the folder of a command before Hydra replaces the record of the command there, which `resume` reads.

    Raises:
        OccupiedError: it holds a result, and the command does not resume that; or another process writes it.
    """
    folder = command.folder
    if not command.resumes and (held := _held_in(folder, command)):
        functions = named_again(command.line.overrides)
        again = command_line("run", f"resume={folder}", *functions)
        raise OccupiedError(
            f"{folder}: holds {held}; continue it with `{again}`, or choose another"
        )
    if folder.is_dir() and not command.sweep:
        with lock_folder(folder) as ours:
            if not ours:
                raise OccupiedError(f"{folder}: another process is measuring there")


def _held_in(folder: Path, command: Command) -> str:
    """Returns what a folder holds whose recorded command another one there would replace; "" if nothing is lost.

    A cluster may submit the same sweep again: its jobs go on.
    """
    if (folder / "result.json").is_file():
        return "a result"
    record = folder / "multirun.yaml"
    if not record.is_file() or next(folder.glob("*/**/result.json"), None) is None:
        return ""
    if not command.sweep:
        return "results of a sweep"
    earlier: list[str] | None = None
    with suppress(UsageError):  # a damaged record is not that of this sweep
        earlier = _measuring(recorded_command(record, folder)[0])
    same = earlier == _measuring(command.line.task)
    return "" if same else "results of another sweep"


def _measuring(overrides: Sequence[str]) -> list[str]:
    """Returns the overrides that say what is measured, without those of the tracker, whose passwords no record has."""
    return [
        override for override in overrides if group_of(key_of(override)) != "tracking"
    ]


@dataclass(frozen=True)
class LaunchedJob:
    """Measures the study of one Hydra job, in the process that a launcher chooses.

    Errors are recorded in the folder's `error.json`; those of a sweep are also printed, and it goes on with its other
    jobs. Raising them here would make Hydra print the overrides of the job first.

    Attributes:
        process: the process of the command.
        composer: that of a single study; None in a sweep, whose jobs have one each.
        how: the settings of the `Experiment` of a single study.
        began: when the command of a single study began; a sweep's job begins when the previous one ends.
        errors: those of the jobs that ran in the process of the command.
        foreseen_s: what each of them would take, of a dry run.
    """

    process: tuple[str, int]
    composer: HydraComposer | None = None
    how: Mapping[str, Any] = field(default_factory=dict)
    began: float | None = None
    errors: list[Exception] = field(default_factory=list)
    foreseen_s: list[float | None] = field(default_factory=list)

    def __call__(self, cfg: DictConfig) -> Any:
        """Measures a study; returns the objective for a sweeper, or NaN if there is none."""
        folder, elsewhere = job_folder(), self.process != _this_process()
        if elsewhere:
            with suppress(
                OSError
            ):  # a machine without the command's folder may not need it
                os.chdir(HydraConfig.get().runtime.cwd)
        add_working_folder()
        try:
            with _ended_by_signals() if elsewhere else nullcontext():
                return self._measure(cfg, folder)
        except Exception as error:
            ending = _record(error, folder, in_a_sweep=self.composer is None)
            self.errors.append(error)
            if self.composer is None:
                print_problems(ending.problems)
            return math.nan

    def _measure(self, cfg: DictConfig, folder: Path) -> Any:
        hide_passwords()
        # Imported here, because a command line that is wrong has ended by now.
        from sdopt.config.composer import HydraComposer
        from sdopt.experiment import Experiment

        how, composer = self.how, self.composer
        if composer is None:
            task: Any = OmegaConf.to_container(
                HydraConfig.get().overrides.task, resolve=False
            )
            how = {"in_sweep": True, "command": ["sdopt", "run", *task]}
            composer = HydraComposer.of_this_job(cfg)
        with independent_children(), lock_folder(folder) as ours:
            if not ours:
                raise OccupiedError(f"{folder}: another process is measuring there")
            timeline = Timeline("Python, Hydra and their imports", self.began)
            context = start_fork_server(composer.current.dry_run)
            experiment = Experiment(composer, folder, context, timeline, **how)
            result = experiment.run()
        self.foreseen_s.append(experiment.foreseen_s)
        return _objective(composer.current, result) if result else math.nan


def _this_process() -> tuple[str, int]:
    return socket.gethostname(), os.getpid()


def _require_lost_job(error: Exception, command: Command) -> None:
    """Says which job of a sweep a launcher lost.

    Raises:
        Exception: the error, told for the user unless it is one of sdopt's own, if it is another one.
    """
    folder = command.folder
    begun = (
        any(path.is_dir() for path in folder.iterdir())
        if command.sweep and folder.is_dir()
        else folder.is_dir()
    )
    if command.sweep and begun and not isinstance(error, OSError):
        # Jobs record their own errors; this error is from the launcher, for a job that died without a message.
        words = ("retry_failed=true", *named_again(command.line.overrides))
        again = command_line("run", f"resume={folder}", *words)
        problem = f"a job of {folder} ended unexpectedly: {type(error).__name__}: {in_one_line(error)[:300]}"
        print_problems([f"{problem}; `{again}` measures the rest"])
    elif (
        isinstance(error, OSError) and error.strerror
    ):  # Hydra's own OSErrors have no strerror
        problem = os_problem(error, folder)
        if begun:
            raise UnavailableError(problem) from error
        raise UsageError(f"{command.place}: {problem}") from error
    elif begun or way_out(error):
        raise error
    else:
        raise UsageError(in_one_line(error) or type(error).__name__) from error


class InterruptedStudy(KeyboardInterrupt):
    """Raised for Ctrl-C during studies; `launched` says where they are."""

    def __init__(self, launched: Launched) -> None:
        super().__init__()
        self.launched = launched


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Makes SIGTERM and the like act like Ctrl-C in a launcher's process, so that a cluster can requeue the job.

    Else a closed terminal or a limit of processor time would end the job without its last round. submitit ignores
    SIGTERM: the job would continue without its workers, and end with a partial result.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in ENDINGS}
    # nohup leaves SIGHUP ignored, and handlers installed by other code are kept.
    handled = [
        number
        for number in ENDINGS
        if number == signal.SIGTERM or before[number] is signal.SIG_DFL
    ]
    for number in handled:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, before[number])


def _record(error: Exception, folder: Path, in_a_sweep: bool) -> JobError:
    """Records what ended a job in its folder's `error.json`, with its status in the sweep's table, and returns it."""
    from sdopt.record.files import JobError, write_error
    from sdopt.record.records import Status

    if in_a_sweep and isinstance(error, ConflictError):
        ending = JobError(0, error.problems, Status.SKIPPED)
    elif isinstance(error, SdoptError):
        ending = JobError(error.exit_code, error.problems)
    else:
        problem = (
            os_problem(error, folder)
            if isinstance(error, OSError)
            else explained(error)
        )
        if (
            type(error).__name__ == "UncompletedJobError"
        ):  # submitit's, within the job that it does not submit again
            said = str(error).strip().rstrip(".")
            problem = f"{said}: raise hydra.launcher.timeout_min or hydra.launcher.max_num_timeout, and resume the sweep"
        ending = JobError(UnavailableError.exit_code, [problem])
    # An error.json would be mistaken for an error of the process that occupies the folder.
    if not isinstance(error, OccupiedError):
        with suppress(OSError):  # the disk may be full
            write_error(ending, folder)
    return ending


def _objective(run_config: RunConfig, result: StudyResult) -> Any:
    """Returns the objective for a sweeper: a metric of the study's last variant, or a tuple of metrics."""
    from sdopt.record.records import Status
    from sdopt.statistics.figures import flat_figures

    candidate = [row for row in result.variants if not row.is_control][-1]
    # A sweeper must not prefer an option that failed or had no effect.
    metrics = flat_figures(result, candidate) if candidate.status is Status.OK else {}
    missing = [name for name in run_config.objective if name not in metrics]
    if missing and metrics:
        print_problems(
            [
                f"objective={','.join(missing)}: unknown metric; available: {', '.join(sorted(metrics))}"
            ]
        )
    values = tuple(metrics.get(name, math.nan) for name in run_config.objective)
    return values if len(values) > 1 else values[0]


def summarise_sweep(
    folder: Path, console: Console, functions: Sequence[str] = ()
) -> int:
    """Prints, writes and logs the table and the report of a sweep; returns the exit code for all jobs.

    `functions` are as `Launched` has them.
    """
    from sdopt.report.markdown import written
    from sdopt.report.sweep import read_sweep
    from sdopt.report.terminal import shown
    from sdopt.tracking.client import TrackingError
    from sdopt.tracking.finding import of_sweep, write_report
    from sdopt.tracking.runs import log_sweep

    if not folder.is_dir():
        return UsageError.exit_code
    sweep = read_sweep(folder)
    if not sweep.studies:
        if not sweep.errors:
            print_problems(
                [
                    f"{folder}: no job has written a result; do all machines share this folder?"
                ]
            )
            return UnavailableError.exit_code
        return sweep.exit_code
    console.print(shown(sweep.blocks(reasons=False), console.width))
    table = written(sweep.blocks())
    try:
        (folder / "sweep.md").write_text(table, encoding="utf-8")
    except OSError as error:
        print_problems([f"no table: {folder / 'sweep.md'}: {error.strerror}"])
    try:
        page, *_ = write_report(of_sweep(sweep))
        print_line(console, f"report: {page}")
    except OSError as error:
        print_problems([f"no report: {os_problem(error)}"])
    print_line(console, f"sweep: {folder}")
    rows = chain.from_iterable(study.variants for study in sweep.studies.values())
    if any(row.to_retry for row in rows):
        words = ("retry_failed=true", *functions)
        again = command_line("run", f"resume={folder}", *words)
        print_problems([f"`{again}` measures again what failed"])
    studies = list(sweep.studies.values())
    # A resumed sweep may disable tracking, which only the jobs of that run have recorded.
    if all(study.config.tracking.kind == "mlflow" for study in studies):
        try:
            log_sweep(sweep, table, studies[0].config.tracking)
        except (TrackingError, UsageError) as error:
            to = "to " if isinstance(error, TrackingError) else ""
            print_problems([f"the sweep's own run was not logged {to}{error}"])
    return sweep.exit_code
