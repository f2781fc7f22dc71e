"""Reads the results of a command's jobs from their folders: the exit code, and for a sweep its answer and one table."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path

from sdopt.errors import UnavailableError, UsageError
from sdopt.gate.judge import exit_code as judged_code
from sdopt.gate.judge import left_unjudged, worst_code
from sdopt.record.files import JobError, read_error, read_result
from sdopt.record.records import Status, StudyResult
from sdopt.report.answer import use_of
from sdopt.report.blocks import Block, Cell, Notes, Prose, Table
from sdopt.report.columns import Cells, TableView, speed_cell, table_of, word
from sdopt.schema import WORK
from sdopt.statistics.rows import Row
from sdopt.statistics.scale import Speed
from sdopt.statistics.sentences import described, lacking_text
from sdopt.statistics.summary import Summary, rank_of, summary_of
from sdopt.statistics.words import seconds_parts


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
    timed = {row.name for row in result.variants if row.status.measured and not row.given_up}
    uncompared = [
        edge
        for edge in ([] if result.is_imported else result.comparisons)
        if {edge.candidate, edge.reference} <= timed and not all(at.speedup for at in edge.shapes)
    ]
    failed = [
        row for row in result.variants if (not row.status.measured and row.status is not Status.SKIPPED) or row.to_retry
    ]
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

    @cached_property
    def summaries(self) -> dict[str, Summary]:
        """Each study summed up, by its job."""
        return {job: summary_of(study) for job, study in self.studies.items()}

    @cached_property
    def jobs(self) -> list["SweepJob"]:
        """The variants of all jobs, best first, then what has no figure; gains are over each job's own baseline."""
        found: list[SweepJob] = []
        for job, summary in self.summaries.items():
            why = ""
            if summary.result.status in ("running", "crashed"):
                why = "; ".join(self.errors[job].problems) if job in self.errors else _LOST
            # An all-default job has no candidates: its baseline is listed.
            for row in summary.candidates or summary.rows:
                # What ended the job says more of a row than that it was not measured.
                because = (row.because or why) if row.status is not Status.PENDING else (why or row.because)
                found.append(SweepJob(job, self._label(job), row, self._name(job, row), because))
        for job, error in self.errors.items():
            if job not in self.studies:
                found.append(SweepJob(job, self._label(job), None, "", "; ".join(error.problems), Status(error.status)))
        return sorted(found, key=lambda each: (*each.rank, len(each.number), each.number))

    def _label(self, job: str) -> str:
        """Returns a job's number; with its machine, if there are several."""
        hosts = {name: study.environment.host for name, study in self.studies.items()}
        return f"{job} on {hosts[job]}" if len({*hosts.values()}) > 1 and hosts.get(job) else job

    def _name(self, job: str, row: Row) -> str:
        """Returns the name of a row, with what distinguishes its job's baseline from those of other jobs."""
        plain = {name: study.variant(study.baseline).config for name, study in self.studies.items()}
        words = [row.name]
        for key in dict.fromkeys(chain.from_iterable(config.differing(plain[job], WORK) for config in plain.values())):
            section, _, name = key.partition(".")
            words.append(f"{key}={getattr(getattr(plain[job], section), name)}")
        return ", ".join(words)

    @property
    def best(self) -> tuple["SweepJob", Row] | None:
        """The recommended variant that gains most over the baseline of its own job, with that job; None if none is."""
        return next(((job, job.row) for job in self.jobs if job.row is not None and job.row.recommended), None)

    @property
    def sentence(self) -> str:
        """The answer of the sweep: which job gains most over its own baseline."""
        rows = [(job, job.row) for job in self.jobs if job.row is not None and not job.row.is_baseline]
        if not rows:
            return "Nothing was compared with a baseline."
        if all(row.speed is None and row.images is None for _, row in rows):
            job, _ = rows[0]
            return f"Nothing was measured beside a baseline: {job.name}: {job.because} (job {job.number})."
        few = rows[0][1].speed is Speed.FEW
        if self.best is None and not few:
            return f"Keep the baseline: none of {len(rows)} is shown to be better."
        job, row = self.best or rows[0]
        before = "" if self.best else f"{lacking_text(row)}: "
        summary = self.summaries[job.number]
        told = described(row, summary.row(summary.result.baseline), job.name)
        return f"{before}{told} (job {job.number} of {len({*self.studies, *self.errors})})."

    def blocks(self, reasons: bool = True) -> list[Block]:
        """Returns the answer, the table of all jobs, and how to use the winner."""
        table = _table(self.jobs, self.summaries, reasons)
        notes = [_NOTE, *([_PER_IMAGE] if _per_image(self.jobs) else [])]
        found: list[Block] = [Prose(self.sentence, strong=True), table, Notes(notes)]
        if self.best is None:
            return found
        job, row = self.best
        return [*found, *use_of(replace(self.summaries[job.number], best=row))]


