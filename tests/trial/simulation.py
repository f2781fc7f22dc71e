"""Simulates studies to measure the gate's error rates and its power, of claims of speed and of rules on time.

A simulated time is the time of the variant, times a log-normal factor of the process, times a log-normal factor of the
round. The ratio of the two deviations is not known in practice, so it is varied. Each option claims a gain, which is
absent or real; or a random share of its calls takes longer. The gate's own code judges.
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
from sdopt.record.records import Promise, Status, StudyResult, VariantResult
from sdopt.record.samples import Measurement, ShapeSamples
from sdopt.record.verdicts import Verdict, worst
from sdopt.schema import Gate, Protocol, Rule
from sdopt.statistics.comparing import compare
from tests.records import recorded, timed

ROUND_DEVIATION = 0.03
"""Deviation of a round's time, as a share: what two shared CPU cores show."""


ON_TIME = Gate(
    "simulated",
    {
        "exact": [
            Rule("speedup", "at_least", limit=0.95),
            Rule("tail_ratio", "at_most", limit=1.25),
        ]
    },
)
"""The rules on time of `gate=default`."""


@dataclass(frozen=True)
class Slow:
    """A random slow-down: one in `every` calls, on average, takes `times` times as long."""

    every: int
    times: float


@dataclass(frozen=True)
class Scenario:
    """Studies of one kind.

    Attributes:
        between: deviation between processes, as a multiple of that between rounds.
        processes: of each variant, at each look.
        variants: how many options claim a gain, beside the baseline and the repeated baseline.
        gain: of the first of them, as in 1.05; the others gain nothing.
        looks: how often the study is judged; before each look `processes` more are added.
        forgetful: whether each look is judged as if it were the first, for contrast.
        rounds: of each process.
        slow: what makes some calls of the options slow.
    """

    between: float
    processes: int = 3
    variants: int = 1
    gain: float = 1.0
    looks: int = 1
    forgetful: bool = False
    rounds: int = 4
    slow: Slow | None = None


@dataclass(frozen=True)
class Rates:
    """Shares of the simulated studies, or of their variants."""

    gain: float
    any_gain: float
    any_harm: float


def simulate(scenario: Scenario, studies: int) -> Rates:
    """Returns how often the gate found gains and harms in simulated studies, at any of their looks."""
    random = np.random.default_rng(
        [0, round(10 * scenario.between), scenario.processes, scenario.variants]
    )
    studies_judged = [_judged(scenario, random) for _ in range(studies)]
    return Rates(
        gain=float(np.mean(["option 0" in gains for gains, _ in studies_judged])),
        any_gain=float(np.mean([bool(gains) for gains, _ in studies_judged])),
        any_harm=float(np.mean([bool(harms) for _, harms in studies_judged])),
    )


def _judged(
    scenario: Scenario, random: np.random.Generator
) -> tuple[set[str], set[str]]:
    """Returns the options of one study that the gate found to pay, and those that it found to harm, at any look."""
    gate = Gate("simulated")
    result = empty_study(scenario.variants)
    gains: set[str] = set()
    harms: set[str] = set()
    for _ in range(scenario.looks):
        measure_session(result, scenario, random)
        compare(result)
        if scenario.forgetful:
            result.looks.clear()
        judge(result, gate, Fit())
        for judgement in result.judgements:
            paying = [
                ruling for ruling in judgement.rulings if ruling.rule == "must pay"
            ]
            spent = any(
                ruling.rule == "looks" and ruling.verdict is not Verdict.PASS
                for ruling in judgement.rulings
            )
            gains |= {
                judgement.candidate
                for ruling in paying
                if ruling.verdict is Verdict.PASS and not spent
            }
            harms |= {
                judgement.candidate for ruling in paying if ruling.payoff == "harm"
            }
    return gains, harms


def empty_study(options: int) -> StudyResult:
    """Returns a study of a baseline, its control and some options that claim a gain, without times."""
    result = blank_study(
        ["baseline", *(f"option {number}" for number in range(options)), "control"],
        "baseline",
    )
    for row in result.variants:
        row.role, row.choices = (
            "control" if row.name == "control" else "variant",
            {"speed": row.name},
        )
        if row.name.startswith("option"):
            row.promises = {"speed": Promise(Contract.EXACT, ["latency"])}
    return result


