"""Puts the figures of an article beside what a study measured, and says which of them were reproduced.

Compared are speed-ups and ratios of memory, each within one machine, and limits of memory that an article names. Times
of different machines are never compared.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from pydantic import TypeAdapter

from sdopt.analysis.article import Printed, Published, PublishedTable, other_setup, read_figure
from sdopt.analysis.figures import Figures, bounds_text, figures_of, first_rows
from sdopt.analysis.measures import MEMORY_RATIO, SPEEDUP
from sdopt.analysis.ratios import MINIMUM_PROCESSES
from sdopt.results.comparisons import Interval
from sdopt.results.records import Status, StudyResult, VariantResult

_GIB_IN_GB = 2**30 / 1e9

MEMORY = "memory"
"""The measure of a claim that an amount of memory suffices; other claims have the name of their `Measure`."""

_SYMBOLS = {SPEEDUP.name: "×", MEMORY_RATIO.name: "×", MEMORY: " GB"}


class Reproduction(StrEnum):
    """Whether one published figure was reproduced here."""

    REPRODUCED = "reproduced"
    NOT_REPRODUCED = "not reproduced"
    UNDECIDED = "undecided"
    """It was measured without an interval."""
    NOT_COMPARABLE = "not comparable"
    """The figure measured here is a different quantity."""
    NOT_RUN = "not run"
    NO_FIGURE = "no figure"
    """The article gives none."""


_JUDGED = (Reproduction.REPRODUCED, Reproduction.NOT_REPRODUCED, Reproduction.UNDECIDED)
"""Verdicts on two figures of the same quantity; only these have a ratio."""


@dataclass(frozen=True)
class Claim:
    """One published figure of one variant on one card, with the figure measured here."""

    variant: str
    reference: str
    shape: str
    """Size or batch if the study has several; else ""."""
    gpu: str
    """The article's card; "" if it gives no figure."""
    place: str
    measure: str
    """`speedup`, `memory_ratio`, or `memory`: a limit in GB."""
    printed: str
    """The article's own figures, as in `8.0 s → 4.1 s`."""
    published: Printed | None
    measured: Interval | None
    ratio: Interval | None
    """Measured over published; None if they are different quantities."""
    amounts: tuple[float, ...]
    """The two values of the measured ratio, reference first: latencies in seconds, or memory in GB.

    They belong to this machine, and are not compared with the article's; () for a limit, or if a value is missing.
    """
    verdict: Reproduction
    reason: str = ""

    @property
    def published_text(self) -> str:
        """The published figure with its unit."""
        if self.published is None:
            return ""
        value = f"{self.published.value:{'g' if self.measure == MEMORY else '.2f'}}"
        return ("<" if self.published.below else "") + value + _SYMBOLS[self.measure]

    @property
    def measured_parts(self) -> tuple[str, str]:
        """The measured figure with its unit, and its interval; "" for none."""
        return _interval(self.measured, _SYMBOLS[self.measure]) if self.measured else ("", "")

    @property
    def ratio_parts(self) -> tuple[str, str]:
        """Measured over published, and its interval; "" for none."""
        return _interval(self.ratio, "") if self.ratio else ("", "")


def _interval(found: Interval, unit: str) -> tuple[str, str]:
    return f"{found.estimate:.2f}{unit}", bounds_text(found)


_PUBLISHED: TypeAdapter[Published] = TypeAdapter(Published)


def published_of(result: StudyResult) -> Published | None:
    """Returns the article that a study's configuration includes, or None if it reproduces no article."""
    found = result.config.study.get("published")
    return None if found is None else _PUBLISHED.validate_python(found)


def claims_of(result: StudyResult) -> list[Claim]:
    """Returns every figure of the article beside what was measured, in the order of the study's comparisons.

    A comparison that the article does not cover gets one claim without a figure, so that no row is left out.
    """
    published = published_of(result)
    if published is None:
        return []
    found: list[Claim] = []
    rows = figures_of(result)
    first = first_rows(rows)
    for figures in rows:
        if figures.variant.role == "control":
            continue
        sides = _Sides(figures, first.get(figures.reference))
        claims = [claim for table in published.tables for claim in _of_table(result, published, table, sides)]
        # A limit belongs to the variant: it is not repeated for its further comparisons.
        claims = [claim for claim in claims if claim not in found]
        if figures.comparison is not None and not claims:
            nothing = PublishedTable(place="", gpus=[])
            claims = [_judged(result, published, sides, sides, _Figure(SPEEDUP.name, "", None), nothing, "")]
        found += claims
    return found


