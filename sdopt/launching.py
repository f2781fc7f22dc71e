"""Runs the study or the sweep of a command line, in this process or in processes of a launcher.

This module is the entry point of the command line and of the Python API; `Experiment` runs each study.
"""

import errno
import math
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console

from sdopt.analysis.figures import flat_figures
from sdopt.config.command import Folders, current_folders, enter_working_folder, is_informative, run_hydra
from sdopt.config.composer import HydraComposer
from sdopt.config.groups import reject_null_groups
from sdopt.config.hydra_job import in_sweep, job_folder, with_resumed
from sdopt.config.messages import explain, in_one_line
from sdopt.config.parse import RunConfig
from sdopt.errors import (
    ENDINGS,
    ConflictError,
    OccupiedError,
    SdoptError,
    UnavailableError,
    UsageError,
    print_problems,
    way_out,
)
from sdopt.experiment import Experiment
from sdopt.locks import lock_folder
from sdopt.report.outcome import Outcome, load_result
from sdopt.results.folders import JobError, write_error
from sdopt.results.records import Status, StudyResult
from sdopt.study.timeline import Timeline, process_begun
from sdopt.tracking.client import TrackingError
from sdopt.tracking.runs import log_sweep
from sdopt.worker.forkserver import independent_children, start_fork_server


def run(*overrides: str, config_dir: str | Path | None = None) -> Outcome:
    """Measures a study like `sdopt run`, and returns its result.

    As with the command, the result, plots and images are also written to a folder in `outputs/runs/` and to MLflow;
    `hydra.run.dir=…` and `tracking=none` change that. A variant that fails is a row with a status and a reason, not an
    exception.

    Args:
        overrides: command-line overrides, such as `"experiment=quickstart"` and `"protocol.rounds=20"`.
        config_dir: a folder with additional configuration groups, like `--config-dir`.

    Raises:
        UsageError: the overrides cannot be composed, or the study cannot run here; `problems` has a line for each.
        UnavailableError: the study was aborted, for example by a full disk; completed measurements are kept.
        KeyboardInterrupt: Ctrl-C; completed measurements are kept in the folder.
    """
    argv = [*(("--config-dir", str(config_dir)) if config_dir is not None else ()), *overrides]
    if is_informative(argv) or {"-m", "--multirun"} & set(argv):
        raise UsageError("sdopt.run measures one study; for sweeps, --help and --cfg use the command `sdopt run`")
    folder = launch(argv).run
    if folder is None or not (folder / "result.json").is_file():
        raise UsageError("dry_run=true: a dry run has no result; use the command `sdopt run … dry_run=true`")
    return load_result(folder)


def launch(argv: Sequence[str], ready: Callable[[], None] = lambda: None, brief: bool = False) -> Folders:
    """Runs the studies of a command line, and returns their folders.

    Args:
        argv: overrides and Hydra's flags; `resume=<folder>` expands into the command line recorded in the folder.
        ready: called before the first study prints, after imports and composition.
        brief: whether to skip tables and reports, for a caller that reads the results.

    Raises:
        UsageError: the command line cannot be composed; nothing was measured.
        UnavailableError: a file or a folder could not be read or written.
        InterruptedStudy: Ctrl-C; the error has the folders of the studies that had started.
    """
    argv = with_resumed(argv)
    reject_null_groups(argv)
    folders = Folders(ready=ready, brief=brief)
    try:
        run_hydra(job, argv, folders)
        if folders.error is not None:
            raise folders.error
    except SdoptError:
        raise
    except KeyboardInterrupt as error:
        raise InterruptedStudy(folders) from error
    except Exception as error:
        # Before a job has a folder, the command line is the cause of an error.
        begun = any(folder.is_dir() for folder in folders.jobs)
        if folders.sweep is not None and begun and not isinstance(error, OSError):
            # Jobs record their own errors; this error is from the launcher, for a job that died without a message.
            folders.lost = True
            problem = f"a job of {folders.sweep} ended unexpectedly: {type(error).__name__}: {in_one_line(error)[:300]}"
            print_problems([f"{problem}; `sdopt run resume={folders.sweep} retry_failed=true` measures the rest"])
            return folders
        explained = _explained(error, folders, begun)
        if explained is error:
            raise
        raise explained from error
    if folders.dry:
        folders.remove_plans()
    return folders


def _explained(error: Exception, folders: Folders, begun: bool) -> Exception:
    """Translates an error that ended a command for the user; returns internal errors of sdopt unchanged."""
    cause: BaseException | None = error
    while cause is not None:  # OmegaConf wraps errors of resolvers
        if isinstance(cause, UsageError):
            return cause
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, OSError) and error.strerror:  # Hydra's own OSErrors have no strerror
        problem = _os_problem(error, folders.run or folders.sweep)
        if begun:
            return UnavailableError(problem)
        unwritable = error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)
        key = "hydra.sweep.dir" if folders.sweep else "hydra.run.dir"
        if unwritable:
            problem = f"{error.filename or folders.run or folders.sweep}: {error.strerror}"
            return UsageError(f"{problem}; choose a writable folder with {key}=…")
        return UsageError(problem)
    return error if begun or way_out(error) else UsageError(explain(error) or type(error).__name__)


class InterruptedStudy(KeyboardInterrupt):
    """Raised for Ctrl-C during studies; `folders` has their folders."""

    def __init__(self, folders: Folders) -> None:
        super().__init__()
        self.folders = folders


