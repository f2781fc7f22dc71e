"""Reads the results of a command's jobs from their folders: the exit code, and for a sweep its answer and one table."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from sdopt.errors import UnavailableError, UsageError
from sdopt.gate.judge import exit_code as judged_code
from sdopt.gate.judge import left_unjudged, worst_code
from sdopt.record.choices import as_choice, difference, is_plain
from sdopt.record.configuration import RecordedConfig
from sdopt.record.files import JobError, read_error, read_result
from sdopt.record.records import Status, StudyResult, VariantResult
from sdopt.record.sweeps import own_words, planned_jobs
from sdopt.report.answer import use_of
from sdopt.report.blocks import Block, Cell, Notes, Prose, Table
from sdopt.report.columns import Cells, TableView, speed_cell, table_of, word
from sdopt.report.sentences.answer import (
    described,
    is_refused,
    lacking_text,
    tells_less,
)
from sdopt.report.sentences.notes import NOT_ENDED
from sdopt.report.summary import Summary, rank_of, summary_of
from sdopt.schema import WORK
from sdopt.statistics.rows import Row
from sdopt.statistics.scale import Speed
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
    incomplete = any(map(_is_unmeasured, result.variants)) or _lacks_speedup(result)
    code = 3 if incomplete or left_unjudged(result) else 0
    # What `sdopt gate` has judged since, of a study that asked for no verdict, is that command's answer.
    judgements = result.judgements if result.config.gate.judges else []
    return worst_code((code, judged_code(judgements, result.config.gate)))


def _is_unmeasured(variant: VariantResult) -> bool:
    if variant.to_retry:
        return True
    return not variant.status.measured and variant.status is not Status.SKIPPED


def _lacks_speedup(result: StudyResult) -> bool:
    """Returns whether two variants that were timed were not compared at every shape; imported ones need not be."""
    if result.is_imported:
        return False
    timed = set()
    for variant in result.variants:
        if variant.status.measured and not variant.given_up:
            timed.add(variant.name)
    for edge in result.comparisons:
        both_timed = {edge.candidate, edge.reference} <= timed
        if both_timed and not all(ratios.speedup for ratios in edge.shapes):
            return True
    return False


_NOTHING = "the job has begun and has written no result: its process still runs, was killed, or lost its machine"

_NOT_BEGUN = "it has not begun: resuming the sweep runs it"


@dataclass(frozen=True)
class Sweep:
    """The jobs of a sweep, in the order of their numbers, with and without a result."""

    folder: Path
    studies: dict[str, StudyResult]
    errors: dict[str, JobError]
    damaged: list[str] = field(default_factory=list)
    """The errors of files that cannot be read, a line for each."""
    waiting: Mapping[str, str] = field(default_factory=dict)
    """The jobs that have not begun, with what each of them has for itself."""
    own: Mapping[str, str] = field(default_factory=dict)
    """The jobs without a result, with what each of them has for itself."""

    @property
    def exit_code(self) -> int:
        """The worst of the jobs' exit codes; see `worst_code`."""
        codes = [error.exit_code for error in self.errors.values()]
        if self.waiting:
            codes.append(UnavailableError.exit_code)
        for job, study in self.studies.items():
            if job not in self.errors:
                codes.append(_code_of(study))
        return worst_code(codes)

    @property
    def ended(self) -> bool:
        """Whether each of its jobs has come to an end of its own, be it an error."""
        if any(error.problems == [_NOTHING] for error in self.errors.values()):
            return False
        statuses = {study.status for study in self.studies.values()}
        return not self.waiting and statuses <= {"finished"}

    @property
    def lost(self) -> dict[str, int]:
        """Why jobs have no result, a line each, with its exit code; one that cannot run here has none to miss."""
        lost = dict.fromkeys(self.damaged, UsageError.exit_code)
        if not (self.folder / "multirun.yaml").is_file():
            return lost  # runs of several commands, each of which has said how it ended
        for job, error in self.errors.items():
            told = job in self.studies or lost.keys() >= set(error.problems)
            if error.exit_code and not told:
                line = f"{self.folder / job}: {'; '.join(error.problems)}"
                lost[line] = error.exit_code
        for job in self.waiting:
            lost[f"{self.folder / job}: {_NOT_BEGUN}"] = UnavailableError.exit_code
        return lost

    @cached_property
    def summaries(self) -> dict[str, Summary]:
        """Each study summed up, by its job."""
        return {job: summary_of(study) for job, study in self.studies.items()}

    @cached_property
    def jobs(self) -> list["SweepJob"]:
        """The variants of all jobs, best first, then what has no figure; gains are over each job's own baseline."""
        jobs: list[SweepJob] = []
        for job, summary in self.summaries.items():
            # An all-default job has no candidates: its baseline is listed.
            for row in summary.candidates or summary.rows:
                reason = self._reason(job, row)
                jobs.append(
                    SweepJob(
                        job,
                        self._label(job),
                        row,
                        self._name(job, row),
                        reason,
                    )
                )
        for job, error in self.errors.items():
            if job not in self.studies:
                reason = "; ".join(error.problems)
                jobs.append(
                    SweepJob(
                        job,
                        self._label(job),
                        None,
                        self.own.get(job, ""),
                        reason,
                        Status(error.status),
                    )
                )
        for job, name in self.waiting.items():
            jobs.append(SweepJob(job, job, None, name, _NOT_BEGUN, Status.PENDING))
        return sorted(jobs, key=lambda job: (*job.rank, len(job.number), job.number))

    def _reason(self, job: str, row: Row) -> str:
        """Returns why a variant does not pay; what ended its job says more of it than that it was not measured."""
        ending = ""
        if self.studies[job].status in ("running", "crashed"):
            ending = (
                "; ".join(self.errors[job].problems)
                if job in self.errors
                else NOT_ENDED
            )
        if row.status is Status.PENDING:
            return ending or row.because
        return row.because or ending

    def _label(self, job: str) -> str:
        """Returns a job's number; with its machine, if there are several."""
        hosts = {name: study.environment.host for name, study in self.studies.items()}
        host = hosts.get(job)
        several = len(set(hosts.values())) > 1
        return f"{job} on {host}" if host and several else job

    def _name(self, job: str, row: Row) -> str:
        """Returns the name of a row, with what distinguishes its job's baseline from those of other jobs."""
        config = self._baseline_config(job)
        keys: dict[str, None] = {}
        for other in self.studies:
            differing = self._baseline_config(other).differing(config, _NAMING)
            keys |= dict.fromkeys(differing)
        keys.pop("hardware.sheet", None)  # a whole record
        words = [row.name]
        for key in keys:
            if key.partition(".")[0] in self._told:
                continue  # by its option, with the keys that were changed
            if key == "model.name" or not self._of_model(key):
                words.append(f"{key}={_value(config, key)}")
        return ", ".join([*words, *self._own_choices(job)])

    def _of_model(self, key: str) -> bool:
        """Returns whether a key is what each of several models sets by itself, so that its name says it too."""
        if not key.startswith(("model.", "scheduler.")):
            return False
        values: dict[str, set[str]] = {}
        for job in self.studies:
            config = self._baseline_config(job)
            values.setdefault(config.model.name, set()).add(str(_value(config, key)))
        is_file = key in ("model.path", "model.factory")
        return len(values) > 1 and not is_file and max(map(len, values.values())) == 1

    def _own_choices(self, job: str) -> list[str]:
        """Returns the gate of a job and what its baseline chooses, as far as that is not the same in all jobs.

        The default of an axis is not said: the names of the other jobs have what they choose there.
        """
        study = self.studies[job]
        choices = []
        if len({other.config.gate.name for other in self.studies.values()}) > 1:
            choices.append(f"gate={study.config.gate.name}")
        for axis, option in study.baseline_variant.choices.items():
            if axis not in self._told or is_plain(axis, option):
                continue
            choice = as_choice(axis, option)
            choices.append(choice if axis in WORK else f"on {choice}")
        return choices

    @cached_property
    def _told(self) -> set[str]:
        """The axes on which baselines choose otherwise, without a scheduler that each of several models has."""
        first, *others = [study.baseline_variant for study in self.studies.values()]
        told: set[str] = set()
        for baseline in others:
            told |= difference(baseline.choices, first.choices).keys()
        if self._of_model("scheduler.class_name"):
            told.discard("scheduler")
        return told

    def _baseline_config(self, job: str) -> RecordedConfig:
        study = self.studies[job]
        return study.baseline_variant.config

    @property
    def best(self) -> tuple["SweepJob", Row] | None:
        """The recommended variant that gains most over the baseline of its own job, with that job; None if none is."""
        for job in self.jobs:
            if job.row is not None and job.row.recommended:
                return job, job.row
        return None

    @property
    def sentence(self) -> str:
        """The answer of the sweep: which job gains most over its own baseline."""
        rows: list[tuple[SweepJob, Row]] = []
        for job in self.jobs:
            if job.row is not None and not job.row.is_baseline:
                rows.append((job, job.row))
        if not rows:
            return "Nothing was compared with a baseline."
        rows.sort(key=lambda found: (*tells_less(found[1]), is_refused(found[1])))
        job, row = rows[0]
        if all(row.speed is None and row.images is None for _, row in rows):
            return f"Nothing was measured beside a baseline: {job.name}: {job.because} (job {job.number})."
        if all(row.speed is None for _, row in rows):
            images = sum(row.images is not None for _, row in rows)
            return f"Nothing was timed beside a baseline: {images} of {len(rows)} variants have images alone."
        open_yet = row.speed is Speed.FEW and not is_refused(row)
        if self.best is None and not open_yet:
            return self._none_better([row for _, row in rows])
        reservation = f"{lacking_text(row)}: "
        if self.best is not None:
            reservation = ""
            job, row = self.best
        summary = self.summaries[job.number]
        answer = described(
            row,
            summary.row(summary.result.baseline),
            job.name,
        )
        return f"{reservation}{answer} (job {job.number} of {self.count})."

    @property
    def count(self) -> int:
        """How many jobs it has, also those that have not begun."""
        return len({*self.studies, *self.errors, *self.waiting})

    def _none_better(self, rows: Sequence[Row]) -> str:
        """Returns that no variant pays, of those that were measured."""
        measured = 0
        for row in rows:
            measured += row.speed is not None or row.images is not None
        lacking = len(rows) - measured
        for job in self.jobs:
            lacking += job.row is None
        others = f"; {lacking} not measured" if lacking else ""
        return f"Keep the baseline: none of {measured} is shown to be better{others}."

    def blocks(self, reasons: bool = True) -> list[Block]:
        """Returns the answer, the table of all jobs, and how to use the winner."""
        notes = [_NOTE]
        if _per_image(self.jobs):
            notes.append(_PER_IMAGE)
        several = [
            str(study.shapes[0])
            for study in self.studies.values()
            if len(study.shapes) > 1
        ]
        if several:
            notes.append(
                f"Figures of a job with several shapes are those of its first one ({'; '.join(dict.fromkeys(several))}); "
                "`sdopt show` of its folder has all."
            )
        if self.waiting:
            notes.append(
                f"Not begun: {len(self.waiting)} of {self.count} jobs, which resuming the sweep runs."
            )
        if not reasons:
            notes += self._endings()
        blocks: list[Block] = [
            Prose(self.sentence, strong=True),
            _table(self.jobs, self.summaries, reasons),
            Notes(notes),
        ]
        if self.best is not None:
            job, row = self.best
            blocks += use_of(replace(self.summaries[job.number], best=row))
        return blocks

    def _endings(self) -> list[str]:
        """Returns why jobs have no result, a line for each reason."""
        jobs: dict[str, list[str]] = {}
        for job in self.jobs:
            if job.row is None and job.status is not Status.PENDING:
                jobs.setdefault(job.because, []).append(job.label)
        return [f"{', '.join(labels)}: {because}" for because, labels in jobs.items()]


