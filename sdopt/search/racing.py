"""Which candidates can still be the best one, from estimates that are noisy by a measured amount.

A study measures the ratio of each candidate to its baseline in the logarithm, and that of the A/A control, which is
noise alone: the controls of all studies say how far a process of the same variant differs from another. A candidate is
dropped where it is worse than the leader by more than that noise allows, at an error that all comparisons of all races
share (Bonferroni): so the chance that the best one is dropped anywhere is at most that error. Ranking alone drops
nobody, and what is reported of a winner is measured anew (`sdopt.search.run`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t


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
            return cls(math.inf, 0)
        return cls(float(np.mean([processes * ratio**2 for ratio, processes in log_ratios])), len(log_ratios))


@dataclass(frozen=True)
class Standing:
    """What is known of a candidate.

    Attributes:
        loss: mean log of what shall be small, in relation to the baseline.
        processes: that it is the mean of.
    """

    loss: float
    processes: int

    @classmethod
    def of(cls, found: Sequence[tuple[float, int]]) -> "Standing":
        """Returns the mean of several studies, each a log ratio over some processes."""
        total = sum(processes for _, processes in found)
        return cls(sum(ratio * processes for ratio, processes in found) / total, total)


def ranked(standings: Mapping[str, Standing]) -> list[str]:
    """Returns the names of the candidates, the best first."""
    return sorted(standings, key=lambda name: standings[name].loss)


def contenders(standings: Mapping[str, Standing], noise: Noise, error: float) -> list[str]:
    """Returns the candidates that may still be the best one, the best first.

    Args:
        standings: of all that are still in.
        noise: measured by controls; without any nobody is dropped.
        error: the chance that this race drops the best one, all its comparisons together.
    """
    order = ranked(standings)
    if len(order) < 2 or noise.degrees == 0:
        return order
    leader = standings[order[0]]
    factor = float(t.ppf(1 - error / (len(order) - 1), noise.degrees))

    def may_win(name: str) -> bool:
        one = standings[name]
        spread = math.sqrt(noise.variance * (1 / one.processes + 1 / leader.processes))
        return one.loss - leader.loss <= factor * spread

    return [name for name in order if may_win(name)]
