"""Puts the figures of an article beside what a study measured, and says which of them were reproduced.

Compared are speed-ups and ratios of memory, each within one machine, and limits of memory that an article names. Times
of different machines are never compared.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from pydantic import TypeAdapter

from sdopt.errors import UsageError
from sdopt.record.comparisons import Interval
from sdopt.record.records import Status, StudyResult
from sdopt.schema import Configured
from sdopt.statistics.figures import rows_of
from sdopt.statistics.measures import MEMORY_RATIO, SPEEDUP
from sdopt.statistics.ratios import MINIMUM_PROCESSES
from sdopt.statistics.rows import Row


@dataclass(frozen=True)
class PublishedTable(Configured):
    """Figures of an article, by variant. A line holds one figure for each of `gpus`, as printed, with blanks between.

    `-` is no figure, `OOM` a run that ran out of memory, and `<3` something less than 3.
    """

    place: str
    """Where the article has the figures, such as the title of its table."""
    gpus: list[str]
    size: int | None = None
    """Height and width in pixels, if the study has a list of sizes."""
    batch_size: int | None = None
    """Prompts per call, if the study has a list of batch sizes."""
    reference: str | None = None
    """The variant that `speedup` and `time_saved` are relative to."""
    unit: Literal["s", "ms", "it/s"] = "s"
    """Unit of the figures in `time`."""
    time: dict[str, str] = field(default_factory=dict)
    """Latencies or rates; if the article gives no speed-up, it is computed from them."""
    speedup: dict[str, str] = field(default_factory=dict)
    """Time of the reference divided by that of the variant."""
    time_saved: dict[str, str] = field(default_factory=dict)
    """Percentage by which the variant's time is shorter than the reference's."""
    memory_gb: dict[str, str] = field(default_factory=dict)
    """Peak memory; ratios are computed from it."""
    memory_limit_gb: dict[str, str] = field(default_factory=dict)
    """Memory that suffices for the variant according to the article."""
    note: str = ""
    """A note for the reader of these figures."""

    @property
    def shape(self) -> str:
        """The shape that the figures belong to; "" if the study has only one."""
        size = f"{self.size}×{self.size}" if self.size else ""
        return ", ".join(filter(None, [size, f"batch {self.batch_size}" if self.batch_size else ""]))

    @property
    def columns(self) -> tuple[dict[str, str], ...]:
        """All lines by variant, one mapping for each kind of figure."""
        return self.time, self.speedup, self.time_saved, self.memory_gb, self.memory_limit_gb


@dataclass(frozen=True)
class PublishedSetup(Configured):
    """What the figures were measured with, as far as the study's own configuration says it; null is not compared."""

    model: str | None = None
    """`model.name`."""
    scheduler: str | None = None
    """`scheduler.class_name`."""
    steps: int | None = None
    """`workload.steps`."""
    size: int | None = None
    """Height and width in pixels; null also where the study has a list of sizes."""
    images: int | None = None
    """Images of one call; null also where the study has a list of batch sizes."""


@dataclass(frozen=True)
class Published(Configured):
    """What an article says of the variants of a study."""

    article: str
    """Title and publisher."""
    gpu: str
    """The card of its main figures: shown where this machine has none of the cards in its tables."""
    setup: PublishedSetup = field(default_factory=PublishedSetup)
    """What the figures were measured with."""
    tables: list[PublishedTable] = field(default_factory=list)
    """The figures, as they stand in the article."""
    notes: list[str] = field(default_factory=list)
    """Settings that the article does not state, and what a preset uses in place of the article's software."""


@dataclass(frozen=True)
class Printed:
    """A printed figure with the bounds implied by its rounding."""

    value: float
    low: float
    high: float
    below: bool = False
    """Whether the article says that it is less than `value`."""


_FIGURE = re.compile(r"-|OOM|(<?)(-?\d+(?:\.(\d+))?)")


def read_figure(line: str | None, column: int) -> Printed | str | None:
    """Returns one figure of a table's line; `OOM` as it is; None where there is none."""
    text = line.split()[column] if line else "-"
    found = _FIGURE.fullmatch(text)
    if found is None or found[2] is None:
        return None if text == "-" else text
    value, half = float(found[2]), 0.5 * 10.0 ** -len(found[3] or "")
    return Printed(value, 0.0, value, below=True) if found[1] else Printed(value, value - half, value + half)


