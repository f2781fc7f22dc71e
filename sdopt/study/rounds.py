"""Times the processes of a session: interleaved rounds, or one block after the other."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, product

import numpy as np

from sdopt.measure.interference import InterferenceMeter
from sdopt.record.records import VariantResult
from sdopt.record.samples import Call, ShapeSamples
from sdopt.record.scores import BrokenImage
from sdopt.schema import Shape
from sdopt.statistics.disturbance import (
    another_may_help,
    rounds_left_out,
    worst_by_round,
)
from sdopt.study.budget import Spending
from sdopt.study.evidence import Inspection
from sdopt.study.reuse import TimedImages
from sdopt.study.session import Session, VariantProcess
from sdopt.study.work import batched
from sdopt.worker.host import PipelineHost
from sdopt.worker.protocol import SampledImage, TimedCall

_SAMPLED = 6
"""Number of images of a process's timed calls that are kept, to be compared with drawn ones."""

_Samples = Callable[[], Sequence[ShapeSamples]]
"""Returns the samples of all processes and shapes that share rounds."""


class _Timing:
    """Times calls of a session whose processes are prepared, and selects the rounds that decide."""

    def __init__(self, session: Session, spending: Spending) -> None:
        self._session, self._study = session, session.study
        self._spending = spending
        self._timed_images = TimedImages(session)

    def _time(
        self, process: VariantProcess, shape_index: int, number: int, start: int = 0
    ) -> None:
        """Times one call at a shape, in a round of some number; one beyond the rounds of the session is an extra round.

        `start` is the number of calls that the process had before the first of these rounds. Raises WorkerError.
        """
        session, again = self._session, number > self._session.rounds
        session.progress.phase(
            process.row.name,
            "timing again" if again else "timing",
            None if again else number,
        )
        samples, count = process.measurement.shapes[shape_index], len(process.given)
        batch = session.next_batch(
            process, shape_index, 1 + self._study.warmup + number
        )
        meter = InterferenceMeter(process.worker.pid)
        every_image = not shape_index and self._timed_images.wanted
        answer = process.worker.ask(
            PipelineHost.time_once, shape_index, batch, every_image=every_image
        )
        call = Call(
            answer.seconds,
            round=start + number - 1,
            repeated=len(process.given) == count,
            interference=meter.stop(answer.seconds),
            held_gib=answer.held_gib,
            gpu=answer.gpu,
        )
        samples.calls.append(call)
        if meter.off:
            self._study.warn_once(meter.off)
        if not self._timed_images.keep(process, answer.images):
            _keep_image(process, shape_index, answer)
        session.note_call(process, shape_index, answer)

    def _round_numbers(self, timed: _Samples, start: int = 0) -> Iterator[int]:
        """Yields the number of each round: the configured rounds, then extra ones while too few are clean.

        A round is clean if other work took no more than `protocol.interference` of any of its calls
        (`Call.disturbed`: shares of the processor and the GPU). An extra round follows while fewer rounds are clean
        than are configured, at most `Session.extra_rounds` times: `protocol.extra_rounds`, or half as many, rounded up.
        One that is disturbed itself is the last: the machine stays as it is, and the intervals show what that costs.
        Without `protocol.interference` there is none. `start` is how many calls the samples had before the first round.
        """
        session = self._session
        rounds = session.rounds
        yield from range(1, rounds + 1)
        extra = session.extra_rounds if rounds else 0
        for number in range(rounds + 1, rounds + extra + 1):
            samples = timed()
            worst = worst_by_round(samples)[start:]
            if not another_may_help(worst, rounds, session.protocol.interference):
                return
            yield number

    def _leave_out(self, timed: Sequence[ShapeSamples], start: int = 0) -> None:
        """Records, for all samples alike, which of the rounds so far are left out: the most disturbed, if too many."""
        if self._spending.limited:
            return  # there are no extra rounds, and settled variants have fewer
        worst = worst_by_round(timed)[start:]
        left_out = rounds_left_out(
            worst, self._session.rounds, self._session.protocol.interference
        )
        for samples in timed:
            for index, call in enumerate(samples.calls[start:]):
                call.left_out = index in left_out


def _keep_image(process: VariantProcess, shape_index: int, call: TimedCall) -> None:
    """Adds an image of a timed call to the sample of its process; each call is equally likely to be in it."""
    if call.image is None:
        return
    if shape_index:
        note_broken(process.row, process.variant.shapes[shape_index], call.image)
        return
    if len(process.images) < _SAMPLED:
        process.images.append(call.image)
    elif (
        chosen := random.randrange(len(process.measurement.shapes[0].calls))
    ) < _SAMPLED:
        process.images[chosen] = call.image


def note_broken(row: VariantResult, shape: Shape, image: SampledImage) -> None:
    """Notes an image that is black or not finite, at a shape of which the quality pass makes none.

    Half precision may overflow at a larger size alone.
    """
    if any(trip.path == shape.name for trip in row.trips):
        return
    wire, detail = "", ""
    if not image.finite:
        wire, detail = "non_finite", "pixels are NaN or infinite"
    elif not (image.pixels.any() or row.config.random_weights):
        wire, detail = "black", "all pixels are 0"
    if wire:
        where = f"{wire} at {shape.size}×{shape.size}"
        row.trips.append(BrokenImage(where, shape.name, detail))


