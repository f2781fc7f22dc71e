"""The gate's error rates in simulated studies, in small: `python -m tests.trial.simulate` has the whole table."""

import pytest

from sdopt.schema import Protocol
from tests.trial.noise import Neighbour, with_neighbour
from tests.trial.simulation import Scenario, simulate

STUDIES = 150
ALLOWED = 0.05 + 2 * (0.05 * 0.95 / STUDIES) ** 0.5
"""A rate of 5 % shows more than this in one of forty simulations; the seed is fixed."""


def test_false_gains_and_harms_stay_rare_and_a_true_gain_is_seen() -> None:
    found = simulate(Scenario(1.0, variants=4), STUDIES)
    assert found.any_gain < ALLOWED
    assert found.any_harm < ALLOWED
    assert simulate(Scenario(0.3, gain=1.1), 50).gain > 0.9


class TestBesideANeighbour:
    """Timing disturbed rounds again makes intervals narrower, and moves no ratio."""

    @pytest.mark.parametrize("gain", [1.0, 1.25])
    def test_ratios_stay_where_they_are_and_intervals_shrink(self, gain: float) -> None:
        off, on = (
            with_neighbour(
                Neighbour(0.1),
                Protocol(replicates=3, interference=limit),
                STUDIES,
                gain,
            )
            for limit in (None, 0.02)
        )
        assert on.width < 0.9 * off.width
        assert on.covered > 1 - ALLOWED
        # Four standard errors of the mean over all studies.
        assert abs(on.bias) < 4 * on.width / 2.8 / STUDIES**0.5
        assert 4 < on.rounds <= 6

    def test_a_quiet_machine_times_nothing_again(self) -> None:
        assert with_neighbour(Neighbour(0.0), Protocol(replicates=3), 5).rounds == 4
