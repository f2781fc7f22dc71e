"""Reads the results of a command's jobs from their folders: the exit code, and for a sweep one table."""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from sdopt.errors import UnavailableError, UsageError
from sdopt.gate.judge import exit_code as judged_code
from sdopt.gate.judge import left_unjudged, worst_code
from sdopt.report.rows import Row, rows_of
from sdopt.results.files import read_result
from sdopt.results.folders import JobError, read_error
from sdopt.results.records import Status, StudyResult


def exit_code(folder: Path) -> int:
    """Returns the exit code for a run's folder.

    0 if everything was measured and passed, 1 for a regression, 2 for a mistake in the configuration, 3 if
    something could not be measured or judged. A variant that was skipped because it cannot run here is not a failure; a
    dry run leaves no file, and is none.
    """
    error = read_error(folder)
    if error is not None:
        return error.exit_code
    if not (folder / "result.json").is_file():
        return 0
    return _code_of(read_result(folder))


def _code_of(result: StudyResult) -> int:
    """Returns the exit code of a study that has a result."""
    measured = {row.name for row in result.variants if row.status.measured}
    uncompared = [
        edge
        for edge in ([] if result.is_imported else result.comparisons)
        if {edge.candidate, edge.reference} <= measured and not all(at.speedup for at in edge.shapes)
    ]
    failed = [row for row in result.variants if not row.status.measured and row.status is not Status.SKIPPED]
    code = 3 if failed or uncompared or left_unjudged(result) else 0
    # What `sdopt gate` has judged since, of a study that asked for no verdict, is that command's answer.
    own = result.judgements if result.config.gate.judges else []
    return worst_code((code, judged_code(own, result.config.gate)))


_LOST = "the study has not ended: its process still runs, was killed, or lost its machine"

_NOTHING = "the job has begun and has written no result: its process still runs, was killed, or lost its machine"


@dataclass(frozen=True)
class Sweep:
    """The jobs of a sweep, in the order of their numbers, with and without a result."""

    folder: Path
    studies: dict[str, StudyResult]
    errors: dict[str, JobError]
    damaged: list[str] = field(default_factory=list)
    """The errors of files that cannot be read, a line for each."""

    @property
    def exit_code(self) -> int:
        """The worst of the jobs' exit codes; see `worst_code`."""
        codes = [_code_of(study) for job, study in self.studies.items() if job not in self.errors]
        return worst_code([*codes, *(error.exit_code for error in self.errors.values())])

    @property
    def rows(self) -> list[tuple[str, Row]]:
        """The job's number and its candidates against their references; the baseline where there is no candidate.

        If jobs ran on several machines, the jobs of one machine stand together and name it.
        """
        hosts = {job: study.environment.host for job, study in self.studies.items()}
        several = len(set(hosts.values())) > 1
        found = []
        for job, study in self.studies.items():
            rows = [row for row in rows_of(study) if study.variant(row.variant).role != "control"]
            rows = [row for row in rows if row.reference or len(rows) == 1]
            if study.status in ("running", "crashed"):
                why = "; ".join(self.errors[job].problems) if job in self.errors else _LOST
                rows = [replace(row, evidence=row.evidence or why) for row in rows]
            found += [(job, row) for row in rows]
        for job, error in self.errors.items():
            if job in self.studies:
                continue
            found.append((job, Row("", Status(error.status), "", {}, "", "", "; ".join(error.problems))))
        by_number = sorted(found, key=lambda item: (len(item[0]), item[0]))
        if not several:
            return by_number
        by_machine = sorted(by_number, key=lambda item: hosts.get(item[0], ""))
        return [(f"{job} on {hosts[job]}" if hosts.get(job) else job, row) for job, row in by_machine]


def read_sweep(folder: Path) -> Sweep:
    """Collects `result.json` and `error.json` of every job of a sweep's folder; one that is damaged is an error."""
    names = sorted(_jobs(folder), key=lambda name: (len(name), name))
    studies: dict[str, StudyResult] = {}
    errors: dict[str, JobError] = {}
    unreadable: list[str] = []
    for name in names:
        job = folder / name
        try:
            if (job / "result.json").is_file():
                studies[name] = read_result(job)
            if (error := read_error(job)) is not None:
                errors[name] = error
            elif name not in studies and (job / ".hydra").is_dir():
                errors[name] = JobError(UnavailableError.exit_code, [_NOTHING])
        except UsageError as damaged:
            errors[name] = JobError(damaged.exit_code, damaged.problems)
            unreadable += damaged.problems
    return Sweep(folder, studies, errors, unreadable)


def _jobs(folder: Path) -> set[str]:
    """Returns the folders of a sweep's jobs: `hydra.sweep.subdir` may put them at any depth, as in `a/b=1`."""
    found: set[Path] = set()
    deep = (folder / "multirun.yaml").is_file()
    for here, folders, files in os.walk(folder):
        path = Path(here)
        if path != folder and (".hydra" in folders or {"result.json", "error.json"} & set(files)):
            found.add(path)
            folders.clear()  # what lies in a job's folder is its own
        elif path != folder and not deep:
            folders.clear()
        folders[:] = [name for name in folders if name != ".hydra"]
    return {path.relative_to(folder).as_posix() for path in found}