def require_published(published: Published, variants: Sequence[str]) -> None:
    """Raises UsageError for a figure that cannot be read, is of no variant of the study, or has no card."""
    problems = []
    for table in published.tables:
        at = f"study.published ({table.place})"
        named = [name for column in table.columns for name in column] + [table.reference or variants[0]]
        problems += [f"{at}: the study has no variant '{name}'" for name in named if name not in variants]
        for name, line in ((name, line) for column in table.columns for name, line in column.items()):
            if len(line.split()) != len(table.gpus):
                problems.append(f"{at}: '{name}' has {len(line.split())} figures for {len(table.gpus)} cards")
            problems += [
                f"{at}: '{name}': {text} is not a number" for text in line.split() if not _FIGURE.fullmatch(text)
            ]
        problems += [
            f"{at}: '{name}' saves {line} %; a saving must be less than 100 %"
            for name, line in table.time_saved.items()
            for saved in [read_figure(text, 0) for text in line.split()]
            if isinstance(saved, Printed) and saved.high >= 100
        ]
        problems += [
            f"{at}: '{name}': {text}: of times and memory ratios are computed: give a number above 0, or -"
            for name, line in (*table.time.items(), *table.memory_gb.items())
            for text in line.split()
            if _FIGURE.fullmatch(text) and isinstance(found := read_figure(text, 0), Printed) and found.low <= 0
        ]
        if (table.speedup or table.time_saved) and table.reference is None:
            problems.append(
                f"{at}: has speed-ups but no reference; set reference to the variant that they are relative to"
            )
    if problems:
        raise UsageError(list(dict.fromkeys(problems)))


_GIB_IN_GB = 2**30 / 1e9

MEMORY = "memory"
"""The measure of a claim that an amount of memory suffices; other claims have the name of their `Measure`."""


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


@dataclass(frozen=True)
class _Figure:
    """One figure of a published table; without a value if the run ran out of memory, or the table has none."""

    measure: str
    """`speedup`, `memory_ratio`, or `memory`: a limit in GB."""
    printed: str
    """The article's own figures, as in `8.0 s → 4.1 s`."""
    value: Printed | None
    out_of_memory: bool = False


@dataclass(frozen=True)
class PublishedClaim:
    """One published figure of one variant on one card, with the figure measured here."""

    variant: str
    reference: str
    shape: str
    """Size or batch if the study has several; else ""."""
    gpu: str
    """The article's card; "" if it gives no figure."""
    place: str
    figure: _Figure
    measured: Interval | None
    verdict: Reproduction
    reason: str

    @property
    def measure(self) -> str:
        """What it is a figure of: see `_Figure.measure`."""
        return self.figure.measure


_PUBLISHED: TypeAdapter[Published] = TypeAdapter(Published)


def published_of(result: StudyResult) -> Published | None:
    """Returns the article that a study's configuration includes, or None if it reproduces no article."""
    found = result.config.study.get("published")
    return None if found is None else _PUBLISHED.validate_python(found)


def claims_of(result: StudyResult) -> list[PublishedClaim]:
    """Returns every figure of the article beside what was measured, in the order of the study's comparisons.

    A comparison that the article does not cover gets one claim without a figure, so that no row is left out.
    """
    published = published_of(result)
    if published is None:
        return []
    found: list[PublishedClaim] = []
    for row in rows_of(result):
        if row.variant.is_control:
            continue
        told = [(table, gpu, one) for table in published.tables for gpu, one in _figures_in(table, row)]
        if row.comparison is not None and not told:
            told = [(PublishedTable(place="", gpus=[]), "", _Figure(SPEEDUP.name, "", None))]
        claims = [_judged(result, published, row, *one) for one in told]
        # A limit belongs to the variant: it is not repeated for its further comparisons.
        found += [claim for claim in claims if claim not in found]
    return found


def notes_of_published(result: StudyResult, claims: Sequence[PublishedClaim]) -> list[str]:
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


def _figures_in(table: PublishedTable, row: Row) -> Iterator[tuple[str, _Figure]]:
    """Yields a table's figures of one comparison, each with its card."""
    for column, gpu in enumerate(table.gpus):
        memory = _quotient(MEMORY_RATIO.name, table.memory_gb, row, column, "GB", more=True)
        line = table.memory_limit_gb.get(row.variant.name)
        limit = read_figure(line, column)
        own = _Figure(MEMORY, f"{line.split()[column]} GB", limit) if line and isinstance(limit, Printed) else None
        yield from ((gpu, figure) for figure in (_speedup(table, row, column), memory, own) if figure is not None)


def _speedup(table: PublishedTable, row: Row, column: int) -> _Figure | None:
    """Returns the factor or the saving that a table prints; else the quotient of its times or rates."""
    name, reference = row.variant.name, row.reference
    if reference == table.reference:
        saved = read_figure(table.time_saved.get(name), column)
        factor = read_figure(table.speedup.get(name), column)
        if isinstance(saved, Printed):
            factors = [1 / (1 - percent / 100) for percent in (saved.value, saved.low, saved.high)]
            text = f"{table.time_saved[name].split()[column]} % of the time saved"
            return _Figure(SPEEDUP.name, text, Printed(factors[0], factors[1], factors[2], below=saved.below))
        if isinstance(factor, Printed):
            return _Figure(SPEEDUP.name, f"×{table.speedup[name].split()[column]}", factor)
    return _quotient(SPEEDUP.name, table.time, row, column, table.unit, more=table.unit == "it/s")