_NOTE = "Each job is a study of its own: gains are over the baseline that was measured in the same job."

_PER_IMAGE = (
    "Times are per image, because calls make different numbers of images. Jobs ran one after the other, so their times "
    "give no ratio: study=one_at_a_time study.options=[workload.batch_size:4] measures batches beside each other."
)


def _per_image(jobs: "Sequence[SweepJob]") -> bool:
    """Returns whether calls of the jobs' variants make different numbers of images."""
    rows = [job.row for job in jobs if job.row is not None]
    counts = {row.images_per_call for row in rows}
    return len(counts) > 1 or any(row.per_image for row in rows)


@dataclass(frozen=True)
class SweepJob:
    """A variant of a sweep's job; `row` is None for a job without a result."""

    number: str
    """The name of the job's folder."""
    label: str
    """The same, with its machine if there are several."""
    row: Row | None
    name: str
    because: str
    status: Status = Status.FAILED

    @property
    def rank(self) -> tuple[bool, float]:
        """Its place: the largest gain first, and what has none last."""
        return rank_of(self.row) if self.row else (True, 0.0)


def _table(jobs: Sequence[SweepJob], summaries: Mapping[str, Summary], reasons: bool) -> Table:
    look = TableView(judged=any(job.row is not None and job.row.decision for job in jobs), per_image=_per_image(jobs))
    names: Cells = ("variant", [job.name for job in jobs])
    labels: Cells = ("job", [job.label for job in jobs])
    because: Cells = ("because", [job.because for job in jobs])
    own = {
        "speed": [_speed_cell(job) for job in jobs],
        "latency/p50_s": [_time_cell(job.row, summaries[job.number], look) if job.row else Cell() for job in jobs],
        "step": [Cell() for _ in jobs],  # of a study, which has a table of its own
    }
    table = table_of([job.row for job in jobs], look, [names, labels], [because] if reasons else [], own)
    numbers = ["job", *table.numbers]
    return replace(table, numbers=numbers, spare=(), needless=()) if reasons else replace(table, numbers=numbers)


def _speed_cell(job: SweepJob) -> Cell:
    if job.row is None:
        return word(job.status)
    if job.row.is_baseline and job.row.status is Status.OK:
        return word(Status.OK)
    return speed_cell(job.row)


def _time_cell(row: Row, summary: Summary, look: TableView) -> Cell:
    """Returns a variant's time, with that of the baseline of the same job, unless that is the row itself."""
    time = _time_text(row, look)
    before = "" if row.is_baseline else _time_text(summary.baseline, look)
    return Cell(time, f"from {before}" if before else "")


def _time_text(row: Row, look: TableView) -> str:
    time = row.image_time if look.per_image else row.latency
    return seconds_parts(time)[0] if time else ""


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
    deep, found = (folder / "multirun.yaml").is_file(), set()
    for place, below, files in os.walk(folder, followlinks=not deep):
        job = Path(place).relative_to(folder).as_posix()
        if job == ".":
            continue
        if marked := {".hydra", "result.json", "error.json"} & {*below, *files}:
            found.add(job)
        if marked or not deep:
            below.clear()  # what lies in a job's folder is its own: there may be thousands of images
    return found
