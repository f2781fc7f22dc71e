"""Times the processes of a session: interleaved rounds, or one block after the other."""

import math
import random
from collections.abc import Iterator

import numpy as np

from sdopt.analysis.interference import enough_clean, places_left_out, worst_by_round
from sdopt.measure.interference import InterferenceMeter
from sdopt.results.records import Schedule, Status
from sdopt.study.inspection import inspect_group
from sdopt.study.preparation import Starved, ask_group, attempt, batched, side_by_side, starvation, warm_up_again
from sdopt.study.state import StudyRun, VariantProcess
from sdopt.worker.protocol import WorkerError
from sdopt.worker.session import PipelineHost

# --------------------------------------------------------------------------------------------------- interleaved rounds


def interleaved_rounds(run: StudyRun) -> Schedule | None:
    """Times all processes once a round, in an order shuffled anew, so that drift of the machine hits all alike.

    A round that others disturbed is timed again, as often as is allowed; whole rounds are left out, so that pairs stay
    pairs.

    Returns:
        how the rest is to be measured, in another session, if a worker ran out of memory beside the others.
    """
    shuffle = random.Random(f"{run.protocol.shuffle_seed} {len(run.result.sessions)}")
    if run.rounds:
        next_schedule = _discarded_round(run, shuffle)
        if next_schedule is not None:
            return next_schedule
    for number in _numbers(run):
        next_schedule = _round(run, shuffle, number)
        if next_schedule is not None:
            return next_schedule
        _leave_out(run)
        run.checkpoint()
    starved: Starved = []
    waiting = [process for process in run.processes if process.active]
    for group in batched(waiting, side_by_side(run)):
        starved += inspect_group(run, group)
        run.checkpoint()
        with run.progress.timeline.during("ending workers"):
            for process in group:
                run.retire(process)
    return Schedule("blocks", starved[-1][1]) if starved else None


def _numbers(run: StudyRun) -> Iterator[int]:
    """Yields the number of each round: those that were asked for, and further ones while too few were clean."""
    yield from range(1, run.rounds + 1)
    for number in range(run.rounds + 1, run.rounds + run.extra_rounds + 1 if run.rounds else 0):
        timed = [process.measurement for process in run.processes if process.timed and process.active]
        if enough_clean(worst_by_round(timed), run.rounds, run.protocol.interference):
            return
        run.progress.more(len(timed))
        yield number


def _round(run: StudyRun, shuffle: random.Random, number: int) -> Schedule | None:
    """Times each process once; returns how the rest is to be measured, if a worker ran out of memory meanwhile."""
    processes = [process for process in run.processes if process.timed and process.active]
    shuffle.shuffle(processes)
    for process in processes:
        try:
            if process.active:
                _time(run, process, number)
        except WorkerError as error:
            reason = starvation(run, process, error)
            if reason is not None:
                return _after_starvation(run, process, f"{reason}, in round {number}")
    return None


def _leave_out(run: StudyRun) -> None:
    """Notes, for all processes alike, which of the rounds so far decide nothing."""
    timed = [process.measurement for process in run.processes if process.timed and process.active]
    places = places_left_out(worst_by_round(timed), run.rounds, run.protocol.interference)
    for measurement in timed:
        measurement.left_out = list(places)


def _after_starvation(run: StudyRun, process: VariantProcess, reason: str) -> Schedule:
    """Tries a process alone, and returns how the rest is to be measured: in blocks if it fits, else as before."""
    run.stop_all()
    attempt(run, process, warm_up_again)
    run.stop_all()
    hopeless = not process.active and not process.row.status.measured
    return Schedule() if hopeless else Schedule("blocks", reason)


def _time(run: StudyRun, process: VariantProcess, number: int) -> None:
    """Times one call; beyond the rounds of the session it is one that is timed again."""
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


def _discarded_round(run: StudyRun, shuffle: random.Random) -> Schedule | None:
    """Calls all processes that will be timed, and discards the times: those that were started early have been idle.

    Returns:
        how the rest is to be measured, if a worker ran out of memory beside the others.
    """
    waiting = [process for process in run.processes if process.timed and process.active]
    shuffle.shuffle(waiting)
    for group in batched(waiting, side_by_side(run)):
        calls, starved = ask_group(run, group, "discarded round", PipelineHost.time_once)
        for process, call in calls:
            process.measurement.discarded_s.append(call.seconds)
            run.progress.advance()
        for process, reason in starved:
            return _after_starvation(run, process, f"{reason}, in the discarded round")
    run.checkpoint()
    return None


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
    attempt(run, process, _measure_block)
    return process.measurement.deciding_s[start:] if process.active else []


def _measure_block(run: StudyRun, process: VariantProcess) -> None:
    warm_up_again(run, process)
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
    inspect_group(run, [process])
