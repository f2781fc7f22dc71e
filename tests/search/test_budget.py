"""How a search spends its time: the real decisions, on a clock that the simulated studies move."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sdopt.config.composer import composer_of
from sdopt.contract import Contract
from sdopt.errors import UnavailableError, UsageError
from sdopt.record.files import write_result
from sdopt.record.records import Status, StudyResult
from sdopt.schema import Gate
from sdopt.search import studies as of_search
from sdopt.search.budget import Cost, SearchBudget
from sdopt.search.config import search_file
from sdopt.search.findings import CandidateFinding, findings_of
from sdopt.search.racing import RatioStanding, Scatter, Standings
from sdopt.search.record import FINAL
from sdopt.search.results import Results, costs_of
from sdopt.search.run import Search
from sdopt.search.space import Combination
from sdopt.search.studies import CALIBRATE, Studies
from sdopt.study.work import Effort, Sharing, work_ahead
from sdopt.worker.protocol import TimeUpError
from tests.fakes import Fakes, FakeWorker, fake_study, run_fake

WORK = {
    CALIBRATE: Effort(1, 1, 2, 50),
    "screen": Effort(1, 1, 15, 15),
    "race": Effort(2, 2, 40, 40),
    FINAL: Effort(3, 3, 120, 120),
}
BASELINE = Cost(0.5, 0.05)
BESIDE_S = 0.8
"""What a process takes besides its calls and its start, which the search has to find out."""


@dataclass
class Options:
    """Stands in for Optuna's trials: options alone first, then combinations."""

    alone: list[str]
    combined: list[str]
    compiled: set[str] = field(default_factory=set)
    candidates: list[Combination] = field(default_factory=list)
    stages: set[str] = field(default_factory=set)
    exhausted: bool = False
    ended: str = ""
    spoiled: tuple[str, ...] = ()

    @property
    def untried(self) -> list[str]:
        known = {candidate.name for candidate in self.candidates}
        return [name for name in self.alone if name not in known]

    @property
    def compiles_next(self) -> bool:
        return bool(self.untried) and self.compiled.issuperset(self.untried)

    def more(self) -> bool:
        return len(self.candidates) < len(self.alone) + len(self.combined)

    def unfinished(self) -> dict[str, list[Combination]]:
        return {}

    def propose(self, count: int, stage: str) -> list[Combination]:
        quick = [name for name in self.untried if name not in self.compiled]
        known = {candidate.name for candidate in self.candidates}
        left = (
            quick
            or self.untried[:1]
            or [name for name in self.combined if name not in known]
        )
        found = [Combination(name, (name,)) for name in left[:count]]
        self.candidates += found
        self.stages.add(stage)
        return found


class Begun(Results):
    """The studies that a simulated search has begun, which say nothing of candidates."""

    def __init__(self, log: Sequence[tuple[str, list[str]]]) -> None:
        self._log = log

    def all_findings(self, stages: Sequence[str]) -> dict[str, list[CandidateFinding]]:
        return {}

    def of(self, stage: str) -> Iterator[StudyResult]:
        begun = [name for name, _ in self._log if name.startswith(stage)]
        result = SimpleNamespace(
            baseline="",
            candidates=(),
            status="interrupted",
            variants=(),
            config=SimpleNamespace(quality=SimpleNamespace(prompt_count=8)),
        )
        return iter([result] * len(begun))  # type: ignore[list-item]


