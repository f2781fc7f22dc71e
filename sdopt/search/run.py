"""Runs a search from its first proposal to its answer: screen, race, judge.

Screening and racing only select; none of their measurements are reported for the winner. The finalists are ranked
first, then judged on prompts, noise and processes that the search has not seen; the answer is the first finalist in
that ranking that passes. So each reported figure is unbiased, as if the option had been named beforehand. The largest
figure of several would be biased.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from statistics import mean

from sdopt.contract import Contract
from sdopt.errors import UsageError, counted
from sdopt.record.records import StudyResult
from sdopt.report.sentences.changes import duration_text
from sdopt.search.budget import Cost, SearchBudget
from sdopt.search.config import SearchConfig
from sdopt.search.findings import CandidateFinding
from sdopt.search.judgements import Judgements
from sdopt.search.racing import (
    RatioStanding,
    Standing,
    Standings,
    contenders,
    is_gain,
    race,
)
from sdopt.search.record import FINAL, Fate, start_said
from sdopt.search.results import Results, costs_of, standing_of
from sdopt.search.space import Combination, Space
from sdopt.search.studies import CALIBRATE, Studies
from sdopt.search.trials import Trials
from sdopt.statistics.words import gib_text, shortened
from sdopt.study.timeline import waited_s
from sdopt.study.work import Sharing, work_ahead
from sdopt.worker.draws import drawing_batch

_LOADING_S = 2.0
"""Seconds to expect of loading a model, before any was measured."""

SLACK = 1.1
"""How far a step may exceed what is left of the budget, and a judgement the budget: no estimate is better than this."""

_FORETOLD = 2.0
"""How much longer than it takes a call may be foretold to take: `sdopt plan` misses by so much where this machine's rates
were measured while it was busy. What was refused for that could not be tried at all."""

_HOPE = 1.5
"""Up to how many times what is left a judgement may be expected to take, and is begun all the same: what does not end
is completed by a later call, which then takes less."""


@dataclass
class Search:
    """One search in one folder. `run` takes its steps in order, or continues where an earlier call ended.

    Attributes:
        trials: the candidates, which Optuna proposes and stores.
        deadline: the end of the budget, in seconds of the monotonic clock.
        say: prints a line of progress.
        brief: whether the judged study is not shown, because the caller answers in other words.
        expected_call_s: returns the seconds to expect of the baseline's call before anything is measured, by
            `sdopt plan`; None where it expects nothing.
        answered: whether an earlier call answered.
        goes_on: whether this call has more time than those that answered, so that it tries more.
        ready_s: the seconds that the command took before the search began, as another call of it will.
        unjudged: the seconds that judging the best candidate takes; set if the budget does not leave them.
        dropped: the fate of each candidate that is out of the search, with the reason, by name.
    """

    config: SearchConfig
    space: Space
    studies: Studies
    trials: Trials
    deadline: float
    say: Callable[[str], None]
    brief: bool = False
    expected_call_s: Callable[[], float | None] = lambda: None
    answered: bool = False
    goes_on: bool = False
    ready_s: float = 0.0
    unjudged: float | None = None
    dropped: dict[str, tuple[Fate, str]] = field(default_factory=dict)
    _cut: bool = False
    """Whether a study was ended because its time was up: this call screens no more, and the next one completes it."""

    @cached_property
    def results(self) -> Results:
        """What its studies measured."""
        return Results(self.studies)

    @cached_property
    def budget(self) -> SearchBudget:
        """Plans the time, with what the studies of this folder cost so far."""
        work = {}
        for stage in (CALIBRATE, "screen", "race", FINAL):
            run, baseline = self.studies.composed(stage)
            # What is calibrated is the baseline alone; else a candidate makes images beside it.
            variants = [baseline] if stage == CALIBRATE else [baseline] * 2
            batch = drawing_batch(variants, run.quality.batch_size, run.gate.judges)
            device = self.space.device
            work[stage] = work_ahead(
                variants,
                run.protocol.replicates or 1,
                run.protocol,
                run.quality,
                batch,
                Sharing.of(device, device.attributes, baseline),
            )
        budget = SearchBudget(work, self.deadline, self.config.finalists)
        # The first study of candidates is planned by what the baseline took, if it was calibrated.
        for result in self.results.finished("screen-"):
            cost, costs = costs_of(result)
            budget.baseline = cost or budget.baseline
            budget.costs |= costs
        self._learn_baseline(budget)
        if budget.baseline is None and (call_s := self.expected_call_s()) is not None:
            budget.baseline = Cost(_LOADING_S + call_s, call_s)
        return budget

    def _learn_baseline(self, budget: SearchBudget) -> None:
        """Lets a budget know what the baseline took while it was calibrated, unless a screening study says so."""
        if not budget.costs:
            for result in self.results.finished(CALIBRATE):
                baseline, _ = costs_of(result)
                budget.baseline = baseline or budget.baseline

    def run(self) -> None:
        """Takes all steps, or those that are left.

        Raises UsageError if the budget is too short to try a single option.
        """
        if self.answered and not self.goes_on:
            self.say(
                "answered before: a larger budget goes on from there, and --again begins anew"
            )
        at_hand = self._at_hand()
        if at_hand is None and self.answered and not self.goes_on:
            self.race()
            return
        finalists = self.race() if at_hand is not None else self._selected()
        if not finalists:
            return
        stage, names = self._judging_stage, [candidate.name for candidate in finalists]
        if at_hand is not None and at_hand.status == "finished":
            self.studies.measure(stage, finalists, brief=self.brief, within=self._last)
            return
        needed_s = self.budget.uncalibrated_s + self._to_judge_s(names)
        if self.budget.uncalibrated_s or needed_s > _HOPE * self.budget.left_s:
            self.unjudged = needed_s
            return
        self.say(
            f"judging {len(finalists)} on fresh prompts, noise and processes{self._duration_text(FINAL, names)}: "
            f"{'; '.join(names)}"
        )
        # What the whole budget may be exceeded by: a judgement that lacks its scores alone is of no use yet.
        limit_s = self.budget.left_s + (SLACK - 1) * self.config.budget_s
        result = self.studies.measure(
            stage, finalists, brief=self.brief, limit_s=limit_s, within=self._last
        )
        if result.status != "finished":
            self.unjudged = self._to_judge_s(names)

    @property
    def _last(self) -> tuple[float, float]:
        """When this call began; it ends with the study that it has come to."""
        return self.deadline - self.config.budget_s, -math.inf

    def _within(
        self, begun: int = 0, calibrating_s: float = 0.0
    ) -> tuple[float, float]:
        """Returns when this call began, and when it ends: with its budget, or once everything was tried and judged.

        Of what is proposed, the last `begun` are not measured yet.
        """
        began, _ = self._last
        known = len(self.trials.candidates)
        most = min(self.space.most, self.config.trials or self.space.most)
        untried = begun + (0 if self.trials.exhausted else max(0, most - known))
        leaders, _ = self._order()
        whole_s = calibrating_s + self.budget.whole_s(
            untried, self.config.side_by_side, len(leaders)
        )
        return began, min(self.deadline, self.budget.clock() + whole_s)

    def _to_judge_s(self, names: Sequence[str]) -> float:
        """Returns the seconds that judging takes, without the timed calls and images that an earlier call kept.

        What was kept tells at which pace the rest goes on; its processes are loaded again.
        """
        begun = self._at_hand()
        if begun is None:
            return self.budget.seconds_of(FINAL, names)
        baseline, costs = costs_of(begun)
        if baseline is not None and costs.keys() >= set(names):
            self.budget.baseline = baseline
            self.budget.costs |= costs
        return self.budget.seconds_of(FINAL, names) - self._kept_s(begun)

    def _kept_s(self, result: StudyResult) -> float:
        """Returns the seconds that the timed calls and the images of a study have taken, which are kept."""
        prompts = result.config.quality.prompt_count or 1
        timed_s: float = 0.0
        drawn_s: list[float] = []
        for row in result.variants:
            calls_s = list(chain.from_iterable(row.samples.values()))
            if not calls_s:
                continue
            timed_s += sum(calls_s)
            if not row.is_control:
                records = row.images or row.kept_images
                drawn = {record.prompt_index for record in records}
                drawn_s.append(len(drawn) / prompts * mean(calls_s))
        return timed_s + self.budget.work[FINAL].images_s(drawn_s)

    @property
    def judgements(self) -> Judgements:
        """The verdicts of the judged studies that ended."""
        ended = [
            (folder, result)
            for folder, result in self.results.judged()
            if result.status == "finished"
        ]
        return Judgements.of(ended, self.config)

    def _at_hand(self) -> StudyResult | None:
        """Returns the judged study that this call completes; None if it may select anew."""
        judged = self.results.judged()
        if not judged:
            return None
        _, latest = judged[-1]
        is_complete = latest.status == "finished"
        return None if is_complete and self.goes_on else latest

    @property
    def _judging_stage(self) -> str:
        """The folder of the judged study that this call completes or begins."""
        judged = self.results.judged()
        number = len(judged)
        if self._at_hand() is not None:
            number -= 1
        return f"{FINAL}-{number}" if number else FINAL

    def _selected(self) -> list[Combination]:
        """Screens and races; returns the finalists, ranked."""
        begun = sum(map(len, self.trials.unfinished().values()))
        if tried := len(self.trials.candidates) - begun:
            self.say(
                f"going on: {tried} combination{'s were' if tried > 1 else ' was'} tried before"
            )
        if left_out := len(self.space.left_out):
            options = counted(left_out, "option")
            self.say(f"cannot run here: {options}; dry_run=true says which, and why")
        self.studies.require_final(self.space.candidates(self.space.alone()))
        calibrating_s = 0.0
        if self.studies.calibration_images:
            calibrating_s = self.budget.seconds(CALIBRATE, [])
        self._require_time(calibrating_s)
        self._tell_least(calibrating_s)
        # To judge takes longer than to calibrate: what needs more than half of the time leaves none for that.
        half_s = self.budget.left_s / 2
        self.budget.uncalibrated_s = self.studies.calibrate(
            self.say, half_s, self._within(calibrating_s=calibrating_s)
        )
        self._learn_baseline(self.budget)
        self._require_time()
        if calibrating_s:
            self._tell_least(self.budget.uncalibrated_s)
        finalists: list[Combination] = []
        # A race that ends early, or that nobody needs any more, leaves time to screen more.
        while self.screen() or not finalists:
            finalists = self.race()
            if not finalists:
                break
        return finalists

    def _tell_least(self, calibrating_s: float) -> None:
        """Says how long this call takes if it tries and judges one combination, and what that is known from."""
        baseline = self.budget.baseline
        if baseline is None:
            return
        source = "as measured" if self._is_measured else "by `sdopt plan`"
        least_min = self._least_min(calibrating_s)
        line = (
            f"to try and to judge one combination takes about {least_min} min in all here "
            f"({duration_text(baseline.call_s)} a call, {source})"
        )
        if calibrating_s + self.budget.needed_s > self.budget.left_s:
            line = (
                f"a budget of {self.config.budget_s / 60:.3g} min may leave no time to judge what is faster: {line}; "
                f"{budget_text(least_min)} leaves enough"
            )
        self.say(line)

    @property
    def _is_measured(self) -> bool:
        """Whether it is known what a call of the baseline takes."""
        measured = [
            *self.results.finished(CALIBRATE),
            *self.results.finished("screen-"),
        ]
        return any(costs_of(result)[0] for result in measured)

    def _least_min(self, calibrating_s: float) -> int:
        """Returns the minutes of this call if it calibrates for some seconds, and tries and judges one combination."""
        used_s = self.config.budget_s - self.budget.left_s
        return math.ceil((used_s + calibrating_s + self.budget.needed_s) / 60)

    def _require_time(self, calibrating_s: float = 0.0) -> None:
        """Raises UsageError if not even one option can be tried; what was measured serves another call."""
        least_s = calibrating_s + self.budget.least_s
        slack = SLACK if self._is_measured else SLACK * _FORETOLD
        if self.budget.costs or least_s <= slack * self.budget.left_s:
            return
        used_s = self.config.budget_s - self.budget.left_s
        to_try = math.ceil((used_s + least_s) / 60)
        to_judge = math.ceil(SLACK * self._least_min(calibrating_s))
        raise UsageError(
            f"search.budget_s={self.config.budget_s:g}: to try one option takes about {to_try} min here; to try one "
            f"and to judge it takes about {to_judge} min in all: give {budget_text(to_judge)}"
        )

    # ---------------------------------------------------------------------------------------------------- screening

    def screen(self) -> bool:
        """Measures candidates side by side, until budget, trials or space are exhausted; returns whether any were."""
        unfinished = {} if self._cut else self.trials.unfinished()
        for stage, candidates in unfinished.items():
            self._screen(stage, candidates)
        measured = bool(unfinished)
        while (
            not self.trials.exhausted and (count := self._next()) > 0 and not self._cut
        ):
            stage = f"screen-{len(self.trials.stages):02d}"
            candidates = self.trials.propose(count, stage)
            if not candidates:
                self._exhaust()
                break
            self._screen(stage, candidates)
            measured = True
        return measured

    def _exhaust(self) -> None:
        """Notes that all combinations were screened."""
        which = "run"
        if self.trials.spoiled:
            which = "run and contain no option that spoils images"
        count = len(self.trials.candidates)
        said = f"All {count} combinations that can {which} were screened."
        if count == 1:
            said = f"The only combination that can {which} was screened."
        self.trials.ended = said
        self.trials.exhausted = True

    def _next(self) -> int:
        """Returns how many candidates the next study screens; 0 ends the screening."""
        done = len(self.trials.candidates)
        most = self.config.side_by_side
        why = f"Screened {counted(done, 'combination')}: search.budget_s={self.config.budget_s:g} left no time for more."
        trials = self.config.trials
        if trials is not None and trials < done + most:
            most = max(0, trials - done)
            if not most:
                why = f"Screened as many combinations as search.trials={trials} allows."
        untried = self.trials.untried
        order, gains = self._order()
        racers = 0
        if self._races < self.config.races and len(order) > self.config.finalists:
            racers = max(self.config.side_by_side, self.config.finalists)
        if most:
            compiles = self.trials.compiles_next
            most = self.budget.to_screen(
                most,
                order,
                alone=bool(untried),
                compile_next=compiles,
                racers=racers,
                gains=gains,
            )
        if not most and not self.trials.more():
            self._exhaust()
        elif not most:
            if untried:
                why += f" Not even tried on their own: {'; '.join(untried)}."
            self.trials.ended = why
        return most

    def _order(self) -> tuple[list[str], bool]:
        """Returns the candidates that may still be the best one, the best first, and whether any of them gains."""
        standings = self._standings(self._races)
        contending = contenders(standings, self.config.error / (self.config.races + 1))
        left = self._earlier.open_among(contending)
        return left, any(is_gain(standings[name]) for name in left)

    @cached_property
    def _earlier(self) -> Judgements:
        """The verdicts of earlier calls."""
        return self.judgements

    @property
    def _races(self) -> int:
        """The number of races so far."""
        return sum(1 for _ in self.results.of("race-"))

    def _duration_text(self, stage: str, names: Sequence[str]) -> str:
        seconds = self.budget.seconds_of(stage, names)
        if stage == FINAL:
            seconds = self._to_judge_s(names)
        minutes = math.ceil(seconds / 60)
        return f" (about {minutes} min)"

    def _screen(self, stage: str, candidates: Sequence[Combination]) -> None:
        self.say(f"{stage}: {counted(len(candidates), 'candidate')}")
        began = time.monotonic()
        # The first one has more time: a search that tries nothing answers nothing.
        limit_s = _HOPE * self.budget.left_s
        if self.budget.costs:
            order, gains = self._order()
            limit_s = self.budget.to_screen_s(order if gains else [])
        result = self.studies.measure(
            stage, candidates, limit_s=limit_s, within=self._within(len(candidates))
        )
        self._cut = result.status != "finished"
        findings = self.results.findings(result)
        took_s = time.monotonic() - began - waited_s(self.studies.folder / stage)
        baseline, costs = costs_of(result)
        self.budget.baseline = baseline or self.budget.baseline
        self.budget.learn(costs, took_s)
        self.trials.tell(findings)
        first = self.config.objectives[0]

        def rank(name: str) -> tuple[bool, float]:
            finding = findings[name]
            loss = finding.losses.get(first, math.inf)
            return bool(finding.out), loss

        for name in sorted(findings, key=rank):
            finding = findings[name]
            out = f": {shortened(finding.out)}" if finding.out else ""
            self.say(f"  {self.figures_of(finding)}  {name}{out}")

    def figures_of(self, finding: CandidateFinding) -> str:
        """Returns the figures of a candidate in one line."""
        words = []
        if finding.speedup is not None:
            words.append(f"{finding.speedup:.2f}×")
        memory_gib = finding.row.largest_memory_gib
        if memory_gib is not None:
            words.append(gib_text(memory_gib))
        if "distance" in finding.losses:
            words.append(f"image distance {finding.losses['distance']:.2g}")
        start = start_said(finding.row.break_even)
        if start:
            words.append(f"start {start}")
        return ", ".join(words) or "no figures"

    # ------------------------------------------------------------------------------------------------------- racing

    def race(self) -> list[Combination]:
        """Drops candidates that cannot win any more, and measures the others again while they cannot be told apart.

        Returns the finalists, ranked.
        """
        self.dropped.clear()
        candidates = {candidate.name: candidate for candidate in self.trials.candidates}
        judged = self._at_hand()

        def measure(number: int, names: list[str]) -> bool:
            stage = f"race-{number}"
            if not self._has_begun(stage):
                if judged:
                    return False
                if not self.budget.may_race(names):
                    self.say(
                        f"{len(names)} may still be the best; search.budget_s leaves no time to race and to judge"
                    )
                    return False
                self.say(
                    f"{stage}: {len(names)} may still be the best{self._duration_text('race', names)}"
                )
            racing = [candidates[name] for name in names]
            self.studies.measure(stage, racing, within=self._within())
            return True

        order = race(self.config, self._standings, measure, self._drop)
        there = [row.name for row in judged.candidates] if judged else []
        finalists = [name for name in there if name in candidates]
        left = self._earlier.open_among(order)
        if not finalists:
            finalists = self._finalists(left, candidates)
        near = self._as_fast(left)
        for name in order:
            if name in finalists:
                continue
            why = "others came first: search.finalists"
            if len(finalists) < min(self.config.finalists, len(left)):
                first = "others gained more than it by more than processes differ, and came first"
                if name in near:
                    first = "of those that are about as fast, the ones whose images are closest came first"
                why = f"search.budget_s left time to judge {len(finalists)}; {first}"
            self._drop([name], "not judged", why)
        return [candidates[name] for name in finalists]

    def _has_begun(self, stage: str) -> bool:
        return (self.studies.folder / stage / "result.json").is_file()

    def _standings(self, races: int) -> Standings:
        """Returns the estimates of all candidates after a number of races; drops those that are ruled out."""
        stages = ("screen-", *(f"race-{number}" for number in range(races)))
        noise = {
            objective: self.results.noise(objective, stages)
            for objective in self.config.objectives
        }
        standings: dict[str, list[Standing]] = {}
        for name, findings in self.results.all_findings(stages).items():
            reasons = [finding.out for finding in findings if finding.out]
            if reasons:
                self._drop([name], "fail", reasons[0])
                continue
            standings[name] = []
            for objective, scatter in noise.items():
                standings[name].append(standing_of(findings, objective, scatter))
        return standings

    def _finalists(
        self, order: Sequence[str], known: dict[str, Combination]
    ) -> list[str]:
        """Returns the first candidates; if none promises equal images, replaces the last by the best one that does."""
        order = self._closest_first(order)
        chosen = list(order[: self.budget.to_judge(order)])
        equal = [
            name
            for name in order
            if self.space.contract(known[name]) is not Contract.LOSSY
        ]
        if len(chosen) > 1 and equal and not set(chosen) & set(equal):
            chosen[-1] = equal[0]
        return chosen

    def _closest_first(self, order: Sequence[str]) -> Sequence[str]:
        """Puts candidates in front whose images are closest, among those that are as fast as the first up to noise.

        Most that fail a judgement do so by their images, and often only one of several equally fast ones can be judged.
        """
        findings = self.results.all_findings(("screen-", "race-"))

        def distance(name: str) -> float:
            known = [one.losses.get("distance") for one in findings.get(name, ())]
            return math.inf if not known or known[-1] is None else known[-1]

        near = self._as_fast(order)
        return [
            *sorted(near, key=distance),
            *(name for name in order if name not in near),
        ]

    def _as_fast(self, order: Sequence[str]) -> list[str]:
        """Returns the candidates that are as fast as the first up to noise; none where speed alone does not rank them."""
        if self.config.objectives != ["latency"] or len(order) < 2:
            return []
        speeds = {name: of[0] for name, of in self._standings(self._races).items()}
        fastest = speeds[order[0]]
        if not isinstance(fastest, RatioStanding) or not fastest.noise.degrees:
            return []
        latest = fastest.loss + math.sqrt(fastest.noise.variance)
        return [name for name in order if speeds[name].loss <= latest]

    def _drop(self, names: Iterable[str], fate: Fate, why: str) -> None:
        self.dropped |= dict.fromkeys(names, (fate, why))


def budget_text(minutes: int) -> str:
    """Returns a budget as the two commands of a search take it."""
    return f"search.budget_s={60 * minutes} (sdopt optimize --budget {minutes}m)"
