"""Holds a running study and its current session: starts and ends workers, asks them, and records what fails.

`Warmup`, `Rounds`, `Blocks` and `Inspection` measure; each is given the session.
"""

import math
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import TypeVar

from sdopt.hardware.cards import CUDA_CONTEXT_GIB
from sdopt.record.files import write_result
from sdopt.record.records import (
    MeasurementSession,
    Schedule,
    Status,
    StudyResult,
    VariantResult,
    append_reason,
    now,
)
from sdopt.record.samples import Measurement, Memory, ShapeSamples
from sdopt.schema import Protocol, Quality
from sdopt.study.designs import CONTROL, Plan
from sdopt.study.fingerprint import changed_inputs, of_model
from sdopt.study.plan import runnable_of, warmup_calls
from sdopt.study.progress import Progress
from sdopt.study.resume import Missing
from sdopt.study.work import Sharing, batched
from sdopt.variant import Variant
from sdopt.worker.draws import LARGEST_BATCH, drawing_batch, timed_draw
from sdopt.worker.host import PipelineHost
from sdopt.worker.machine import Machine
from sdopt.worker.process import StartWorker, Worker, answers_of
from sdopt.worker.protocol import SampledImage, TimedCall, WorkerError

T = TypeVar("T")

TRIALS = 5
"""How many trial calls of a process get prompts and noise of their own."""

_LARGEST_WITHOUT_VECTORS = 4
"""Images in one call of the quality pass, at most, on a processor without vector instructions."""


@dataclass
class Study:
    """A study while it runs: what it measures, with what, and where its result goes."""

    plan: Plan
    result: StudyResult
    machine: Machine
    start_worker: StartWorker
    folder: Path
    scratch: Path
    """Folder for the compilers' caches, one for each process."""
    progress: Progress
    operations: dict[str, float | None] = field(default_factory=dict)
    """TFLOP of one image, by the work that variants share."""
    begun_after_s: float = 0.0
    """Seconds from the start of the command to that of its first session."""
    written_s: float = -math.inf
    """When `result.json` was last written, in seconds of the monotonic clock."""
    unwritten: bool = False
    """Whether `result.json` could not be written the last time."""

    @property
    def protocol(self) -> Protocol:
        """How it measures."""
        return self.result.config.protocol

    @property
    def quality(self) -> Quality:
        """Which images it draws and scores."""
        return self.result.config.quality

    @property
    def drawing_batch(self) -> int | None:
        """How many prompts of the quality pass all variants draw in one call; None leaves that to each workload."""
        variants = runnable_of(self.plan, self.result)
        largest = (
            LARGEST_BATCH if self.sharing.has_vectors else _LARGEST_WITHOUT_VECTORS
        )
        return drawing_batch(
            variants, self.quality.batch_size, self.result.config.gate.judges, largest
        )

    @property
    def sharing(self) -> Sharing:
        """How its processes share the machine while none is timed."""
        return Sharing.of(self.machine.device, self.machine.cpu, self.plan.baseline)

    @property
    def warmup(self) -> int:
        """How many untimed calls at each shape follow the first one; the last is the discarded round."""
        return warmup_calls(runnable_of(self.plan, self.result), self.protocol)

    @property
    def shapes(self) -> range:
        """The indices of the shapes, in the order in which every process is called at them."""
        return range(len(self.result.shapes))

    def draws_floors(self, row: VariantResult) -> bool:
        """Whether a variant draws the baseline's images in other ways, to measure the floors, and none of its own."""
        return row.is_control and self.quality.metrics

    def slug(self, row: VariantResult) -> str:
        """Returns a stem for file names; the row's number keeps names apart that differ in forbidden characters."""
        letters = re.sub(r"[^A-Za-z0-9]+", "-", row.name).strip("-").lower()[:60]
        return f"{self.result.variants.index(row):02d}-{letters or 'variant'}"

    def checkpoint(self, every_s: float = 0.0) -> None:
        """Writes `result.json`, unless the last `every_s` seconds did.

        If it cannot be written, measuring goes on, and the user is warned once.
        """
        if time.monotonic() < self.written_s + every_s:
            return
        self.written_s = time.monotonic()
        try:
            with self.progress.timeline.during("writing result.json"):
                write_result(self.result, self.folder)
        except OSError as error:
            if not self.unwritten:
                problem = f"{self.folder / 'result.json'}: {error.strerror}"
                self.progress.warn(
                    f"{problem}; measuring continues, and writing is tried again after every round"
                )
            self.unwritten = True
        else:
            self.unwritten = False

    def warn_once(self, text: str) -> None:
        """Warns the user and records the warning in the result, once for each text."""
        warnings = self.result.environment.warnings
        if text not in warnings:
            warnings.append(text)
            self.progress.warn(text)


