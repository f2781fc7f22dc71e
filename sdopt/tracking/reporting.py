"""Reports on results by what a user names (a run, a sweep, a run in MLflow), and logs what was reported."""

from pathlib import Path

from sdopt.errors import UsageError
from sdopt.report.blocks import Page
from sdopt.report.page.files import write_page
from sdopt.schema import Tracking
from sdopt.statistics.summary import summary_of
from sdopt.tracking.client import TrackingError
from sdopt.tracking.finding import Found, find_results
from sdopt.tracking.runs import log_report
from sdopt.tracking.store import store_exists


def find_source(name: str, tracking: Tracking) -> Found:
    """Returns the results that a name stands for, to report on.

    Raises:
        UsageError: there is no result of that name, it cannot be read, or the command there ended without one.
        TrackingError: the server cannot be reached.
    """
    found = find_results(name, tracking)
    if not found.studies:
        raise UsageError(found.damaged)
    return found


def write_report(source: Found, output: Path | None = None) -> list[Path]:
    """Writes `report.html` and `report.md`; returns their paths.

    Args:
        source: the results to report on; all jobs of a sweep have one report.
        output: the folder to write to; None is the result's own, and `outputs/reports/<id>` for an MLflow run.

    Raises:
        UnavailableError: the folder cannot be written.
    """
    return write_page(_page(source), output or source.folder)


def _page(source: Found) -> Page:
    from sdopt.report.page.sections import study_page, sweep_page  # draws charts, whose library takes time to load

    if source.sweep is None:
        [(study, folder)] = source.studies
        return study_page(summary_of(study), folder)
    jobs = [(folder.name, summary_of(study), folder) for study, folder in source.studies]
    return sweep_page(f"{jobs[0][1].result.name} {source.folder.resolve().name}", source.sweep.blocks(), jobs)


def track_report(source: Found, files: list[Path], tracking: Tracking | None) -> str:
    """Adds a report to the MLflow run of a study or a sweep; returns a line that says whether that was done.

    Args:
        source: the results of the report.
        files: the files of the report.
        tracking: the store; None is the one that the result was tracked in.
    """
    studies = [study for study, _ in source.studies]
    store = tracking or studies[0].config.tracking
    if store.kind == "none":
        return "not logged: the result was not tracked"
    if not store_exists(store):
        return f"not logged: {store.uri} does not exist"
    try:
        # A downloaded result has no images beside it, so a report that the run itself logged is kept.
        run = log_report(studies, files, store, swept=source.sweep is not None, replace=not source.downloaded)
    except TrackingError as error:
        return f"not logged to {error}"
    except UsageError as error:  # such as a password that the result does not hold
        return f"not logged: {error}"
    return f"MLflow: among the artifacts of run {run}" if run else f"not logged: {store.uri} does not have this result"
