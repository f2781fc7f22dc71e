"""Who is dropped before the judging: only who is worse than the best one by more than noise explains."""

import math

import numpy as np
import pytest

from sdopt.search.config import search_config, search_file
from sdopt.search.racing import (
    DistanceStanding,
    RatioStanding,
    Scatter,
    Standing,
    contenders,
    front_of,
    is_gain,
    race,
    ranked,
)
from sdopt.search.record import Fate
from tests.trial.search import simulated

KNOWN = Scatter.of_controls([(0.02, 1), (-0.02, 1), (0.02, 1), (-0.02, 1), (0.02, 1)])
EXACT = Scatter(0.0, 5)


def standings(
    losses: dict[str, float], noise: Scatter = KNOWN
) -> dict[str, list[Standing]]:
    """Candidates of one objective, each measured in one process."""
    return {name: [RatioStanding(loss, 1, noise)] for name, loss in losses.items()}


def test_who_is_worse_by_more_than_the_noise_is_dropped_and_nobody_without_a_control() -> (
    None
):
    found = standings({"close": -0.47, "best": -0.5, "slow": 0.0})
    assert contenders(found, 0.05) == ["best", "close"]
    assert ranked(found) == ["best", "close", "slow"]
    assert contenders(
        standings({"fast": -1.0, "slow": 1.0}, Scatter.of_controls([])), 0.05
    ) == ["fast", "slow"]


def test_processes_weigh_as_many_measurements() -> None:
    assert Scatter.of_controls([(0.01, 4)]).variance == pytest.approx(
        Scatter.of_controls([(0.02, 1)]).variance
    )
    assert RatioStanding.of([(0.3, 1), (0.0, 2)], KNOWN).loss == pytest.approx(0.1)


def test_the_best_one_is_dropped_no_more_often_than_the_error_allows() -> None:
    random = np.random.default_rng(0)
    dropped = 0
    for _ in range(200):
        # Ten of which the first is the best by a little, with five controls to tell the noise.
        losses = {
            str(n): 0.05 * random.standard_normal() - (0.01 if n == 0 else 0)
            for n in range(10)
        }
        noise = Scatter.of_controls(
            [(0.05 * random.standard_normal(), 1) for _ in range(5)]
        )
        dropped += "0" not in contenders(standings(losses, noise), 0.05)
    assert dropped / 200 <= 0.05


