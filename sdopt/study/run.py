"""Running a study: workers, the solo pass, the rounds, the evidence and images afterwards, and what is kept of it."""

import math
import random
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from sdopt.analysis.effects import effects_of
from sdopt.analysis.timing import compare
from sdopt.hardware.cards import CUDA_CONTEXT_GIB
from sdopt.locks import Presence
from sdopt.results.files import write_at_last, write_result
from sdopt.results.records import (
    ImageRecord,
    Measurement,
    Memory,
    Schedule,
    Sitting,
    Status,
    StudyResult,
    VariantResult,
)
from sdopt.schema import Protocol, Quality
from sdopt.study.designs import CONTROL, Plan
from sdopt.study.image_cache import ImageCache, content_key
from sdopt.study.missing import missing_of
from sdopt.study.progress import Progress
from sdopt.study.status import append_reason, now, progress_of, set_final_statuses
from sdopt.variant import Variant
from sdopt.worker.draws import Draw, draw_of, floor_draws
from sdopt.worker.forkserver import StartContext
from sdopt.worker.machine import Machine
from sdopt.worker.process import Worker
from sdopt.worker.protocol import WorkerError

_STARVED = (Status.OUT_OF_MEMORY, Status.KILLED)


def run_study(
    plan: Plan,
    result: StudyResult,
    protocol: Protocol,
    machine: Machine,
    context: StartContext,
    folder: Path,
    progress: Progress,
    quality: Quality,
) -> StudyResult:
    """Measures what is missing of a study, and keeps `result.json` in `folder` up to date while it does.

    A worker that fails ends its variant and no other. On KeyboardInterrupt what was measured is kept and compared, the
    workers are ended, and the interrupt is raised again. Where the file cannot be written measuring goes on, and it is
    tried again after every round.

    Raises:
        OSError: the file could not be written at the end; the message says where the result is instead.
    """
    cache = ImageCache(Path(quality.cache) if quality.cache and quality.metrics else None)
    run = _Run(plan, result, protocol, machine, context, folder, progress, quality, cache)
    result.status, result.finished = "running", None
    try:
        with Presence(machine.device, str(folder)) as run.presence:
            in_blocks = protocol.schedule == "blocks"
            run.sit(Schedule("blocks", "protocol.schedule=blocks") if in_blocks else Schedule())
        set_final_statuses(result)
        result.status = "finished"
    except KeyboardInterrupt:
        result.status = "interrupted"
        lacking = missing_of(result).variants
        for row in result.variants:
            if row.status is Status.PENDING and row.name in lacking:
                row.status, row.reason = Status.INTERRUPTED, append_reason(row, progress_of(row, protocol))
        set_final_statuses(result)
        raise
    finally:
        for lane in run.lanes:
            lane.kill()
        if result.status == "running":
            result.status = "crashed"
        progress.timeline.enter("comparing")
        result.finished = now()
        compare(result)
        result.effects = effects_of(result, plan.factors)
        write_at_last(result, folder)
    return result


@dataclass
class _Lane:
    """One process of one variant, and where its figures go."""

    row: VariantResult
    variant: Variant
    measurement: Measurement
    slug: str
    timed: bool
    """Whether it takes part in the rounds; else only evidence, stages or images are missing."""
    worker: Worker | None = None
    footprint_gib: float = 0.0
    graphs: int = 0
    """Graphs that its worker had compiled after the first call."""
    active: bool = True

    def stop(self) -> None:
        if self.worker is not None:
            self.worker.stop()
            self.worker = None

    def kill(self) -> None:
        if self.worker is not None:
            self.worker.kill()
            self.worker = None


