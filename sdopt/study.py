"""Running a study: workers, the solo pass, the rounds, the evidence and images afterwards, and what is kept of it."""

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from sdopt.designs import CONTROL, Plan
from sdopt.effects import effects_of
from sdopt.environment import describe_environment
from sdopt.errors import ConflictError
from sdopt.forkserver import StartContext
from sdopt.hardware import CUDA_CONTEXT_GIB
from sdopt.optimizations.base import Contract
from sdopt.report.progress import Progress
from sdopt.results import Comparison, Measurement, Memory, Schedule, Status, StudyResult, VariantResult, write_result
from sdopt.schema import Protocol
from sdopt.statistics import compare
from sdopt.variant import Variant
from sdopt.worker import Machine, Worker, WorkerError

_STARVED = (Status.OUT_OF_MEMORY, Status.KILLED)


def plan_result(
    plan: Plan, name: str, design: str, config: dict[str, Any], machine: Machine, command: list[str]
) -> StudyResult:
    """The result of a study before anything is measured: what will be run, compared and skipped, and why.

    Raises:
        ConflictError: the baseline cannot run here, so that there is nothing to compare with.
    """
    variants = []
    for variant in plan.variants:
        conflicts = variant.conflicts(machine.device)
        variants.append(_row(variant, variant.name, "variant", conflicts))
        if variant.other_work(plan.baseline):
            # Another scheduler or number of steps: no option promised that, and the images are others.
            variants[-1].contract = str(Contract.LOSSY)
        if conflicts and variant is plan.baseline:
            raise ConflictError([f"the baseline '{variant.name}' cannot run: {reason}" for reason in conflicts])
    variants.append(_row(plan.baseline, CONTROL, "control", []))
    return StudyResult(
        name=name,
        design=design,
        started=_now(),
        environment=describe_environment(machine, command),
        config=config,
        variants=variants,
        comparisons=[Comparison(edge.candidate, edge.reference, edge.credit) for edge in plan.edges]
        + [Comparison(CONTROL, plan.baseline.name, "nothing")],
        baseline=plan.baseline.name,
    )


def _row(variant: Variant, name: str, role: str, conflicts: list[str]) -> VariantResult:
    return VariantResult(
        name=name,
        role=role,
        choices=dict(variant.choices),
        overrides=list(variant.overrides),
        config=dict(variant.config),
        contract=str(variant.contract),
        status=Status.SKIPPED if conflicts else Status.PENDING,
        reason="; ".join(conflicts),
    )


def run_study(
    plan: Plan,
    result: StudyResult,
    protocol: Protocol,
    machine: Machine,
    context: StartContext,
    folder: Path,
    progress: Progress,
) -> StudyResult:
    """Measures every variant of a planned study, and keeps `result.json` in `folder` up to date while it does.

    A worker that fails ends its variant and no other. On KeyboardInterrupt what was measured is kept, the workers are
    ended, and the interrupt is raised again.

    Raises:
        OSError: the folder cannot be written.
    """
    run = _Run(plan, result, protocol, machine, context, folder, progress)
    try:
        run.solo_pass()
        if run.result.schedule.kind == "interleaved":
            run.interleaved_rounds()
        else:
            run.blocks()
        for row in result.variants:
            if row.status is Status.PENDING:
                row.status, row.reason = _engagement(row)
        result.status = "finished"
    except KeyboardInterrupt:
        result.status = "interrupted"
        for row in result.variants:
            if row.status is Status.PENDING:
                row.status, row.reason = Status.INTERRUPTED, "interrupted by the user"
        raise
    finally:
        for lane in run.lanes:
            lane.kill()
        if result.status == "running":
            result.status = "crashed"
        progress.timeline.enter("comparing")
        result.finished = _now()
        compare(result)
        result.effects = effects_of(result, plan.factors)
        write_result(result, folder)
    return result


def _engagement(row: VariantResult) -> tuple[Status, str]:
    """Without evidence of every option in every process, a variant is not engaged."""
    idle = {
        f"{evidence.axis}={evidence.option}: {evidence.summary}"
        for measurement in row.measurements
        for evidence in measurement.evidence
        if not evidence.engaged
    }
    silent = not all(measurement.evidence for measurement in row.measurements)
    reasons = [*([row.reason] if row.reason else []), *sorted(idle)]
    return (Status.NOT_ENGAGED if idle or silent else Status.OK), "; ".join(reasons)


