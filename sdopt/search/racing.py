"""Which candidates may still be the best, from estimates that are noisy by a measured amount.

A study measures the ratio of each candidate to its baseline in the logarithm, and that of the A/A control, which is
noise alone: the controls of all studies say how far a process of the same variant differs from another. Distances of
images differ from prompt to prompt, and are compared prompt by prompt. A candidate is dropped where another one is
better in every objective by more than that explains.

A candidate than which none is better in everything, compared with any other one, is at least as good in some objective,
and that comparison alone has to be wrong for it to be dropped. So all comparisons of all races share an error
(Bonferroni): those of the best candidate, or with several objectives those of every candidate of the front. Ranking
alone drops nobody, and what is reported of a winner is measured anew (`sdopt.search.run`).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy import special

from sdopt.search.config import SearchConfig
from sdopt.search.record import Fate


@dataclass(frozen=True)
class Noise:
    """How far log ratios of a process and its baseline scatter that is the same variant.

    Attributes:
        variance: of one process against one baseline process.
        degrees: how many control processes it was estimated from.
    """

    variance: float
    degrees: int

    @classmethod
    def of_controls(cls, log_ratios: Sequence[tuple[float, int]]) -> "Noise":
        """Returns the noise that A/A controls show.

        Args:
            log_ratios: of each study, the mean log ratio of its control, and over how many processes. Its true value is
                zero, so each counts as a degree of freedom.
        """
        if not log_ratios:
            return UNKNOWN
        return cls(float(np.mean([processes * ratio**2 for ratio, processes in log_ratios])), len(log_ratios))


UNKNOWN = Noise(math.inf, 0)
"""Without any control."""


@dataclass(frozen=True)
class RatioStanding:
    """What is known of a candidate's time or memory.

    Attributes:
        loss: mean log ratio to the baseline.
        processes: that it is the mean of.
        noise: of one process.
    """

    loss: float
    processes: int
    noise: Noise

    @classmethod
    def of(cls, found: Sequence[tuple[float, int]], noise: Noise) -> "RatioStanding":
        """Returns the mean of several studies, each a log ratio over some processes."""
        total = sum(processes for _, processes in found)
        return cls(sum(ratio * processes for ratio, processes in found) / total, total, noise)

    def excess(self, other: "RatioStanding", error: float) -> float:
        """Returns by how much it is worse than another one, beyond what noise explains at an error.

        Without any noise it is the difference itself; where the noise is not known it is minus infinity.
        """
        if not self.noise.degrees:
            return -math.inf
        spread = math.sqrt(self.noise.variance * (1 / self.processes + 1 / other.processes))
        return self.loss - other.loss - _quantile(self.noise.degrees, error) * spread


@dataclass(frozen=True)
class DistanceStanding:
    """What is known of the distance of a candidate's images to the baseline's.

    Attributes:
        loss: its mean.
        by_prompt: of each prompt, in the order in which all studies of a search show them.
    """

    loss: float
    by_prompt: tuple[float, ...]

    def excess(self, other: "DistanceStanding", error: float) -> float:
        """Returns by how much it is worse than another one, beyond what prompts explain that both were drawn for."""
        count = min(len(self.by_prompt), len(other.by_prompt))
        if count < 2:
            return -math.inf
        gaps = np.subtract(self.by_prompt[:count], other.by_prompt[:count])
        return float(gaps.mean() - _quantile(count - 1, error) * gaps.std(ddof=1) / math.sqrt(count))


Standing = RatioStanding | DistanceStanding

Standings = Mapping[str, Sequence[Standing]]
"""By candidate, what is known of it in each objective."""


@cache
def _quantile(degrees: int, error: float) -> float:
    return float(special.stdtrit(degrees, 1 - error))


def front_of(losses: Mapping[str, Sequence[float]]) -> set[str]:
    """Returns the names than which none is at least as good in all losses, and better in one."""

    def beats(one: Sequence[float], other: Sequence[float]) -> bool:
        return one != other and all(mine <= theirs for mine, theirs in zip(one, other, strict=True))

    return {name for name, mine in losses.items() if not any(beats(other, mine) for other in losses.values())}


def ranked(standings: Standings) -> list[str]:
    """Returns the names of the candidates, the best first.

    With several objectives these are the front, then the front of the rest, and so on; of each the best one of each
    objective comes first, so that the ends of a front are measured whatever is between them.
    """
    losses = {name: [each.loss for each in standing] for name, standing in standings.items()}
    rest = sorted(losses, key=lambda name: losses[name])
    if not rest or len(losses[rest[0]]) == 1:
        return rest
    order: dict[str, None] = {}
    while rest:
        front = front_of({name: losses[name] for name in rest})
        inside = [name for name in rest if name in front]
        ends = [min(inside, key=lambda name: losses[name][place]) for place in range(len(losses[rest[0]]))]
        order |= dict.fromkeys([*ends, *inside])
        rest = [name for name in rest if name not in front]
    return list(order)


def contenders(standings: Standings, error: float) -> list[str]:
    """Returns the candidates that may still be the best one, or on the front, the best first.

    Args:
        standings: of all that are still in.
        error: the chance that this race drops the best one, or any of the front, all its comparisons together.
    """
    order = ranked(standings)
    if len(order) < 2:
        return order
    objectives = len(standings[order[0]])
    each = error / (len(order) - 1) / (1 if objectives == 1 else len(order))

    def beaten(place: int) -> bool:
        # Who is worse in everything is ranked behind.
        return any(_is_beaten(standings[order[place]], standings[better], each) for better in order[:place])

    return [name for place, name in enumerate(order) if not beaten(place)]


def _is_beaten(one: Sequence[Standing], other: Sequence[Standing], error: float) -> bool:
    """Whether the other one is shown to be better in everything; where nothing is noisy, being as good is enough."""
    found = [mine.excess(theirs, error) for mine, theirs in zip(one, other, strict=True)]  # type: ignore[arg-type]
    return all(each >= 0 for each in found) and any(each > 0 for each in found)


def is_gain(standing: Sequence[Standing]) -> bool:
    """Whether a candidate was measured to be better than the baseline in something, if it can be.

    In the distance of images it cannot: that of the baseline itself is zero.
    """
    ratios = [each.loss for each in standing if isinstance(each, RatioStanding)]
    return not ratios or min(ratios) < 0


def race(
    config: SearchConfig,
    known: Callable[[int], Standings],
    measure: Callable[[int, list[str]], bool],
    drop: Callable[[Iterable[str], Fate, str], None],
) -> list[str]:
    """Drops who cannot win any more, measuring the others again where they are too many to be judged.

    Args:
        config: how many races there are, of how many, with which error, until how many are left.
        known: returns what is known after so many races; of some it may tell that they are out, and leave them out.
        measure: measures candidates again in a race of that number; returns whether it did.
        drop: takes the names of candidates that take no further part, and why.

    Returns:
        who is left and was measured to be a gain, the best first.
    """
    gone: set[str] = set()
    for number in range(config.races + 1):
        standings = {name: standing for name, standing in known(number).items() if name not in gone}
        order = contenders(standings, config.error / (config.races + 1))
        gone |= standings.keys() - set(order)
        drop(standings.keys() - set(order), Fate.DROPPED, _why_dropped(config))
        most = max(config.side_by_side, config.finalists)
        if number == config.races or len(order) <= config.finalists or not measure(number, order[:most]):
            break
        gone |= set(order[most:])
        drop(order[most:], Fate.LEFT_OUT, f"{most} others came first, and raced")
    without = [name for name in order if not is_gain(standings[name])]
    drop(without, Fate.LEFT_OUT, f"no gain in {' or '.join(config.objectives)} was measured")
    return [name for name in order if name not in without]


_WHY = {
    "latency": "slower than the best one by more than the A/A controls differ",
    "memory": "more memory than the best one, by more than the A/A controls differ",
    "distance": "farther from the baseline's images than another one, by more than prompts explain",
}


def _why_dropped(config: SearchConfig) -> str:
    if len(config.objectives) == 1:
        return f"cannot win any more: {_WHY[config.objectives[0]]}"
    better = f"{', '.join(config.objectives[:-1])} and {config.objectives[-1]}"
    return f"cannot be on the front any more: another one is better in {better} by more than noise explains"
