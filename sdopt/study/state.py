"""Holds the state of a running study: its processes, its current session, and its result so far."""

import math
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from sdopt.locks import Presence
from sdopt.results.files import write_result
from sdopt.results.records import MeasurementSession, Schedule, Status, StudyResult, VariantResult, append_reason
from sdopt.results.samples import Measurement
from sdopt.schema import Protocol, Quality
from sdopt.study.designs import Plan
from sdopt.study.image_cache import ImageCache
from sdopt.study.plan import runnable_of, warmup_calls
from sdopt.study.progress import Progress
from sdopt.study.sharing import Sharing
from sdopt.variant import Variant
from sdopt.worker.draws import drawing_batch, timed_draw
from sdopt.worker.forkserver import StartContext
from sdopt.worker.machine import Machine
from sdopt.worker.process import Worker
from sdopt.worker.protocol import SampledImage, WorkerError


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
    """A sample of the images of its timed calls at the main shape."""
    compiled_packages: int = 0
    """Packages that its worker compiled to disk; 0 once it is replaced by one that loads them."""
    given: set[tuple[int, int]] = field(default_factory=set)
    """The calls of its worker so far, each as the index of the shape and the number of the batch."""

    @property
    def first(self) -> bool:
        """Whether it is the first process of its variant, whose start the variant reports."""
        return not self.measurement.replicate

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


@dataclass
class StudyRun:
    """The state of a study while it runs. Starts and ends workers, and records failures; measures nothing itself."""

    plan: Plan
    result: StudyResult
    protocol: Protocol
    quality: Quality
    machine: Machine
    context: StartContext
    folder: Path
    scratch: Path
    """Folder for the compilers' caches, one for each process."""
    progress: Progress
    presence: Presence
    images: ImageCache
    processes: list[VariantProcess] = field(default_factory=list)
    """Processes of the current session."""
    rounds: int = 0
    """Rounds of the current session."""
    operations: dict[str, float | None] = field(default_factory=dict)
    """TFLOP of one image, by the work that variants share."""
    unwritten: bool = False
    """Whether `result.json` could not be written the last time."""

    @property
    def session(self) -> MeasurementSession:
        """The current session."""
        return self.result.sessions[-1]

    @property
    def interleaved(self) -> bool:
        """Whether all processes live side by side; in blocks there is one at a time."""
        return self.session.schedule == "interleaved"

    @property
    def drawing_batch(self) -> int | None:
        """How many prompts of the quality pass all variants draw in one call; None leaves that to each workload."""
        variants = runnable_of(self.plan, self.result)
        return drawing_batch(variants, self.quality.batch_size, self.result.config.gate.judges)

    @property
    def sharing(self) -> Sharing:
        """How its processes share the machine while none is timed."""
        cores = int(self.machine.cpu["cores"])
        return Sharing(cores, self.plan.baseline.hardware.threads or cores, self.machine.device.is_cuda)

    @property
    def warmup(self) -> int:
        """How many untimed calls at each shape follow the first one; the last is the discarded round."""
        return warmup_calls(runnable_of(self.plan, self.result), self.protocol)

    @property
    def extra_rounds(self) -> int:
        """How many rounds of the current session may be timed again because other work disturbed them."""
        if self.protocol.interference is None:
            return 0
        allowed = self.protocol.extra_rounds
        return math.ceil(self.rounds / 2) if allowed is None else allowed

    def number(self, process: VariantProcess, shape_index: int, call: int) -> int:
        """Returns the number of the batch for a call of a process; it is the same for all variants.

        While there are enough prompts, no two calls of a variant, in one process or in several, get the same prompts
        and noise: an option must not gain by remembering earlier calls.

        Args:
            process: the process that makes the call.
            shape_index: the index of the shape.
            call: the index of the worker's call at that shape; 0 is its first.
        """
        calls_per_process = 2 + self.warmup + self.rounds + self.extra_rounds
        number = process.measurement.replicate * calls_per_process + call
        return number % timed_draw(process.variant, shape_index).calls

    @property
    def shapes(self) -> range:
        """The indices of the shapes, in the order in which every process is called at them."""
        return range(len(self.result.shapes))

    @property
    def living(self) -> list[VariantProcess]:
        """The processes that have a worker now."""
        return [process for process in self.processes if process.running is not None]

    def set_schedule(self, schedule: Schedule) -> None:
        """Changes the schedule of the current session; the drift of earlier blocks is kept."""
        self.result.schedule = Schedule(schedule.kind, schedule.reason, self.result.schedule.drift)
        self.session.schedule = schedule.kind

    def slug(self, row: VariantResult) -> str:
        """Returns a stem for file names; the row's number keeps names apart that differ in forbidden characters."""
        letters = re.sub(r"[^A-Za-z0-9]+", "-", row.name).strip("-").lower()[:60]
        return f"{self.result.variants.index(row):02d}-{letters or 'variant'}"

    def checkpoint(self) -> None:
        """Writes `result.json`. If it cannot be written, measuring goes on, and the user is warned once."""
        self.note_other_studies()
        try:
            with self.progress.timeline.during("writing result.json"):
                write_result(self.result, self.folder)
        except OSError as error:
            if not self.unwritten:
                problem = f"{self.folder / 'result.json'}: {error.strerror}"
                self.progress.warn(f"{problem}; measuring continues, and writing is tried again after every round")
            self.unwritten = True
        else:
            self.unwritten = False

    def note_other_studies(self) -> None:
        """Records, and warns of, other studies that run on the same device now."""
        for other in self.presence.others():
            if other not in self.session.disturbed_by:
                self.session.disturbed_by.append(other)
                self.progress.warn(
                    f"another study is being measured on this device: {other}; timings of both are unreliable"
                )

    def warn_once(self, text: str) -> None:
        """Warns the user and records the warning in the result, once for each text."""
        warnings = self.result.environment.warnings
        if text not in warnings:
            warnings.append(text)
            self.progress.warn(text)

    def start(self, process: VariantProcess) -> None:
        """Starts a worker. Raises WorkerError."""
        self.progress.phase(process.row.name, "starting")
        process.given.clear()
        try:
            process.running = Worker(
                self.context,
                process.variant,
                self.machine.device,
                self.folder / "logs" / f"{process.slug}.log",
                self.scratch,
                self.protocol.timeout_s,
                self.progress.timeline.called,
                self.progress.warn,
            )
        except OSError as error:
            raise WorkerError(Status.FAILED, f"its process could not be started: {error}") from error
        process.worker.hello()

    def fail(self, process: VariantProcess, error: WorkerError) -> None:
        """Ends all processes of a variant, with the error as its status and reason."""
        row = process.row
        if row.status is Status.PENDING:
            row.status, row.reason = error.status, error.reason
        else:
            # It was fully measured before, and was only timed again beside the missing variants.
            row.reason = append_reason(row, f"when timed again: {error.reason}")
        for other in self.processes:
            if other.row is row:
                other.active = False
                other.kill()
                self._forget(other)

    def retire(self, process: VariantProcess) -> None:
        """Ends the worker of a process that will not start again, and deletes its compiler cache."""
        process.stop()
        self._forget(process)

    def stop_all(self) -> None:
        """Ends all workers; they may be started again."""
        for process in self.processes:
            process.stop()

    def kill_all(self) -> None:
        """Ends all workers at once."""
        for process in self.processes:
            process.kill()

    def _forget(self, process: VariantProcess) -> None:
        shutil.rmtree(self.scratch / process.slug, ignore_errors=True)
