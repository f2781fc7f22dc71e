"""Reports on results by what a user names (a run, a sweep, a run in MLflow), and logs what was reported."""

from dataclasses import dataclass
from pathlib import Path

from sdopt.errors import UsageError
from sdopt.report.page.blocks import Page
from sdopt.report.page.files import write_page
from sdopt.report.page.sections import study_page, sweep_page
from sdopt.report.sweep import Sweep, read_sweep
from sdopt.results.records import StudyResult
from sdopt.schema import Tracking
from sdopt.tracking.finding import find_results
from sdopt.tracking.runs import log_report
from sdopt.tracking.store import TrackingError, store_exists


@dataclass(frozen=True)
class Source:
    """What a name stands for.

    Attributes:
        name: as it was given.
        studies: each result with the folder of its run; of an MLflow run that is a temporary one, without images.
        sweep: the sweep that they belong to, if the name is that of one.
        damaged: what cannot be read of the sweep's other jobs, a line each.
    """

    name: str
    studies: list[tuple[StudyResult, Path]]
    sweep: Sweep | None = None
    damaged: tuple[str, ...] = ()

    @property
    def downloaded(self) -> bool:
        """Whether it comes from MLflow."""
        return not Path(self.name).exists()

    @property
    def folder(self) -> Path:
        """Where its report is written."""
        if self.downloaded:
            return Path("outputs/reports") / self.name
        return self.sweep.folder if self.sweep else self.studies[0][1]


def find_source(name: str, tracking: Tracking) -> Source:
    """Returns the results of a run's folder, a `result.json`, a sweep's folder or an MLflow run.

    Raises:
        UsageError: there is none of that name, it cannot be read, or the command there ended without a result.
        TrackingError: the server cannot be reached.
    """
    (studies, damaged), path = find_results(name, tracking), Path(name)
    if not studies:
        raise UsageError(damaged)
    swept = path.is_dir() and not (path / "result.json").is_file()
    return Source(name, studies, read_sweep(path) if swept else None, tuple(damaged))


def write_report(source: Source, output: Path | None = None) -> list[Path]:
    """Writes `report.html` and `report.md`; returns their paths.

    Args:
        source: what they are about; all jobs of a sweep have one report.
        output: the folder to write to; None is the result's own, and `outputs/reports/<id>` for an MLflow run.

    Raises:
        UnavailableError: the folder cannot be written.
    """
    return write_page(_page(source), output or source.folder)


def _page(source: Source) -> Page:
    if source.sweep is None:
        [(study, folder)] = source.studies
        return study_page(study, folder)
    jobs = [(folder.name, study, folder) for study, folder in source.studies]
    return sweep_page(f"{jobs[0][1].name} {source.folder.resolve().name}", source.sweep.rows, jobs)


def track_report(source: Source, files: list[Path], tracking: Tracking | None) -> str:
    """Adds a report to what MLflow has of a run or a sweep; returns a line that says what became of it.

    Args:
        source: what the report is about.
        files: of the report.
        tracking: the store; None is the one that the result was tracked in.
    """
    studies = [study for study, _ in source.studies]
    store = tracking or studies[0].config.tracking
    if store.kind == "none":
        return "not logged: the result was not tracked"
    if not store_exists(store):
        return f"not logged: {store.uri} is not there"
    try:
        # What was downloaded has no images beside it: the report that the run wrote itself shows more.
        run = log_report(studies, files, store, swept=source.sweep is not None, replace=not source.downloaded)
    except TrackingError as error:
        return f"not logged to {error}"
    return f"MLflow: among the artifacts of run {run}" if run else f"not logged: {store.uri} does not have this result"
