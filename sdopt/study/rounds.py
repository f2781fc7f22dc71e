"""Times the processes of a session: the solo pass, then interleaved rounds, or one block after the other."""

import math
import random
from collections.abc import Callable, Sequence

import numpy as np

from sdopt.analysis.interference import enough_clean, places_left_out, worst_by_round
from sdopt.hardware.cards import CUDA_CONTEXT_GIB
from sdopt.hardware.device import Device
from sdopt.hardware.probe import host_memory_gib
from sdopt.measure.interference import InterferenceMeter
from sdopt.results.records import Memory, Schedule, Status
from sdopt.study.inspection import inspect_process
from sdopt.study.state import StudyRun, VariantProcess
from sdopt.study.status import append_reason
from sdopt.worker.process import Worker
from sdopt.worker.protocol import WorkerError

# ------------------------------------------------------------------------------------------------------------ solo pass


def solo_pass(run: StudyRun) -> None:
    """Measures load time, cold start, warm-up and memory of each process in turn; falls back to blocks if need be.

    Blocks are chosen if the processes do not fit in memory together. A variant that runs out of memory beside others is
    tried alone first: if it runs out alone too, it has failed, and the others stay interleaved.
    """
    budget_gib = memory_budget_gib(run.machine.device, run.protocol.memory_fraction)
    starved: list[tuple[VariantProcess, str]] = []
    for process in run.processes:
        if run.interleaved and run.protocol.schedule == "auto":
            too_much = excess([other.footprint_gib for other in run.living], budget_gib)
            if too_much is not None:
                _use_blocks(run, too_much)
        if process.active:
            reason = _attempt(run, process, _measure_first_calls)
            if reason is not None:
                starved.append((process, reason))
    if starved:
        _try_alone(run, starved)


def _try_alone(run: StudyRun, starved: Sequence[tuple[VariantProcess, str]]) -> None:
    """Runs the solo pass of starved processes again, each alone; then starts the others again, or turns to blocks."""
    run.stop_all()
    for process, _ in starved:
        if process.active:
            _attempt(run, process, _measure_first_calls)
            process.stop()
    if not run.interleaved:
        return
    fitting = [reason for process, reason in starved if process.active]
    if fitting:
        _use_blocks(run, fitting[0])
        return
    survivors = [process for process in run.processes if process.active]
    run.progress.more(len(survivors) * (2 + run.protocol.warmup))
    for process in survivors:
        reason = _attempt(run, process, _warm_up_again)
        if reason is not None:
            _use_blocks(run, reason)
            return


def _measure_first_calls(run: StudyRun, process: VariantProcess) -> None:
    worker, process.measurement.load_s = run.start(process)
    name, measurement = process.row.name, process.measurement
    measurement.cold_start_s = _first_call(run, process, "cold start")
    compiled = worker.compile_report()
    measurement.compile_s = compiled.seconds if compiled.graphs else None
    measurement.warmup_s = _warm_up(run, name, worker)
    run.progress.phase(name, "memory")
    measurement.memory = worker.measure_memory()
    process.footprint_gib = footprint_gib(measurement.memory)
    run.progress.advance()


def _warm_up_again(run: StudyRun, process: VariantProcess) -> None:
    """Brings a fresh worker of a process that was measured alone before to its steady state."""
    worker, _ = run.start(process)
    _first_call(run, process, "warm-up")
    _warm_up(run, process.row.name, worker)


def _first_call(run: StudyRun, process: VariantProcess, phase: str) -> float:
    run.progress.phase(process.row.name, phase)
    seconds = process.worker.time_once().seconds
    process.graphs = process.worker.compile_report().graphs
    run.progress.advance()
    return seconds


def _warm_up(run: StudyRun, name: str, worker: Worker) -> list[float]:
    found = []
    for _ in range(run.protocol.warmup):
        run.progress.phase(name, "warm-up")
        found.append(worker.time_once().seconds)
        run.progress.advance()
    return found


# --------------------------------------------------------------------------------------------------- what fits together