def job(_cfg: DictConfig) -> Any:
    """Measures the study of one Hydra job, in the process that the launcher chooses.

    Errors are recorded in the folder's `error.json`, so that a sweep continues with its other jobs.

    Returns:
        The objective for a sweeper, or NaN if there is none.
    """
    folder = job_folder()
    enter_working_folder()
    try:
        with independent_children(), _ended_by_signals(), lock_folder(folder) as ours:
            if not ours:
                raise OccupiedError(f"{folder}: another process is measuring there")
            composer = HydraComposer.of_this_job()
            # In a sweep, a job starts when the previous one ends, not when the process started.
            timeline = Timeline("Python, Hydra and their imports", None if in_sweep() else process_begun())
            result = Experiment(
                composer, folder, start_fork_server(), timeline, in_sweep=in_sweep(), brief=_is_brief()
            ).run()
    except Exception as error:
        _keep_error(error, folder)
        return math.nan
    return _objective(composer.current, result) if result else math.nan


def _is_brief() -> bool:
    folders = current_folders()
    return folders is not None and folders.brief


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Makes SIGTERM and the like act like Ctrl-C in a launcher's process, so that a cluster can requeue the job.

    Else a closed terminal or a limit of processor time would end the job without its last round. submitit ignores
    SIGTERM: the job would continue without its workers, and end with a partial result.
    """
    if current_folders() is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in ENDINGS}
    # nohup leaves SIGHUP ignored, and handlers installed by other code are kept.
    taken = [number for number in ENDINGS if number == signal.SIGTERM or before[number] is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])


def _keep_error(error: Exception, folder: Path) -> None:
    """Records the error of a job. A job of a sweep prints the error; `launch` raises the error of a single run."""
    found = _job_error(error, folder, in_sweep())
    folders = current_folders()
    if isinstance(error, OccupiedError):
        # An error.json would be mistaken for an error of the process that occupies the folder.
        if folders is not None:
            folders.occupied = True
    else:
        with suppress(OSError):  # the disk may be full
            write_error(found, folder)
    if folders is not None and not in_sweep():
        # Raising here would make Hydra print the overrides of the job first.
        folders.error = error
        return
    if not isinstance(error, SdoptError | OSError) and not way_out(error):
        traceback.print_exception(error)
    print_problems(found.problems)


def _job_error(error: Exception, folder: Path, in_a_sweep: bool) -> JobError:
    """Returns the record of an error for `error.json`, with the job's status in the sweep's table."""
    if isinstance(error, UsageError):
        if in_a_sweep and isinstance(error, ConflictError):
            return JobError(0, error.problems, Status.SKIPPED)
        return JobError(UsageError.exit_code, error.problems)
    if isinstance(error, UnavailableError):
        return JobError(error.exit_code, error.problems)
    if isinstance(error, OSError):
        return JobError(UnavailableError.exit_code, [_os_problem(error, folder)])
    return JobError(UnavailableError.exit_code, [f"{type(error).__name__}: {error}{way_out(error)}"])


def _os_problem(error: OSError, folder: Path | None) -> str:
    reason = error.strerror or str(error)
    return f"{error.filename or folder}: {reason}{'' if ';' in reason else way_out(error)}"


def _objective(run_config: RunConfig, result: StudyResult) -> Any:
    """Returns the objective for a sweeper: a metric of the study's last variant, or a tuple of metrics."""
    candidate = [row for row in result.variants if not row.is_control][-1]
    # A sweeper must not prefer an option that failed or had no effect.
    metrics = flat_figures(result, candidate) if candidate.status is Status.OK else {}
    missing = [name for name in run_config.objective if name not in metrics]
    if missing and metrics:
        print_problems([f"objective={','.join(missing)}: unknown metric; available: {', '.join(sorted(metrics))}"])
    values = tuple(metrics.get(name, math.nan) for name in run_config.objective)
    return values if len(values) > 1 else values[0]


def summarise_sweep(folder: Path, console: Console) -> int:
    """Prints, writes and logs the table and the report of a sweep; returns the exit code for all jobs."""
    from sdopt.report.markdown import sweep_markdown
    from sdopt.report.sweep import read_sweep
    from sdopt.report.table import sweep_table
    from sdopt.tracking.finding import of_sweep
    from sdopt.tracking.reporting import write_report

    if not folder.is_dir():
        return UsageError.exit_code
    sweep = read_sweep(folder)
    if not sweep.studies:
        if not sweep.errors:
            print_problems([f"{folder}: no job has written a result; do all machines share this folder?"])
            return UnavailableError.exit_code
        return sweep.exit_code
    console.print(sweep_table(sweep.rows, console.width))
    try:
        (folder / "sweep.md").write_text(sweep_markdown(sweep.rows))
    except OSError as error:
        print_problems([f"no table: {folder / 'sweep.md'}: {error.strerror}"])
    try:
        page, *_ = write_report(of_sweep(sweep))
        console.print(f"report: {page}", markup=False, highlight=False, soft_wrap=True)
    except UnavailableError as error:
        print_problems([f"no report: {error}"])
    console.print(f"sweep: {folder}", markup=False, highlight=False, soft_wrap=True)
    if any(row.status.failure for study in sweep.studies.values() for row in study.variants):
        print_problems([f"`sdopt run resume={folder} retry_failed=true` measures again what failed"])
    studies = list(sweep.studies.values())
    # A resumed sweep may disable tracking, which only the jobs of that run have recorded.
    if all(study.config.tracking.kind == "mlflow" for study in studies):
        try:
            log_sweep(studies, folder, sweep_markdown(sweep.rows), studies[0].config.tracking)
        except (TrackingError, UsageError) as error:
            to = "to " if isinstance(error, TrackingError) else ""
            print_problems([f"the sweep's own run was not logged {to}{error}"])
    return sweep.exit_code
