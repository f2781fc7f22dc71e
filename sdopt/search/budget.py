"""Plans the time of a search: how many candidates the next study may have, by what the studies so far took."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sdopt.study.work import Effort

_TO_BEGIN_S = 10.0


@dataclass(frozen=True)
class Cost:
    """What one process of a variant takes: from the start of loading to the end of the first call; a further call."""

    start_s: float
    call_s: float


@dataclass
class SearchBudget:
    """The time of a search, which always leaves enough of it to judge.

    While options are left that were not tried alone, enough is kept to judge one candidate; later, to judge all
    finalists, and to race as long as a race is needed. Once something was tried and nothing gains, there is nothing to
    judge: time that would be kept for that is spent on trying more.

    Attributes:
        work: what a study does with each of its variants, by stage (`calibrate`, `screen`, `race` and `final`).
        deadline: the end of the budget, in seconds of the clock.
        finalists: the most candidates that are judged.
        baseline: None before the first study.
        costs: of each measured candidate, by name.
        uncalibrated_s: the seconds that calibrating takes beyond half of the budget: then this call judges nothing, and
            no time is kept for that.
        process_s: what a process takes besides its start and its calls, before a study has shown it: scoring and
            reports, in shares.
    """

    work: Mapping[str, Effort]
    deadline: float
    finalists: int
    clock: Callable[[], float] = time.monotonic
    baseline: Cost | None = None
    costs: dict[str, Cost] = field(default_factory=dict)
    uncalibrated_s: float = 0.0
    process_s: float = 4.0
    _beside_s: float = 0.0
    _processes: int = 0

    @property
    def left_s(self) -> float:
        """Seconds left."""
        return self.deadline - self.clock()

    @property
    def least_s(self) -> float:
        """Seconds that it takes to screen one candidate; 0 where nothing is known yet."""
        if self.baseline is None:
            return 0.0
        return self.seconds("screen", [self._usual()])

    @property
    def needed_s(self) -> float:
        """Seconds of the least search, which screens and judges one candidate; 0 where nothing is known yet."""
        if self.baseline is None:
            return 0.0
        judge_s = self.seconds("final", [self._usual()])
        return self.least_s + judge_s

    def seconds(self, stage: str, costs: Sequence[Cost]) -> float:
        """Returns how many seconds a study of candidates takes, with the baseline and its control beside them."""
        work = self.work[stage]
        beside_s = self.process_s
        if self._processes:
            beside_s = self._beside_s / self._processes
        seconds = 0.0
        if self.baseline:
            costs = [self.baseline, *costs]
            seconds += work.starts * self.baseline.start_s
            seconds += work.processes * beside_s
            seconds += work.repeated * self.baseline.call_s
        for cost in costs:
            seconds += work.starts * cost.start_s
            seconds += work.processes * beside_s
            seconds += work.calls * cost.call_s
        calls_s = [cost.call_s for cost in costs]
        return seconds + work.images_s(calls_s)

    def seconds_of(self, stage: str, names: Iterable[str]) -> float:
        """Returns how many seconds a study of measured candidates takes."""
        return self.seconds(stage, [self._cost(name) for name in names])

    def learn(self, costs: Mapping[str, Cost], took_s: float) -> None:
        """Records how long a screening study took: what it took besides calls and starts is shared by its processes."""
        self.costs |= costs
        beside_s = self._beside_s
        processes = self._processes
        self._beside_s = 0.0
        self._processes = 0
        expected_s = self.seconds("screen", list(costs.values()))
        self._beside_s = max(0.0, beside_s + took_s - expected_s)
        of_each = self.work["screen"].processes
        self._processes = processes + of_each * (len(costs) + 2)

    def to_screen(
        self,
        most: int,
        leaders: Sequence[str],
        *,
        alone: bool,
        compile_next: bool,
        racers: int,
        gains: bool = False,
    ) -> int:
        """Returns how many candidates the next study may screen; 0 if none fits, and some were screened.

        Args:
            most: the most that a study may have.
            leaders: the best candidates so far, the best first.
            alone: whether options are left that were not tried alone.
            compile_next: whether what comes next compiles, which takes as long as the longest start so far.
            racers: number of candidates that a race would have; 0 if none is needed.
            gains: whether a candidate was measured to be better than the baseline.
        """
        if self.baseline is None:  # without a study, there is no estimate
            return most
        usual = self._usual()
        if compile_next:
            starts_s = [cost.start_s for cost in self.costs.values()]
            usual = Cost(max([usual.start_s, *starts_s]), usual.call_s)
        finalists = 1 if alone else self.finalists
        judged = [self._cost(name) for name in leaders[:finalists]]
        reserved_s = 0.0
        if not self.uncalibrated_s:
            reserved_s = self.seconds("final", judged or [usual])
        # For a race that there is no time for anyway, nothing is kept.
        if racers and not alone and self.may_race(leaders[:racers]):
            reserved_s += self.seconds_of("race", leaders[:racers])
        reserves = [reserved_s]
        if self.costs and not gains:
            reserves.append(0.0)
        for kept_s in reserves:
            for count in range(most, 0, -1):
                screen_s = self.seconds("screen", [usual] * count)
                if screen_s + kept_s <= self.left_s:
                    return count
        # A search that tries nothing answers nothing, however slow the machine is.
        return 0 if self.costs else min(most, 2)

    def to_screen_s(self, leaders: Sequence[str]) -> float:
        """Returns in how many seconds a screening study has to end, for the best of those that gain to be judged.

        It has time to begin in any case: ended while it is composed, it would leave no result.
        """
        to_judge_s = 0.0
        if leaders and not self.uncalibrated_s:
            to_judge_s = self.seconds_of("final", leaders[:1])
        return max(_TO_BEGIN_S, self.left_s - to_judge_s)

    def may_race(self, names: Sequence[str]) -> bool:
        """Returns whether candidates can race and still leave enough time to judge the finalists."""
        race_s = self.seconds_of("race", names)
        final_s = self.seconds_of("final", names[: self.finalists])
        return race_s + final_s <= self.left_s

    def whole_s(self, untried: int, side_by_side: int, leaders: int) -> float:
        """Returns how many seconds it takes to screen all that is untried, to race if need be, and to judge the first."""
        if self.baseline is None:
            return math.inf
        usual = self._usual()
        studies, rest = divmod(untried, side_by_side)
        seconds = studies * self.seconds("screen", [usual] * side_by_side)
        if rest:
            seconds += self.seconds("screen", [usual] * rest)
        if leaders > self.finalists:
            seconds += self.seconds("race", [usual] * leaders)
        judged = min(max(1, leaders), self.finalists)
        return seconds + self.seconds("final", [usual] * judged)

    def to_judge(self, names: Sequence[str]) -> int:
        """Returns how many of the finalists, the best first, can be judged in the time that is left: at least one."""
        for count in range(min(self.finalists, len(names)), 1, -1):
            if self.seconds_of("final", names[:count]) <= self.left_s:
                return count
        return 1

    def _cost(self, name: str) -> Cost:
        return self.costs.get(name) or self._usual()

    def _usual(self) -> Cost:
        """Returns what a candidate takes on average, or the baseline before any was measured."""
        costs = list(self.costs.values())
        if not costs:
            return self.baseline or Cost(0.0, 0.0)
        start_s = sum(cost.start_s for cost in costs)
        call_s = sum(cost.call_s for cost in costs)
        return Cost(start_s / len(costs), call_s / len(costs))
