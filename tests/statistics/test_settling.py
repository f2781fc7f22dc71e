"""Simulates the error of a study with a budget: verdicts that were settled early are wrong no more often than others.

`python -m tests.statistics.test_settling` prints the table for 4,000 studies each.
"""

import math
from dataclasses import dataclass

import numpy as np
import pytest

from sdopt.record.records import StudyResult
from sdopt.record.samples import Call, Measurement
from sdopt.report.summary import summary_of
from sdopt.schema import Protocol
from sdopt.statistics.comparing import compare
from sdopt.statistics.scale import Speed
from sdopt.statistics.settling import is_settled
from sdopt.study.designs import CONTROL
from tests.trial.simulation import ROUND_DEVIATION, blank_study

ROUNDS, PROCESSES = 4, 3


@dataclass(frozen=True)
class Share:
    """Shares of studies: a wrong verdict, the right one, a settled one; and intervals that hold the truth."""

    wrong: float
    right: float
    settled: float
    covered: float


def one_study(
    gain: float, between: float, rounds: int, budget: bool, random: np.random.Generator
) -> tuple[StudyResult, bool]:
    """Returns a study of an option that is `gain` times as fast, and whether it was settled before its last round."""
    result = blank_study(
        ("base", "option", CONTROL), "base", Protocol(replicates=PROCESSES)
    )
    result.variants[-1].role = "control"
    sides = []
    for row in result.variants:
        row.measurements = [Measurement(replicate) for replicate in range(PROCESSES)]
        level = 1 / gain if row.name == "option" else 1.0
        processes = [
            level * math.exp(between * ROUND_DEVIATION * random.standard_normal())
            for _ in row.measurements
        ]
        sides.append((row, processes))
    settled = False
    for number in range(rounds):
        for row, processes in sides:
            if row.name == "option" and settled:
                continue
            for measurement, level in zip(row.measurements, processes, strict=True):
                seconds = level * math.exp(ROUND_DEVIATION * random.standard_normal())
                measurement.shapes[0].calls.append(Call(seconds, number))
        settled = settled or (
            budget
            and number + 1 < rounds
            and is_settled(result, result.variant("option"))
        )
    compare(result)
    return result, settled


def simulated(
    gain: float, between: float, rounds: int, budget: bool, studies: int
) -> Share:
    random = np.random.default_rng(1)
    verdicts, settled, covered = [], 0, 0
    for _ in range(studies):
        result, early = one_study(gain, between, rounds, budget, random)
        row = summary_of(result).row("option")
        assert row is not None
        assert row.speedup is not None
        low, high = row.speedup.interval.low, row.speedup.interval.high
        assert low is not None
        assert high is not None
        verdicts.append(row.speed)
        settled += early
        covered += low <= gain <= high
    right = {True: Speed.FASTER, False: Speed.CLOSE}[gain > 1.02]
    wrong = {Speed.FASTER, Speed.SLOWER} - {right}
    return Share(
        sum(verdict in wrong for verdict in verdicts) / studies,
        sum(verdict is right for verdict in verdicts) / studies,
        settled / studies,
        covered / studies,
    )


@pytest.mark.parametrize("between", [0.3, 1.0])
@pytest.mark.walk(1)
def test_an_early_look_finds_no_more_differences_by_chance(between: float) -> None:
    assert simulated(1.0, between, ROUNDS, budget=True, studies=400).wrong <= 0.05


def test_what_is_clearly_faster_is_settled_and_its_interval_holds_the_truth() -> None:
    found = simulated(1.5, 1.0, ROUNDS, budget=True, studies=200)
    assert found.settled > 0.9
    assert found.right > 0.98
    assert found.covered >= 0.9


if __name__ == "__main__":
    print(
        "| true speed-up | between / round | rounds | budget | wrong | right | settled | covered |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for gain in (1.0, 1.05, 1.1, 1.5):
        for between in (0.3, 1.0, 3.0):
            for rounds, budget in ((ROUNDS, False), (ROUNDS, True), (1, True)):
                of = simulated(gain, between, rounds, budget, 4000)
                shares = " | ".join(
                    f"{100 * share:.1f} %"
                    for share in (of.wrong, of.right, of.settled, of.covered)
                )
                print(
                    f"| {gain:g} | {between:g} | {rounds} | {'yes' if budget else 'no'} | {shares} |"
                )
