"""What the jobs of a command left in their folders: the exit code, and of a sweep one table."""

from dataclasses import dataclass
from pathlib import Path

from sdopt.gate.judge import exit_code as judged_code
from sdopt.report.rows import Row, rows_of
from sdopt.results.files import read_result
from sdopt.results.folders import JobError, read_error
from sdopt.results.records import Status, StudyResult


def exit_code(folder: Path) -> int:
    """What a run's folder comes to.

    0 where everything was measured and passed, 1 for a regression, 2 for a mistake in the configuration, 3 where
    something could not be measured or judged. A variant that was skipped because it cannot run here is not a failure; a
    dry run leaves no file, and is none.
    """
    error = read_error(folder)
    if error is not None:
        return error.exit_code
    if not (folder / "result.json").is_file():
        return 0
    result = read_result(folder)
    measured = {row.name for row in result.variants if row.status.measured}
    uncompared = [
        edge
        for edge in result.comparisons
        if {edge.candidate, edge.reference} <= measured and not all(at.speedup for at in edge.shapes)
    ]
    failed = [row for row in result.variants if not row.status.measured and row.status is not Status.SKIPPED]
    code = 3 if failed or uncompared else 0
    if result.judgements and not result.config.gate.report_only:
        # A regression tells more than what could not be measured beside it.
        judged = judged_code(result.judgements)
        return judged if judged == 1 else max(code, judged)
    return code


@dataclass(frozen=True)
class Sweep:
    """The jobs of a sweep, in the order of their numbers, with and without a result."""

    folder: Path
    studies: dict[str, StudyResult]
    errors: dict[str, JobError]

    @property
    def exit_code(self) -> int:
        """The worst of the jobs' exit codes."""
        return max((exit_code(self.folder / job) for job in [*self.studies, *self.errors]), default=0)

    @property
    def rows(self) -> list[tuple[str, Row]]:
        """The job's number and its candidates against their references; the baseline where there is no candidate."""
        found = []
        for job, study in self.studies.items():
            rows = [row for row in rows_of(study) if study.variant(row.variant).role != "control"]
            found += [(job, row) for row in rows if row.reference or len(rows) == 1]
        for job, error in self.errors.items():
            found.append((job, Row("", Status(error.status), "", {}, "", "", "; ".join(error.problems))))
        return sorted(found, key=lambda item: (len(item[0]), item[0]))


def read_sweep(folder: Path) -> Sweep:
    """Collects `result.json` and `error.json` of every job of a sweep's folder."""
    jobs = sorted((path for path in folder.iterdir() if path.is_dir()), key=lambda path: (len(path.name), path.name))
    studies = {job.name: read_result(job) for job in jobs if (job / "result.json").is_file()}
    errors = {job.name: error for job in jobs if job.name not in studies and (error := read_error(job)) is not None}
    return Sweep(folder, studies, errors)
