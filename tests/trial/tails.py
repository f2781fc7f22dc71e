"""Simulates how often rules on time fail identical variants, and how often they detect occasional slow calls.

The time of a call is the level of its process times a factor of its own, both log-normal. The candidate is the baseline
again, or a random share of its calls takes longer.
"""

from dataclasses import dataclass
from itertools import product

import numpy as np

from sdopt.gate.calibration import Fit
from sdopt.gate.judge import judge
from sdopt.gate.rulings import worst
from sdopt.record.records import StudyResult
from sdopt.record.samples import Measurement, ShapeSamples
from sdopt.record.verdicts import Verdict
from sdopt.schema import Gate, Rule
from sdopt.statistics.ratios import compare
from tests.records import timed
from tests.trial.simulation import BETWEEN, ROUND_DEVIATION, empty_study, percent

GATE = Gate(
    "simulated", {"exact": [Rule("speedup", "at_least", limit=0.95), Rule("tail_ratio", "at_most", limit=1.25)]}
)
"""The rules on time of `gate=default`."""


@dataclass(frozen=True)
class Slow:
    """A random slow-down: one in `every` calls, on average, takes `times` times as long."""

    every: int
    times: float


def tails(studies: int) -> list[dict[str, str]]:
    """Returns a row for each kind of slow calls, deviation and number of rounds: how often each verdict occurred."""
    rows = []
    for slow, between, rounds in product((None, Slow(10, 2.0), Slow(4, 1.5)), BETWEEN, (4, 6)):
        verdicts = verdicts_of(studies, between, rounds, slow)
        named = "none (A/A)" if slow is None else f"one of {slow.every}, {slow.times:g}×"
        shares = {
            str(verdict): percent(verdicts.count(verdict) / studies)
            for verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS)
        }
        rows.append({"slow calls": named, "between / round": f"{between:g}", "rounds": str(rounds), **shares})
    return rows


def verdicts_of(studies: int, between: float, rounds: int, slow: Slow | None = None, seed: int = 0) -> list[Verdict]:
    """Returns the worst verdict of the rules on time in each of `studies` independent studies, three processes each."""
    random = np.random.default_rng([seed, round(10 * between), rounds])
    return [_verdict(_measured(between, rounds, slow, random)) for _ in range(studies)]


def _measured(between: float, rounds: int, slow: Slow | None, random: np.random.Generator) -> StudyResult:
    result = empty_study(1)
    for row in result.variants:
        row.promises = {}
        for process in range(3):
            times = np.exp(ROUND_DEVIATION * (between * random.standard_normal() + random.standard_normal(rounds)))
            if slow is not None and row.name.startswith("option"):
                times = np.where(random.random(rounds) < 1 / slow.every, slow.times * times, times)
            row.measurements.append(Measurement(process, shapes=[ShapeSamples(calls=timed(times.tolist()))]))
    return result


def _verdict(result: StudyResult) -> Verdict:
    compare(result)
    judge(result, GATE, Fit())
    [judgement] = result.judgements
    return worst([ruling.verdict for ruling in judgement.rulings if ruling.metric])