def _quotient(measure: str, lines: dict[str, str], row: Row, column: int, unit: str, *, more: bool) -> _Figure | None:
    """Returns candidate over reference (`more`), or reference over candidate; None if one of them has no figure."""
    texts = [lines[name].split()[column] for name in (row.reference, row.variant.name) if name in lines]
    other, mine = (read_figure(lines.get(name), column) for name in (row.reference, row.variant.name))
    printed = " → ".join(text if text == "OOM" else f"{text} {unit}" for text in texts)
    if mine and other and "OOM" in (mine, other):
        return _Figure(measure, printed, None, out_of_memory=True)
    if not (isinstance(mine, Printed) and isinstance(other, Printed)):
        return None
    over, under = (mine, other) if more else (other, mine)
    return _Figure(measure, printed, Printed(over.value / under.value, over.low / under.high, over.high / under.low))


def _judged(
    result: StudyResult, published: Published, row: Row, table: PublishedTable, gpu: str, figure: _Figure
) -> PublishedClaim:
    """Returns the claim for one published figure: with the measured figure beside it, and the verdict."""
    fits = (
        at
        for at in row.shapes
        if table.size in (None, at.shape.size) and table.batch_size in (None, at.shape.batch_size)
    )
    there = next(fits, None)
    measured = _measured(there, figure.measure) if there else None
    verdict, reason = _not_run(result, row, figure) or (
        _verdict(result, published, there, figure, measured, gpu)
        if there
        else (Reproduction.NOT_COMPARABLE, f"not measured at {table.shape}")
    )
    reference = "" if figure.measure == MEMORY else row.reference
    return PublishedClaim(row.variant.name, reference, table.shape, gpu, table.place, figure, measured, verdict, reason)


def _measured(row: Row, measure: str) -> Interval | None:
    if measure != MEMORY:
        ratio = row.beside_reference.get(measure)
        return ratio.interval if ratio else None
    peak = row.largest_memory_gib
    return None if peak is None else Interval(peak * _GIB_IN_GB)


_Reasoned = tuple[Reproduction, str]
"""A verdict and its reason."""


def _verdict(
    result: StudyResult, published: Published, row: Row, figure: _Figure, measured: Interval | None, gpu: str
) -> _Reasoned:
    """Judges a figure of a comparison whose two sides both ran."""
    if figure.out_of_memory:
        return Reproduction.NOT_COMPARABLE, f"{gpu} ran out of memory, and this machine did not"
    if figure.value is None:
        return Reproduction.NO_FIGURE, "the article gives none"
    config, setup = result.config, published.setup
    pairs = {
        "model": (config.model.name, setup.model),
        "scheduler": (config.scheduler.class_name, setup.scheduler),
        "steps": (config.workload.steps, setup.steps),
        "size": (config.shapes[0].size, setup.size),
        "images per call": (config.images_per_call, setup.images),
    }
    others = [f"{what} {here} instead of {there}" for what, (here, there) in pairs.items() if there not in (None, here)]
    if others:
        return Reproduction.NOT_COMPARABLE, f"measured here with {', '.join(others)}"
    if figure.measure != SPEEDUP.name and (row.headline_memory or ("",))[0] != "peak_allocated_gib":
        return Reproduction.NOT_COMPARABLE, "here the memory of a process on a CPU, in the article that of a GPU"
    return _compared(figure.measure, figure.value, measured)


def _not_run(result: StudyResult, row: Row, figure: _Figure) -> _Reasoned | None:
    """Returns why one of the sides has no figure here; running out of memory may be what the article reports, too."""
    sides = [row.variant, *([] if figure.measure == MEMORY else [result.variant(row.reference)])]
    if figure.out_of_memory and any(side.status is Status.OUT_OF_MEMORY for side in sides):
        return Reproduction.REPRODUCED, "ran out of memory here too"
    stopped = [side for side in sides if side.status is not Status.OK]
    reasons = []
    for side in stopped:
        silent = "no evidence that its options took effect" if side.status is Status.NOT_ENGAGED else ""
        reason = side.reason or silent
        told = f"{side.status} ({reason})" if reason else str(side.status)
        reasons.append(told if side is row.variant else f"{side.name}: {told}")
    return (Reproduction.NOT_RUN, "; ".join(reasons)) if stopped else None


def _compared(measure: str, published: Printed, measured: Interval | None) -> _Reasoned:
    """Returns whether a published figure lies in the measured interval, widened by its rounding, or is exceeded."""
    if measured is None:
        return Reproduction.NOT_RUN, "it was not measured"
    if measure == MEMORY:
        if measured.estimate <= published.high:
            return Reproduction.REPRODUCED, "suffices here"
        return Reproduction.NOT_REPRODUCED, "more is needed here"
    if measured.low is None or measured.high is None:
        return Reproduction.UNDECIDED, f"no interval, which needs protocol.replicates={MINIMUM_PROCESSES} or more"
    if measure == SPEEDUP.name:
        reached, exceeded = measured.high >= published.low, measured.low > published.high
    else:  # less memory is better
        reached, exceeded = measured.low <= published.high, measured.high < published.low
    if not reached:
        return Reproduction.NOT_REPRODUCED, "the whole interval falls short of it"
    return Reproduction.REPRODUCED, "exceeded" if exceeded else "within its interval"
