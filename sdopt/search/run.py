"""A search from its first proposal to its answer: screen, race, judge.

Screening and racing choose; nothing that they measured is reported of the winner. The finalists are ranked before they
are judged, by prompts, noise and processes that the search has not seen, and the answer is the first of them that
passes. So the figure of each is unbiased, as it would be of an option that somebody named beforehand; the largest of
them would not be.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from sdopt.config.composer import composer_of
from sdopt.gate.rules import decidable
from sdopt.optimizations.base import Contract
from sdopt.results.files import read_result
from sdopt.results.records import StudyResult
from sdopt.schema import Gate
from sdopt.search.config import SearchConfig
from sdopt.search.findings import Finding, control_of, findings_of
from sdopt.search.racing import Noise, Standing, contenders
from sdopt.search.record import Fate, shortened
from sdopt.search.space import Candidate, Space
from sdopt.search.studies import FINAL, Studies
from sdopt.search.trials import Trials

_RACED = ("latency", "memory")
"""Objectives whose noise the A/A control tells, or that have next to none."""

_RACE_AGAINST_SCREEN = 2.5
"""What a race takes, as a multiple of a screening study: twice the processes, three times the prompts."""


@dataclass
class Search:
    """One search in one folder. `run` takes its steps in order, or goes on where an earlier call ended.

    Attributes:
        config: its keys.
        space: what is varied.
        studies: makes the studies.
        trials: the candidates, as Optuna proposes and keeps them.
        deadline: in seconds of the monotonic clock, after which nothing more is screened.
        say: takes a line of progress.
    """

    config: SearchConfig
    space: Space
    studies: Studies
    trials: Trials
    deadline: float
    say: Callable[[str], None]
    dropped: dict[str, tuple[Fate, str]] = field(default_factory=dict)
    """How candidates ended that take no further part, and why, by their names."""
    _gaining: set[str] = field(default_factory=set)
    """Candidates that were measured to be better than the baseline, if that is what is looked for."""
    _read: dict[str, dict[str, Finding]] = field(default_factory=dict)

    def run(self) -> StudyResult | None:
        """Takes all steps; returns the judged study, or None where no candidate is worth judging."""
        if not any(self.results(FINAL)):
            self.studies.require_final(self._foreseen())
            # Who has raced was chosen among those that were screened before.
            if not any(self.results("race-")):
                self.screen()
        finalists = self.race()
        if not finalists:
            return None
        said = "; ".join(candidate.name for candidate in finalists)
        self.say(f"judging {len(finalists)} on fresh prompts, noise and processes: {said}")
        return self.studies.measure(FINAL, finalists, brief=False)

    def _foreseen(self) -> list[Candidate]:
        """Some candidates, for checks before anything is measured."""
        found = (self.space.candidate(point) for point in self.space.alone())
        return [candidate for candidate in found if isinstance(candidate, Candidate)]

    # ---------------------------------------------------------------------------------------------------- screening

    def screen(self) -> None:
        """Measures candidates side by side, until the budget, the trials or the space are at their end."""
        for stage, candidates in self.trials.unfinished().items():
            self._screen(stage, candidates)
        longest = 0.0
        while (count := self._next(longest)) > 0:
            stage = f"screen-{len(self.trials.stages):02d}"
            candidates = self.trials.propose(count, stage)
            if not candidates:
                which = "can run and hold none of those that spoil images" if self.trials.spoiled else "can run"
                self.trials.ended = f"All {len(self.trials.candidates)} combinations that {which} were screened."
                return
            began = time.monotonic()
            self._screen(stage, candidates)
            longest = max(longest, time.monotonic() - began)

    def _next(self, longest: float) -> int:
        """How many candidates the next study screens; 0 where there is none."""
        done = len(self.trials.candidates)
        count = self.config.side_by_side
        if self.config.trials is not None:
            count = min(count, self.config.trials - done)
            if count <= 0:
                self.trials.ended = f"Screened as many as search.trials={self.config.trials} allows."
                return 0
        if done and time.monotonic() + longest + self._reserved(longest) > self.deadline:
            self.trials.ended = (
                f"Screened {done}: no more fitted into search.budget_s={self.config.budget_s:g} with the judging."
            )
            return 0
        return count

    def _reserved(self, longest: float) -> float:
        """What racing and judging will take, in seconds, as far as it is known."""
        screened = next(iter(self.results("screen-")), None)
        if screened is None:
            return 0.0
        return self.studies.final_seconds(screened) + (_RACE_AGAINST_SCREEN * longest if self.config.races else 0)

    def _screen(self, stage: str, candidates: Sequence[Candidate]) -> None:
        self.say(f"{stage}: {len(candidates)} candidates")
        found = self.findings(self.studies.measure(stage, candidates))
        self.trials.tell(found)
        for name, finding in sorted(found.items(), key=lambda item: _order(item[1], self.config)):
            self.say(f"  {self.told(finding)}  {name}{f': {shortened(finding.out)}' if finding.out else ''}")

    def told(self, finding: Finding) -> str:
        """Writes the figures of a candidate in a line."""
        words = [
            "" if finding.speedup is None else f"{finding.speedup:.2f}×",
            "" if finding.memory_gib is None else f"{finding.memory_gib:.2f} GiB",
            "" if finding.distance is None else f"{self.config.distance} {finding.distance:.2g}",
        ]
        return ", ".join(filter(None, words)) or "no figures"

    # ------------------------------------------------------------------------------------------------------- racing

    def race(self) -> list[Candidate]:
        """Drops who cannot win any more, measuring the others again where they cannot be told apart.

        Returns:
            the finalists, ranked.
        """
        known = {candidate.name: candidate for candidate in self.trials.candidates}
        judged = next(iter(self.results(FINAL)), None)
        for number in range(self.config.races + 1):
            order = self._contenders(number)
            stage = f"race-{number}"
            ran = (self.studies.folder / stage / "result.json").is_file()
            if number == self.config.races or (judged and not ran) or len(order) <= self.config.finalists:
                break
            most = max(self.config.side_by_side, self.config.finalists)
            self._drop(order[most:], Fate.LEFT_OUT, f"{most} others came first, and raced")
            if judged is None:
                self.say(f"{stage}: {len(order[:most])} cannot be told from the best one")
            self.studies.measure(stage, [known[name] for name in order[:most]])
        losing = [name for name in order if name not in self._gaining]
        self._drop(losing, Fate.LEFT_OUT, f"no gain in {self.config.objectives[0]} was measured")
        order = [name for name in order if name in self._gaining]
        there = [row.name for row in judged.candidates] if judged else []
        finalists = [name for name in there if name in known] or self._finalists(order, known)
        self._drop(
            [name for name in order if name not in finalists], Fate.LEFT_OUT, "others came first: search.finalists"
        )
        return [known[name] for name in finalists]

    def _contenders(self, races: int) -> list[str]:
        """The candidates that may still win after so many races, the best first; notes why the others do not."""
        stages = ("screen-", *(f"race-{number}" for number in range(races)))
        found = self.all_findings(stages)
        alive = {name: findings for name, findings in found.items() if name not in self.dropped}
        for name, findings in list(alive.items()):
            if out := next((finding.out for finding in findings if finding.out), ""):
                self._drop([name], Fate.RULED_OUT, out)
                del alive[name]
        self._gaining = set(alive)
        if len(self.config.objectives) > 1 or self.config.objectives[0] not in _RACED:
            return self._ranked_by_front(alive)
        [objective] = self.config.objectives
        standings = {name: standing_of(findings, objective) for name, findings in alive.items()}
        noise = self.noise(stages)
        kept = contenders(standings, noise, self.config.error / max(1, self.config.races + 1))
        why = {
            "latency": "cannot win any more: slower than the best one by more than the A/A controls differ",
            "memory": "cannot win any more: more memory than the best one",
        }
        self._drop(standings.keys() - set(kept), Fate.DROPPED, why[objective])
        self._gaining = {name for name in kept if self._is_gain(standings[name])}
        return kept

    @staticmethod
    def _is_gain(standing: Standing) -> bool:
        return standing.loss < 0

    def _ranked_by_front(self, found: dict[str, list[Finding]]) -> list[str]:
        """The candidates than which none is better in all objectives; for a single one, all by its order."""
        means = {
            name: [standing_of(findings, objective).loss for objective in self.config.objectives]
            for name, findings in found.items()
        }
        order = sorted(means, key=lambda name: means[name])
        if len(self.config.objectives) == 1:
            return order
        front = front_of(means)
        self._drop(
            [name for name in order if name not in front], Fate.DROPPED, "another one is better in all objectives"
        )
        # The best one of each objective first, so that the ends of the front are judged whatever is between them.
        ends = [min(front, key=lambda name: means[name][place]) for place in range(len(self.config.objectives))]
        return list(dict.fromkeys([*ends, *(name for name in order if name in front)]))

    def _finalists(self, order: Sequence[str], known: dict[str, Candidate]) -> list[str]:
        """The first ones, the last of them replaced by the best that promises equal images, if none of them does."""
        chosen = list(order[: self.config.finalists])
        if len(chosen) > 1 and not any(self._promises_equal(known[name]) for name in chosen):
            safe = next((name for name in order if self._promises_equal(known[name])), None)
            chosen = [*chosen[:-1], safe] if safe else chosen
        return chosen

    def _promises_equal(self, candidate: Candidate) -> bool:
        return self.space.contract(candidate) is not Contract.LOSSY

    def _drop(self, names: Iterable[str], fate: Fate, why: str) -> None:
        self.dropped |= dict.fromkeys(names, (fate, why))

    # ------------------------------------------------------------------------------------------------------- reading

    def noise(self, stages: Sequence[str]) -> Noise:
        """What the A/A controls of some stages say of how far processes differ."""
        if self.config.objectives == ["memory"]:
            return Noise(0.0, 1)
        controls = [control_of(result) for stage in stages for result in self.results(stage)]
        return Noise.of_controls([control for control in controls if control is not None])

    def all_findings(self, stages: Sequence[str]) -> dict[str, list[Finding]]:
        """What the studies of some stages say of each candidate."""
        found: dict[str, list[Finding]] = {}
        for stage in stages:
            for result in self.results(stage):
                if result.id not in self._read:
                    self._read[result.id] = self.findings(result)
                for name, finding in self._read[result.id].items():
                    found.setdefault(name, []).append(finding)
        return found

    def findings(self, result: StudyResult) -> dict[str, Finding]:
        """What one study says of each candidate."""
        quality, model = result.config.quality, result.config.model
        images = (quality.prompt_count or 0) * result.config.workload.images_per_prompt
        return findings_of(result, self.config, decidable(self.gate, quality, model, images))

    @cached_property
    def gate(self) -> Gate:
        """The rules that the finalists are judged by."""
        with composer_of(self.studies.overrides(FINAL), self.studies.config_dir) as composer:
            return composer.current.gate

    def results(self, stage: str) -> Iterator[StudyResult]:
        """The results of the studies whose folders begin so, in their order."""
        for path in sorted(self.studies.folder.glob(f"{stage}*/result.json")):
            yield read_result(path)


def standing_of(findings: Sequence[Finding], objective: str) -> Standing:
    """Returns what several studies, in each of which it was measured, say of a candidate in one objective."""
    return Standing.of([(finding.losses[objective], finding.processes) for finding in findings])


def front_of(losses: dict[str, list[float]]) -> set[str]:
    """Returns the names than which none is at least as good in all losses, and better in one."""

    def beats(one: list[float], other: list[float]) -> bool:
        return one != other and all(mine <= theirs for mine, theirs in zip(one, other, strict=True))

    return {name for name, mine in losses.items() if not any(beats(other, mine) for other in losses.values())}


def _order(finding: Finding, config: SearchConfig) -> tuple[bool, float]:
    return bool(finding.out), finding.losses.get(config.objectives[0], math.inf)