def blank_study(
    names: Sequence[str], baseline: str, protocol: Protocol | None = None
) -> StudyResult:
    """Returns a study of some variants, each compared with the baseline, without times."""
    config = RecordedConfig(protocol=protocol or Protocol())
    rows = [
        VariantResult(name, "variant", {}, [], config, status=Status.OK)
        for name in names
    ]
    made = recorded(
        rows, [Comparison(name, baseline, "") for name in names if name != baseline]
    )
    made.config, made.baseline = config, baseline
    return made


def measure_session(
    result: StudyResult, scenario: Scenario, random: np.random.Generator
) -> None:
    """Adds the processes of one session to every variant."""
    for row in result.variants:
        speed = scenario.gain if row.name == "option 0" else 1.0
        begun = len(row.measurements)
        session = 1 + max((m.session for m in row.measurements), default=-1)
        for number in range(scenario.processes):
            process = scenario.between * ROUND_DEVIATION * random.standard_normal()
            rounds = ROUND_DEVIATION * random.standard_normal(scenario.rounds)
            times = np.exp(process + rounds) / speed
            if scenario.slow is not None and row.name.startswith("option"):
                slowed = random.random(scenario.rounds) < 1 / scenario.slow.every
                times = np.where(slowed, scenario.slow.times * times, times)
            samples = ShapeSamples(calls=timed(times.tolist()), traced={row.name: 1.0})
            row.measurements.append(
                Measurement(begun + number, session, shapes=[samples])
            )


BETWEEN = (0.3, 1.0, 3.0)


def first_look(studies: int) -> list[dict[str, str]]:
    """Returns a row for each number of options and processes and each deviation: false gains and harms, and power."""
    rows = []
    for variants, processes, between in product((1, 10), (1, 3, 5), BETWEEN):
        scenario = Scenario(between, processes, variants)
        null = simulate(scenario, studies)
        power = [
            simulate(replace(scenario, gain=gain), max(studies // 4, 1)).gain
            for gain in (1.05, 1.10)
        ]
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
    """Returns a row for each deviation: false gains at any of three looks.

    Three processes are added before each look. The contrast judges each look as if it were the first.
    """
    rows = []
    for share in BETWEEN:
        plain = Scenario(share, looks=3)
        kinds = {
            "the first look alone can pass": plain,
            "each look as if the first": replace(plain, forgetful=True),
        }
        shares = {
            name: percent(simulate(kind, studies).gain) for name, kind in kinds.items()
        }
        rows.append({"between / round": f"{share:g}", **shares})
    return rows


def tails(studies: int) -> list[dict[str, str]]:
    """Returns a row for each kind of slow calls, deviation and number of rounds: how often each verdict occurred."""
    rows = []
    for slow, between, rounds in product(
        (None, Slow(10, 2.0), Slow(4, 1.5)), BETWEEN, (4, 6)
    ):
        verdicts = verdicts_on_time(
            Scenario(between, rounds=rounds, slow=slow), studies
        )
        named = (
            "none (A/A)" if slow is None else f"one of {slow.every}, {slow.times:g}×"
        )
        shares = {
            str(verdict): percent(verdicts.count(verdict) / studies)
            for verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS)
        }
        rows.append(
            {
                "slow calls": named,
                "between / round": f"{between:g}",
                "rounds": str(rounds),
                **shares,
            }
        )
    return rows


def verdicts_on_time(scenario: Scenario, studies: int) -> list[Verdict]:
    """Returns the worst verdict of the rules on time in each of some independent studies of one option."""
    random = np.random.default_rng([0, round(10 * scenario.between), scenario.rounds])
    found = []
    for _ in range(studies):
        result = empty_study(1)
        measure_session(result, scenario, random)
        compare(result)
        judge(result, ON_TIME, Fit())
        [judgement] = result.judgements
        found.append(
            worst([ruling.verdict for ruling in judgement.rulings if ruling.metric])
        )
    return found


def percent(share: float) -> str:
    """Formats a share as a percentage, for tables."""
    return f"{100 * share:.1f} %"