def memory_budget_gib(device: Device, fraction: float) -> dict[str, float]:
    """Returns the GiB that all processes may fill together, of each memory that may run out."""
    free = {"host": device.memory_free_gib}
    if device.is_cuda:
        free = {"host": host_memory_gib()[1], "device": device.memory_free_gib}
    return {kind: gib * fraction for kind, gib in free.items()}


def footprint_gib(memory: Memory) -> dict[str, float]:
    """Returns what an idle worker keeps, and a running one needs, of each memory that may run out."""
    # A sandbox may not tell the peak.
    host = memory.process_loaded_gib if memory.process_peak_gib is None else memory.process_peak_gib
    if memory.cuda_peak_reserved_gib is None:
        return {"host": host}
    on_card = memory.nvml_process_gib or memory.cuda_peak_reserved_gib + CUDA_CONTEXT_GIB
    return {"host": host, "device": on_card}


def excess(footprints_gib: Sequence[dict[str, float]], budget_gib: dict[str, float]) -> str | None:
    """Returns why no process as large as the largest would fit beside those that live, or None if one would."""
    for kind, budget in budget_gib.items():
        needs = [footprint.get(kind, 0.0) for footprint in footprints_gib]
        if needs and sum(needs) + max(needs) > budget:
            return f"{len(needs) + 1} processes of {max(needs):.2f} GiB exceed {budget:.2f} GiB of {kind} memory"
    return None


def _use_blocks(run: StudyRun, reason: str) -> None:
    run.set_schedule(Schedule("blocks", reason))
    run.stop_all()


def _attempt(run: StudyRun, process: VariantProcess, work: Callable[[StudyRun, VariantProcess], None]) -> str | None:
    """Runs the work of one process, and ends its worker afterwards if the schedule is blocks.

    Returns:
        what is known of it, if the worker ran out of memory beside others: then it is ended, and to be tried alone.
        Any other error fails the variant.
    """
    try:
        work(run, process)
    except WorkerError as error:
        return _starvation(run, process, error)
    finally:
        if not run.interleaved:
            process.stop()
        run.checkpoint()
    return None


def _starvation(run: StudyRun, process: VariantProcess, error: WorkerError) -> str | None:
    """Ends a worker that ran out of memory beside others, and returns that as a reason; fails it for another error."""
    others = len([other for other in run.living if other is not process])
    if (
        error.starved
        and others
        and run.protocol.schedule == "auto"
        and run.interleaved
        # A card that is emulated is each worker's own: others take nothing of it.
        and not process.variant.hardware.emulate_memory
    ):
        process.kill()
        return f"'{process.row.name}' failed beside {others} others, perhaps for lack of memory ({error.reason})"
    run.fail(process, error)
    if error.starved and others:
        advice = f"{others} other processes were in memory: try protocol.schedule=blocks"
        process.row.reason = append_reason(process.row, advice)
    return None


# --------------------------------------------------------------------------------------------------- interleaved rounds


def interleaved_rounds(run: StudyRun) -> Schedule | None:
    """Times all processes once a round, in an order shuffled anew, so that drift of the machine hits all alike.

    A first round is discarded, and recorded as such: processes that were started early have been idle since. A round
    that others disturbed is timed again, as often as is allowed; whole rounds are left out, so that pairs stay pairs.

    Returns:
        how the rest is to be measured, in another session, if a worker ran out of memory beside the others.
    """
    shuffle = random.Random(f"{run.protocol.shuffle_seed} {len(run.result.sessions)}")
    for number in range(run.rounds + run.extra_rounds + 1 if run.rounds else 0):
        processes = [process for process in run.processes if process.timed and process.active]
        if number > run.rounds:
            worst = worst_by_round(process.measurement for process in processes)
            if enough_clean(worst, run.rounds, run.protocol.interference):
                break
            run.progress.more(len(processes))
        shuffle.shuffle(processes)
        for process in processes:
            try:
                if process.active:
                    _time(run, process, number)
            except WorkerError as error:
                reason = _starvation(run, process, error)
                if reason is not None:
                    where = f"in round {number}" if number else "in the discarded round"
                    return _after_starvation(run, process, f"{reason}, {where}")
        _leave_out(run)
        run.checkpoint()
    reason = None
    for process in run.processes:
        if process.active:
            reason = _attempt(run, process, inspect_process) or reason
        with run.progress.timeline.during("ending workers"):
            run.retire(process)
    return Schedule("blocks", reason) if reason else None