class Simulated(Search):
    """A search whose studies move the clock by what they truly take."""

    calibrated = 0
    uncalibrated = 0.0

    def begin(
        self,
        truth: dict[str, Cost],
        losses: dict[str, float],
        noise: float,
        pace: float = 1.0,
    ) -> "Simulated":
        self.truth, self.losses, self.pace = truth, losses, pace
        self.noise_of = Scatter.of_controls([(noise, 1)] * 8)
        self.now, self.log = 0.0, list[tuple[str, list[str]]]()
        self.foretold = list[tuple[float, float]]()
        budget = SearchBudget(
            WORK,
            self.deadline,
            self.config.finalists,
            clock=lambda: self.now,
            process_s=0.0,
        )
        self.__dict__["budget"] = budget
        self.__dict__["results"] = Begun(self.log)

        def measure(
            stage: str,
            candidates: Sequence[Combination],
            brief: bool = True,
            limit_s: float | None = None,
            within: tuple[float, float] | None = None,
        ) -> Any:
            ends_s = math.inf if limit_s is None else self.now + limit_s
            self.measured(stage, [candidate.name for candidate in candidates])
            late, self.now = self.now > ends_s, min(self.now, ends_s)
            return SimpleNamespace(status="interrupted" if late else "finished")

        self.studies = SimpleNamespace(  # type: ignore[assignment]
            measure=measure,
            require_final=lambda _: None,
            calibrate=lambda *_: self.uncalibrated,
            calibration_images=self.calibrated,
        )
        self.space = SimpleNamespace(  # type: ignore[assignment]
            most=len(truth),
            left_out=(),
            alone=lambda: (),
            candidates=list,
            contract=lambda candidate: Contract.LOSSY,
        )
        return self

    def measured(self, stage: str, names: Sequence[str]) -> None:
        work = WORK[stage.partition("-")[0]]
        costs = [BASELINE, BASELINE, *(self.truth[name] for name in names)]
        self.log.append((stage, list(names)))
        self.now += self.pace * sum(
            work.processes * (c.start_s + BESIDE_S) + work.calls * c.call_s
            for c in costs
        )

    def _screen(self, stage: str, candidates: Sequence[Combination]) -> None:
        began, names = self.now, [candidate.name for candidate in candidates]
        self.foretold.append(self._within(len(names)))
        self.measured(stage, names)
        self.budget.baseline = BASELINE
        self.budget.learn({name: self.truth[name] for name in names}, self.now - began)

    def _standings(self, races: int) -> Standings:
        return {
            c.name: [RatioStanding(self.losses[c.name], 1 + 2 * races, self.noise_of)]
            for c in self.trials.candidates
        }

    def _has_begun(self, stage: str) -> bool:
        return any(stage == begun for begun, _ in self.log)


def searched(
    budget_s: float,
    *,
    options: int = 12,
    slow: int = 0,
    noise: float = 0.01,
    pace: float = 1.0,
    combined: int = 400,
) -> Simulated:
    """A search among options of which some take long to start, with any number of combinations of them."""
    random = np.random.default_rng(round(budget_s) + options)
    alone, pairs = (
        [f"option {n}" for n in range(options)],
        [f"pair {n}" for n in range(combined)],
    )
    truth = {
        name: Cost(0.5 + random.random(), 0.05 * (0.5 + random.random()))
        for name in [*alone, *pairs]
    }
    late = alone[options - slow :]
    truth |= {name: replace(truth[name], start_s=12.0) for name in late}
    losses = {
        name: float(np.log(cost.call_s / BASELINE.call_s))
        for name, cost in truth.items()
    }
    config = replace(search_file(), budget_s=budget_s)
    trials: Any = Options(alone, pairs, set(late))
    search = Simulated(config, None, None, trials, budget_s, lambda line: None)  # type: ignore[arg-type]
    search.begin(truth, losses, noise, pace).run()
    return search


@pytest.mark.parametrize(
    ("budget_s", "options", "slow", "pace", "noise"),
    [
        (240, 6, 2, 1.0, 0.2),
        (240, 12, 0, 1.0, 0.001),
        (240, 12, 2, 1.0, 0.2),
        (600, 20, 3, 1.0, 0.001),
        # These find out that studies take less or more than what their calls and starts do.
        (600, 12, 0, 0.7, 0.2),
        (600, 12, 0, 2.0, 0.001),
    ],
)
def test_spends_its_budget_and_no_more_and_tries_each_option_alone_first(
    budget_s: float, options: int, slow: int, pace: float, noise: float
) -> None:
    search = searched(budget_s, options=options, slow=slow, noise=noise, pace=pace)
    assert 0.85 * budget_s <= search.now <= 1.1 * budget_s
    assert {began for began, _ in search.foretold} == {0.0}
    for _, ends in search.foretold:
        assert ends == pytest.approx(search.now, rel=0.2)
    assert search.log[-1][0] == FINAL
    stages = [stage.partition("-")[0] for stage, _ in search.log]
    before_races = search.log[: stages.index("race") if "race" in stages else -1]
    tried = [name for _, names in before_races for name in names][:options]
    assert set(tried) == set(search.trials.alone)  # type: ignore[attr-defined]