class TestSeveralObjectives:
    def test_nobody_is_dropped_who_may_be_better_in_one(self) -> None:
        found: dict[str, list[Standing]] = {
            "fast": [RatioStanding(-0.5, 1, KNOWN), RatioStanding(0.0, 1, EXACT)],
            "small": [RatioStanding(0.0, 1, KNOWN), RatioStanding(-0.1, 1, EXACT)],
            "as fast": [RatioStanding(-0.48, 1, KNOWN), RatioStanding(0.0, 1, EXACT)],
            "slow and as large": [
                RatioStanding(0.5, 1, KNOWN),
                RatioStanding(0.0, 1, EXACT),
            ],
        }
        assert contenders(found, 0.05) == ["fast", "small", "as fast"]

    def test_distances_are_compared_prompt_by_prompt(self) -> None:
        def both(latency: float, distances: list[float]) -> list[Standing]:
            return [
                RatioStanding(latency, 1, KNOWN),
                DistanceStanding(float(np.mean(distances)), tuple(distances)),
            ]

        close, far = [0.01, 0.02, 0.03, 0.04] * 2, [0.11, 0.12, 0.14, 0.14] * 2
        mixed = [*far[:4], *([0.0] * 4)]
        # Slower than the first one by far; closer to the baseline's images on no prompt, on some, or unknown.
        found = {
            "best": both(-0.5, close),
            "worse": both(0.0, far),
            "mixed": both(0.1, mixed),
            "one": both(0.2, [0.3]),
        }
        assert contenders(found, 0.05) == ["best", "mixed", "one"]

    def test_nobody_of_the_front_is_dropped_more_often_than_the_error_allows(
        self,
    ) -> None:
        """Ten candidates, of which four are on the true front by a little, and three are far from it."""
        random = np.random.default_rng(0)
        true = {f"front {n}": (-0.1 * n, 1.0 + 0.3 * n) for n in range(4)}
        true |= {f"close {n}": (0.01 - 0.1 * n, 1.02 + 0.3 * n) for n in range(3)}
        true |= {f"far {n}": (0.8 + 0.1 * n, 4.0 + n) for n in range(3)}
        wrong = far = 0
        for _ in range(100):
            noise = Scatter.of_controls(
                [(0.05 * random.standard_normal(), 1) for _ in range(8)]
            )
            found: dict[str, list[Standing]] = {}
            for name, (latency, distance) in true.items():
                # Distances of prompts are skewed.
                prompts = distance * random.lognormal(-0.08, 0.4, 24)
                loss = latency + 0.05 * random.standard_normal()
                found[name] = [
                    RatioStanding(loss, 1, noise),
                    DistanceStanding(float(prompts.mean()), tuple(prompts)),
                ]
            kept = contenders(found, 0.05)
            wrong += any(f"front {n}" not in kept for n in range(4))
            far += sum(name.startswith("far") for name in kept)
        assert wrong / 100 <= 0.05
        assert far / 300 <= 0.2

    def test_the_ends_of_a_front_come_first_and_then_the_front_of_the_rest(
        self,
    ) -> None:
        losses = {
            "behind": (3.0, 3.0),
            "middle": (2.0, 2.0),
            "fast": (1.0, 4.0),
            "small": (4.0, 1.0),
        }
        found = {
            name: [RatioStanding(loss, 1, EXACT) for loss in both]
            for name, both in losses.items()
        }
        assert ranked(found) == ["fast", "small", "middle", "behind"]

    def test_a_gain_in_one_is_enough_and_distance_alone_has_none(self) -> None:
        assert is_gain([RatioStanding(0.1, 1, KNOWN), RatioStanding(-0.1, 1, KNOWN)])
        assert not is_gain(
            [RatioStanding(0.1, 1, KNOWN), DistanceStanding(0.0, (0.0,))]
        )
        assert is_gain([DistanceStanding(0.1, (0.1,))])


class TestRace:
    def test_measures_again_until_few_are_left_and_says_how_the_others_ended(
        self,
    ) -> None:
        config = search_config(
            ["search.groups=[layout]", "search.finalists=1", "search.side_by_side=3"]
        )
        found = {"slow": 1.0, "a": -0.1, "b": -0.11, "c": -0.12, "d": -0.05}
        raced: list[list[str]] = []
        ends: dict[str, Fate] = {}

        def measure(number: int, names: list[str]) -> bool:
            assert number == len(raced)
            raced.append(names)
            found["a"] = -1.0
            return True

        order = race(
            config,
            lambda _: standings(found),
            measure,
            lambda names, fate, _: ends.update(dict.fromkeys(names, fate)),
        )
        assert raced == [["c", "b", "a"]]
        assert order == ["a"]
        assert ends == {
            "slow": "beaten",
            "d": "not judged",
            "b": "beaten",
            "c": "beaten",
        }

    def test_leaves_out_what_is_no_gain(self) -> None:
        ends: dict[str, Fate] = {}
        order = race(
            search_file(),
            lambda _: standings({"gain": -0.01, "none": 0.01}),
            lambda *_: pytest.fail("two need no race"),
            lambda names, fate, _: ends.update(dict.fromkeys(names, fate)),
        )
        assert order == ["gain"]
        assert ends == {"none": "not judged"}


def test_what_is_reported_of_the_best_of_fifty_null_options_is_unbiased() -> None:
    random = np.random.default_rng(1)
    found = [simulated(search_file(), 1.0, 1.0, random) for _ in range(30)]
    reported = [each.reported for each in found if each.reported is not None]
    assert min(each.screened for each in found) > math.log(
        1.02
    )  # the best of fifty looks good, and is not
    assert abs(np.mean(reported)) < 2.6 * np.std(reported) / math.sqrt(len(reported))
    assert (
        sum(each.false for each in found) <= 4
    )  # of 30, where 5 % are 1.5: more come once in fifty seeds


def test_the_front_is_of_those_that_none_beats_in_everything() -> None:
    losses = {
        "small": [2.0, 1.0],
        "fast": [1.0, 2.0],
        "worse": [2.0, 2.0],
        "even": [1.0, 2.0],
    }
    assert front_of(losses) == {"small", "fast", "even"}