class Rounds(_Timing):
    """Times all processes once per round at every shape, in a newly shuffled order, so that drift affects all alike.

    What is shuffled are the pairs of process and shape, by `protocol.shuffle_seed` and the number of the session.
    Rounds that other processes disturbed are repeated, up to a limit (`_round_numbers`); only whole rounds are left
    out, so that pairs stay complete.
    """

    def __init__(self, session: Session, spending: Spending) -> None:
        super().__init__(session, spending)
        self._shuffle = random.Random(
            f"{session.protocol.shuffle_seed} {len(session.result.sessions)}"
        )

    def measure(self) -> None:
        """Times and inspects all processes. Raises DoesNotFitError if some ran out of memory beside others."""
        session, study = self._session, self._study
        if session.rounds:
            self._discarded_round()
        for number in self._round_numbers(self._timed_samples):
            if not self._spending.another_round(number):
                break
            is_open = [
                process
                for process in session.timed
                if process.row.name not in session.settled
            ]
            calls = list(product(is_open, study.shapes))
            self._shuffle.shuffle(calls)
            for process, shape_index in calls:
                if process.active:
                    with session.noting_failure(process):
                        self._time(process, shape_index, number)
                    session.require_fit(f", in round {number}")
            self._leave_out(self._timed_samples())
            self._spending.settle(number)
            self._spending.foretell()
            study.checkpoint()
        for process in session.timed:
            if (
                process.active
            ):  # else another process of its variant has failed meanwhile
                with session.noting_failure(process):
                    process.measurement.memory_after = process.worker.ask(
                        PipelineHost.memory_so_far
                    )
        self._timed_images.settle()
        self._spending.choose_images()
        # Processes that draw images come first, so that they draw side by side; the baseline is the first of them.
        waiting = sorted(
            (process for process in session.processes if process.active),
            key=lambda process: (not process.first, process.row.is_control),
        )
        for group in batched(waiting, study.sharing.processes):
            Inspection(session, group, self._spending.foretell).take()
            self._spending.foretell()
            study.checkpoint()
            with session.progress.timeline.during("ending workers"):
                for process in group:
                    session.retire(process)
        session.require_fit()
        self._spending.note_spent()

    def _timed_samples(self) -> list[ShapeSamples]:
        shapes = [process.measurement.shapes for process in self._session.timed]
        return list(chain.from_iterable(shapes))

    def _discarded_round(self) -> None:
        """Calls all processes that will be timed, and discards the times: processes that started early have been idle.

        This is the last of their warm-up calls, and measures their memory.
        """
        session, warmup = self._session, self._study.warmup
        waiting = session.timed
        self._shuffle.shuffle(waiting)
        for group, shape_index in product(
            batched(waiting, self._study.sharing.processes), self._study.shapes
        ):
            for process, call in session.call(
                group, "discarded round", shape_index, 1 + warmup, memory=warmup > 0
            ):
                process.measurement.shapes[shape_index].discarded_s.append(call.seconds)
                session.note_call(process, shape_index, call)
            session.require_fit(", in the discarded round")
        self._study.checkpoint()


_Times = Sequence[Sequence[float]]
"""Seconds of timed calls, by shape."""


class Blocks(_Timing):
    """Times one process at a time, and the baseline before and after each, if variants do not fit in memory together.

    Each pass of the baseline closes one block and opens the next. Its drift over a block is recorded.
    """

    def measure(self) -> None:
        """Times and inspects all processes."""
        session = self._session
        session.rounds = self._spending.rounds_that_fit()
        self._spending.choose_images()
        for process in session.processes:
            if not process.timed:
                self._block(process)
        timed = [process for process in session.processes if process.timed]
        if not timed:
            return
        baseline = next(
            process for process in timed if process.row.name == session.result.baseline
        )
        others = [process for process in timed if process is not baseline]
        before = self._block(baseline)
        for process in others:
            # Recorded first: samples of a block that breaks off must not look like samples of interleaved rounds.
            _set_baseline_times(process, before)
            block = self._block(process)
            session.retire(process)
            if not block:
                continue
            after = self._block(baseline)
            _set_baseline_times(process, before, after)
            session.result.schedule.drift[process.slug] = math.exp(
                _mean_log(after) - _mean_log(before)
            )
            before = after
            self._spending.note_spent()
            self._spending.foretell()
            self._study.checkpoint()

    def _block(self, process: VariantProcess) -> list[list[float]]:
        """Times a fresh worker for all rounds, and inspects it; returns the times by shape, or nothing if it failed."""
        if not process.active:
            return []
        shapes = process.measurement.shapes
        starts = [len(samples.deciding_s) for samples in shapes]
        try:
            with self._session.noting_failure(process):
                self._measure(process)
        finally:
            process.stop()
            self._study.checkpoint()
        if not process.active:
            return []
        return [
            samples.deciding_s[start:]
            for samples, start in zip(shapes, starts, strict=True)
        ]

    def _measure(self, process: VariantProcess) -> None:
        self._session.warm_up_again(process)
        if process.timed:
            shapes = process.measurement.shapes
            start = len(shapes[0].calls)
            for number in self._round_numbers(lambda: shapes, start):
                for shape_index in self._study.shapes:
                    self._time(process, shape_index, number, start)
            self._leave_out(shapes, start)
            process.measurement.memory_after = process.worker.ask(
                PipelineHost.memory_so_far
            )
        Inspection(self._session, [process], self._spending.foretell).take()


def _set_baseline_times(
    process: VariantProcess, before: _Times, after: _Times = ()
) -> None:
    """Records the baseline's times by shape, just before a process was measured and just after."""
    for samples, times in zip(process.measurement.shapes, before, strict=False):
        samples.latency_before_s = list(times)
    for samples, times in zip(process.measurement.shapes, after, strict=False):
        samples.latency_after_s = list(times)


def _mean_log(times: _Times) -> float:
    return float(np.mean([np.log(of_shape).mean() for of_shape in times]))