def _value(config: RecordedConfig, key: str) -> object:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


_NAMING = (*WORK, "hardware", "protocol", "quality")
"""Sections by which jobs are told apart."""

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


def _table(
    jobs: Sequence[SweepJob],
    summaries: Mapping[str, Summary],
    reasons: bool,
) -> Table:
    verdicts = [job.row.has_verdict for job in jobs if job.row is not None]
    view = TableView(judged=any(verdicts), per_image=_per_image(jobs))
    names: Cells = ("variant", [job.name for job in jobs])
    labels: Cells = ("job", [job.label for job in jobs])
    because: Cells = ("because", [job.because for job in jobs])
    cells = {
        "speed": [_speed_cell(job) for job in jobs],
        "latency/p50_s": [_time_cell(job, summaries, view) for job in jobs],
        "step": [Cell() for _ in jobs],  # of a study, which has a table of its own
    }
    rows = [job.row for job in jobs]
    table = table_of(
        rows,
        view,
        [names, labels],
        [because] if reasons else [],
        cells,
    )
    table = replace(table, numbers=["job", *table.numbers])
    return replace(table, spare=(), needless=()) if reasons else table


def _speed_cell(job: SweepJob) -> Cell:
    if job.row is not None:
        return speed_cell(job.row)
    return word("not measured" if job.status is Status.PENDING else job.status)