@dataclass
class _Run:
    plan: Plan
    result: StudyResult
    protocol: Protocol
    machine: Machine
    context: StartContext
    folder: Path
    progress: Progress
    quality: Quality
    cache: ImageCache
    presence: Presence | None = None
    lanes: list[_Lane] = field(default_factory=list)
    rounds: int = 0
    operations: dict[str, float | None] = field(default_factory=dict)
    unwritten: OSError | None = None

    def sit(self, schedule: Schedule) -> None:
        """Measures what is missing, with new processes for all that takes part."""
        missing = missing_of(self.result)
        if not missing.variants:
            return
        variants = {variant.name: variant for variant in self.plan.variants} | {CONTROL: self.plan.baseline}
        rows = [row for row in self.result.variants if row.name in missing.variants]
        # The control is measured right after the baseline, so that the floor is known early.
        rows.sort(key=lambda row: (row.name != self.result.baseline, row.role != "control"))
        number = len(self.result.sittings)
        self.result.sittings.append(Sitting(now()))
        self._follow(schedule.kind, schedule.reason)
        self.rounds, self.lanes = missing.rounds, []
        for replicate in range(self.protocol.replicates or 1):
            for row in rows:
                timed = row.name in missing.timed
                if not timed and any(m.complete for m in row.measurements if m.replicate == replicate):
                    continue
                slug = f"{self.slug(row)}-{replicate}" + (f"-sitting-{number}" if number else "")
                lane = _Lane(row, variants[row.name], Measurement(replicate, number), slug, timed)
                row.measurements.append(lane.measurement)
                self.lanes.append(lane)
        for sub in ("logs", "images"):
            with suppress(OSError):  # who needs it will say so
                (self.folder / sub).mkdir(exist_ok=True)
        per_lane = 4 + self.protocol.warmup + self.rounds + self.protocol.stage_calls
        drawn = sum(draw_of(variants[row.name]).calls for row in rows)
        self.progress.start(len(self.lanes) * per_lane + drawn, self.rounds)
        self.keep()
        self.solo_pass()
        if self.result.schedule.kind == "blocks":
            self.blocks()
            return
        starved = self.interleaved_rounds()
        if starved is not None:
            # The rounds that were whole stay, paired within their own sitting; what they lack is measured in blocks.
            for lane in self.lanes:
                lane.stop()
            self.sit(Schedule("blocks", starved))

    def slug(self, row: VariantResult) -> str:
        """A name for files; with the row's number, because two names may differ only in what a file's cannot hold."""
        letters = re.sub(r"[^A-Za-z0-9]+", "-", row.name).strip("-").lower()[:60]
        return f"{self.result.variants.index(row):02d}-{letters or 'variant'}"

    def keep(self) -> None:
        self._look_around()
        try:
            with self.progress.timeline.during("writing result.json"):
                write_result(self.result, self.folder)
        except OSError as error:
            if self.unwritten is None:
                said = f"{self.folder / 'result.json'}: {error.strerror}"
                self.progress.warn(f"{said}; measuring goes on, and it is tried again after every round")
            self.unwritten = error
        else:
            self.unwritten = None

    def _look_around(self) -> None:
        """Notes which other studies are measured on the same device."""
        seen = self.result.sittings[-1].disturbed_by
        for other in self.presence.others() if self.presence else []:
            if other not in seen:
                seen.append(other)
                self.progress.warn(f"also measured on this device now: {other}; the timings of both are disturbed")

    def _follow(self, kind: str, reason: str) -> None:
        self.result.schedule = Schedule(kind, reason, self.result.schedule.drift)
        self.result.sittings[-1].schedule = kind

    # ----------------------------------------------------------------------------------------------------- solo pass

    def solo_pass(self) -> None:
        """Starts each worker in turn: load time, cold start, warm-up, memory; finds out whether all fit together."""
        budget = self.machine.device.memory_free_gib * self.protocol.memory_fraction
        for lane in self.lanes:
            alive = [other for other in self.lanes if other.worker is not None]
            taken = sum(other.footprint_gib for other in alive)
            largest = max((other.footprint_gib for other in alive), default=0.0)
            if alive and self.protocol.schedule == "auto" and taken + largest > budget:
                self._fall_back(f"{len(alive) + 1} processes of {largest:.2f} GiB exceed {budget:.2f} GiB")
            if not lane.active:
                continue
            starved = self._alone(lane, self._warm_up)
            if starved is not None:
                self._fall_back(starved)
                lane.measurement.warmup_s.clear()
                self._alone(lane, self._warm_up)

    def _fall_back(self, reason: str) -> None:
        self._follow("blocks", reason)
        for lane in self.lanes:
            lane.stop()

    def _starved(self, lane: _Lane, error: WorkerError) -> str | None:
        """Why a lane should be measured in blocks, where it ran out of memory beside others; else it has failed."""
        others = sum(other.worker is not None for other in self.lanes if other is not lane)
        if (
            error.status in _STARVED
            and others
            and self.protocol.schedule == "auto"
            and self.result.schedule.kind == "interleaved"
            # A card that is emulated is each worker's own: others take nothing of it.
            and not lane.variant.hardware.emulate_memory
        ):
            lane.kill()
            return f"'{lane.row.name}' ran out of memory beside {others} others"
        self._fail(lane, error)
        if error.status in _STARVED and others:
            lane.row.reason = append_reason(
                lane.row, f"{others} other processes were in memory: try protocol.schedule=blocks"
            )
        return None

    def _alone(self, lane: _Lane, work: Callable[[_Lane], None]) -> str | None:
        """Runs one lane's work; a failure ends the variant. In blocks the worker is stopped afterwards.

        Returns:
            why it should be measured in blocks, where it ran out of memory beside others.
        """
        try:
            work(lane)
        except WorkerError as error:
            return self._starved(lane, error)
        finally:
            if self.result.schedule.kind == "blocks":
                lane.stop()
            self.keep()
        return None

    def _fail(self, lane: _Lane, error: WorkerError) -> None:
        if lane.row.status is Status.PENDING:
            lane.row.status, lane.row.reason = error.status, error.reason
        else:
            # It was measured whole before, and was to be timed again beside what is missing.
            lane.row.reason = append_reason(lane.row, f"when timed again: {error.reason}")
        for other in self.lanes:
            if other.row is lane.row:
                other.active = False
                other.kill()

    def _start(self, lane: _Lane) -> Worker:
        self.progress.phase(lane.row.name, "starting")
        log = self.folder / "logs" / f"{lane.slug}.log"
        called = self.progress.timeline.called
        try:
            lane.worker = Worker(self.context, lane.variant, self.machine.device, log, self.protocol.timeout_s, called)
        except OSError as error:
            raise WorkerError(Status.FAILED, f"its process could not be started: {error}") from error
        lane.worker.ask("hello")
        self.progress.phase(lane.row.name, "loading")
        load_s = lane.worker.ask("prepare")
        if lane.measurement.load_s is None:
            lane.measurement.load_s = load_s
        self.progress.advance()
        return lane.worker

    def _warm_up(self, lane: _Lane) -> None:
        worker, measurement = self._start(lane), lane.measurement
        self.progress.phase(lane.row.name, "cold start")
        measurement.cold_start_s = worker.ask("time_once")[0]
        compile_s, lane.graphs = worker.ask("compile_report")
        measurement.compile_s = compile_s if lane.graphs else None
        self.progress.advance()
        for _ in range(self.protocol.warmup):
            self.progress.phase(lane.row.name, "warm-up")
            measurement.warmup_s.append(worker.ask("time_once")[0])
            self.progress.advance()
        self.progress.phase(lane.row.name, "memory")
        measurement.memory = worker.ask("measure_memory")
        lane.footprint_gib = _footprint(measurement.memory)
        self.progress.advance()

    # --------------------------------------------------------------------------------------------------------- rounds

    def interleaved_rounds(self) -> str | None:
        """Times all workers once a round, in an order shuffled anew, so that drift of the machine hits all alike.

        Returns:
            why the rest should be measured in blocks, where a worker ran out of memory beside the others.
        """
        shuffle = random.Random(f"{self.protocol.shuffle_seed} {len(self.result.sittings)}")
        for number in range(self.rounds):
            lanes = [lane for lane in self.lanes if lane.timed and lane.active]
            shuffle.shuffle(lanes)
            for lane in lanes:
                try:
                    if lane.active:
                        self._time(lane, number)
                except WorkerError as error:
                    starved = self._starved(lane, error)
                    if starved is not None:
                        return f"{starved}, in round {number + 1}"
            self.keep()
        starved = None
        for lane in self.lanes:
            if lane.active:
                starved = self._alone(lane, self._finish) or starved
            with self.progress.timeline.during("ending workers"):
                lane.stop()
        return starved

    def _time(self, lane: _Lane, number: int) -> None:
        assert lane.worker is not None
        self.progress.phase(lane.row.name, "timing", number + 1)
        seconds, state = lane.worker.ask("time_once")
        lane.measurement.latency_s.append(seconds)
        if state is not None:
            lane.measurement.gpu.append(state)
        self.progress.advance()

    def blocks(self) -> None:
        """Times one worker at a time, and the baseline before and after each: for variants that do not fit together.

        Each pass of the baseline closes one block and opens the next. Its drift over a block is recorded.
        """
        timed = [lane for lane in self.lanes if lane.timed]
        for lane in self.lanes:
            if not lane.timed:
                self._pass(lane)
        if not timed:
            return
        baseline = next(lane for lane in timed if lane.row.name == self.result.baseline)
        others = [lane for lane in timed if lane is not baseline]
        # Each lane is loaded and warmed up again, and the baseline is timed once more for each.
        self.progress.more(len(others) * (3 + self.rounds) + len(self.lanes))
        before = self._pass(baseline)
        for lane in others:
            # Noted first: samples of a block that breaks off must not pass for samples of interleaved rounds.
            lane.measurement.latency_before_s = before
            own = self._pass(lane)
            if not own:
                continue
            after = self._pass(baseline)
            if not after:
                break
            lane.measurement.latency_after_s = after
            drift = math.exp(float(np.mean(np.log(after)) - np.mean(np.log(before))))
            self.result.schedule.drift[lane.slug] = drift
            before = after
            self.keep()
        if not baseline.active:
            for lane in others:
                if lane.active and not lane.measurement.latency_after_s:
                    self._fail(lane, WorkerError(Status.FAILED, "the baseline failed, and there is nothing around it"))

    def _pass(self, lane: _Lane) -> list[float]:
        """A fresh worker, warmed up and timed for all rounds; an empty list where it failed."""
        if not lane.active:
            return []
        start = len(lane.measurement.latency_s)

        def work(lane: _Lane) -> None:
            worker = self._start(lane)
            for call in range(1 + self.protocol.warmup):
                self.progress.phase(lane.row.name, "warm-up")
                worker.ask("time_once")
                if call == 0:
                    lane.graphs = worker.ask("compile_report")[1]
            for number in range(self.rounds if lane.timed else 0):
                self._time(lane, number)
            self._finish(lane)

        self._alone(lane, work)
        return lane.measurement.latency_s[start:] if lane.active else []

    # ------------------------------------------------------------------------------------------- evidence and pictures

    def _finish(self, lane: _Lane) -> None:
        """What would disturb timing, and so comes after it: evidence, stages, operation counts and images."""
        if lane.measurement.complete:
            return
        assert lane.worker is not None
        worker, measurement, row = lane.worker, lane.measurement, lane.row
        if lane.graphs:
            # A graph compiled after the first call was compiled in the warm-up or, worse, within a sample.
            measurement.recompiles = worker.ask("compile_report")[1] - lane.graphs
        for _ in range(self.protocol.stage_calls):
            self.progress.phase(row.name, "stages")
            stages = self._afterwards(lane, "time_stages", {})
            row.denoiser_calls = len(stages.get("denoiser_step", [])) or row.denoiser_calls
            for stage, samples in stages.items():
                measurement.stages_s.setdefault(stage, []).extend(samples)
            self.progress.advance()
        self.progress.phase(row.name, "evidence")
        measurement.evidence = self._afterwards(lane, "prove", [])
        measurement.denoiser_busy_s = self._afterwards(lane, "denoiser_busy_s", None)
        self.progress.phase(row.name, "energy")
        joules = self._afterwards(lane, "measure_energy", None)
        measurement.energy_j += [] if joules is None else [joules]
        self.progress.advance()
        if measurement.replicate == 0 and not any(other.complete for other in row.measurements if not other.replicate):
            work = repr(lane.variant.work)
            if work not in self.operations:
                self.operations[work] = self._afterwards(lane, "count_operations", None)
            row.tflop_per_image = self.operations[work]
            self._draw_images(lane)
        measurement.complete = True

    def _draw_images(self, lane: _Lane) -> None:
        """The quality pass of one variant; of the control the floors instead, for its images are the baseline's."""
        row = lane.row
        if row.role == "control" and self.quality.metrics:
            threads = lane.variant.hardware.threads or int(self.machine.cpu["cores"])
            for kind, draw in floor_draws(lane.variant, self.quality.floor_prompts, threads).items():
                self.result.redrawn[kind] = self._drawn(lane, draw, Path("images") / f"floor-{kind}")[1]
        else:
            row.content_key, row.images = self._drawn(lane, draw_of(lane.variant), Path("images") / self.slug(row))

    def _drawn(self, lane: _Lane, draw: Draw, place: Path) -> tuple[str, list[ImageRecord]]:
        """The images of a draw below the run's folder, and their content key; from the cache where they are there."""
        key = content_key(lane.variant, draw, lane.row.inputs, self.result.environment)
        records = self.cache.fetch(key, self.folder / place)
        if records is not None:
            self.progress.advance(draw.calls)
        else:
            records = []
            for batch in range(draw.calls):
                self.progress.phase(lane.row.name, "images")
                arguments = {"batch": batch, "draw": draw, "folder": str(self.folder / place)}
                records += self._afterwards(lane, "generate", [], **arguments)
                self.progress.advance()
            if len(records) == len(draw.prompts) * lane.variant.workload.images_per_prompt:
                self.cache.keep(key, self.folder / place, records)
        return key, [replace(record, path=str(place / record.path)) for record in records]

    def _afterwards(self, lane: _Lane, request: str, nothing: Any, **arguments: Any) -> Any:
        """Asks for what is not a timing; if the worker cannot, that is noted, and the timings stay.

        Raises:
            WorkerError: the worker is gone.
        """
        assert lane.worker is not None
        try:
            return lane.worker.ask(request, **arguments)
        except WorkerError as error:
            if error.status is not Status.FAILED:
                raise
            lane.row.reason = append_reason(lane.row, f"{request}: {error.reason}")
            return nothing


def _footprint(memory: Memory) -> float:
    """What an idle worker keeps, and a running one needs, on the device that may run out."""
    if memory.cuda_peak_reserved_gib is not None:
        return memory.nvml_process_gib or memory.cuda_peak_reserved_gib + CUDA_CONTEXT_GIB
    return memory.process_loaded_gib if memory.process_peak_gib is None else memory.process_peak_gib