def shown_claims(result: StudyResult, claims: Sequence[Claim]) -> list[Claim]:
    """Returns the claims for this machine's card if the article covers it; else those for the article's main card."""
    published = published_of(result)
    if published is None:
        return []
    cards = {claim.gpu for claim in claims if claim.gpu and is_card(claim.gpu, str(result.environment.device["name"]))}
    return [claim for claim in claims if claim.gpu in (cards or {published.gpu}) or not claim.gpu]


def is_card(gpu: str, device: str) -> bool:
    """Returns whether the driver's name of a device matches the card that an article names: `A10` is not `A100`."""
    mine, there = _words_of(gpu), _words_of(device)
    return mine <= there and not (there - mine) & _OTHER_CARDS


_OTHER_CARDS = {"TI", "SUPER", "LAPTOP", "MAX", "MIG"}
"""Words that distinguish a card, or a slice (MIG) of it, from the card of the same name without them."""


def _words_of(card: str) -> set[str]:
    """Returns the words that identify a card: `A100 (40 GB)` has the same ones as `A100-SXM4-40GB`."""
    joined = re.sub(r"(\d) GB", r"\1GB", re.sub(r"SXM\d", "SXM", card.upper()))
    return set(re.findall(r"\w+", joined)) - {"NVIDIA", "TESLA", "GEFORCE"}


def notes_of_published(result: StudyResult, claims: Sequence[Claim]) -> list[str]:
    """Returns notes that a reader of the claims needs."""
    published = published_of(result)
    if published is None:
        return []
    counts = {verdict: sum(claim.verdict is verdict for claim in claims) for verdict in Reproduction}
    interval, device = f"{100 * result.confidence:g} % interval", result.environment.device["name"]
    return [
        f"Published: {published.article}.",
        "; ".join(f"{count} {verdict}" for verdict, count in counts.items() if count) + ".",
        f"Reproduced: the published figure lies within the {interval} measured here, or is exceeded.",
        f"Speed-ups and memory are compared, times of different machines are not: this is {device}.",
        *(f"{table.place}: {table.note}" for table in published.tables if table.note),
        *published.notes,
    ]


@dataclass(frozen=True)
class _Figure:
    """One figure of a published table; without a value if the run ran out of memory, or the table has none."""

    measure: str
    printed: str
    value: Printed | None
    out_of_memory: bool = False


@dataclass(frozen=True)
class _Sides:
    """The figures of the two variants of a comparison, at one shape; without a reference those of one variant."""

    figures: Figures
    reference: Figures | None

    def at(self, table: PublishedTable) -> "_Sides | None":
        """Returns both sides at the shape of a table, or None if that shape was not measured."""
        others: Sequence[Figures | None] = (
            self.reference.shapes if self.reference else [None] * len(self.figures.shapes)
        )
        pairs = zip(self.figures.shapes, others, strict=True)
        return next((_Sides(mine, other) for mine, other in pairs if table.is_of(mine.shape)), None)

    def amounts(self, measure: str) -> tuple[float, ...]:
        """Returns the two values of a ratio, the reference first; () if one of them is missing."""
        if measure == MEMORY or self.reference is None:
            return ()
        amount = _latency_s if measure == SPEEDUP.name else _memory_gb
        found = [amount(side) for side in (self.reference, self.figures) if side.variant.status.measured]
        known = tuple(value for value in found if value is not None)
        return known if len(known) == 2 else ()


def _latency_s(figures: Figures) -> float | None:
    return None if figures.latency is None else figures.latency.estimate


def _memory_gb(figures: Figures) -> float | None:
    return None if figures.headline_memory is None else figures.headline_memory[1] * _GIB_IN_GB


