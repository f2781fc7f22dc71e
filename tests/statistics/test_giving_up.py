"""Simulates how often a variant is called clearly slower that is not.

`python -m tests.statistics.test_giving_up` prints the table of all cases, for 20,000 variants each.
"""

from dataclasses import dataclass

import numpy as np
import pytest

from sdopt.statistics.giving_up import needs_call, times_slower

LIMIT = 3.0


@dataclass(frozen=True)
class Case:
    """A variant on a machine.

    Attributes:
        slower: how many times as long as the baseline's its warm calls take in truth.
        starts: factors of its first warm calls, such as those of a cold cache or a slow start.
        noise: deviation of a call, as a share.
        between: deviation of a process, as a share.
        bursts: the chance that other work slows a call down, by 2 to 6 times.
        seen: the share of that which the kernel's counters show, and which is taken off.
    """

    slower: float
    starts: tuple[float, ...] = ()
    noise: float = 0.03
    between: float = 0.03
    bursts: float = 0.0
    seen: float = 0.8


CASES = {
    "equal": Case(1.0),
    "equal, first warm call 20 times": Case(1.0, (20.0,)),
    "equal, three slow calls (a compiler records)": Case(1.0, (8.0, 6.0, 4.0)),
    "equal, falls by a third in each call": Case(
        1.0, tuple(12.0 * 0.67**n for n in range(6))
    ),
    "equal, noise 30 %": Case(1.0, noise=0.3, between=0.1),
    "equal, every fourth call disturbed": Case(1.0, noise=0.1, bursts=0.25),
    "equal, every second call disturbed": Case(1.0, noise=0.1, bursts=0.5),
    "equal, every second call disturbed, and no counters": Case(
        1.0, noise=0.1, bursts=0.5, seen=0.0
    ),
    "twice as slow, every fourth call disturbed": Case(2.0, noise=0.1, bursts=0.25),
    "2.5 times, noise 10 %": Case(2.5, noise=0.1, between=0.05),
    "just below the limit, noise 10 %": Case(2.99, noise=0.1, between=0.05),
    "4 times": Case(4.0),
    "4 times, noise 10 %": Case(4.0, noise=0.1, between=0.05),
    "8 times, every fourth call disturbed": Case(8.0, noise=0.1, bursts=0.25),
    "8 times": Case(8.0),
}


def tried(case: Case, random: np.random.Generator) -> tuple[float | None, int]:
    """Returns the bound that the trial calls of one variant give, and how many calls it made."""
    mine, beside = (float(random.lognormal(0, case.between)) for _ in range(2))

    def call(of: float) -> float:
        burst = random.uniform(2, 6) if random.random() < case.bursts else 1.0
        return (
            of
            * burst
            * (1 - case.seen * (1 - 1 / burst))
            * float(random.lognormal(0, case.noise))
        )

    starts = iter(case.starts)
    trial_s, beside_s = list[float](), [call(beside)]
    while needs_call(trial_s, beside_s, LIMIT):
        trial_s.append(call(mine) * case.slower * next(starts, 1.0))
        beside_s.append(call(beside))
    return times_slower(trial_s, beside_s), len(trial_s)


def simulated(case: Case, count: int) -> tuple[float, float, float]:
    """Returns the shares of variants that were given up, and whose bound was above the truth; and the mean calls."""
    random = np.random.default_rng(0)
    found = [tried(case, random) for _ in range(count)]
    given_up = [bound for bound, _ in found if bound is not None and bound > LIMIT]
    wrong = sum(bound > case.slower for bound in given_up)
    return (
        len(given_up) / count,
        wrong / count,
        float(np.mean([calls for _, calls in found])),
    )


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.slower < LIMIT]
)
def test_gives_up_nothing_that_is_not_slower(name: str) -> None:
    given_up, _, _ = simulated(CASES[name], 3000)
    assert given_up <= (
        0.01 if not CASES[name].seen or CASES[name].slower > 2.9 else 0.003
    )


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.slower > LIMIT]
)
def test_gives_up_what_is_slower_and_its_bound_holds(name: str) -> None:
    given_up, wrong, _ = simulated(CASES[name], 3000)
    assert given_up > (
        0.9 if not CASES[name].bursts and CASES[name].slower > 4 else 0.2
    )
    assert wrong <= 0.03


if __name__ == "__main__":
    print(
        "| variant | given up | bound above the truth | trial calls |\n|---|---|---|---|"
    )
    for name, case in CASES.items():
        given_up, wrong, calls = simulated(case, 20_000)
        print(
            f"| {name} | {100 * given_up:.2f} % | {100 * wrong:.2f} % | {calls:.1f} |"
        )
