"""Simulates the coverage of intervals if disturbed rounds are repeated, or processes added for `protocol.precision`.

sdopt's own code analyses the simulated studies. A simulated time is the time of the variant, times a log-normal factor
of the process, times one of the round, plus the time that other work took from the call.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sdopt.record.records import StudyResult
from sdopt.record.samples import Call, Interference, Measurement
from sdopt.schema import Protocol
from sdopt.statistics.disturbance import enough_clean, rounds_left_out, worst_by_round
from sdopt.statistics.precision import processes_needed
from sdopt.statistics.ratios import MINIMUM_PROCESSES, LogRatio, log_speedup
from tests.records import retime
from tests.trial.simulation import ROUND_DEVIATION, Scenario, blank_study, measure_session, percent

CONFIDENCE = 0.95


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
    """Bias, coverage and width of the speed-up over many simulated studies, as shares.

    Attributes:
        bias: geometric mean of the estimates over the truth, less 1.
        covered: share of the intervals that hold the truth.
        width: geometric mean of the upper over the lower bound, less 1, halved.
        rounds: mean number of rounds that were timed.
        processes: mean number of processes of each variant.
    """

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
    bounds = [(found.low, found.high) for found in intervals if found.low is not None and found.high is not None]
    return Summary(
        bias=math.exp(float(np.mean([study.found.mean - truth for study in studies]))) - 1,
        covered=float(np.mean([low <= gain <= high for low, high in bounds])),
        width=(math.exp(float(np.mean([math.log(high / low) for low, high in bounds]))) - 1) / 2,
        rounds=float(np.mean([study.rounds for study in studies])),
        processes=float(np.mean([study.processes for study in studies])),
    )


# -------------------------------------------------------------------------------------------------------- interference


def with_neighbour(
    neighbour: Neighbour,
    protocol: Protocol,
    studies: int,
    gain: float = 1.0,
    seconds: float = 1.0,
    between: float = 1.0,
) -> Summary:
    """Simulates studies of an option beside other work, and summarises their speed-ups.

    Args:
        neighbour: the other work.
        protocol: `replicates`, `rounds`, `interference` and `extra_rounds`.
        studies: how many.
        gain: the option's true speed-up.
        seconds: time of an undisturbed call of the baseline.
        between: deviation between processes, as a multiple of that between rounds.
    """
    random = np.random.default_rng([7, round(1000 * neighbour.chance), round(100 * gain)])
    found = [_beside(neighbour, protocol, gain, seconds, between, random) for _ in range(studies)]
    return _summary(found, gain)


def _beside(
    neighbour: Neighbour,
    protocol: Protocol,
    gain: float,
    seconds: float,
    between: float,
    random: np.random.Generator,
) -> _Study:
    sides = _empty(protocol).variants
    processes, levels = [], []
    for side, level in zip(sides, (seconds / gain, seconds), strict=True):
        for replicate in range(protocol.replicates or 1):
            side.measurements.append(Measurement(replicate))
            levels.append(level * math.exp(between * ROUND_DEVIATION * random.standard_normal()))
        processes += [measurement.shapes[0] for measurement in side.measurements]
    extra = 0 if protocol.interference is None else protocol.extra_rounds or math.ceil(protocol.rounds / 2)
    for number in range(protocol.rounds + extra):
        if number >= protocol.rounds and enough_clean(
            worst_by_round(processes), protocol.rounds, protocol.interference
        ):
            break
        for process, level in zip(processes, levels, strict=True):
            clean = level * math.exp(ROUND_DEVIATION * random.standard_normal())
            taken = float(random.exponential(neighbour.takes_s, random.poisson(neighbour.chance * clean)).sum())
            seconds = clean + taken * (1 + neighbour.unseen)
            process.calls.append(Call(seconds, number, interference=Interference(taken / seconds, 0.0)))
    left_out = rounds_left_out(worst_by_round(processes), protocol.rounds, protocol.interference)
    for process in processes:
        retime(process, left_out=left_out)
    found = log_speedup(*sides)
    assert found is not None
    return _Study(found, len(processes[0].latency_s), protocol.replicates or 1)


NEIGHBOURS = (0.0, 0.02, 0.1, 0.5)
"""Numbers of interruptions by other work for each second of a call."""

GAINS = (1.0, 1.25)

DISTURBED = (
    "speed-up",
    "interruptions / s",
    "rule",
    "bias",
    "95 % interval holds the truth",
    "half its width",
    "rounds timed",
)


def disturbed_rounds(studies: int) -> list[tuple[str, ...]]:
    """Returns rows for each rate of interference and each true speed-up, without the rule and with it."""
    rows: list[tuple[str, ...]] = []
    for gain in GAINS:
        for chance in NEIGHBOURS:
            for rule, limit in (("off", None), ("on", Protocol().interference)):
                protocol = Protocol(replicates=3, interference=limit)
                found = with_neighbour(Neighbour(chance), protocol, studies, gain)
                shown = (_signed(found.bias), percent(found.covered), f"±{percent(found.width)}")
                rows.append((f"{gain:g}×", f"{chance:g}", rule, *shown, f"{found.rounds:.1f}"))
    return rows


# ----------------------------------------------------------------------------------------------------------- precision


def two_stages(pilot: int, precision: float, between: float, random: np.random.Generator) -> _Study:
    """Applies Stein's procedure with the study's own code: the pilot decides the number of processes."""
    result = _empty(Protocol(replicates=pilot, precision=precision, confidence=CONFIDENCE))
    _add(result, pilot, between, random)
    [needed] = processes_needed(result).values()
    _add(result, needed - pilot, between, random)
    found = log_speedup(*result.variants)
    assert found is not None
    return _Study(found, 0, needed)


def until_narrow(pilot: int, precision: float, between: float, random: np.random.Generator) -> _Study:
    """Adds processes one by one until Student's interval is narrow enough, for contrast."""
    result = _empty(Protocol(replicates=pilot, confidence=CONFIDENCE))
    _add(result, pilot, between, random)
    while True:
        found = log_speedup(*result.variants)
        assert found is not None
        high, processes = found.interval(CONFIDENCE).high, len(result.variants[0].measurements)
        if high is not None and math.log(high) - found.mean <= math.log1p(precision):
            return _Study(found, 0, processes)
        _add(result, 1, between, random)


