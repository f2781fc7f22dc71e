"""Who is dropped before the judging: only who is worse than the best one by more than noise explains."""

import math

import numpy as np
import pytest

from sdopt.search.racing import Noise, Standing, contenders, ranked
from sdopt.search.run import front_of
from sdopt.search.simulation import simulated


def test_without_a_control_nobody_is_dropped() -> None:
    standings = {"fast": Standing(-1.0, 1), "slow": Standing(1.0, 1)}
    assert contenders(standings, Noise.of_controls([]), 0.05) == ["fast", "slow"]


def test_who_is_worse_by_more_than_the_noise_is_dropped() -> None:
    noise = Noise.of_controls([(0.02, 1), (-0.02, 1), (0.02, 1), (-0.02, 1), (0.02, 1)])
    standings = {"close": Standing(-0.47, 1), "best": Standing(-0.5, 1), "slow": Standing(0.0, 1)}
    assert contenders(standings, noise, 0.05) == ["best", "close"]
    assert ranked(standings) == ["best", "close", "slow"]


def test_a_control_over_more_processes_says_as_much_of_a_single_one() -> None:
    assert Noise.of_controls([(0.01, 4)]).variance == pytest.approx(Noise.of_controls([(0.02, 1)]).variance)


def test_a_standing_weighs_studies_by_their_processes() -> None:
    assert Standing.of([(0.3, 1), (0.0, 2)]).loss == pytest.approx(0.1)


def test_the_best_one_is_dropped_no_more_often_than_the_error_allows() -> None:
    random = np.random.default_rng(0)
    dropped = 0
    for _ in range(400):
        # Ten of which the first is the best by a little, with five controls to tell the noise.
        losses = {str(n): 0.05 * random.standard_normal() - (0.01 if n == 0 else 0) for n in range(10)}
        noise = Noise.of_controls([(0.05 * random.standard_normal(), 1) for _ in range(5)])
        standings = {name: Standing(loss, 1) for name, loss in losses.items()}
        dropped += "0" not in contenders(standings, noise, 0.05)
    assert dropped / 400 <= 0.05


def test_what_is_reported_of_the_best_of_fifty_null_options_is_unbiased() -> None:
    random = np.random.default_rng(1)
    found = [simulated(1.0, 1.0, random) for _ in range(60)]
    reported = [each.reported for each in found if each.reported is not None]
    assert min(each.screened for each in found) > math.log(1.02)  # the best of fifty looks good, and is not
    assert abs(np.mean(reported)) < 2.6 * np.std(reported) / math.sqrt(len(reported))
    assert sum(each.false for each in found) <= 6  # of 60, where 5 % are 3: more come once in fifty seeds


def test_the_front_is_of_those_that_none_beats_in_everything() -> None:
    losses = {"small": [2.0, 1.0], "fast": [1.0, 2.0], "worse": [2.0, 2.0], "even": [1.0, 2.0]}
    assert front_of(losses) == {"small", "fast", "even"}
