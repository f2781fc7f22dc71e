"""Simulates the coverage of intervals if disturbed rounds are repeated, or processes added for `protocol.precision`.

sdopt's own code analyses the simulated studies. A simulated time is the time of the variant, times a log-normal factor
of the process, times one of the round, plus the time that other work took from the call.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from sdopt.record.samples import Call, Interference, Measurement
from sdopt.schema import Protocol
from sdopt.statistics.disturbance import (
    another_may_help,
    rounds_left_out,
    worst_by_round,
)
from sdopt.statistics.precision import processes_needed
from sdopt.statistics.ratios import MINIMUM_PROCESSES, LogRatio, log_speedup
from tests.records import retime
from tests.trial.simulation import (
    ROUND_DEVIATION,
    Scenario,
    blank_study,
    measure_session,
    percent,
)

CONFIDENCE = 0.95

_SIDES = ("option", "base")


@dataclass(frozen=True)
class Neighbour:
    """Other work on the machine, which comes and goes.

    Attributes:
        chance: mean number of interruptions for each second of a call; Poisson distributed.
        takes_s: mean time, in seconds, that an interruption takes from a call; exponentially distributed.
        unseen: further time that no counter shows, for example by emptied caches, as a share of the counted time.
    """

    chance: float
    takes_s: float = 0.1
    unseen: float = 0.5


@dataclass(frozen=True)
class Summary:
    """Bias, coverage and half the width of the speed-up over many simulated studies, as shares; and mean numbers."""

    bias: float
    covered: float
    width: float
    rounds: float
    processes: float


@dataclass(frozen=True)
class _Study:
    found: LogRatio
    rounds: int
    processes: int


def _summary(studies: Sequence[_Study], gain: float) -> Summary:
    truth = math.log(gain)
    intervals = [study.found.interval(CONFIDENCE) for study in studies]
    bounds = [
        (found.low, found.high)
        for found in intervals
        if found.low is not None and found.high is not None
    ]
    return Summary(
        bias=math.exp(float(np.mean([study.found.mean - truth for study in studies])))
        - 1,
        covered=float(np.mean([low <= gain <= high for low, high in bounds])),
        width=(
            math.exp(float(np.mean([math.log(high / low) for low, high in bounds]))) - 1
        )
        / 2,
        rounds=float(np.mean([study.rounds for study in studies])),
        processes=float(np.mean([study.processes for study in studies])),
    )


# -------------------------------------------------------------------------------------------------------- interference


def with_neighbour(
    neighbour: Neighbour, protocol: Protocol, studies: int, gain: float = 1.0
) -> Summary:
    """Simulates studies of an option with a true speed-up beside other work, and summarises their speed-ups.

    An undisturbed call of the baseline takes a second, and processes differ by as much as rounds.
    """
    random = np.random.default_rng(
        [7, round(1000 * neighbour.chance), round(100 * gain)]
    )
    return _summary(
        [_beside(neighbour, protocol, gain, random) for _ in range(studies)], gain
    )


def _beside(
    neighbour: Neighbour, protocol: Protocol, gain: float, random: np.random.Generator
) -> _Study:
    sides = blank_study(_SIDES, "base", protocol).variants
    processes, levels = [], []
    for side, level in zip(sides, (1 / gain, 1.0), strict=True):
        for replicate in range(protocol.replicates or 1):
            side.measurements.append(Measurement(replicate))
            levels.append(level * math.exp(ROUND_DEVIATION * random.standard_normal()))
        processes += [measurement.shapes[0] for measurement in side.measurements]
    extra = (
        0
        if protocol.interference is None
        else protocol.extra_rounds or math.ceil(protocol.rounds / 2)
    )
    for number in range(protocol.rounds + extra):
        worst = worst_by_round(processes)
        if number >= protocol.rounds and not another_may_help(
            worst, protocol.rounds, protocol.interference
        ):
            break
        for process, level in zip(processes, levels, strict=True):
            clean = level * math.exp(ROUND_DEVIATION * random.standard_normal())
            taken = float(
                random.exponential(
                    neighbour.takes_s, random.poisson(neighbour.chance * clean)
                ).sum()
            )
            seconds = clean + taken * (1 + neighbour.unseen)
            process.calls.append(
                Call(seconds, number, interference=Interference(taken / seconds, 0.0))
            )
    left_out = rounds_left_out(
        worst_by_round(processes), protocol.rounds, protocol.interference
    )
    for process in processes:
        retime(process, left_out=left_out)
    found = log_speedup(*sides)
    assert found is not None
    return _Study(found, len(processes[0].latency_s), protocol.replicates or 1)


def disturbed_rounds(studies: int) -> list[dict[str, str]]:
    """Returns rows for each rate of interference and each true speed-up, without the rule and with it."""
    rows = []
    for gain, chance, limit in product(
        (1.0, 1.25), (0.0, 0.02, 0.1, 0.5), (None, Protocol().interference)
    ):
        found = with_neighbour(
            Neighbour(chance), Protocol(replicates=3, interference=limit), studies, gain
        )
        rows.append(
            {
                "speed-up": f"{gain:g}×",
                "interruptions / s": f"{chance:g}",
                "rule": "off" if limit is None else "on",
                "bias": f"{100 * found.bias:+.2f} %",
                "95 % interval holds the truth": percent(found.covered),
                "half its width": f"±{percent(found.width)}",
                "rounds timed": f"{found.rounds:.1f}",
            }
        )
    return rows


# ----------------------------------------------------------------------------------------------------------- precision


def two_stages(
    pilot: int, precision: float, between: float, random: np.random.Generator
) -> _Study:
    """Applies Stein's procedure with the study's own code: the pilot decides the number of processes."""
    result = blank_study(
        _SIDES,
        "base",
        Protocol(replicates=pilot, precision=precision, confidence=CONFIDENCE),
    )
    measure_session(result, Scenario(between, pilot), random)
    [needed] = processes_needed(result).values()
    measure_session(result, Scenario(between, needed - pilot), random)
    found = log_speedup(*result.variants)
    assert found is not None
    return _Study(found, 0, needed)


def until_narrow(
    pilot: int, precision: float, between: float, random: np.random.Generator
) -> _Study:
    """Adds processes one by one until Student's interval is narrow enough, for contrast."""
    result = blank_study(
        _SIDES, "base", Protocol(replicates=pilot, confidence=CONFIDENCE)
    )
    measure_session(result, Scenario(between, pilot), random)
    while True:
        found = log_speedup(*result.variants)
        assert found is not None
        high, processes = (
            found.interval(CONFIDENCE).high,
            len(result.variants[0].measurements),
        )
        if high is not None and math.log(high) - found.mean <= math.log1p(precision):
            return _Study(found, 0, processes)
        measure_session(result, Scenario(between, 1), random)


def stopping(studies: int) -> list[dict[str, str]]:
    """Returns a row for each deviation and each pilot: coverage and processes, with Stein's stages and without."""
    rows = []
    for between, pilot in product((0.3, 1.0, 2.0), (MINIMUM_PROCESSES, 5, 8)):
        stein, naive = (
            precise(rule, pilot, 0.03, between, studies)
            for rule in (two_stages, until_narrow)
        )
        rows.append(
            {
                "between / round": f"{between:g}",
                "pilot": str(pilot),
                "two stages hold the truth": percent(stein.covered),
                "half the width": f"±{percent(stein.width)}",
                "processes": f"{stein.processes:.1f}",
                "until narrow enough: hold the truth": percent(naive.covered),
                "processes ": f"{naive.processes:.1f}",
            }
        )
    return rows


def precise(
    rule: Callable[[int, float, float, np.random.Generator], _Study],
    pilot: int,
    precision: float,
    between: float,
    studies: int,
) -> Summary:
    """Simulates studies of an option without effect that stop by a rule, and summarises their speed-ups."""
    random = np.random.default_rng([11, pilot, round(10 * between)])
    return _summary(
        [rule(pilot, precision, between, random) for _ in range(studies)], 1.0
    )
