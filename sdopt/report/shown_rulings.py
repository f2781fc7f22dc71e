"""Shows rulings on changes of images as the candidate less the reference, whichever way is better.

A record has them turned so that more is better, and those of which neither way is better the other way round.
"""

import re
from dataclasses import replace

from sdopt.quality.metrics import known_family
from sdopt.record.verdicts import Ruling
from sdopt.statistics.ruling_sentences import CHANGES

_NUMBER = r"-?\d[\d.]*(?:e[+-]\d+)?"

_TURNED = re.compile(
    rf"\[(?P<low>{_NUMBER}), (?P<high>{_NUMBER})\]"
    rf"|(?P<words>at least |at most |above the limit |below the limit |the limit |^)(?P<number>{_NUMBER})"
)
"""An interval, or a bound or a limit, in the reason of a ruling."""

_OPPOSITES = {
    "at least ": "at most ",
    "at most ": "at least ",
    "above the limit ": "below the limit ",
    "below the limit ": "above the limit ",
}


def shown_ruling(ruling: Ruling) -> Ruling:
    """Returns a ruling with its figures as the candidate less the reference; of another kind the ruling itself."""
    family = known_family(ruling.metric)
    is_change = ruling.rule in CHANGES and ruling.estimate is not None
    if not is_change or family is None or family.higher_is_better:
        return ruling
    return replace(
        ruling,
        reason=_TURNED.sub(_turned, ruling.reason),
        estimate=_negative(ruling.estimate),
        low=_negative(ruling.high),
        high=_negative(ruling.low),
        margin=_negative(ruling.margin),
    )


def limit_text(ruling: Ruling) -> str:
    """Returns the limit of a ruling, which a change either way has on both sides; "" without one."""
    limit = ruling.margin
    if limit is None:
        return ""
    return f"±{abs(limit):.4g}" if ruling.rule == "equivalent" else f"{limit:.4g}"


def _negative(value: float | None) -> float | None:
    return None if value is None else 0.0 - value


def _turned(figure: re.Match[str]) -> str:
    if figure["low"]:
        return f"[{_opposite(figure['high'])}, {_opposite(figure['low'])}]"
    words = figure["words"]
    return f"{_OPPOSITES.get(words, words)}{_opposite(figure['number'])}"


def _opposite(number: str) -> str:
    if number.startswith("-"):
        return number[1:]
    return number if number == "0" else f"-{number}"
