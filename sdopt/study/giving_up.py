"""Ends the timing of variants of which a few warm calls show that they are clearly slower than the baseline."""

from itertools import chain

from sdopt.measure.interference import InterferenceMeter
from sdopt.record.records import Status, VariantResult, append_reason
from sdopt.record.samples import Call
from sdopt.statistics.giving_up import (
    at_least_slower,
    bound_text,
    needs_call,
    times_slower,
)
from sdopt.study.session import TRIALS, Session, VariantProcess

_LEAST_SHARE = 0.01
"""Share of a trial call that always counts, since a time is not 0."""


class GivingUp:
    """Makes trial calls of variants whose first call was slow (`consider`), and then decides on all (`settle`).

    The baseline is called before, between and after them if it is in memory; in blocks, the calls of its warm-up count.
    Calls in which a compiler still records, and the time that it compiles, do not. The first call counts where an
    option is known to be slow on this device.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._study = session, session.study
        self._limit = session.protocol.give_up

    def consider(self, process: VariantProcess) -> None:
        """Makes trial calls of a process that has just been warmed up, if its first call was slow."""
        row = process.row
        is_candidate = row.name != self._session.result.baseline and not row.is_control
        if (
            self._limit is None
            or not is_candidate
            or not process.timed
            or not process.takes_part
            or row.samples
        ):
            return
        for shape_index in self._study.shapes:
            if not self._try_at(process, shape_index, self._limit):
                return

    def _try_at(self, process: VariantProcess, shape_index: int, limit: float) -> bool:
        """Returns whether a process is shown to be slower at a shape."""
        samples = process.measurement.shapes[shape_index]
        # A call of the process may make as many times as many images as one of the baseline.
        plain = self._session.result.baseline_variant
        more_images = process.row.config.images_per_call / plain.config.images_per_call
        beside = [seconds * more_images for seconds in self._known(shape_index)]
        baseline = self._baseline
        cold_s = self._cold_s(process, shape_index)
        if not beside and baseline is not None:
            # Both were cold, which adds to the baseline's call too, so that the ratio of warm ones may be larger.
            baseline_cold_s = more_images * (self._cold_s(baseline, shape_index) or 0.0)
            if cold_s is not None and cold_s <= limit / 2 * baseline_cold_s:
                return False
            beside = [
                seconds * more_images for seconds in self._call(baseline, shape_index)
            ]
        if not beside or (cold_s is not None and cold_s <= limit * max(beside)):
            return False
        samples.trial_beside_s = beside
        for _ in range(self._recording_calls(process)):
            self._call(process, shape_index)
        if cold_s is not None and process.variant.slow_here(self._study.machine.device):
            # An option that this device computes in software is not slow because it has just started.
            samples.trial_s = [cold_s]
        while process.takes_part and needs_call(
            samples.trial_s, samples.trial_beside_s, limit
        ):
            samples.trial_s += self._call(process, shape_index)
            if baseline is not None:
                samples.trial_beside_s += [
                    seconds * more_images
                    for seconds in self._call(baseline, shape_index)
                ]
        times = times_slower(samples.trial_s, samples.trial_beside_s)
        return times is not None and times > limit

    def _call(self, process: VariantProcess, shape_index: int) -> list[float]:
        """Makes a warm call; returns its seconds less what other work took of it, or nothing if it failed."""
        session = self._session
        call = session.first_trial + process.trials % TRIALS
        process.trials += 1
        meter = InterferenceMeter(process.worker.pid)
        answers = session.call([process], "trial", shape_index, call)
        for _, answer in answers:
            session.note_call(process, shape_index, answer)
            interference = meter.stop(answer.seconds)
            timed = Call(answer.seconds, interference=interference, gpu=answer.gpu)
            return [answer.seconds * max(1 - (timed.disturbed or 0.0), _LEAST_SHARE)]
        return []

    def _known(self, shape_index: int) -> list[float]:
        """Returns the baseline's last warm call at a shape; in blocks, all calls of its and the control's warm-up."""
        if self._session.interleaved and self._baseline is not None:
            return []
        result = self._session.result
        measurements = list(result.baseline_variant.measurements)
        if result.control is not None:
            measurements += result.control.measurements
        seconds: list[float] = []
        for measurement in measurements:
            if measurement.session == len(result.sessions) - 1:
                seconds += measurement.shapes[shape_index].warmup_s
        return seconds

    @property
    def _baseline(self) -> VariantProcess | None:
        """The first living process of the baseline."""
        rows = (
            p
            for p in self._session.processes
            if p.row.name == self._session.result.baseline
        )
        return next((process for process in rows if process.takes_part), None)

    def _cold_s(self, process: VariantProcess, shape_index: int) -> float | None:
        """Returns the seconds of the first call without its compile time; None if it was not reported."""
        samples = process.measurement.shapes[shape_index]
        return (
            None
            if samples.cold_start_s is None
            else samples.cold_start_s - (samples.compile_s or 0.0)
        )

    def _recording_calls(self, process: VariantProcess) -> int:
        """Returns how many more calls an option of the variant records graphs in."""
        recording = max(
            (o.recording_calls for o in process.variant.optimizations.values()),
            default=0,
        )
        calls = max(len(samples.warmup_s) for samples in process.measurement.shapes)
        return max(0, recording - calls)

    def settle(self) -> None:
        """Ends the timing of all variants that were shown to be slower.

        One with which another variant is compared that is not slower itself is timed all the same.
        """
        if self._limit is None:
            return
        result = self._session.result
        slow = {
            p.row.name
            for p in self._session.processes
            if p.active and self._is_slower(p, self._limit)
        }
        while needed := {
            edge.reference
            for edge in result.comparisons
            if edge.reference in slow and edge.candidate not in slow
        }:
            slow -= needed
        for name in slow:
            self._give_up(result.variant(name), self._limit)
        self._study.checkpoint()

    def _is_slower(self, process: VariantProcess, limit: float) -> bool:
        shapes = process.measurement.shapes
        bounds = [
            times_slower(samples.trial_s, samples.trial_beside_s) for samples in shapes
        ]
        return not process.row.samples and all(
            bound is not None and bound > limit for bound in bounds
        )

    def _give_up(self, row: VariantResult, limit: float) -> None:
        row.given_up = True
        times = at_least_slower(row)
        assert times is not None
        processes = [
            process for process in self._session.processes if process.row is row
        ]
        for process in processes:
            process.timed = False
        claims = [promise.claims for promise in row.promises.values()]
        if set(chain.from_iterable(claims)) == {"memory"}:
            return
        row.status = Status.SLOWER
        reason = f"its calls take at least {bound_text(times)} the baseline's (protocol.give_up={limit:g})"
        row.reason = append_reason(row, reason)
        self._session.end(row)
        measurements = [process.measurement for process in processes]
        row.drop(m for m in measurements if not m.shapes[0].trial_s)