@dataclass(eq=False)
class VariantProcess:
    """One process of one variant in one session, with the `Measurement` that receives its samples.

    In blocks it is started several times; later workers reuse the compiler cache of the first one.
    """

    row: VariantResult
    variant: Variant
    measurement: Measurement
    slug: str
    """The stem of its file names."""
    timed: bool
    """Whether it takes part in the rounds; else only evidence, stages or images are missing."""
    running: Worker | None = None
    footprint_gib: dict[str, float] = field(default_factory=dict)
    """GiB that it needs of each memory that may run out: `device`, `host`."""
    active: bool = True
    """False after its variant has failed."""
    images: list[SampledImage] = field(default_factory=list)
    """A sample of the images of its timed calls at the first shape."""
    pictures: dict[tuple[int, int], SampledImage] = field(default_factory=dict)
    """All of those images, by prompt and image, where the quality pass need not generate them again."""
    compiled_packages: int = 0
    """Packages that its worker compiled to disk; 0 once it is replaced by one that loads them."""
    compiles_for_others: bool = False
    """Whether what it compiled is on disk, so that no other process of its variant compiles."""
    trials: int = 0
    """Trial calls so far, by which `study.giving_up` decides."""
    given: set[tuple[int, int]] = field(default_factory=set)
    """The calls of its worker so far, each as the index of the shape and the number of the batch."""

    @property
    def first(self) -> bool:
        """Whether it is the first process of its variant, whose start the variant reports."""
        return not self.measurement.replicate

    @property
    def takes_part(self) -> bool:
        """Whether it has a worker, and its variant has not failed."""
        return self.active and self.running is not None

    @property
    def worker(self) -> Worker:
        """The worker, which must have been started."""
        assert self.running is not None
        return self.running

    def stop(self) -> None:
        """Ends its worker, gently."""
        if self.running is not None:
            self.running.stop()
            self.running = None

    def kill(self) -> None:
        """Ends its worker at once."""
        if self.running is not None:
            self.running.kill()
            self.running = None


class DoesNotFitError(Exception):
    """Processes ran out of memory beside others, and were ended; each with the reason.

    `run.measure_missing` then goes on with another session, by the schedule that `Session.after` returns.
    """

    def __init__(self, starved: Sequence[tuple[VariantProcess, str]]) -> None:
        self.starved = starved


class BaselineFailedError(Exception):
    """The baseline has failed, so that nothing is left to compare the other variants with.

    `run.run_study` then ends the study: it counts as finished, and the variants that had no status yet are
    `interrupted`, with what was measured of them.
    """