def _of_table(result: StudyResult, published: Published, table: PublishedTable, sides: _Sides) -> Iterator[Claim]:
    """Yields a table's claims on one comparison, one for each card and figure."""
    there = sides.at(table)
    for column, gpu in enumerate(table.gpus):
        for find in (_speedup, _memory, _limit):
            figure = find(table, sides.figures, column)
            if figure is not None:
                yield _judged(result, published, sides, there, figure, table, gpu)


def _speedup(table: PublishedTable, figures: Figures, column: int) -> _Figure | None:
    candidate, reference = figures.variant.name, figures.reference
    mine, other = read_figure(table.time.get(candidate), column), read_figure(table.time.get(reference), column)
    printed = _arrow(table.time, reference, candidate, column, f" {table.unit}")
    if mine and other and "OOM" in (mine, other):
        return _Figure(SPEEDUP.name, printed, None, out_of_memory=True)
    if reference == table.reference:
        saved = read_figure(table.time_saved.get(candidate), column)
        factor = read_figure(table.speedup.get(candidate), column)
        prefix = [] if not printed else [printed]
        if isinstance(saved, Printed):
            factors = [1 / (1 - percent / 100) for percent in (saved.value, saved.low, saved.high)]
            value = Printed(factors[0], factors[1], factors[2], below=saved.below)
            text = f"{table.time_saved[candidate].split()[column]} % of the time saved"
            return _Figure(SPEEDUP.name, "; ".join([text, *prefix]), value)
        if isinstance(factor, Printed):
            text = f"×{table.speedup[candidate].split()[column]}"
            return _Figure(SPEEDUP.name, "; ".join([text, *prefix]), factor)
    if isinstance(mine, Printed) and isinstance(other, Printed):
        value = _quotient(mine, other) if table.unit == "it/s" else _quotient(other, mine)
        return _Figure(SPEEDUP.name, printed, value)
    return None


def _memory(table: PublishedTable, figures: Figures, column: int) -> _Figure | None:
    candidate, reference = figures.variant.name, figures.reference
    mine, other = (
        read_figure(table.memory_gb.get(candidate), column),
        read_figure(table.memory_gb.get(reference), column),
    )
    printed = _arrow(table.memory_gb, reference, candidate, column, " GB")
    if mine and other and "OOM" in (mine, other):
        return _Figure(MEMORY_RATIO.name, printed, None, out_of_memory=True)
    if isinstance(mine, Printed) and isinstance(other, Printed):
        return _Figure(MEMORY_RATIO.name, printed, _quotient(mine, other))
    return None


def _limit(table: PublishedTable, figures: Figures, column: int) -> _Figure | None:
    name, lines = figures.variant.name, table.memory_limit_gb
    limit = read_figure(lines.get(name), column)
    if not isinstance(limit, Printed):
        return None
    return _Figure(MEMORY, f"{lines[name].split()[column]} GB", limit)


def _quotient(over: Printed, under: Printed) -> Printed:
    return Printed(over.value / under.value, over.low / under.high, over.high / under.low)


def _arrow(lines: dict[str, str], reference: str, candidate: str, column: int, unit: str) -> str:
    """Returns the printed figures of reference and candidate, as in `8.0 s → 4.1 s`; "" without the candidate's."""
    texts = [lines[name].split()[column] for name in (reference, candidate) if name in lines]
    if candidate not in lines or texts[-1] == "-":
        return ""
    return " → ".join(text if text == "OOM" else text + unit for text in texts if text != "-")


