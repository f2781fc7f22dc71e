"""Tests whether a search reports true figures: it simulates searches among invented options, with the real code.

A simulated time is the variant's true time, multiplied by a random factor of the process and one of the round, as in
`tests.trial.simulation`. Either no option has a true gain, or exactly one has.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from sdopt.gate.calibration import Fit
from sdopt.gate.judge import judge
from sdopt.record.verdicts import Verdict
from sdopt.schema import Gate
from sdopt.search.config import SearchConfig, search_file
from sdopt.search.racing import RatioStanding, Scatter, Standings, race
from sdopt.search.record import Fate
from sdopt.statistics.comparing import compare
from sdopt.study.work import batched
from tests.trial.simulation import (
    BETWEEN,
    ROUND_DEVIATION,
    Scenario,
    empty_study,
    measure_session,
    percent,
)

_OPTIONS, _ROUNDS = 50, 3


@dataclass(frozen=True)
class Found:
    """One simulated search."""

    screened: float
    reported: float | None
    false: bool
    dropped: bool
    judged: bool
    passed: bool


def simulated(
    config: SearchConfig, between: float, gain: float, random: np.random.Generator
) -> Found:
    """Simulates one search in which the first option has a true gain, such as 1.05, and the others have none."""
    speeds = {
        f"{number}": math.log(gain) if number == 0 else 0.0
        for number in range(_OPTIONS)
    }
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in speeds}
    controls: list[tuple[float, int]] = []

    def add_study(names: Sequence[str], processes: int) -> None:
        """Adds the log losses of candidates and of a control against one baseline."""
        deviation = (
            ROUND_DEVIATION * math.sqrt(between**2 + 1 / _ROUNDS) / math.sqrt(processes)
        )
        baseline, control, *times = deviation * random.standard_normal(len(names) + 2)
        controls.append((control - baseline, processes))
        for name, time in zip(names, times, strict=True):
            found[name].append((time - baseline - speeds[name], processes))

    for names in batched(list(speeds), config.side_by_side):
        add_study(names, 1)
    screened = max(-loss for [(loss, _)] in found.values())

    def known(_race: int) -> Standings:
        noise = Scatter.of_controls(controls)
        return {name: [RatioStanding.of(mine, noise)] for name, mine in found.items()}

    def measure(_race: int, chosen: list[str]) -> bool:
        add_study(chosen, 2)
        return True

    dropped: set[str] = set()

    def drop(losing: Iterable[str], fate: Fate, _why: str) -> None:
        dropped.update(losing if fate == "beaten" else ())

    finalists = race(config, known, measure, drop)[: config.finalists]
    return _judged(finalists, screened, "0" in dropped, between, gain, random)


def _judged(
    finalists: Sequence[str],
    screened: float,
    dropped: bool,
    between: float,
    gain: float,
    random: np.random.Generator,
) -> Found:
    """Judges finalists with the gate's own code, in newly simulated processes."""
    if not finalists:
        return Found(screened, None, False, dropped, False, False)
    # The simulated study gives its gain to the first option, whatever its rank.
    order = sorted(finalists, key=lambda name: name != "0")
    scenario = Scenario(
        between, variants=len(order), gain=gain if order[0] == "0" else 1.0
    )
    result = empty_study(len(order))
    measure_session(result, scenario, random)
    compare(result)
    judge(result, Gate("simulated"), Fit())
    gains = {
        order[int(judgement.candidate.removeprefix("option "))]
        for judgement in result.judgements
        if any(
            ruling.rule == "must pay" and ruling.verdict is Verdict.PASS
            for ruling in judgement.rulings
        )
    }
    first = result.comparisons[order.index(finalists[0])]
    assert first.shapes[0].speedup is not None
    true = {"0"} if gain > 1 else set()
    return Found(
        screened,
        math.log(first.shapes[0].speedup.estimate),
        bool(gains - true),
        dropped,
        "0" in finalists,
        "0" in gains,
    )


def searches(studies: int) -> list[dict[str, str]]:
    """Returns two rows for each deviation between processes: without a true gain, and with one of 10 %."""
    rows, config = [], search_file()
    for between, gain in product(BETWEEN, (1.0, 1.1)):
        random = np.random.default_rng(
            [studies, round(10 * between), round(100 * gain)]
        )
        found = [simulated(config, between, gain, random) for _ in range(studies)]
        reported = [study.reported for study in found if study.reported is not None]
        spread = 196 * float(np.std(reported)) / math.sqrt(len(reported))
        shares = {
            name: percent(float(np.mean([getattr(study, name) for study in found])))
            for name in _SHARES
        }
        rows.append(
            {
                "between / round": f"{between:g}",
                "true gain": f"{100 * (gain - 1):.0f} %" if gain > 1 else "none",
                "screened best of 50": _signed([study.screened for study in found]),
                "reported of the first": f"{_signed(reported)} ± {spread:.2f} %",
                "false gain, any": shares["false"],
                "best one dropped": shares["dropped"] if gain > 1 else "",
                "best one judged": shares["judged"] if gain > 1 else "",
                "best one passes": shares["passed"] if gain > 1 else "",
            }
        )
    return rows


_SHARES = ("false", "dropped", "judged", "passed")


def _signed(log_ratios: Sequence[float]) -> str:
    return f"{100 * math.expm1(float(np.mean(log_ratios))):+.2f} %"
