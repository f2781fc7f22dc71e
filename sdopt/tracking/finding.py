"""Finds results by what a user names: a folder of a run or a sweep, a file, or a run in MLflow."""

from dataclasses import dataclass
from pathlib import Path

from sdopt.errors import UsageError
from sdopt.record.files import read_result
from sdopt.record.folders import read_error
from sdopt.record.records import StudyResult
from sdopt.report.sweep import Sweep, read_sweep
from sdopt.schema import Tracking
from sdopt.tracking.runs import download_result


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
    def downloaded(self) -> bool:
        """Whether it comes from MLflow."""
        return not Path(self.name).exists()

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
        return Found(name, [(read_result(path), path if path.is_dir() else path.parent)])
    if path.is_dir():
        sweep = read_sweep(path)
        if not sweep.studies and not sweep.damaged and (error := read_error(path)) is not None:
            raise UsageError(
                [
                    f"{path}: the command that wrote this folder ended without a result: {problem}"
                    for problem in error.problems
                ]
            )
        if not sweep.studies and not sweep.damaged:
            raise UsageError(f"{path}: has no result.json, nor does a folder of a sweep's job in it")
        return of_sweep(sweep)
    if path.exists() or "/" in name:
        raise UsageError(f"{name}: neither a run's folder, nor a result.json, nor an MLflow run id")
    return Found(name, [(download_result(name, tracking), Path("outputs", "reports", name))])


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
    found = find_results(name, tracking)
    if found.damaged or len(found.studies) > 1:
        several = f"{name}: a sweep of {len(found.studies)} studies; name the folder of one of its jobs"
        raise UsageError(found.damaged or several)
    return found.studies[0]
