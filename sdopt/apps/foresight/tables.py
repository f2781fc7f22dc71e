"""Shows predictions, and what checking them against published figures found, as tables."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from sdopt.apps.foresight.check import Check
from sdopt.apps.foresight.fitting import EXTRAPOLATED
from sdopt.apps.foresight.plan import (
    REFUSED,
    Prediction,
    names_of,
    ranks,
    shares_text,
)
from sdopt.record.comparisons import Interval
from sdopt.report.blocks import Block, Notes, Prose, Table
from sdopt.statistics.words import seconds_text

TIE = 0.75
"""Below this probability, two neighbours in a ranking are called a tie."""


def plan_table(predictions: Sequence[Prediction]) -> Table:
    """Returns a row per prediction."""
    several = len({prediction.variant for prediction in predictions}) > 1
    works = len({prediction.work for prediction in predictions}) > 1
    headings = ["card", "variant", "call of", "one call", "memory", "fits?"]
    headings += ["per 1,000 images", "mostly"]
    rows = []
    for prediction in predictions:
        interval = Interval(prediction.seconds, prediction.low, prediction.high)
        memory = prediction.memory
        rows.append(
            [
                prediction.card,
                prediction.variant if several else "",
                prediction.work if works else "",
                "—" if math.isnan(prediction.seconds) else seconds_text(interval),
                f"{memory.floor:.1f} to {memory.likely:.1f} of {prediction.sheet.memory_gib:.1f} GiB",
                prediction.fits,
                "" if prediction.price is None else f"{prediction.price:.2f}",
                shares_text(prediction, 1),
            ]
        )
    return Table(headings, rows).filled()


def rows_of(
    predictions: Sequence[Prediction], notes: Sequence[str]
) -> list[dict[str, Any]]:
    """Returns the predictions as flat rows, each with the notes on its card, and the chance that it beats the next."""
    chances = {id(prediction): chance for prediction, chance in ranks(predictions)}
    rows = []
    for prediction in predictions:
        row = prediction.row()
        row["beats_next"] = chances.get(id(prediction), math.nan)
        named = re.compile(rf"\b{re.escape(prediction.card)}\b")
        row["notes"] = list(filter(named.search, notes))
        rows.append(row)
    return rows


def remarks(predictions: Sequence[Prediction], command: str) -> Iterator[str]:
    """Yields what stands below the table: how to read it, what it rests on, the ranking, how to measure it."""
    if len(predictions) > 1:
        yield from _how_to_read(predictions)
    refusals = set()
    for prediction in predictions:
        # The line of a single prediction has said it.
        if prediction.state == REFUSED and len(predictions) > 1:
            refusals.add(
                f"{prediction.card}, {prediction.variant}: {prediction.reason}"
            )
    for refusal in sorted(refusals):
        yield f"no time for {refusal}"
    ordered = list(ranks(predictions))
    if len(ordered) > 1:
        words = []
        for name, (_, chance) in zip(
            names_of([prediction for prediction, _ in ordered]), ordered, strict=True
        ):
            sign = (
                ""
                if math.isnan(chance)
                else f" ({100 * chance:.0f} %) >"
                if chance >= TIE
                else " ="
            )
            words.append(f"{name}{sign}")
        yield f"fastest per image first, with the chance that each beats the next; = is a tie: {' '.join(words)}"
    if any(
        prediction.state == EXTRAPOLATED and prediction.card != "cpu"
        for prediction in predictions
    ):
        yield (
            "extrapolated: no or few published figures of that generation, size or cache; the interval is wider"
        )
    priced = {
        prediction.card for prediction in predictions if prediction.price is not None
    }
    if len(priced) > 1:
        yield "per 1,000 images: at the same hardware.price_per_hour for each of the cards"
    if not all(prediction.is_too_large for prediction in predictions):
        yield f"to measure it there: {command}"


def _how_to_read(predictions: Sequence[Prediction]) -> Iterator[str]:
    """Yields what brackets and memory mean, and what the times of which cards rest on."""
    rests: dict[str, list[str]] = {}
    for prediction in predictions:
        if prediction.state != REFUSED:
            rests.setdefault(f"{prediction.state}: {prediction.evidence}", []).append(
                prediction.card
            )
    works = {prediction.work for prediction in predictions}
    if len(works) == 1:
        yield f"one call: {works.pop()}"
    if rests:
        yield "in brackets: four in five such calls take between these (80 % interval)"
    yield "memory: what it needs at least, what it likely takes, and what the card has"
    for evidence, cards in rests.items():
        yield f"{', '.join(dict.fromkeys(cards))}: {evidence}"


def check_blocks(found: Check) -> list[Block]:
    """Returns the table of a check, and what else it found."""
    headings = [
        "class",
        "figures",
        "devices",
        "median",
        "80th pct",
        "devices' median",
        "within 25 %",
    ]
    headings += ["in the 80 % interval", "width", "ratio of peaks"]
    rows = [
        [
            score.name,
            str(score.figures),
            str(score.devices),
            *map(
                _percent,
                (
                    score.median,
                    score.p80,
                    score.devices_median,
                    score.devices_near,
                    score.covered,
                ),
            ),
            f"{score.width:.2f}×",
            _percent(score.peaks),
        ]
        for score in found.scores
    ]
    title = f"latency, each figure predicted without its {found.by} (errors as a share of the published time):"
    return [
        Prose(title),
        Table(headings, rows, numbers=headings[1:]),
        Notes([*_notes(found)]),
    ]


def _notes(found: Check) -> Iterator[str]:
    apart = "that differ by over 10 %"
    right, peaks, pairs = found.order
    yield f"order of pairs of devices {apart}: {_percent(right)} right (by peak rates {_percent(peaks)}), {pairs} pairs"
    right, pairs = found.options
    yield f"order of pairs of options on one device {apart}: {_percent(right)} right, {pairs} pairs"
    for kind, figures, median, p80, above in found.memory:
        yield (
            f"memory, {kind}: {figures} figures, median error {_percent(median)}, 80th percentile {_percent(p80)}; "
            f"the floor is not above {_percent(above)} of them"
        )
    for reason, count in found.refusals.items():
        yield f"refused: {count} figures: {reason}"


def _percent(value: float) -> str:
    return "—" if math.isnan(value) else f"{100 * value:.1f} %"