def test_ends_early_where_everything_is_tried() -> None:
    search = searched(600, options=3, combined=2)
    assert "All 5 combinations" in search.trials.ended
    for budget_s in (12, 20):  # the first leaves no time for more, if there were more
        one = searched(budget_s, options=1, combined=0).trials
        assert one.ended == "The only combination that can run was screened."
    assert search.now < 300
    _, ends = search.foretold[-1]
    assert ends == pytest.approx(search.now, rel=0.2), "it is not the whole budget"
    assert search.log[-1][0] == FINAL


def test_judges_one_where_little_time_is_left_and_names_what_was_not_tried() -> None:
    search = searched(70, options=12, slow=2, noise=0.2)
    stage, judged = search.log[-1]
    assert stage == FINAL
    assert len(judged) == 1
    assert search.unjudged is None
    reasons = {why for fate, why in search.dropped.values() if fate == "not judged"}
    assert any("search.budget_s left time to judge 1;" in why for why in reasons)
    assert any(
        search.losses[name] - search.losses[judged[0]] > 0.2 and "gained more" in why
        for name, (_, why) in search.dropped.items()
    ), "what is slower by more than noise is not about as fast"
    assert "Not even tried on their own: option" in search.trials.ended


def test_judges_none_where_that_would_take_longer_than_the_budget_and_says_how_long() -> (
    None
):
    search = searched(34, options=12, slow=2)
    assert search.log[-1][0].startswith("screen-")
    assert search.now <= 1.1 * 34
    assert search.unjudged == pytest.approx(
        search.budget.seconds_of(FINAL, search._order()[0][:1])
    )


def test_begins_a_judgement_that_may_fit_and_ends_it_with_the_budget() -> None:
    search = searched(42, options=12, slow=2)
    assert search.log[-1][0] == FINAL
    assert search.now <= 1.1 * 42
    assert search.unjudged == pytest.approx(
        search.budget.seconds_of(FINAL, search.log[-1][1])
    )


def test_of_a_judgement_that_was_begun_the_rest_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = searched(42, options=12, slow=2)
    names = search.log[-1][1]
    final = replace(WORK[FINAL], images=4, together=2)
    search.budget.work = {**WORK, FINAL: final}
    whole_s = search.budget.seconds_of(FINAL, names)
    begun, _ = run_fake(tmp_path, fake_study(["a"], rounds=4, replicates=1))
    calls_s = [call_s for row in begun.variants for call_s in row.samples[0]]
    assert all(row.images for row in begun.variants if not row.is_control)
    monkeypatch.setattr(search, "_at_hand", lambda: begun)
    rest_s = search._to_judge_s(names)
    assert sum(calls_s) < whole_s - rest_s < 2 * sum(calls_s)
    # Its own calls tell the pace of the rest, and how long that is said to take is without what was kept.
    [candidate] = begun.candidates
    begun.baseline_variant.name = begun.baseline = "baseline"
    search.budget.costs = {candidate.name: Cost(0.0, 0.0)}
    slower_s = search._to_judge_s([candidate.name])
    assert search.budget.costs == costs_of(begun)[1]
    minutes = math.ceil(slower_s / 60)
    assert search._duration_text(FINAL, [candidate.name]) == f" (about {minutes} min)"


def test_a_budget_in_which_no_option_can_be_tried_is_refused_before_anything_is_measured() -> (
    None
):
    config, trials = replace(search_file(), budget_s=1.0), Options(["one", "two"], [])
    search = Simulated(config, None, None, trials, 1.0, lambda line: None)  # type: ignore[arg-type]
    search.begin(dict.fromkeys(trials.alone, BASELINE), {}, 0.01)
    search.budget.baseline = BASELINE
    with pytest.raises(
        UsageError,
        match=r"=1: to try one .* takes about 1 min here; to try one and to judge it takes about 2 min in all",
    ):
        search.run()
    assert not search.log


def test_a_call_that_is_foretold_to_take_longer_than_it_does_refuses_no_budget() -> (
    None
):
    """As where this machine's rates were measured while it was busy."""
    config, trials = replace(search_file(), budget_s=20.0), Options(["one", "two"], [])
    said: list[str] = []
    search = Simulated(config, None, None, trials, 20.0, said.append)  # type: ignore[arg-type]
    search.begin(dict.fromkeys(trials.alone, BASELINE), {"one": -0.5, "two": 0.0}, 0.01)
    search.budget.baseline = Cost(4.0, 0.4)
    assert search.budget.least_s > 1.1 * 20.0
    search.run()
    assert search.log
    assert said[0].startswith("a budget of 0.333 min may leave no time to judge")
    assert said[0].endswith("(sdopt optimize --budget 4m) leaves enough")