def _judged(
    result: StudyResult,
    published: Published,
    sides: _Sides,
    there: _Sides | None,
    figure: _Figure,
    table: PublishedTable,
    gpu: str,
) -> Claim:
    """Returns the claim for one published figure: with the measured figure beside it, and the verdict.

    Args:
        result: the study.
        published: the article.
        sides: the comparison, at the main shape.
        there: the comparison at the table's shape; None if that shape was not measured.
        figure: the published figure.
        table: the table that holds the figure.
        gpu: the card of the figure.
    """
    figures = sides.figures
    measured = _measured(there.figures, figure.measure) if there else None
    verdict, reason = _not_run(result, figures, figure) or (
        _verdict(result, published, there.figures, figure, measured, gpu)
        if there
        else (Reproduction.NOT_COMPARABLE, f"not measured at {table.shape}")
    )
    ratio = None
    if measured is not None and figure.value is not None and verdict in _JUDGED:
        scale = figure.value.value
        low, high = (None if bound is None else bound / scale for bound in (measured.low, measured.high))
        ratio = replace(measured, estimate=measured.estimate / scale, low=low, high=high)
    return Claim(
        variant=figures.variant.name,
        reference="" if figure.measure == MEMORY else figures.reference,
        shape=table.shape,
        gpu=gpu,
        place=table.place,
        measure=figure.measure,
        printed=figure.printed,
        published=figure.value,
        measured=measured,
        ratio=ratio,
        amounts=there.amounts(figure.measure) if there else (),
        verdict=verdict,
        reason=reason,
    )


def _measured(figures: Figures, measure: str) -> Interval | None:
    if measure != MEMORY:
        ratio = figures.ratios.get(measure)
        return ratio.interval if ratio else None
    peak = figures.largest_memory_gib
    return None if peak is None else Interval(peak * _GIB_IN_GB)


_Reasoned = tuple[Reproduction, str]
"""A verdict and its reason."""


def _verdict(
    result: StudyResult,
    published: Published,
    figures: Figures,
    figure: _Figure,
    measured: Interval | None,
    gpu: str,
) -> _Reasoned:
    """Judges a figure of a comparison whose two sides both ran."""
    if figure.out_of_memory:
        return Reproduction.NOT_COMPARABLE, f"{gpu} ran out of memory, and this machine did not"
    if figure.value is None:
        return Reproduction.NO_FIGURE, "the article gives none"
    others = other_setup(published.setup, result.config)
    if others:
        return Reproduction.NOT_COMPARABLE, f"measured here with {', '.join(others)}"
    if figure.measure != SPEEDUP.name and (figures.headline_memory or ("",))[0] != "peak_allocated_gib":
        return Reproduction.NOT_COMPARABLE, "here the memory of a process on a CPU, in the article that of a GPU"
    return _compared(figure.measure, figure.value, measured)


def _not_run(result: StudyResult, figures: Figures, figure: _Figure) -> _Reasoned | None:
    """Returns why one of the sides has no figure here; running out of memory may be what the article reports, too."""
    sides = [figures.variant, *([] if figure.measure == MEMORY else [result.variant(figures.reference)])]
    if figure.out_of_memory and any(side.status is Status.OUT_OF_MEMORY for side in sides):
        return Reproduction.REPRODUCED, "ran out of memory here too"
    stopped = [side for side in sides if side.status is not Status.OK]
    if not stopped:
        return None
    reasons = [("" if side is figures.variant else f"{side.name}: ") + _why_not_run(side) for side in stopped]
    return Reproduction.NOT_RUN, "; ".join(reasons)


def _why_not_run(side: VariantResult) -> str:
    reason = side.reason or {Status.NOT_ENGAGED: "no evidence that its options took effect"}.get(side.status, "")
    return f"{side.status} ({reason})" if reason else str(side.status)


def _compared(measure: str, published: Printed, measured: Interval | None) -> _Reasoned:
    """Returns whether a published figure lies in the measured interval, widened by its rounding, or is exceeded."""
    if measured is None:
        return Reproduction.NOT_RUN, "it was not measured"
    if measure == MEMORY:
        enough = measured.estimate <= published.high
        return (
            (Reproduction.REPRODUCED, "suffices here")
            if enough
            else (Reproduction.NOT_REPRODUCED, "more is needed here")
        )
    if measured.low is None or measured.high is None:
        return Reproduction.UNDECIDED, f"no interval, which needs protocol.replicates={MINIMUM_PROCESSES} or more"
    if measure == SPEEDUP.name:
        reached, exceeded = measured.high >= published.low, measured.low > published.high
    else:  # less memory is better
        reached, exceeded = measured.low <= published.high, measured.high < published.low
    if not reached:
        return Reproduction.NOT_REPRODUCED, "the whole interval falls short of it"
    return Reproduction.REPRODUCED, "exceeded" if exceeded else "within its interval"