class Session:
    """One session of a study, with new processes for all variants that take part."""

    def __init__(self, study: Study, missing: Missing, schedule: Schedule) -> None:
        self.study, self.result, self.protocol, self.progress = (
            study,
            study.result,
            study.protocol,
            study.progress,
        )
        self.rounds = missing.rounds
        planned = self.protocol.rounds
        if self.result.budget is not None:
            planned = self.result.budget.rounds or planned
        self.rounds_before = max(0, planned - missing.rounds)
        """Rounds that earlier sessions timed of what lacks the most."""
        self.settled: set[str] = set()
        """The variants that were shown to be faster or slower, and on which no further round is spent."""
        self._starved: list[tuple[VariantProcess, str]] = []
        self._number = len(self.result.sessions)
        self.record = MeasurementSession(now())
        self.result.sessions.append(self.record)
        self._set_schedule(schedule)
        variants = {variant.name: variant for variant in study.plan.variants} | {
            CONTROL: study.plan.baseline
        }
        rows = [row for row in self.result.variants if row.name in missing.variants]
        # The control is measured right after the baseline, so that the floor is known early.
        rows.sort(
            key=lambda row: (row.name != self.result.baseline, not row.is_control)
        )
        self.processes: list[VariantProcess] = []
        for replicate, row in product(
            sorted({replicate for _, replicate in missing.processes}), rows
        ):
            if (row.name, replicate) in missing.processes:
                slug = f"{study.slug(row)}-{replicate}" + (
                    f"-session-{self._number}" if self._number else ""
                )
                measurement = Measurement(
                    replicate, self._number, [ShapeSamples() for _ in study.shapes]
                )
                row.measurements.append(measurement)
                timed = (row.name, replicate) in missing.timed
                self.processes.append(
                    VariantProcess(row, variants[row.name], measurement, slug, timed)
                )
        for sub in ("logs", "images"):
            with suppress(OSError):  # the code that needs the folder reports the error
                (study.folder / sub).mkdir(exist_ok=True)
        self.progress.start(self.rounds)
        study.checkpoint()

    # ------------------------------------------------------------------------------------------------- its processes

    @property
    def interleaved(self) -> bool:
        """Whether all processes live side by side; in blocks there is one at a time."""
        return self.record.schedule == "interleaved"

    @property
    def first_replicate(self) -> int:
        """The number of the processes that are prepared first."""
        return min(
            (process.measurement.replicate for process in self.processes), default=0
        )

    @property
    def with_worker(self) -> list[VariantProcess]:
        """The processes that have a worker now."""
        return [process for process in self.processes if process.running is not None]

    @property
    def timed(self) -> list[VariantProcess]:
        """The processes that take part in the rounds, and whose variants have not failed."""
        return [
            process for process in self.processes if process.timed and process.active
        ]

    @property
    def extra_rounds(self) -> int:
        """How many extra rounds may be timed because other work disturbed some."""
        if self.protocol.interference is None or self.result.budget is not None:
            return 0
        allowed = self.protocol.extra_rounds
        return math.ceil(self.rounds / 2) if allowed is None else allowed

    def start(self, process: VariantProcess) -> None:
        """Starts a worker: a `WorkerProcess`, whose process starts when it is made. Raises WorkerError."""
        study = self.study
        self.progress.phase(process.row.name, "starting")
        process.given.clear()
        log = study.folder / "logs" / f"{process.slug}.log"
        try:
            process.running = study.start_worker(
                process.variant,
                log,
                study.scratch,
                self.progress.timeline.called,
                self.progress.warn,
            )
        except OSError as error:
            raise WorkerError(
                Status.FAILED, f"its process could not be started: {error}"
            ) from error
        process.worker.ask(PipelineHost.hello)

    def require_same_files(self, process: VariantProcess) -> None:
        """Raises WorkerError if a worker has loaded other files than those that the study was planned with.

        A model may be trained on under its name, and a repository of the hub may move, while a study runs: its variants
        would be of different models.
        """
        try:
            changed = changed_inputs(process.variant, process.row.inputs, of_model)
        except OSError:
            return  # what was removed after it was loaded
        if changed:
            named = " and ".join(sorted(changed))
            problem = f"the contents of its {named} changed while the study ran"
            raise WorkerError(
                Status.FAILED, f"{problem}: measure again when nothing writes them"
            )

    def warm_up_again(self, process: VariantProcess) -> None:
        """Brings a fresh worker of a process that was measured before to its steady state. Raises WorkerError."""
        self.start(process)
        self.progress.phase(process.row.name, "loading")
        process.worker.ask(PipelineHost.prepare)
        self.require_same_files(process)
        self.progress.advance()
        for shape_index in self.study.shapes:
            for call in range(1 + self.study.warmup):
                self.progress.phase(process.row.name, "warm-up")
                # Loading must not count towards the peak that is read after the rounds.
                last = call == self.study.warmup
                number = self.next_batch(process, shape_index, call)
                process.worker.ask(
                    PipelineHost.time_once, shape_index, number, memory=last
                )
                self.progress.advance()

    def retire(self, process: VariantProcess) -> None:
        """Ends the worker of a process that will not start again, and deletes its compiler cache."""
        process.stop()
        shutil.rmtree(self.study.scratch / process.slug, ignore_errors=True)

    def stop_all(self) -> None:
        """Ends all workers; they may be started again."""
        for process in self.processes:
            process.stop()

    # ------------------------------------------------------------------------------------------------------ requests

    def ask_each(
        self,
        group: Sequence[VariantProcess],
        phase: str,
        begin: Callable[[VariantProcess], Callable[[], T]],
        lenient: bool = False,
    ) -> list[tuple[VariantProcess, T]]:
        """Sends one request to each living worker of a group at once; returns the processes that answered, and what.

        Of the others, `note_failure` keeps what went wrong. Where it is `lenient`, a request that fails is noted
        instead of failing its variant, because it is no timing; a worker that is gone or lacks memory fails it anyway.
        """
        asked = [process for process in group if process.takes_part]
        if not asked:
            return []
        self.progress.together([process.row.name for process in asked], phase)
        good: list[tuple[VariantProcess, T]] = []
        for process, answer in zip(
            asked,
            answers_of([partial(begin, process) for process in asked]),
            strict=True,
        ):
            if not isinstance(answer, WorkerError):
                good.append((process, answer))
            elif lenient and answer.status is Status.FAILED:
                process.row.reason = append_reason(
                    process.row, f"{phase}: {answer.reason}"
                )
            elif (
                process.active
            ):  # else another process of its variant has failed beside it
                self.note_failure(process, answer)
        return good

    def call(
        self,
        group: Sequence[VariantProcess],
        phase: str,
        shape_index: int,
        call: int,
        memory: bool = False,
    ) -> list[tuple[VariantProcess, TimedCall]]:
        """Lets the living workers of a group make one call, as many at once as there are cores for.

        `call` is how many each has made at that shape; `memory` says whether to measure the peak memory, too.
        """

        def begin(process: VariantProcess) -> Callable[[], TimedCall]:
            number = self.next_batch(process, shape_index, call)
            return process.worker.begin(
                PipelineHost.time_once, shape_index, number, memory=memory
            )

        answers: list[tuple[VariantProcess, TimedCall]] = []
        for part in batched(group, self.study.sharing.calls):
            answers += self.ask_each(part, phase, begin)
        return answers

    def next_batch(self, process: VariantProcess, shape_index: int, call: int) -> int:
        """Returns the number of the batch for a call of a process, the same for all variants, and records it as given.

        `call` is the index of the worker's call at that shape; 0 is its first.

        While there are enough prompts, no two calls of a variant, in one process or in several, get the same prompts
        and noise: an option must not gain by remembering earlier calls.
        """
        trials = TRIALS if self.protocol.give_up is not None else 0
        calls_per_process = self.first_trial + trials
        number = process.measurement.replicate * calls_per_process + call
        number %= timed_draw(process.variant, shape_index).calls
        process.given.add((shape_index, number))
        return number

    @property
    def first_trial(self) -> int:
        """The index, for `next_batch`, of the first call that is not timed in any round."""
        return 2 + self.study.warmup + self.rounds + self.extra_rounds

    def note_call(
        self, process: VariantProcess, shape_index: int, call: TimedCall
    ) -> None:
        """Records the figures of a call at a shape, except its time."""
        self.progress.advance()
        samples = process.measurement.shapes[shape_index]
        if samples.recompiles is not None:
            samples.recompiles += call.graphs
        if call.memory is not None:
            samples.memory = call.memory
            needed = footprint_gib(call.memory)
            process.footprint_gib = {
                kind: max(gib, process.footprint_gib.get(kind, 0))
                for kind, gib in needed.items()
            }

    # ------------------------------------------------------------------------------------- what fails, or does not fit

    @contextmanager
    def noting_failure(self, process: VariantProcess) -> Iterator[None]:
        """Notes a WorkerError of a block of code as the failure of a process."""
        try:
            yield
        except WorkerError as error:
            self.note_failure(process, error)

    def note_failure(self, process: VariantProcess, error: WorkerError) -> None:
        """Decides what follows for a variant one of whose workers has died or could not answer.

        The variant fails, and no other (`fail`). But if the worker may have lacked memory that others held beside it
        (it said so, SIGKILL ended it, or it crashed on a GPU), only this process ends, as long as
        `protocol.schedule=auto` leaves a choice: `require_fit` then ends the session, and `after` tries it alone.

        Raises BaselineFailedError, which ends the study, if it is the baseline that fails.
        """
        others = len([other for other in self.with_worker if other is not process])
        if not (error.out_of_memory and others):
            self.fail(process, error)
            return
        # Each worker emulates a card of its own, from which others take no memory.
        emulated = process.variant.hardware.emulate_memory
        if self.protocol.schedule == "auto" and self.interleaved and not emulated:
            process.kill()
            failed = f"'{process.row.name}' failed while {others} other processes were in memory"
            self._starved.append(
                (process, f"{failed}, perhaps for lack of memory ({error.reason})")
            )
            return
        self.fail(process, error)
        advice = (
            f"{others} other processes were in memory: try protocol.schedule=blocks"
        )
        process.row.reason = append_reason(process.row, advice)

    def fail(self, process: VariantProcess, error: WorkerError) -> None:
        """Ends all processes of a variant, with the error as its status and reason; a measured one keeps its status.

        Raises BaselineFailedError if it is the baseline, and others wait to be compared with it.
        """
        row = process.row
        if row.status is Status.PENDING:
            row.status, row.reason = error.status, error.reason
        else:
            # It was fully measured before, and was only timed again beside the missing variants.
            row.reason = append_reason(row, f"when timed again: {error.reason}")
        self.end(row)
        if row.name == self.result.baseline and any(
            other.active for other in self.processes
        ):
            raise BaselineFailedError

    def end(self, row: VariantResult) -> None:
        """Ends all processes of a variant."""
        for process in self.processes:
            if process.row is row:
                process.active = False
                process.kill()
                self.retire(process)

    def require_fit(self, when: str = "") -> None:
        """Raises DoesNotFitError if processes ran out of memory beside others; `when` is added to the reasons."""
        if self._starved:
            raise DoesNotFitError(
                [(process, f"{reason}{when}") for process, reason in self._starved]
            )

    def use_blocks(self, reason: str) -> None:
        """Measures one process at a time from now on."""
        self._set_schedule(Schedule("blocks", reason))
        self.stop_all()

    def after(self, error: DoesNotFitError) -> Schedule:
        """Returns the schedule for a session that measures the rest: blocks if a process fits alone, else as before.

        Its workers end. Each process that ran out of memory is tried alone; a variant that fails so has failed.
        """
        self.stop_all()
        for process, _ in error.starved:
            if process.active:
                try:
                    self.warm_up_again(process)
                except WorkerError as alone:
                    self.fail(process, alone)
                process.stop()
        # One that was measured before, and fails now, is wanted again as long as others are timed beside it.
        fitting = [
            reason
            for process, reason in error.starved
            if process.active or process.row.status.measured
        ]
        self._forget_untimed()
        if fitting:
            return Schedule("blocks", fitting[0])
        return Schedule(self.record.schedule, self.result.schedule.reason)

    def _forget_untimed(self) -> None:
        """Deletes the measurements that broke off before the first round: another session makes them again."""
        for process in self.processes:
            self.retire(process)
            measurement = process.measurement
            timed = any(samples.calls for samples in measurement.shapes)
            # What was so slow that it is not timed further has shown it.
            is_slower = process.row.given_up and measurement.shapes[0].trial_s
            if not (measurement.complete or timed or is_slower):
                process.row.drop([measurement])
        measured = {measurement.session for measurement in self.result.measurements}
        if self._number not in measured:
            self.result.sessions.remove(self.record)

    def _set_schedule(self, schedule: Schedule) -> None:
        """Changes its schedule; the drift of earlier blocks is kept."""
        self.result.schedule = Schedule(
            schedule.kind, schedule.reason, self.result.schedule.drift
        )
        self.record.schedule = schedule.kind


def footprint_gib(memory: Memory) -> dict[str, float]:
    """Returns how many GiB a worker needs at its peak, for each memory that may run out."""
    # In a sandbox, the kernel may not report the peak.
    host = (
        memory.process_loaded_gib
        if memory.process_peak_gib is None
        else memory.process_peak_gib
    )
    if memory.cuda_peak_reserved_gib is None:
        return {"host": host}
    counted = memory.cuda_peak_reserved_gib + (memory.cuda_elsewhere_gib or 0.0)
    on_card = memory.nvml_process_gib or counted + CUDA_CONTEXT_GIB
    return {"host": host, "device": on_card}