def test_the_time_to_calibrate_is_told_with_the_rest() -> None:
    config, trials = replace(search_file(), budget_s=60.0), Options(["one", "two"], [])
    search = Simulated(config, None, None, trials, 60.0, lambda line: None)  # type: ignore[arg-type]
    search.calibrated = 48
    search.begin(dict.fromkeys(trials.alone, BASELINE), {}, 0.01)
    search.budget.baseline = BASELINE
    search.budget.work = {**WORK, CALIBRATE: Effort(1, 1, 100, 4700)}
    with pytest.raises(
        UsageError, match=r"to try one option takes about 5 min .* --budget 6m"
    ):
        search.run()
    assert not search.log


def test_options_are_tried_though_the_calibration_takes_more_than_its_half() -> None:
    """What is faster is told with the minutes that judging it takes, instead of an error after half of the budget."""
    config, trials = replace(search_file(), budget_s=40.0), Options(["one", "two"], [])
    search = Simulated(config, None, None, trials, 40.0, lambda line: None)  # type: ignore[arg-type]
    search.uncalibrated = 90.0
    search.begin(dict.fromkeys(trials.alone, BASELINE), {"one": -0.5, "two": 0.0}, 0.01)
    search.run()
    assert [stage for stage, _ in search.log] == ["screen-00"]
    assert search.unjudged == pytest.approx(
        90.0 + search.budget.seconds_of(FINAL, search._order()[0][:1])
    )


def test_a_study_whose_time_was_up_is_left_to_the_next_call() -> None:
    config, trials = replace(search_file(), budget_s=240), Options(["one", "two"], [])
    trials.unfinished = lambda: {"screen-01": [Combination("two", ("two",))]}  # type: ignore[method-assign]
    search = Simulated(config, None, None, trials, 240, lambda line: None)  # type: ignore[arg-type]
    search.begin(dict.fromkeys(trials.alone, BASELINE), {}, 0.01)
    search._cut = True
    assert not search.screen()
    assert not search.log


def slow_one(tmp_path: Path, **protocol: Any) -> StudyResult:
    study = fake_study(
        ("quick", "slow"),
        rounds=3,
        warmup=1,
        replicates=1,
        interference=None,
        **protocol,
    )
    return run_fake(tmp_path, study, Fakes(seconds={"quick": 0.05, "slow": 2.0}))[0]


def test_a_study_ends_early_what_is_many_times_slower_and_times_the_rest(
    tmp_path: Path,
) -> None:
    result = slow_one(tmp_path, give_up=4)
    slow = result.variant("slow")
    assert slow.status is Status.SLOWER
    assert "the baseline's (protocol.give_up=4)" in slow.reason
    assert not slow.measurements[0].shapes[0].calls
    assert result.variant("quick").status is Status.OK
    (tmp_path / "all").mkdir()
    assert slow_one(tmp_path / "all", give_up=None).variant("slow").status is Status.OK


