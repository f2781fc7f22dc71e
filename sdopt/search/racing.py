"""Finds the candidates that may still be the best, from estimates whose noise is measured.

A study measures the log ratio of each candidate to its baseline, and that of the repeated baseline, which is pure
noise: the controls of all studies show how far two processes of one variant differ. Image distances vary from prompt to
prompt, so they are compared prompt by prompt. A race drops a candidate if another one is better in every objective by
more than this noise explains.

A candidate on the front is at least as good as any other one in some objective, so it is dropped only if that one
comparison is wrong. So all comparisons of all races share one error rate α (Bonferroni): the comparisons of the best
candidate or, with several objectives, of every candidate on the front. A low rank alone drops no candidate, and the
figures reported of the winner are measured anew (`sdopt.search.run`).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import scipy

from sdopt.search.config import SearchConfig
from sdopt.search.record import Fate


@dataclass(frozen=True)
class Scatter:
    """The scatter of log ratios between two processes of the same variant.

    Attributes:
        variance: the variance of the log ratio of one process to one baseline process.
        degrees: the degrees of freedom of that estimate: the number of controls.
    """

    variance: float
    degrees: int

    @classmethod
    def of_controls(cls, log_ratios: Sequence[tuple[float, int]]) -> "Scatter":
        """Estimates the noise from repeated baselines.

        Args:
            log_ratios: for each study, the mean log ratio of its control and the number of processes. The true log
                ratio is zero, so each control counts as one degree of freedom.
        """
        if not log_ratios:
            return UNKNOWN
        squares = [processes * ratio**2 for ratio, processes in log_ratios]
        return cls(float(np.mean(squares)), len(squares))


UNKNOWN = Scatter(math.inf, 0)
"""The noise if no control was measured."""


@dataclass(frozen=True)
class RatioStanding:
    """The estimate of a candidate's time or memory.

    Attributes:
        loss: the mean log ratio to the baseline.
        processes: the number of processes in that mean.
        noise: the noise of one process.
    """

    loss: float
    processes: int
    noise: Scatter

    @classmethod
    def of(
        cls,
        studies: Sequence[tuple[float, int]],
        noise: Scatter,
    ) -> "RatioStanding":
        """Returns the mean of several studies, each a log ratio over some processes."""
        total = 0
        weighted = 0.0
        for ratio, processes in studies:
            total += processes
            weighted += ratio * processes
        return cls(weighted / total, total, noise)

    def excess(self, other: "RatioStanding", error: float) -> float:
        """Returns by how much this candidate is worse than another, beyond what noise explains at an error rate.

        Returns the plain difference if the noise is zero, and minus infinity if the noise is unknown.
        """
        if not self.noise.degrees:
            return -math.inf
        of_means = 1 / self.processes + 1 / other.processes
        spread = math.sqrt(self.noise.variance * of_means)
        by_noise = _quantile(self.noise.degrees, error) * spread
        return self.loss - other.loss - by_noise


@dataclass(frozen=True)
class DistanceStanding:
    """The estimate of the distance of a candidate's images to the baseline's.

    Attributes:
        loss: the mean distance.
        by_prompt: the distance for each prompt, in the order of prompts that all studies of a search share.
    """

    loss: float
    by_prompt: tuple[float, ...]

    def excess(self, other: "DistanceStanding", error: float) -> float:
        """Returns by how much this candidate is worse than another, beyond the variation over their common prompts."""
        count = min(len(self.by_prompt), len(other.by_prompt))
        if count < 2:
            return -math.inf
        mine = self.by_prompt[:count]
        theirs = other.by_prompt[:count]
        gaps = np.subtract(mine, theirs)
        spread = gaps.std(ddof=1)
        by_chance = _quantile(count - 1, error) * spread
        return float(gaps.mean() - by_chance / math.sqrt(count))


Standing = RatioStanding | DistanceStanding

Standings = Mapping[str, Sequence[Standing]]
"""The estimates of each candidate, one for each objective."""


@cache
def _quantile(degrees: int, error: float) -> float:
    return float(scipy.special.stdtrit(degrees, 1 - error))


def front_of(losses: Mapping[str, Sequence[float]]) -> set[str]:
    """Returns the Pareto front: the names for which no other is at least as good in all losses and better in one."""
    front = set()
    for name, mine in losses.items():
        if not any(_beats(other, mine) for other in losses.values()):
            front.add(name)
    return front


def _beats(one: Sequence[float], other: Sequence[float]) -> bool:
    """Returns whether losses are at most those of another one, and one of them is less."""
    if one == other:
        return False
    pairs = zip(one, other, strict=True)
    return all(mine <= theirs for mine, theirs in pairs)


def ranked(standings: Standings) -> list[str]:
    """Returns the names of the candidates, the best first.

    With several objectives, the front comes first, then the front of the rest, and so on. Within each front, the best
    candidate in each objective comes first, so that the ends of a front are always measured.
    """
    losses = {}
    for name, standing in standings.items():
        losses[name] = [estimate.loss for estimate in standing]
    rest = sorted(losses, key=lambda name: losses[name])
    objectives = max(map(len, losses.values()), default=0)
    if objectives < 2:
        return rest
    order: dict[str, None] = {}
    while rest:
        front = front_of({name: losses[name] for name in rest})
        inside = [name for name in rest if name in front]
        for objective in range(objectives):
            end = min(inside, key=lambda name: losses[name][objective])
            order[end] = None
        order |= dict.fromkeys(inside)
        rest = [name for name in rest if name not in front]
    return list(order)


def contenders(standings: Standings, error: float) -> list[str]:
    """Returns the candidates that may still be the best one, or on the front, the best first.

    Args:
        standings: the estimates of all candidates that are still in the race.
        error: the chance, over all comparisons together, that this race drops the best candidate, or any of the front.
    """
    order = ranked(standings)
    if len(order) < 2:
        return order
    objectives = len(standings[order[0]])
    chance = error / (len(order) - 1)
    if objectives > 1:
        chance /= len(order)

    def is_beaten(name: str, better: str) -> bool:
        """Whether another one is shown better in all objectives; without noise, ties in some suffice."""
        pairs = zip(standings[name], standings[better], strict=True)
        excesses = [mine.excess(theirs, chance) for mine, theirs in pairs]  # type: ignore[arg-type]
        return min(excesses) >= 0 and max(excesses) > 0

    # A candidate that is worse in everything has a lower rank.
    contending = []
    for rank, name in enumerate(order):
        if not any(is_beaten(name, better) for better in order[:rank]):
            contending.append(name)
    return contending


def is_gain(standing: Sequence[Standing]) -> bool:
    """Returns whether a candidate was measured to be better than the baseline in time or memory.

    True if distance is the only objective: no candidate can beat the baseline there, whose own distance is zero.
    """
    ratios = [one.loss for one in standing if isinstance(one, RatioStanding)]
    return not ratios or min(ratios) < 0


def race(
    config: SearchConfig,
    known: Callable[[int], Standings],
    measure: Callable[[int, list[str]], bool],
    drop: Callable[[Iterable[str], Fate, str], None],
) -> list[str]:
    """Drops candidates that cannot win any more, and measures the others again while they are too many to judge.

    Args:
        config: the number of races, candidates per race and finalists, and the error rate.
        known: returns the estimates after a number of races, without the candidates that are ruled out by then.
        measure: measures candidates again in the race of a number; returns whether it did.
        drop: receives the names of dropped candidates, with the reason.

    Returns:
        the remaining candidates that were measured to be a gain, the best first.
    """
    gone: set[str] = set()
    why = f"cannot win any more: {_WHY[config.objectives[0]]}"
    if len(config.objectives) > 1:
        *first, last = config.objectives
        better = f"{', '.join(first)} and {last}"
        why = f"cannot be on the front any more: another one is better in {better} by more than noise explains"
    for number in range(config.races + 1):
        standings = dict(known(number))
        for name in gone & standings.keys():
            del standings[name]
        error = config.error / (config.races + 1)
        order = contenders(standings, error)
        beaten = standings.keys() - set(order)
        gone |= beaten
        drop(beaten, "beaten", why)
        most = max(config.side_by_side, config.finalists)
        if number == config.races or len(order) <= config.finalists:
            break
        if not measure(number, order[:most]):
            break
        gone |= set(order[most:])
        drop(
            order[most:],
            "not judged",
            f"{most} other candidates ranked higher and took the places in the race",
        )
    without = [name for name in order if not is_gain(standings[name])]
    drop(
        without,
        "not judged",
        f"no gain in {' or '.join(config.objectives)} was measured",
    )
    return [name for name in order if name not in without]


_WHY = {
    "latency": "outpaced by the best one, by more than equal baselines differ",
    "memory": "more memory than the best one, by more than equal baselines differ",
    "distance": "farther from the baseline's images than another one, by more than prompts explain",
}
