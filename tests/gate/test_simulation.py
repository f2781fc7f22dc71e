"""The gate's error rates in simulated studies, in small: `python -m tests.trial.simulate` has the whole table."""

import pytest

from sdopt.schema import Protocol
from tests.trial.noise import Neighbour, with_neighbour
from tests.trial.simulation import Scenario, simulate

STUDIES = 150
ALLOWED = 0.05 + 2 * (0.05 * 0.95 / STUDIES) ** 0.5
"""A rate of 5 % shows more than this in one of forty simulations; the seed is fixed."""


def test_false_gains_and_harms_stay_rare() -> None:
    found = simulate(Scenario(1.0, variants=4), STUDIES)
    assert found.any_gain < ALLOWED
    assert found.any_harm < ALLOWED


def test_one_process_claims_nothing() -> None:
    found = simulate(Scenario(0.3, processes=1, gain=2.0, rounds=100), 20)
    assert (found.gain, found.any_gain, found.any_harm) == (0, 0, 0)


def test_a_true_gain_is_seen() -> None:
    assert simulate(Scenario(0.3, gain=1.1), 50).gain > 0.9


def test_repeated_looks_are_no_second_chance() -> None:
    """With the error shared, or spent at the first look, three looks err no more than one may."""
    for settled in (1, 3):
        assert simulate(Scenario(3.0, looks=3, settled=settled), STUDIES).any_gain < ALLOWED


def test_the_simulation_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """With claims that are tested one by one it finds what Holm's method prevents."""
    monkeypatch.setattr("sdopt.gate.paying.holm", lambda values, level: [value <= 4 * level for value in values])
    monkeypatch.setattr("sdopt.gate.paying.exceeds", lambda *_: True)
    assert simulate(Scenario(1.0, variants=4), 50).any_gain > 0.2


class TestBesideANeighbour:
    """Timing disturbed rounds again makes intervals narrower, and moves no ratio."""

    BUSY = Neighbour(0.1)

    @pytest.mark.parametrize("gain", [1.0, 1.25])
    def test_ratios_stay_where_they_are_and_intervals_shrink(self, gain: float) -> None:
        off, on = (
            with_neighbour(self.BUSY, Protocol(replicates=3, interference=limit), STUDIES, gain)
            for limit in (None, 0.02)
        )
        assert on.width < 0.9 * off.width
        assert on.covered > 1 - ALLOWED
        # Four standard errors of the mean over all studies.
        assert abs(on.bias) < 4 * on.width / 2.8 / STUDIES**0.5
        assert 4 < on.rounds <= 6

    def test_a_quiet_machine_times_nothing_again(self) -> None:
        assert with_neighbour(Neighbour(0.0), Protocol(replicates=3), 5).rounds == 4
