"""Times the processes of a session: interleaved rounds, or one block after the other."""

import math
import random
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from sdopt.analysis.disturbance import enough_clean, rounds_left_out, worst_by_round
from sdopt.measure.interference import InterferenceMeter
from sdopt.results.records import Schedule, Status
from sdopt.results.samples import Call, ShapeSamples
from sdopt.study.inspection import inspect_group
from sdopt.study.preparation import (
    OutOfMemory,
    attempt,
    batched,
    call_group,
    living,
    memory_reason,
    next_batch,
    note_call,
    warm_up_again,
)
from sdopt.study.state import StudyRun, VariantProcess
from sdopt.worker.protocol import TimedCall, WorkerError

_SAMPLED = 6
"""Number of images of a process's timed calls that are kept, to be compared with drawn ones."""

# --------------------------------------------------------------------------------------------------- interleaved rounds


def interleaved_rounds(run: StudyRun) -> Schedule | None:
    """Times all processes once per round at every shape, in a newly shuffled order, so that drift affects all alike.

    Repeats rounds that other processes disturbed, up to a limit; leaves out whole rounds only, so that pairs stay
    complete.

    Returns:
        the schedule for the rest, in another session, if a worker ran out of memory beside the others.
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
    for process in run.processes:
        _end_rounds(run, process)
    out_of_memory: OutOfMemory = []
    # Processes that draw images come first, so that they draw side by side; the baseline is the first of them.
    waiting = sorted(
        (process for process in run.processes if process.active),
        key=lambda process: (not process.first, process.row.is_control),
    )
    for group in batched(waiting, run.sharing.processes):
        out_of_memory += inspect_group(run, group)
        run.checkpoint()
        with run.progress.timeline.during("ending workers"):
            for process in group:
                run.retire(process)
    return Schedule("blocks", out_of_memory[-1][1]) if out_of_memory else None


def _numbers(run: StudyRun) -> Iterator[int]:
    """Yields the number of each round: the configured rounds, then further ones while too few are clean."""
    yield from range(1, run.rounds + 1)
    for number in range(run.rounds + 1, run.rounds + run.extra_rounds + 1 if run.rounds else 0):
        timed = _timed_samples(run)
        if enough_clean(worst_by_round(timed), run.rounds, run.protocol.interference):
            return
        run.progress.more(len(timed))
        yield number


def _timed_samples(run: StudyRun) -> list[ShapeSamples]:
    """Returns the samples of all processes in the rounds, at all shapes."""
    timed = [process.measurement for process in run.processes if process.timed and process.active]
    return [samples for measurement in timed for samples in measurement.shapes]


def _round(run: StudyRun, shuffle: random.Random, number: int) -> Schedule | None:
    """Times each process once at each shape, in a newly shuffled order (`protocol.shuffle_seed`).

    Returns:
        the schedule for the rest, if a worker ran out of memory meanwhile.
    """
    timed = [process for process in run.processes if process.timed and process.active]
    calls = [(process, shape_index) for process in timed for shape_index in run.shapes]
    shuffle.shuffle(calls)
    for process, shape_index in calls:
        try:
            if process.active:
                _time(run, process, shape_index, number)
        except WorkerError as error:
            reason = memory_reason(run, process, error)
            if reason is not None:
                return _after_out_of_memory(run, process, f"{reason}, in round {number}")
    return None


def _leave_out(run: StudyRun) -> None:
    """Records, for all processes and shapes alike, which of the rounds so far are left out."""
    timed = _timed_samples(run)
    left_out = rounds_left_out(worst_by_round(timed), run.rounds, run.protocol.interference)
    for samples in timed:
        for index, call in enumerate(samples.calls):
            call.left_out = index in left_out


def _after_out_of_memory(run: StudyRun, process: VariantProcess, reason: str) -> Schedule:
    """Tries a process alone, and returns the schedule for the rest: blocks if the process fits, else as before."""
    run.stop_all()
    attempt(run, process, warm_up_again)
    run.stop_all()
    hopeless = not process.active and not process.row.status.measured
    return Schedule() if hopeless else Schedule("blocks", reason)


def _time(run: StudyRun, process: VariantProcess, shape_index: int, number: int) -> None:
    """Times one call at a shape; a number beyond the rounds of the session is a repeated round.

    Raises WorkerError.
    """
    again = number > run.rounds
    run.progress.phase(process.row.name, "timing again" if again else "timing", None if again else number)
    samples, count = process.measurement.shapes[shape_index], len(process.given)
    batch = next_batch(run, process, shape_index, 1 + run.warmup + number)
    meter = InterferenceMeter(process.worker.pid)
    answer = process.worker.time_once(shape_index, batch)
    call = Call(
        answer.seconds,
        len(samples.calls),
        repeated=len(process.given) == count,
        interference=meter.stop(answer.seconds),
        held_gib=answer.held_gib,
        gpu=answer.gpu,
    )
    samples.calls.append(call)
    if meter.off:
        run.warn_once(meter.off)
    _keep_image(process, shape_index, answer)
    note_call(run, process, shape_index, answer)


def _keep_image(process: VariantProcess, shape_index: int, call: TimedCall) -> None:
    """Adds an image of a timed call to the sample of its process; each call is equally likely to be in it."""
    if shape_index or call.image is None:
        return
    if len(process.images) < _SAMPLED:
        process.images.append(call.image)
    elif (chosen := random.randrange(len(process.measurement.shapes[0].calls))) < _SAMPLED:
        process.images[chosen] = call.image


def _end_rounds(run: StudyRun, process: VariantProcess) -> None:
    """Records the figures of a process after its last round, before it gets any other request."""
    if not (process.timed and process.active):
        return
    try:
        process.measurement.memory_after = process.worker.memory_so_far()
    except WorkerError as error:
        run.fail(process, error)


def _discarded_round(run: StudyRun, shuffle: random.Random) -> Schedule | None:
    """Calls all processes that will be timed, and discards the times: processes that started early have been idle.

    This is the last of their warm-up calls, and measures their memory.

    Returns:
        the schedule for the rest, if a worker ran out of memory beside the others.
    """
    waiting = [process for process in run.processes if process.timed and process.active]
    shuffle.shuffle(waiting)
    for group, shape_index in product(batched(waiting, run.sharing.processes), run.shapes):
        number, memory = 1 + run.warmup, run.warmup > 0
        calls, out_of_memory = call_group(run, group, "discarded round", shape_index, number, memory=memory)
        for process, call in calls:
            process.measurement.shapes[shape_index].discarded_s.append(call.seconds)
            note_call(run, process, shape_index, call)
        for process, reason in out_of_memory:
            return _after_out_of_memory(run, process, f"{reason}, in the discarded round")
    run.checkpoint()
    return None


# --------------------------------------------------------------------------------------------------------------- blocks


_Times = Sequence[Sequence[float]]
"""Seconds of timed calls, by shape."""


def blocks(run: StudyRun) -> None:
    """Times one process at a time, and the baseline before and after each, if variants do not fit in memory together.

    Each pass of the baseline closes one block and opens the next. Its drift over a block is recorded.
    """
    for process in run.processes:
        if not process.timed:
            _block(run, process)
    timed = [process for process in run.processes if process.timed]
    if not timed:
        return
    shapes = len(run.shapes)
    baseline = next(process for process in timed if process.row.name == run.result.baseline)
    others = [process for process in timed if process is not baseline]
    # Each process is loaded and warmed up again, and the baseline is timed once more for each.
    run.progress.more(len(others) * (1 + shapes * (2 + run.rounds)) + len(run.processes))
    before = _block(run, baseline)
    for process in others:
        # Recorded first: samples of a block that breaks off must not look like samples of interleaved rounds.
        _set_baseline_times(process, before)
        own = _block(run, process)
        run.retire(process)
        if not own:
            continue
        after = _block(run, baseline)
        if not after:
            break
        _set_baseline_times(process, before, after)
        drift = math.exp(_mean_log(after) - _mean_log(before))
        run.result.schedule.drift[process.slug] = drift
        before = after
        run.checkpoint()
    if not baseline.active:
        for process in others:
            if process.active and not process.measurement.shapes[0].latency_after_s:
                problem = "the baseline failed, so this block has no baseline after it to compare with"
                run.fail(process, WorkerError(Status.FAILED, problem))


def _set_baseline_times(process: VariantProcess, before: _Times, after: _Times = ()) -> None:
    """Records the baseline's times by shape, just before a process was measured and just after."""
    for samples, times in zip(process.measurement.shapes, before, strict=False):
        samples.latency_before_s = list(times)
    for samples, times in zip(process.measurement.shapes, after, strict=False):
        samples.latency_after_s = list(times)


