"""Every verdict has a tone, and every tone a look."""

from enum import StrEnum
from importlib.resources import files

import pytest

from sdopt.record.records import Status
from sdopt.report.charts.tradeoff import _SHAPES
from sdopt.report.tones import BASELINE, COLOUR, GLYPH, RICH, TONES, Tone
from sdopt.statistics.published import Reproduction
from sdopt.statistics.scale import Decision, Images, Speed


@pytest.mark.parametrize("verdicts", [Status, Speed, Images, Decision, Reproduction])
def test_every_verdict_has_a_tone(verdicts: type[StrEnum]) -> None:
    assert not [verdict for verdict in verdicts if verdict not in TONES]


def test_every_tone_has_a_look() -> None:
    style = (files("sdopt.report.page") / "templates" / "page.css").read_text(encoding="utf-8")
    for tone in Tone:
        assert tone in RICH
        assert tone in COLOUR
        assert f".badge.{tone} " in style
    assert len({GLYPH[tone] for tone in Tone}) == len(Tone)


def test_verdicts_of_one_colour_differ_in_their_shapes() -> None:
    assert {*_SHAPES} == {BASELINE, *Images}
    assert len({*_SHAPES.values()}) == len(_SHAPES)