def _empty(protocol: Protocol) -> StudyResult:
    return blank_study(("option", "base"), "base", protocol)


def _add(result: StudyResult, processes: int, between: float, random: np.random.Generator) -> None:
    """Adds processes to both variants, in one session."""
    measure_session(result, Scenario(between, processes), random)


PILOTS = (MINIMUM_PROCESSES, 5, 8)
BETWEEN = (0.3, 1.0, 2.0)
PRECISION = 0.03

STOPPING = (
    "between / round",
    "pilot",
    "two stages hold the truth",
    "half the width",
    "processes",
    "until narrow enough: hold the truth",
    "processes",
)


def stopping(studies: int) -> list[tuple[str, ...]]:
    """Returns a row for each deviation and each pilot: coverage and processes, with Stein's stages and without."""
    rows: list[tuple[str, ...]] = []
    for between in BETWEEN:
        for pilot in PILOTS:
            stein, naive = (precise(rule, pilot, PRECISION, between, studies) for rule in (two_stages, until_narrow))
            shown = (percent(stein.covered), f"±{percent(stein.width)}", f"{stein.processes:.1f}")
            rows.append((f"{between:g}", str(pilot), *shown, percent(naive.covered), f"{naive.processes:.1f}"))
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
    return _summary([rule(pilot, precision, between, random) for _ in range(studies)], 1.0)


def _signed(share: float) -> str:
    return f"{100 * share:+.2f} %"
