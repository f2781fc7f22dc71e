"""Shows predictions, and what checking them against published figures found, as tables."""

import math
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from sdopt.foresight.check import Check
from sdopt.foresight.fitting import EXTRAPOLATED
from sdopt.foresight.plan import REFUSED, Prediction, ranks
from sdopt.record.comparisons import Interval
from sdopt.statistics.words import seconds_text

TIE = 0.75
"""Below this probability, two neighbours in a ranking are called a tie."""


def plan_table(predictions: Sequence[Prediction]) -> Table:
    """Returns a row per prediction."""
    several = len({each.variant for each in predictions}) > 1
    shapes = len({each.shape for each in predictions}) > 1
    priced = any(each.price is not None for each in predictions)
    table = Table(title="what it would take (80 % intervals)", title_justify="left")
    for number, each in enumerate(predictions):
        largest = sorted(each.shares.items(), key=lambda item: -item[1])[:2]
        interval = Interval(each.seconds, each.low, each.high)
        row = {
            "card": each.card,
            **({"variant": each.variant} if several else {}),
            **({"shape": str(each.shape)} if shapes else {}),
            "one call": "—" if math.isnan(each.seconds) else seconds_text(interval),
            "at least": f"{each.memory.floor:.1f} GiB",
            "likely": f"{each.memory.likely:.1f}",
            "of": f"{each.sheet.memory_gib:.1f}",
            "fits?": each.fits,
            **({"per 1,000 images": "" if each.price is None else f"{each.price:.2f}"} if priced else {}),
            "bound by": ", ".join(f"{name} {100 * share:.0f} %" for name, share in largest),
            "rests on": "refused" if each.state == REFUSED else f"{each.state}: {each.evidence}",
        }
        if not number:
            for heading in row:
                table.add_column(heading)
        table.add_row(*map(escape, row.values()))
    return table


def remarks(predictions: Sequence[Prediction], command: str) -> Iterator[str]:
    """Yields what stands below the table: refusals, the ranking, and the command that measures."""
    refusals = {f"{each.card}, {each.variant}: {each.reason}" for each in predictions if each.state == REFUSED}
    for refusal in sorted(refusals):
        yield f"no time for {refusal}"
    ordered = list(ranks(predictions))
    if len(ordered) > 1:
        several = len({each.variant for each in predictions}) > 1
        words = []
        for each, chance in ordered:
            name = f"{each.card} {each.variant}" if several else each.card
            sign = "" if math.isnan(chance) else f" ({100 * chance:.0f} %) >" if chance >= TIE else " ="
            words.append(f"{name}{sign}")
        yield f"fastest per image first, with the chance that each beats the next; = is a tie: {' '.join(words)}"
    if any(each.state == EXTRAPOLATED and each.card != "cpu" for each in predictions):
        yield "extrapolated: no or few published figures of that generation or size; the interval is wider"
    yield f"to measure it there: {command}"


def check_tables(found: Check) -> Iterator[RenderableType]:
    """Yields the tables and lines of a check."""
    table = Table(
        title=f"latency, each figure predicted without its {found.by} (errors as a share of the published time)",
        title_justify="left",
    )
    for heading in (
        "class", "figures", "devices", "median", "80th pct", "devices' median", "within 25 %", "in the 80 % interval",
        "width", "ratio of peaks",
    ):  # fmt: skip
        table.add_column(heading, overflow="fold")
    for score in found.scores:
        table.add_row(
            score.name,
            str(score.figures),
            str(score.devices),
            *(
                _percent(value)
                for value in (score.median, score.p80, score.devices_median, score.devices_near, score.covered)
            ),
            f"{score.width:.2f}×",
            _percent(score.peaks),
        )
    yield table
    right, peaks, pairs = found.order
    apart = "that differ by over 10 %"
    beside = f"(by peak rates {_percent(peaks)}), {pairs} pairs"
    yield f"order of pairs of devices {apart}: {_percent(right)} right {beside}"
    right, pairs = found.options
    yield f"order of pairs of options on one device {apart}: {_percent(right)} right, {pairs} pairs"
    for kind, figures, median, p80, above in found.memory:
        yield (
            f"memory, {kind}: {figures} figures, median error {_percent(median)}, 80th percentile {_percent(p80)}; "
            f"the floor is not above {_percent(above)} of them"
        )
    right, wrong, count = found.fits
    if count:
        yield (
            f"fits: right for {_percent(right)} of {count} usual cards just too small or just large enough; "
            f"wrongly refused {_percent(wrong)}"
        )
    for reason, count in found.refusals.items():
        yield f"refused: {count} figures: {reason}"


def _percent(value: float) -> str:
    return "—" if math.isnan(value) else f"{100 * value:.1f} %"
