"""Finds the results that a command line names (of a run, a sweep, an MLflow run), and reports on them."""

from dataclasses import dataclass
from pathlib import Path

from sdopt.errors import UsageError
from sdopt.report.page.blocks import Page
from sdopt.report.page.files import write_page
from sdopt.report.page.sections import study_page, sweep_page
from sdopt.report.sweep import Sweep, read_sweep
from sdopt.results.files import read_result
from sdopt.results.folders import read_error
from sdopt.results.records import StudyResult
from sdopt.schema import Tracking
from sdopt.tracking.runs import download_result, log_report
from sdopt.tracking.store import TrackingError, is_absent


@dataclass(frozen=True)
class Source:
    """What a name stands for.

    Attributes:
        name: as it was given.
        folder: the run's, the sweep's, or for an MLflow run a temporary one with its `result.json` alone.
        studies: each result with the folder of its run, by the number of its job; of a single run by "".
        sweep: the sweep that they belong to.
        downloaded: whether they come from MLflow.
    """

    name: str
    folder: Path
    studies: dict[str, tuple[StudyResult, Path]]
    sweep: Sweep | None = None
    downloaded: bool = False


def find_source(name: str, tracking: Tracking) -> Source:
    """Returns the results that a name stands for.

    Args:
        name: a run's folder, its `result.json`, a sweep's folder, or the id of an MLflow run.
        tracking: the store of an MLflow run.

    Raises:
        UsageError: there is none; the message says what was looked for.
        TrackingError: the store cannot be reached.
    """
    path = Path(name)
    if path.name == "result.json" or (path / "result.json").is_file():
        folder = path if path.is_dir() else path.parent
        return Source(name, folder, {"": (read_result(path), folder)})
    if path.is_dir():
        sweep = read_sweep(path)
        if not sweep.studies and (error := read_error(path)) is not None:
            raise UsageError([f"{path}: that command ended without a result: {said}" for said in error.problems])
        if not sweep.studies:
            raise UsageError(f"{path}: there is no result.json in it, nor in a folder of a sweep's job")
        return Source(name, path, {job: (study, path / job) for job, study in sweep.studies.items()}, sweep)
    if path.exists() or "/" in name:
        raise UsageError(f"{name}: neither a run's folder, nor a result.json, nor an MLflow run id")
    file = download_result(name, tracking)
    return Source(name, file.parent, {"": (read_result(file), file.parent)}, downloaded=True)


def write_report(source: Source, output: Path | None = None) -> list[Path]:
    """Writes `report.html` and `report.md`; returns their paths.

    Args:
        source: what they are about; all jobs of a sweep have one report.
        output: the folder to write to; None is the result's own, and `outputs/reports/<id>` for an MLflow run.

    Raises:
        UnavailableError: the folder cannot be written.
    """
    own = Path("outputs/reports") / source.name if source.downloaded else source.folder
    return write_page(_page(source), output or own)


def _page(source: Source) -> Page:
    if source.sweep is None:
        [(study, folder)] = source.studies.values()
        return study_page(study, folder)
    jobs = [(job, study, folder) for job, (study, folder) in source.studies.items()]
    return sweep_page(f"{jobs[0][1].name} {source.folder.resolve().name}", source.sweep.rows, jobs)


def track_report(source: Source, files: list[Path], tracking: Tracking | None) -> str:
    """Adds a report to what MLflow has of a run or a sweep; returns a line that says what became of it.

    Args:
        source: what the report is about.
        files: of the report.
        tracking: the store; None is the one that the result was tracked in.
    """
    studies = [study for study, _ in source.studies.values()]
    store = tracking or studies[0].config.tracking
    if store.kind == "none":
        return "not logged: the result was not tracked"
    if is_absent(store):
        return f"not logged: {store.uri} is not there"
    try:
        # What was downloaded has no images beside it: the report that the run wrote itself shows more.
        run = log_report(studies, files, store, swept=source.sweep is not None, replace=not source.downloaded)
    except TrackingError as error:
        return f"not logged to {error}"
    return f"MLflow: among the artifacts of run {run}" if run else f"not logged: {store.uri} does not have this result"
