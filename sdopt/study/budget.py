"""Spends `protocol.budget_s`: what a whole study may take is used where a verdict is still open.

In the order in which time is found for it: one process of each variant, three of each whose verdict matters, the
fastest first; a round; a few images; stages; a second round; then all rounds, images and evidence. What is left out is
recorded (`Budget`), and `resume=… protocol.budget_s=…` measures it.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from sdopt.record.records import Budget, VariantResult
from sdopt.record.samples import Measurement
from sdopt.statistics.settling import is_settled
from sdopt.study.ahead import Ahead, Extent
from sdopt.study.session import Session

_FEWEST_PROMPTS, _FEWEST_FLOORS = 4, 2
"""Prompts that are drawn, and drawn again by the baseline, where there is hardly time for one round."""

_FEW_PROMPTS, _FEW_FLOORS = 8, 4
"""Prompts that come before a second round."""

_ENOUGH_S = 5.0
"""Seconds of estimated work from which on a pace is known."""

_PACES = 0.8, 2.5
"""Smallest and largest factor by which estimates are corrected."""

_FIRST_ROUNDS = 2
"""Rounds that come before the rest of the images and of the evidence."""


class Spending:
    """Decides what a session leaves out, so that the command ends in time.

    Without a budget, and in a study with `protocol.precision`, whose pilot is always measured whole, nothing is.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._study, self._ahead = session, session.study, Ahead(session)
        self._noted: tuple[float, float] | None = None
        """When the last estimate was made, and how many seconds it said were ahead."""
        self._took_s = self._estimated_s = 0.0
        protocol = session.protocol
        self._limit_s = protocol.budget_s if protocol.precision is None else None
        self._judges = session.result.config.gate.judges
        self._chosen: Extent | None = None
        if self._limit_s is not None and session.result.budget is None:
            session.result.budget = Budget()

    @property
    def _pace(self) -> float:
        """By what the work takes longer than estimated, as on a busy machine; 1 until enough was done to tell."""
        if self._estimated_s < _ENOUGH_S:
            return 1.0
        return min(max(self._took_s / self._estimated_s, _PACES[0]), _PACES[1])

    def _note_pace(self, now_s: float, ahead_s: float) -> None:
        """Notes an estimate of what is ahead, in seconds; what the last one was more is what the time since did."""
        if self._noted is not None and ahead_s < self._noted[1]:
            self._took_s += now_s - self._noted[0]
            self._estimated_s += self._noted[1] - ahead_s
        self._noted = now_s, ahead_s

    @property
    def limited(self) -> bool:
        """Whether there is a budget to keep."""
        return self._limit_s is not None

    @property
    def _left_s(self) -> float:
        assert self._limit_s is not None
        return self._limit_s - self._study.progress.timeline.elapsed_s

    @property
    def _record(self) -> Budget:
        budget = self._session.result.budget
        assert budget is not None
        return budget

    @property
    def _whole(self) -> Extent:
        return Extent(self._session.rounds)

    @property
    def _least(self) -> Extent:
        """The least of a study; a gate judges no images of fewer prompts than it asks for."""
        if self._judges:
            return replace(self._whole, rounds=1, programs=1)
        return replace(self._few(_FEWEST_PROMPTS, _FEWEST_FLOORS), stages=False)

    @property
    def _some(self) -> Extent:
        """What comes before a second round."""
        if self._judges:
            return self._least
        return self._few(_FEW_PROMPTS, _FEW_FLOORS)

    def _few(self, prompts: int, floors: int) -> Extent:
        return Extent(
            1,
            prompts,
            min(floors, self._study.quality.floor_prompts),
            evidence=False,
            programs=1,
        )

    def _fits(self, extent: Extent) -> bool:
        seconds = self._ahead.seconds(extent)
        return seconds is None or seconds * self._pace <= self._left_s

    def _fits_at_least(self) -> bool:
        """Returns whether the least fits; that loading went quickly says little of rounds."""
        seconds = self._ahead.seconds(self._least)
        return seconds is None or seconds * max(1.0, self._pace) <= self._left_s

    def choose_processes(self) -> None:
        """Leaves out further processes of the slowest variants, until the others fit; first processes are ready.

        The fastest keeps its own, without which it would have no interval: it is what most studies are made for. If
        every option is shown to be slower, nothing is left to compare, and the study ends as soon as it can.
        """
        # What is slower was given up just before, which took no time.
        self._noted = None
        session = self._session
        if session.result.only_slower and session.protocol.precision is None:
            self._end_soon()
            return
        if not self.limited or self._fits_at_least():
            return
        whole_s = self._ahead.seconds(self._whole) or 0.0
        first = session.first_replicate
        rows = {
            id(p.row): p.row
            for p in session.processes
            if p.active and p.row in session.result.candidates
        }
        calls_s = {
            p.row.name: self._ahead.call_s(p) or 0.0
            for p in session.processes
            if p.measurement.replicate == first
        }
        slowest_first = sorted(
            rows.values(), key=lambda row: -calls_s.get(row.name, 0.0)
        )
        for row in slowest_first[:-1]:
            self._leave_out_further(row)
            if self._fits_at_least():
                return
        self._tell_short(whole_s)

    def _end_soon(self) -> None:
        result = self._session.result
        result.budget = result.budget or Budget()
        self._limit_s, self._judges = 0.0, False
        for row in filter(None, (result.baseline_variant, result.control)):
            self._leave_out_further(row)
        self.foretell()

    def _leave_out_further(self, row: VariantResult) -> None:
        """Leaves out all processes of a variant but the first."""
        first = self._session.first_replicate
        further = [
            p
            for p in self._session.processes
            if p.row is row and p.measurement.replicate != first
        ]
        for process in further:
            process.active = False
        self._leave_out(row, [process.measurement for process in further])

    def _leave_out(self, row: VariantResult, further: Sequence[Measurement]) -> None:
        """Takes processes out; those of the same number of an earlier session stay, with the evidence that they have."""
        row.drop(further)
        numbers = {measurement.replicate for measurement in further} & row.silent
        count = len({measurement.replicate for measurement in row.measurements})
        if count < self._session.result.config.replicates:
            self._record.processes[row.name] = count
        for measurement in row.measurements:
            if measurement.replicate in numbers:
                measurement.spared = measurement.complete = True
                self._record.evidence = False

    def _tell_short(self, whole_s: float) -> None:
        """Says before anything is timed that not even the least fits, and which budget holds the whole study."""
        spent_s = self._study.progress.timeline.elapsed_s
        minutes = math.ceil((spent_s + whole_s * max(1.0, self._pace)) / 60)
        config = self._session.result.config
        what = "one round and a few images do not fit"
        if config.gate.judges:
            what = f"gate={config.gate.name} judges no fewer than {config.quality.prompt_count} images of each variant"
        self._study.progress.tell(
            f"protocol.budget_s={self._limit_s:g} will be exceeded: {what}. All of it takes about {minutes} min here: "
            f"protocol.budget_s={60 * minutes}."
        )

    def another_round(self, number: int) -> bool:
        """Returns whether there is time for a round; the first one is always timed."""
        if not self.limited or number == 1:
            return True
        extent = self._some if number <= _FIRST_ROUNDS else self._whole
        if self._fits(replace(extent, rounds=number)):
            return True
        self._record.rounds = self._session.rounds_before + number - 1
        return False

    def rounds_that_fit(self) -> int:
        """Returns how many rounds there is time for, at least one, where all rounds of a process follow each other."""
        rounds = self._session.rounds
        while (
            self.limited
            and rounds > 1
            and not self._fits(replace(self._some, rounds=rounds))
        ):
            rounds -= 1
        if rounds < self._session.rounds:
            self._record.rounds = self._session.rounds_before + rounds
        return rounds

    def settle(self, number: int) -> None:
        """Notes which variants are shown to be faster or slower: no further round is spent on them."""
        if (
            not self.limited
            or number >= self._session.rounds
            or self._session.study.plan.factors
        ):
            return
        result, settled = self._session.result, self._session.settled
        for row in result.candidates:
            is_open = row.name not in settled and any(
                p.row is row for p in self._session.timed
            )
            if is_open and is_settled(result, row):
                settled.add(row.name)
                self._noted = None
                self._record.settled[row.name] = self._session.rounds_before + number

    def choose_images(self) -> None:
        """Leaves out images, and the evidence of further processes, as far as there is no time for them."""
        if not self.limited or self._fits(self._whole):
            return
        least, whole = self._least, self._whole
        steps = [
            replace(whole, evidence=least.evidence),
            replace(least, prompts=None, stages=True, programs=None),
            replace(least, prompts=None, stages=True),
        ]
        most = max(
            (len(p.variant.pictured) for p in self._session.processes), default=0
        )
        if least.prompts is not None:
            steps += [
                replace(least, prompts=prompts, stages=True)
                for prompts in range(most, least.prompts - 1, -1)
            ]
        extent = next(filter(self._fits, steps), least)
        record, floors = self._record, self._study.quality.floor_prompts
        rounds = self._session.rounds
        if record.rounds is not None:
            rounds = record.rounds - self._session.rounds_before
        self._chosen = replace(extent, rounds=rounds)
        self._noted = None
        record.evidence = record.evidence and extent.evidence
        record.stages = extent.stages
        record.prompts = (
            extent.prompts
            if extent.prompts is not None and extent.prompts < most
            else None
        )
        fewer_floors = (
            extent.floor_prompts is not None and extent.floor_prompts < floors
        )
        record.floor_prompts = extent.floor_prompts if fewer_floors else None

    def foretell(self) -> None:
        """Tells the display when the command ends: with all that is to be done, or with its budget if that is earlier.

        Nothing is left out of the least, whatever the budget.
        """
        seconds = self._ahead.seconds(self._chosen or self._whole)
        least_s = self._ahead.seconds(self._chosen or self._least)
        if seconds is None or least_s is None:
            if self.limited:
                self._study.progress.expect(max(0.0, self._left_s))
            return
        worked_s = self._study.progress.timeline.elapsed_s - self._ahead.unforeseen_s
        self._note_pace(worked_s, seconds)
        compiling_s = self._ahead.compiling_s
        seconds = seconds * self._pace + compiling_s
        if self.limited:
            least_s = least_s * self._pace + compiling_s
            seconds = min(seconds, max(self._left_s, least_s))
        else:
            self._study.progress.tell_if_long(seconds)
        self._study.progress.expect(seconds)

    def note_spent(self) -> None:
        """Records what the command took so far."""
        if self.limited:
            self._record.spent_s = self._study.progress.timeline.elapsed_s
