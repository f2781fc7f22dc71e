"""Runs what a command line asks for: one study or a sweep, in this process or in those of a launcher.

The command line and a Python program begin here; each study is then an `Experiment`.
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
from sdopt.errors import ConflictError, OccupiedError, UnavailableError, UsageError, print_problems, way_out
from sdopt.experiment import Experiment
from sdopt.locks import lock_folder
from sdopt.report.outcome import Outcome, load_result
from sdopt.results.folders import JobError, write_error
from sdopt.results.records import Status, StudyResult
from sdopt.study.timeline import Timeline, process_begun
from sdopt.tracking.runs import log_sweep
from sdopt.tracking.store import TrackingError
from sdopt.worker.forkserver import independent_children, start_fork_server


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


def launch(argv: Sequence[str], ready: Callable[[], None] = lambda: None, brief: bool = False) -> Folders:
    """Runs the studies that a command line asks for, and returns where they were written.

    Args:
        argv: overrides and Hydra's flags; `resume=<folder>` stands for the command line recorded there.
        ready: called when the first study is about to print, once all is imported and composed.
        brief: leaves out tables and reports, for a caller that reads the results.

    Raises:
        UsageError: the command line cannot be composed; nothing was measured.
        UnavailableError: a file or a folder could not be read or written.
        InterruptedStudy: Ctrl-C, with the folders of what had begun.
    """
    argv = with_resumed(argv)
    reject_null_groups(argv)
    folders = Folders(ready=ready, brief=brief)
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
        if folders.sweep is not None and begun and not isinstance(error, OSError):
            # Jobs record their own errors; this one is the launcher's, for a job that ended without a message.
            folders.lost = True
            said = f"a job of {folders.sweep} did not end by itself: {type(error).__name__}: {in_one_line(error)[:300]}"
            print_problems([f"{said}; `sdopt run resume={folders.sweep} retry_failed=true` measures what is missing"])
            return folders
        explained = _explained(error, folders, begun)
        if explained is error:
            raise
        raise explained from error
    if folders.dry:
        folders.remove_plans()
    return folders


def _explained(error: Exception, folders: Folders, begun: bool) -> Exception:
    """Returns the error to raise for one that ended a command; an internal error of sdopt stays unchanged."""
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
        if unwritable:
            problem = f"{error.filename or folders.run or folders.sweep}: {error.strerror}"
            return UsageError(f"{problem}; choose a folder that can be written with {key}=…")
        return UsageError(problem)
    return error if begun or way_out(error) else UsageError(explain(error) or type(error).__name__)


class InterruptedStudy(KeyboardInterrupt):
    """Ctrl-C while studies were measured; `folders` says where they are."""

    def __init__(self, folders: Folders) -> None:
        super().__init__()
        self.folders = folders


def job(_cfg: DictConfig) -> Any:
    """Measures the study of one Hydra job, in any process in which a launcher runs it.

    Errors are recorded in the folder's `error.json`, so that a sweep goes on with its other jobs.

    Returns:
        The objective for a sweeper, or NaN if there is none.
    """
    folder = job_folder()
    enter_working_folder()
    try:
        with independent_children(), _ends_at_sigterm(), lock_folder(folder) as ours:
            if not ours:
                raise OccupiedError(f"{folder}: another process is measuring there")
            composer = HydraComposer.of_this_job()
            # A sweep's later jobs begin where the one before them ended.
            timeline = Timeline("Python, Hydra and their imports", None if in_sweep() else process_begun())
            result = Experiment(
                composer, folder, start_fork_server(), timeline, alone=not in_sweep(), brief=_is_brief()
            ).run()
    except Exception as error:
        _keep_error(error, folder)
        return math.nan
    return _objective(composer.current, result) if result else math.nan


def _is_brief() -> bool:
    folders = current_folders()
    return folders is not None and folders.brief


@contextmanager
def _ends_at_sigterm() -> Iterator[None]:
    """Lets a job in a launcher's process end at SIGTERM as at Ctrl-C, so that a cluster may run it again.

    submitit ignores that signal: the job would go on without its workers, and end with a partial result.
    """
    if current_folders() is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _keep_error(error: Exception, folder: Path) -> None:
    """Records why a job has no result; a sweep's job prints it at once, a single run's error is raised by `launch`."""
    found = _job_error(error, folder, in_sweep())
    folders = current_folders()
    if isinstance(error, OccupiedError):
        # An error.json there would be taken for the other's.
        if folders is not None:
            folders.occupied = True
    else:
        with suppress(OSError):  # a full disk prevents this, too
            write_error(found, folder)
    if folders is not None and not in_sweep():
        # Not raised here: Hydra would print the overrides of the job first.
        folders.error = error
        return
    if not isinstance(error, UsageError | UnavailableError | OSError) and not way_out(error):
        traceback.print_exception(error)
    print_problems(found.problems)


def _job_error(error: Exception, folder: Path, in_a_sweep: bool) -> JobError:
    """Returns the record of an error for `error.json`, with the status that the sweep's table shows for the job."""
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
    said = error.strerror or str(error)
    return f"{error.filename or folder}: {said}{'' if ';' in said else way_out(error)}"


def _objective(run_config: RunConfig, result: StudyResult) -> Any:
    """Returns the metric, or the tuple of metrics, that the last variant of a study has for a sweeper."""
    candidate = [row for row in result.variants if row.role != "control"][-1]
    # An option that failed, or that took no effect, has nothing that a sweeper should prefer.
    metrics = flat_figures(result, candidate) if candidate.status is Status.OK else {}
    missing = [name for name in run_config.objective if name not in metrics]
    if missing and metrics:
        print_problems([f"objective={','.join(missing)}: there are {', '.join(sorted(metrics))}"])
    values = tuple(metrics.get(name, math.nan) for name in run_config.objective)
    return values if len(values) > 1 else values[0]


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
        if not sweep.errors:
            print_problems([f"{folder}: no job has written anything there; do all machines share that folder?"])
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
    # A sweep that is resumed may be told to track nothing, which those of its jobs say that were run then.
    if all(study.config.tracking.kind == "mlflow" for study in studies):
        try:
            log_sweep(studies, folder, sweep_markdown(sweep.rows), studies[0].config.tracking)
        except TrackingError as error:
            print_problems([f"the sweep's own run was not logged to {error}"])
    return sweep.exit_code
