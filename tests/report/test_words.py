"""The words of verdicts: one scale, wherever a user meets one."""

from enum import StrEnum

import pytest

from sdopt.search.record import Fate
from sdopt.statistics.scale import Decision, Images, Speed

SCALE = {
    *("faster", "slower", "too close to call", "not enough runs"),
    *("equal", "within tolerance", "worse", "not judged"),
    *("pass", "fail", "undecided"),
}


@pytest.mark.parametrize("verdicts", [Speed, Images, Decision])
def test_a_verdict_is_a_word_of_the_scale(verdicts: type[StrEnum]) -> None:
    assert {str(verdict) for verdict in verdicts} <= SCALE


def test_a_search_adds_its_winner_and_no_other_word() -> None:
    assert {str(fate) for fate in Fate} - SCALE == {str(Fate.WINNER)}


def test_each_word_of_the_scale_is_one_of_a_verdict() -> None:
    assert {str(verdict) for verdicts in (Speed, Images, Decision) for verdict in verdicts} == SCALE