def _time_cell(
    job: SweepJob,
    summaries: Mapping[str, Summary],
    view: TableView,
) -> Cell:
    """Returns a variant's time, with that of the baseline of the same job, unless that is the row itself."""
    if job.row is None:
        return Cell()
    time = _time_text(job.row, view)
    baseline = _time_text(summaries[job.number].baseline, view)
    if job.row.is_baseline or not baseline:
        return Cell(time)
    return Cell(time, f"from {baseline}")


def _time_text(row: Row, view: TableView) -> str:
    interval = row.image_time if view.per_image else row.latency
    if interval is None:
        return ""
    time, _ = seconds_parts(interval)
    return time


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
            error = read_error(job)
            if error is not None:
                errors[name] = error
            elif name not in studies and (job / ".hydra").is_dir():
                errors[name] = JobError(UnavailableError.exit_code, [_NOTHING])
        except UsageError as damaged:
            errors[name] = JobError(damaged.exit_code, damaged.problems)
            unreadable += damaged.problems
    waiting = {
        job: own for job, own in planned_jobs(folder).items() if job not in names
    }
    own = own_words(folder, names) if errors.keys() - studies.keys() else {}
    return Sweep(folder, studies, errors, unreadable, waiting, own)


def _jobs(folder: Path) -> set[str]:
    """Returns the folders of a sweep's jobs: `hydra.sweep.subdir` may put them at any depth, as in `a/b=1`."""
    deep = (folder / "multirun.yaml").is_file()
    jobs = set()
    for place, folders, files in os.walk(folder, followlinks=not deep):
        job = Path(place).relative_to(folder).as_posix()
        if job == ".":
            continue
        is_job = not _MARKS.isdisjoint([*folders, *files])
        if is_job:
            jobs.add(job)
        if is_job or not deep:
            folders.clear()  # what lies in a job's folder is its own: there may be thousands of images
    return jobs


_MARKS = frozenset({".hydra", "result.json", "error.json"})
"""What a job's folder has one of."""