@dataclass
class _Lane:
    """One process of one variant, and where its figures go."""

    row: VariantResult
    variant: Variant
    measurement: Measurement
    slug: str
    worker: Worker | None = None
    footprint_gib: float = 0.0
    graphs: int = 0
    """Graphs that its worker had compiled after the first call."""
    finished: bool = False

    @property
    def active(self) -> bool:
        return self.row.status is Status.PENDING

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
    lanes: list[_Lane] = field(default_factory=list)
    operations: dict[str, float | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        variants = {variant.name: variant for variant in self.plan.variants} | {CONTROL: self.plan.baseline}
        rows = [row for row in self.result.variants if row.status is Status.PENDING]
        # The control is measured right after the baseline, so that the floor is known early.
        rows.sort(key=lambda row: (row.name != self.result.baseline, row.role != "control"))
        for replicate in range(self.protocol.replicates):
            for row in rows:
                measurement = Measurement(replicate)
                row.measurements.append(measurement)
                self.lanes.append(_Lane(row, variants[row.name], measurement, f"{self.slug(row)}-{replicate}"))
        for sub in ("logs", "images"):
            (self.folder / sub).mkdir(parents=True, exist_ok=True)
        per_lane = 4 + self.protocol.warmup + self.protocol.rounds + self.protocol.stage_calls
        drawn = sum(-(-len(v.prompts) // v.workload.batch_size) for v in variants.values())
        self.progress.start(len(self.lanes) * per_lane + drawn, self.protocol.rounds)
        self.keep()

    def slug(self, row: VariantResult) -> str:
        """A name for files; with the row's number, because two names may differ only in what a file's cannot hold."""
        letters = re.sub(r"[^A-Za-z0-9]+", "-", row.name).strip("-").lower()[:60]
        return f"{self.result.variants.index(row):02d}-{letters or 'variant'}"

    def keep(self) -> None:
        with self.progress.timeline.during("writing result.json"):
            write_result(self.result, self.folder)

    # ----------------------------------------------------------------------------------------------------- solo pass

    def solo_pass(self) -> None:
        """Starts each worker in turn: load time, cold start, warm-up, memory; finds out whether all fit together."""
        budget = self.machine.device.memory_free_gib * self.protocol.memory_fraction
        if self.protocol.schedule == "blocks":
            self.result.schedule = Schedule("blocks", "protocol.schedule=blocks")
        for lane in self.lanes:
            alive = [other for other in self.lanes if other.worker is not None]
            taken = sum(other.footprint_gib for other in alive)
            largest = max((other.footprint_gib for other in alive), default=0.0)
            if alive and self.protocol.schedule == "auto" and taken + largest > budget:
                self._fall_back(f"{len(alive) + 1} processes of {largest:.2f} GiB exceed {budget:.2f} GiB")
            if not lane.active:
                continue
            if self._alone(lane, self._warm_up):
                continue
            if (
                lane.row.status in _STARVED
                and alive
                and self.protocol.schedule == "auto"
                and self.result.schedule.kind == "interleaved"
                # A card that is emulated is each worker's own: others take nothing of it.
                and not lane.variant.hardware.emulate_memory
            ):
                self._fall_back(f"'{lane.row.name}' ran out of memory beside {len(alive)} others")
                lane.row.status, lane.row.reason = Status.PENDING, ""
                lane.measurement.warmup_s.clear()
                self._alone(lane, self._warm_up)

    def _fall_back(self, reason: str) -> None:
        self.result.schedule = Schedule("blocks", reason)
        for lane in self.lanes:
            lane.stop()

    def _alone(self, lane: _Lane, work: Callable[[_Lane], None]) -> bool:
        """Runs one lane's work; a failure ends the variant. In blocks the worker is stopped afterwards."""
        try:
            work(lane)
        except WorkerError as error:
            self._fail(lane, error)
            return False
        finally:
            if self.result.schedule.kind == "blocks":
                lane.stop()
            self.keep()
        return True

    def _fail(self, lane: _Lane, error: WorkerError) -> None:
        lane.row.status, lane.row.reason = error.status, error.reason
        for other in self.lanes:
            if other.row is lane.row:
                other.kill()

    def _start(self, lane: _Lane) -> Worker:
        self.progress.phase(lane.row.name, "starting")
        log = self.folder / "logs" / f"{lane.slug}.log"
        called = self.progress.timeline.called
        lane.worker = Worker(self.context, lane.variant, self.machine.device, log, self.protocol.timeout_s, called)
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

    def interleaved_rounds(self) -> None:
        """Times all workers once a round, in an order shuffled anew, so that drift of the machine hits all alike."""
        shuffle = random.Random(self.protocol.shuffle_seed)
        for number in range(self.protocol.rounds):
            lanes = [lane for lane in self.lanes if lane.active]
            shuffle.shuffle(lanes)
            for lane in lanes:
                if lane.active:
                    self._alone_in_round(lane, number)
            self.keep()
        for lane in self.lanes:
            if lane.active:
                self._alone(lane, self._finish)
            with self.progress.timeline.during("ending workers"):
                lane.stop()

    def _alone_in_round(self, lane: _Lane, number: int) -> None:
        try:
            self._time(lane, number)
        except WorkerError as error:
            self._fail(lane, error)
            if error.status in _STARVED:
                others = sum(other.worker is not None for other in self.lanes)
                lane.row.reason += f"; {others} other processes were in memory: try protocol.schedule=blocks"

    def _time(self, lane: _Lane, number: int) -> None:
        assert lane.worker is not None
        self.progress.phase(lane.row.name, "timing", number + 1)
        seconds, joules = lane.worker.ask("time_once")
        lane.measurement.latency_s.append(seconds)
        if joules is not None:
            lane.measurement.energy_j.append(joules)
        self.progress.advance()

    def blocks(self) -> None:
        """Times one worker at a time, and the baseline before and after each: for variants that do not fit together.

        Each pass of the baseline closes one block and opens the next. Its drift over a block is recorded.
        """
        baseline = next(lane for lane in self.lanes if lane.row.name == self.result.baseline)
        others = [lane for lane in self.lanes if lane is not baseline]
        # Each lane is loaded and warmed up again, and the baseline is timed once more for each.
        self.progress.more(len(others) * (3 + self.protocol.rounds) + len(self.lanes))
        before = self._sitting(baseline)
        for lane in others:
            own = self._sitting(lane) if lane.active else []
            if not own:
                continue
            after = self._sitting(baseline)
            if not after:
                break
            lane.measurement.latency_before_s, lane.measurement.latency_after_s = before, after
            drift = math.exp(float(np.mean(np.log(after)) - np.mean(np.log(before))))
            self.result.schedule.drift[lane.slug] = drift
            before = after
            self.keep()
        if not baseline.active:
            for lane in others:
                if lane.active and not lane.measurement.latency_after_s:
                    self._fail(lane, WorkerError(Status.FAILED, "the baseline failed, and there is nothing around it"))

    def _sitting(self, lane: _Lane) -> list[float]:
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
            for number in range(self.protocol.rounds):
                self._time(lane, number)
            self._finish(lane)

        if not self._alone(lane, work):
            return []
        return lane.measurement.latency_s[start:]

    # ------------------------------------------------------------------------------------------- evidence and pictures

    def _finish(self, lane: _Lane) -> None:
        """What would disturb timing, and so comes after it: evidence, stages, operation counts and images."""
        if lane.finished:
            return
        assert lane.worker is not None
        worker, measurement, row = lane.worker, lane.measurement, lane.row
        if lane.graphs:
            # A graph compiled after the first call was compiled in the warm-up or, worse, within a sample.
            measurement.recompiles = worker.ask("compile_report")[1] - lane.graphs
        for _ in range(self.protocol.stage_calls):
            self.progress.phase(row.name, "stages")
            for stage, samples in self._afterwards(lane, "time_stages", {}).items():
                measurement.stages_s.setdefault(stage, []).extend(samples)
            self.progress.advance()
        self.progress.phase(row.name, "evidence")
        measurement.evidence = self._afterwards(lane, "prove", [])
        self.progress.advance()
        if measurement.replicate == 0:
            work = repr(lane.variant.work)
            if work not in self.operations:
                self.operations[work] = self._afterwards(lane, "count_operations", None)
            row.tflop_per_image = self.operations[work]
            images = Path("images") / self.slug(row)
            (self.folder / images).mkdir(exist_ok=True)
            for batch in range(worker.ask("call_count")):
                self.progress.phase(row.name, "images")
                for record in self._afterwards(lane, "generate", [], batch=batch, folder=str(self.folder / images)):
                    record.path = str(images / record.path)
                    row.images.append(record)
                self.progress.advance()
        lane.finished = True

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
            said = f"{request}: {error.reason}"
            if said not in lane.row.reason:
                lane.row.reason = "; ".join(filter(None, [lane.row.reason, said]))
            return nothing


def _footprint(memory: Memory) -> float:
    """What an idle worker keeps, and a running one needs, on the device that may run out."""
    if memory.cuda_peak_reserved_gib is not None:
        return memory.nvml_process_gib or memory.cuda_peak_reserved_gib + CUDA_CONTEXT_GIB
    return memory.process_peak_gib


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
