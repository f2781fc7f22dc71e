"""Simulates studies to measure the gate's error rates and its power for claims of speed; judges with the gate's code.

A simulated time is the time of the variant, times a log-normal factor of the process, times a log-normal factor of the
round. The ratio of the two deviations is not known in practice, so it is varied. Each option claims a gain, which is
absent or real.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from sdopt.contract import Contract
from sdopt.gate.calibration import Fit
from sdopt.gate.judge import judge
from sdopt.record.comparisons import Comparison
from sdopt.record.configuration import RecordedConfig
from sdopt.record.records import Environment, Promise, Status, StudyResult, VariantResult
from sdopt.record.samples import Measurement, ShapeSamples
from sdopt.record.verdicts import Payoff, Verdict
from sdopt.schema import Gate, Protocol
from sdopt.statistics.ratios import compare
from tests.records import timed

ROUND_DEVIATION = 0.03
"""Deviation of a round's time, as a share: what two shared CPU cores show."""


@dataclass(frozen=True)
class Scenario:
    """Studies of one kind.

    Attributes:
        between: deviation between processes, as a multiple of that between rounds.
        processes: of each variant, at each look.
        variants: how many options claim a gain, beside the baseline and the repeated baseline.
        gain: of the first of them, as in 1.05; the others gain nothing.
        looks: how often the study is judged; before each look `processes` more are added.
        settled: `gate.looks`, the number of looks that is fixed beforehand.
        rounds: of each process.
        smallest: `gate.smallest_speedup`.
    """

    between: float
    processes: int = 3
    variants: int = 1
    gain: float = 1.0
    looks: int = 1
    settled: int = 1
    rounds: int = 4
    smallest: float = 0.01


@dataclass(frozen=True)
class Rates:
    """Shares of the simulated studies, or of their variants."""

    gain: float
    any_gain: float
    any_harm: float
    studies: int


def simulate(scenario: Scenario, studies: int, seed: int = 0) -> Rates:
    """Returns how often the gate found gains and harms in simulated studies, at any of their looks."""
    random = np.random.default_rng([seed, round(10 * scenario.between), scenario.processes, scenario.variants])
    studies_judged = [_judged(scenario, random) for _ in range(studies)]
    return Rates(
        gain=float(np.mean(["option 0" in gains for gains, _ in studies_judged])),
        any_gain=float(np.mean([bool(gains) for gains, _ in studies_judged])),
        any_harm=float(np.mean([bool(harms) for _, harms in studies_judged])),
        studies=studies,
    )


def _judged(scenario: Scenario, random: np.random.Generator) -> tuple[set[str], set[str]]:
    """Returns the options of one study that the gate found to pay, and those that it found to harm, at any look."""
    gate = Gate("simulated", smallest_speedup=scenario.smallest, looks=scenario.settled)
    result = empty_study(scenario.variants)
    gains: set[str] = set()
    harms: set[str] = set()
    for _ in range(scenario.looks):
        measure_session(result, scenario, random)
        compare(result)
        judge(result, gate, Fit())
        for judgement in result.judgements:
            paying = [ruling for ruling in judgement.rulings if ruling.rule == "must pay"]
            spent = any(ruling.rule == "looks" and ruling.verdict is not Verdict.PASS for ruling in judgement.rulings)
            gains |= {judgement.candidate for ruling in paying if ruling.verdict is Verdict.PASS and not spent}
            harms |= {judgement.candidate for ruling in paying if ruling.payoff is Payoff.HARM}
    return gains, harms


def empty_study(options: int) -> StudyResult:
    """Returns a study of a baseline, its control and some options that claim a gain, without times."""
    result = blank_study(["baseline", *(f"option {number}" for number in range(options)), "control"], "baseline")
    for row in result.variants:
        row.role, row.choices = "control" if row.name == "control" else "variant", {"speed": row.name}
        if row.name.startswith("option"):
            row.promises = {"speed": Promise(Contract.EXACT, ["latency"])}
    return result


def blank_study(names: Sequence[str], baseline: str, protocol: Protocol | None = None) -> StudyResult:
    """Returns a study of some variants, each compared with the baseline, without times."""
    config = replace(RecordedConfig(), protocol=protocol or Protocol())
    rows = [VariantResult(name, "variant", {}, [], config, status=Status.OK) for name in names]
    environment = Environment("", None, None, "", "", {}, {}, {}, "", [])
    edges = [Comparison(name, baseline, "") for name in names if name != baseline]
    return StudyResult("simulated", "explicit", "", environment, config, rows, edges, baseline)


def measure_session(result: StudyResult, scenario: Scenario, random: np.random.Generator) -> None:
    """Adds the processes of one session to every variant."""
    for row in result.variants:
        speed = scenario.gain if row.name == "option 0" else 1.0
        begun = len(row.measurements)
        session = 1 + max((m.session for m in row.measurements), default=-1)
        for number in range(scenario.processes):
            process = scenario.between * ROUND_DEVIATION * random.standard_normal()
            rounds = ROUND_DEVIATION * random.standard_normal(scenario.rounds)
            samples = ShapeSamples(calls=timed((np.exp(process + rounds) / speed).tolist()), traced={row.name: 1.0})
            row.measurements.append(Measurement(begun + number, session, shapes=[samples]))


BETWEEN = (0.3, 1.0, 3.0)


def first_look(studies: int) -> list[dict[str, str]]:
    """Returns a row for each number of options and processes and each deviation: false gains and harms, and power."""
    rows = []
    for variants, processes, between in product((1, 10), (1, 3, 5), BETWEEN):
        scenario = Scenario(between, processes, variants)
        null = simulate(scenario, studies)
        power = [simulate(replace(scenario, gain=gain), max(studies // 4, 1)).gain for gain in (1.05, 1.10)]
        rows.append(
            {
                "options": str(variants),
                "processes": str(processes),
                "between / round": f"{between:g}",
                "false gain, each": percent(null.gain),
                "any": percent(null.any_gain),
                "false harm, any": percent(null.any_harm),
                "sees 5 %": percent(power[0]),
                "sees 10 %": percent(power[1]),
            }
        )
    return rows


def repeated_looks(studies: int) -> list[dict[str, str]]:
    """Returns a row for each deviation: false gains at any of three looks, with the error spent and, for contrast, not.

    Three processes are added before each look. The contrast judges each look as if it were the first.
    """
    return [
        {
            "between / round": f"{share:g}",
            "looks=3": percent(simulate(Scenario(share, looks=3, settled=3), studies).gain),
            "looks=1": percent(simulate(Scenario(share, looks=3), studies).gain),
            "each look as if the first": percent(_naive(share, studies)),
        }
        for share in BETWEEN
    ]


def _naive(between: float, studies: int) -> float:
    """Returns the share of studies with a false gain at any of three looks, each of which ignores those before it."""
    scenario = Scenario(between, looks=3)
    random = np.random.default_rng([0, round(10 * between)])
    false = 0
    for _ in range(studies):
        result, paid = empty_study(scenario.variants), False
        for _ in range(scenario.looks):
            measure_session(result, scenario, random)
            compare(result)
            result.looks.clear()
            judge(result, Gate("simulated", smallest_speedup=scenario.smallest), Fit())
            paid = paid or bool(result.judgements[0].gains)
        false += paid
    return false / studies


def percent(share: float) -> str:
    """Formats a share as a percentage, for tables."""
    return f"{100 * share:.1f} %"
