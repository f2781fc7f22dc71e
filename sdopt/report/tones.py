"""Gives every verdict and status a tone, and every tone its look: in a terminal, on a page and in a plot."""

from collections.abc import Mapping
from typing import Literal

from sdopt.record.records import Status
from sdopt.record.verdicts import Verdict
from sdopt.statistics.scale import Images, Speed

INK, MUTED, LINE = "#1f2933", "#5d6b79", "#d5dbe1"

BLUE, VERMILION, GREY, PURPLE, GREEN, AMBER, SKY = (
    "#0072b2", "#d55e00", "#868e96", "#cc79a7", "#009e73", "#e69f00", "#56b4e9",
)  # fmt: skip
"""Colours that differ for every kind of colour vision (Okabe and Ito 2008), and by 3:1 from white and from black."""


Tone = Literal["good", "open", "bad", "broken", "plain"]
"""How a reader should take a verdict: `open` if more measurements may decide it, `plain` if it judges nothing.

The page's style sheet has a class for each.
"""


BASELINE, BROKEN = "baseline", "broken"
"""What stands where other variants have a verdict, and where an image tripped a wire."""

_MEMBERS: Mapping[Tone, tuple[str, ...]] = {
    "good": (
        Status.OK,
        Speed.FASTER,
        Images.EQUAL,
        Images.WITHIN,
        Verdict.PASS,
        "reproduced",
    ),
    "open": (
        Status.INTERRUPTED,
        Speed.CLOSE,
        Speed.FEW,
        Verdict.INCONCLUSIVE,
    ),
    "bad": (
        Status.NOT_ENGAGED,
        Status.SLOWER,
        Status.FAILED,
        Status.OUT_OF_MEMORY,
        Status.KILLED,
        Status.TIMEOUT,
        Speed.SLOWER,
        Images.WORSE,
        Verdict.FAIL,
        "not reproduced",
    ),
    "broken": (BROKEN,),
    "plain": (
        BASELINE,
        Status.PENDING,
        "in part",
        "not measured",
        Status.SKIPPED,
        Images.NOT_JUDGED,
        "not run",
        "no figure",
    ),
}
"""Verdicts on published figures are among them; `undecided` and `not judged` stand for several."""

TONES: dict[str, Tone] = {}
for _tone, _members in _MEMBERS.items():
    TONES |= dict.fromkeys(_members, _tone)

_LOOKS = {
    "good": ("green", "✓", BLUE),
    "open": ("yellow", "?", GREY),
    "bad": ("red", "✗", VERMILION),
    "broken": ("red", "⚠", PURPLE),
    "plain": ("dim", "–", INK),
}

RICH = {tone: style for tone, (style, _, _) in _LOOKS.items()}
"""Styles of a terminal."""

GLYPH = {tone: symbol for tone, (_, symbol, _) in _LOOKS.items()}
"""Symbols of a page, which say the same as the colours of its badges."""

COLOUR = {tone: colour for tone, (_, _, colour) in _LOOKS.items()}
"""Colours of a plot."""
