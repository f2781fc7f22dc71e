"""Finds results by what a user names: a folder of a run or a sweep, a file, or a run in MLflow."""

from pathlib import Path

from sdopt.errors import UsageError
from sdopt.report.sweep import read_sweep
from sdopt.results.files import read_result
from sdopt.results.folders import read_error
from sdopt.results.records import StudyResult
from sdopt.schema import Tracking
from sdopt.tracking.runs import download_result


def find_results(name: str, tracking: Tracking) -> tuple[list[tuple[StudyResult, Path]], list[str]]:
    """Returns the result of a run, those of a sweep, or that of an MLflow run, each with its folder.

    Returns:
        the results, and what cannot be read of a sweep's other jobs, a line each. The folder of an MLflow run is one
        for what is made of it, and need not exist.

    Raises:
        UsageError: there is none of that name, it cannot be read, or the command there ended without a result.
        TrackingError: the server cannot be reached.
    """
    path = Path(name)
    if path.name == "result.json" or (path / "result.json").is_file():
        return [(read_result(path), path if path.is_dir() else path.parent)], []
    if path.is_dir():
        sweep = read_sweep(path)
        studies = sweep.studies
        if not studies and not sweep.damaged and (error := read_error(path)) is not None:
            raise UsageError([f"{path}: that command ended without a result: {said}" for said in error.problems])
        if not studies and not sweep.damaged:
            raise UsageError(f"{path}: there is no result.json in it, nor in a folder of a sweep's job")
        return [(study, path / job) for job, study in studies.items()], sweep.damaged
    if path.exists() or "/" in name:
        raise UsageError(f"{name}: neither a run's folder, nor a result.json, nor an MLflow run id")
    return [(download_result(name, tracking), Path("outputs", "reports", name))], []


def find_result(name: str, tracking: Tracking) -> tuple[StudyResult, Path]:
    """Returns the one result that a name stands for. Raises UsageError if it is a sweep of several, or none."""
    found, damaged = find_results(name, tracking)
    if damaged or len(found) > 1:
        raise UsageError(damaged or f"{name}: a sweep of {len(found)} studies; name the folder of one of its jobs")
    return found[0]