def _mean_log(times: _Times) -> float:
    return float(np.mean([np.log(of_shape).mean() for of_shape in times]))


def _block(run: StudyRun, process: VariantProcess) -> list[list[float]]:
    """Times a fresh worker for all rounds, and inspects it; returns the times by shape, or nothing if it failed."""
    if not process.active:
        return []
    shapes = process.measurement.shapes
    starts = [len(samples.deciding_s) for samples in shapes]
    attempt(run, process, _measure_block)
    if not process.active:
        return []
    return [samples.deciding_s[start:] for samples, start in zip(shapes, starts, strict=True)]


def _measure_block(run: StudyRun, process: VariantProcess) -> None:
    warm_up_again(run, process)
    shapes, limit = process.measurement.shapes, run.protocol.interference
    start = len(process.measurement.shapes[0].calls)
    for number in range(1, run.rounds + run.extra_rounds + 1 if process.timed else 1):
        if number > run.rounds:
            if enough_clean(worst_by_round(shapes)[start:], run.rounds, limit):
                break
            run.progress.more(len(shapes))
        for shape_index in run.shapes:
            _time(run, process, shape_index, number)
    left_out = rounds_left_out(worst_by_round(shapes)[start:], run.rounds, limit)
    for samples in shapes:
        for index in left_out:
            samples.calls[start + index].left_out = True
    _end_rounds(run, process)
    inspect_group(run, living([process]))
