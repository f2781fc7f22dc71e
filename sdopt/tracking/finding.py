"""Finds results by what a user names (a folder of a run or a sweep, a file, a run in MLflow), and reports on them."""

from dataclasses import dataclass
from pathlib import Path

from sdopt.errors import UsageError
from sdopt.record.files import read_error, read_result, write_atomically
from sdopt.record.images import remarks_on_images
from sdopt.record.records import StudyResult
from sdopt.report.catalog import HTML, MARKDOWN
from sdopt.report.markdown import markdown_page
from sdopt.report.page.html import html_page
from sdopt.report.page.sections import study_page, sweep_page
from sdopt.report.summary import summary_of
from sdopt.report.sweep import Sweep, read_sweep
from sdopt.schema import Tracking
from sdopt.tracking.client import TrackingError
from sdopt.tracking.runs import download_run, log_report
from sdopt.tracking.store import store_exists


@dataclass(frozen=True)
class Found:
    """The results that a name stands for.

    Attributes:
        name: the name as the user gave it.
        studies: each result with the folder of its run; for an MLflow run, with the folder for files generated from it,
            which may not exist yet.
        sweep: the sweep, if `name` names one.
    """

    name: str
    studies: list[tuple[StudyResult, Path]]
    sweep: Sweep | None = None

    @property
    def damaged(self) -> list[str]:
        """The unreadable files of a sweep's other jobs, a line each."""
        return self.sweep.damaged if self.sweep else []

    @property
    def remarks(self) -> list[str]:
        """A line for each study of which images were replaced since."""
        lines = []
        for study, folder in self.studies:
            lines += remarks_on_images(study, folder)
        return lines

    @property
    def downloaded(self) -> bool:
        """Whether it comes from MLflow."""
        return not Path(self.name).exists()

    def job(self, folder: Path) -> str:
        """The name of a study's folder: in a sweep its path there, which may have several parts, as in `a/b=1`."""
        return (
            folder.relative_to(self.sweep.folder).as_posix()
            if self.sweep
            else folder.name
        )

    @property
    def folder(self) -> Path:
        """The folder for files that are made from the result."""
        return self.sweep.folder if self.sweep else self.studies[0][1]


def find_results(name: str, tracking: Tracking) -> Found:
    """Returns the result of a run, those of a sweep, or that of an MLflow run.

    Raises:
        UsageError: there is none of that name, it cannot be read, or the command there ended without a result.
        TrackingError: the server cannot be reached.
    """
    path = Path(name)
    if path.name == "result.json" or (path / "result.json").is_file():
        return Found(
            name, [(read_result(path), path if path.is_dir() else path.parent)]
        )
    if path.is_dir():
        sweep = read_sweep(path)
        if (
            not sweep.studies
            and not sweep.damaged
            and (error := read_error(path)) is not None
        ):
            ended = f"{path}: the command that wrote this folder ended without a result"
            raise UsageError([f"{ended}: {problem}" for problem in error.problems])
        if not sweep.studies and not sweep.damaged:
            raise UsageError(
                f"{path}: has no result.json, nor does a folder of a sweep's job in it"
            )
        return of_sweep(sweep)
    if path.exists() or "/" in name:
        raise UsageError(
            f"{name}: neither a run's folder, nor a result.json, nor an MLflow run id"
        )
    return Found(
        name, [(download_run(name, tracking)[0], Path("outputs", "reports", name))]
    )


def of_sweep(sweep: Sweep) -> Found:
    """Returns the results of a sweep that is already read."""
    studies = [(study, sweep.folder / job) for job, study in sweep.studies.items()]
    return Found(str(sweep.folder), studies, sweep)


def find_result(name: str, tracking: Tracking) -> tuple[StudyResult, Path]:
    """Returns the one result that a name stands for.

    Raises:
        UsageError: it is a sweep of several, or none.
        UnavailableError: what the name stands for cannot be reached.
    """
    results = find_results(name, tracking)
    if results.damaged or len(results.studies) > 1:
        several = f"{name}: a sweep of {len(results.studies)} studies; name the folder of one of its jobs"
        raise UsageError(results.damaged or several)
    return results.studies[0]


def write_report(source: Found, output: Path | None = None) -> list[Path]:
    """Writes `report.html` and `report.md` of a result, or one of all jobs of a sweep; returns their paths.

    Without `output` the folder is the result's own, and `outputs/reports/<id>` for an MLflow run. Raises OSError.
    """
    jobs = [
        (source.job(folder), summary_of(study), folder)
        for study, folder in source.studies
    ]
    if source.sweep is None:
        page = study_page(*jobs[0][1:])
    else:
        name = f"{jobs[0][1].result.name} {source.folder.resolve().name}"
        page = sweep_page(name, source.sweep.blocks(), jobs)
    folder = output or source.folder
    contents = {folder / HTML: html_page(page), folder / MARKDOWN: markdown_page(page)}
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in contents.items():
        write_atomically(path, content)
    return list(contents)


def track_report(source: Found, files: list[Path], tracking: Tracking | None) -> str:
    """Adds a report to the MLflow run of a study or a sweep; returns a line that says whether that was done.

    Without a store that is named, it is the one that the result was tracked in.
    """
    studies = [study for study, _ in source.studies]
    store = tracking or studies[0].config.tracking
    if store.kind == "none":
        return "not logged: the result was not tracked"
    if not store_exists(store):
        return f"not logged: {store.uri} does not exist"
    try:
        # A downloaded result has no images beside it, so a report that the run itself logged is kept.
        run = log_report(
            studies,
            files,
            store,
            swept=source.sweep is not None,
            replace=not source.downloaded,
        )
    except TrackingError as error:
        return f"not logged to {error}"
    except UsageError as error:  # such as a password that the result does not hold
        return f"not logged: {error}"
    return (
        f"MLflow: among the artifacts of run {run}"
        if run
        else f"not logged: {store.uri} does not have this result"
    )