def test_a_study_whose_time_is_up_keeps_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second round takes longer than there is time; the first one is in the result."""
    given: dict[str, float] = {}

    def late(worker: FakeWorker, name: str) -> None:
        if name == "time_once" and worker.requests.count(name) == 4:
            raise TimeUpError

    def launched(_argv: list[str], deadline: float, **_: Any) -> None:
        given["s"] = deadline - time.monotonic()
        (tmp_path / "screen-00").mkdir()
        run_fake(tmp_path / "screen-00", study, Fakes({"it": late}))

    monkeypatch.setattr(of_search, "launch", launched)
    monkeypatch.setattr(Studies, "overrides", lambda *_: [])
    studies, study = (
        Studies([], search_file(), None, tmp_path),
        fake_study(rounds=3, warmup=1, replicates=1),
    )
    result = studies.measure("screen-00", [], limit_s=40)
    assert given["s"] == pytest.approx(40, abs=5)
    assert result.status == "interrupted"
    assert findings_of(result, search_file(), Gate())["it"].speedup == pytest.approx(
        1, abs=0.1
    )


def test_what_a_budget_expects_and_keeps() -> None:
    names = [f"option {n}" for n in range(6)]
    budget = SearchBudget(WORK, 100.0, 3, clock=lambda: 0.0, process_s=0.0)
    assert budget.needed_s == 0, "nothing is known yet"
    budget.baseline = BASELINE
    # The baseline, its control and a candidate: four processes and 135 calls of each.
    needed_s = 3 * (4 * BASELINE.start_s + 135 * BASELINE.call_s)
    assert budget.needed_s == pytest.approx(needed_s)
    # It races only where that leaves time to judge.
    assert budget.may_race(names)
    assert not replace(budget, deadline=60.0).may_race(names)
    # Each process of a finalist starts as it did.
    quick = budget.seconds(FINAL, [Cost(0.0, 0.1)])
    assert budget.seconds(FINAL, [Cost(10.0, 0.1)]) == pytest.approx(quick + 3 * 10)
    budget.learn({"a": BASELINE}, budget.seconds("screen", [BASELINE]) + 3 * 2.0)
    assert budget.seconds(FINAL, [Cost(0.0, 0.1)]) == pytest.approx(quick + 3 * 3 * 2.0)


def test_what_a_budget_lets_a_search_screen() -> None:
    plan: dict[str, Any] = {"alone": True, "compile_next": False, "racers": 0}
    # What the baseline takes on a busy machine may leave no time to judge: one is tried all the same.
    late = SearchBudget(
        WORK, 10.0, 3, clock=lambda: 9.0, baseline=Cost(5.0, 5.0), process_s=0.0
    )
    assert late.to_screen(6, [], **plan) == 2
    late.costs["one"] = Cost(5.0, 5.0)
    assert late.to_screen(6, ["one"], **plan) == 0
    # While nothing gains, no time is kept to judge.
    budget = SearchBudget(
        WORK,
        26.0,
        3,
        clock=lambda: 0.0,
        baseline=BASELINE,
        costs={"one": BASELINE},
        process_s=0.0,
    )
    assert budget.to_screen(6, ["one"], **plan, gains=False) > budget.to_screen(
        6, ["one"], **plan, gains=True
    )
    assert budget.to_screen_s([]) == 26
    assert budget.to_screen_s(["one"]) < 26


def test_the_forecast_of_a_judgement_is_what_it_took() -> None:
    """Two cores, a call of 1.4 s, three processes of each of three variants: it took 266 s.

    Images of two variants are made side by side, and the repeated baseline makes few.
    """
    sharing = Sharing(cores=2, threads=1, on_gpu=False)
    with composer_of(["model=emoji", "gate=default"]) as composer:
        run, baseline = composer.current, composer.variant("baseline")
    work = work_ahead([baseline] * 2, 3, run.protocol, run.quality, None, sharing)
    cost, faster = Cost(1.9, 1.4), Cost(1.25, 0.63)
    budget = SearchBudget({FINAL: work}, 1e6, 3, baseline=cost)
    assert budget.seconds(FINAL, [faster]) == pytest.approx(266, rel=0.2)


@pytest.mark.parametrize(
    ("variant", "what", "said"),
    [
        ("baseline", "model", "the contents of its model are later, and were earlier"),
        ("it", "parts", "the contents of its parts"),
        ("it", "caching", "the keys of caching are {'interval': 'later'}, and were"),
    ],
)
def test_a_judged_study_is_of_the_files_and_the_options_of_the_others(
    tmp_path: Path, variant: str, what: str, said: str
) -> None:
    """A repository may move within a search, or the file of an option of one's own be edited."""
    for name, digest in (("screen-00", "earlier"), ("final", "later")):
        (tmp_path / name).mkdir()
        result, _ = run_fake(tmp_path / name, fake_study())
        row = result.variant(variant)
        if what == "caching":
            options = row.config.options | {what: {"interval": digest}}
            row.config = replace(row.config, options=options)
        else:
            row.inputs[what] = digest
        write_result(result, tmp_path / name)
    studies: Any = SimpleNamespace(folder=tmp_path)
    with pytest.raises(UnavailableError, match=f"{variant}: {said}"):
        Studies._require_same_files(studies, tmp_path / "final", result)