def _leave_out(run: StudyRun) -> None:
    """Notes, for all processes alike, which of the rounds so far decide nothing."""
    timed = [process.measurement for process in run.processes if process.timed and process.active]
    places = places_left_out(worst_by_round(timed), run.rounds, run.protocol.interference)
    for measurement in timed:
        measurement.left_out = list(places)


def _after_starvation(run: StudyRun, process: VariantProcess, reason: str) -> Schedule:
    """Tries a process alone, and returns how the rest is to be measured: in blocks if it fits, else as before."""
    run.stop_all()
    _attempt(run, process, _warm_up_again)
    run.stop_all()
    hopeless = not process.active and not process.row.status.measured
    return Schedule() if hopeless else Schedule("blocks", reason)


def _time(run: StudyRun, process: VariantProcess, number: int) -> None:
    """Times one call; that of round 0 is recorded as discarded."""
    if number == 0:
        run.progress.phase(process.row.name, "discarded round")
        process.measurement.discarded_s.append(process.worker.time_once().seconds)
    else:
        again = number > run.rounds
        run.progress.phase(process.row.name, "timing again" if again else "timing", None if again else number)
        meter = InterferenceMeter(process.worker.pid)
        call = process.worker.time_once()
        found = meter.stop(call.seconds)
        process.measurement.latency_s.append(call.seconds)
        if call.gpu is not None:
            process.measurement.gpu.append(call.gpu)
        if meter.off:
            run.warn_once(meter.off)
        else:
            process.measurement.interference.append(found)
    run.progress.advance()


# --------------------------------------------------------------------------------------------------------------- blocks


def blocks(run: StudyRun) -> None:
    """Times one process at a time, and the baseline before and after each: for variants that do not fit together.

    Each pass of the baseline closes one block and opens the next. Its drift over a block is recorded.
    """
    for process in run.processes:
        if not process.timed:
            _block(run, process)
    timed = [process for process in run.processes if process.timed]
    if not timed:
        return
    baseline = next(process for process in timed if process.row.name == run.result.baseline)
    others = [process for process in timed if process is not baseline]
    # Each process is loaded and warmed up again, and the baseline is timed once more for each.
    run.progress.more(len(others) * (3 + run.rounds) + len(run.processes))
    before = _block(run, baseline)
    for process in others:
        # Noted first: samples of a block that breaks off must not pass for samples of interleaved rounds.
        process.measurement.latency_before_s = before
        own = _block(run, process)
        run.retire(process)
        if not own:
            continue
        after = _block(run, baseline)
        if not after:
            break
        process.measurement.latency_after_s = after
        drift = math.exp(float(np.mean(np.log(after)) - np.mean(np.log(before))))
        run.result.schedule.drift[process.slug] = drift
        before = after
        run.checkpoint()
    if not baseline.active:
        for process in others:
            if process.active and not process.measurement.latency_after_s:
                problem = "the baseline failed, and there is nothing around it"
                run.fail(process, WorkerError(Status.FAILED, problem))


def _block(run: StudyRun, process: VariantProcess) -> list[float]:
    """Times a fresh worker for all rounds, and inspects it; returns the times, or nothing if it failed."""
    if not process.active:
        return []
    start = len(process.measurement.deciding_s)
    _attempt(run, process, _measure_block)
    return process.measurement.deciding_s[start:] if process.active else []


def _measure_block(run: StudyRun, process: VariantProcess) -> None:
    _warm_up_again(run, process)
    measurement, limit = process.measurement, run.protocol.interference
    start = len(measurement.latency_s)
    for number in range(1, run.rounds + run.extra_rounds + 1 if process.timed else 1):
        if number > run.rounds:
            if enough_clean(worst_by_round([measurement])[start:], run.rounds, limit):
                break
            run.progress.more(1)
        _time(run, process, number)
    places = places_left_out(worst_by_round([measurement])[start:], run.rounds, limit)
    measurement.left_out += [start + place for place in places]
    inspect_process(run, process)
