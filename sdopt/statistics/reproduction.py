"""Puts the figures of an article beside what a study measured, and says which of them were reproduced.

Compared are speed-ups and ratios of memory, each within one machine, and limits of memory that an article names. Times
of different machines are never compared.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from pydantic import TypeAdapter

from sdopt.record.comparisons import Interval
from sdopt.record.records import Status, StudyResult, VariantResult
from sdopt.statistics.figures import rows_of
from sdopt.statistics.measures import MEMORY_RATIO, SPEEDUP
from sdopt.statistics.published import (
    OUT_OF_MEMORY,
    Printed,
    Published,
    PublishedSetup,
    PublishedTable,
    read_figure,
)
from sdopt.statistics.ratios import needed_processes
from sdopt.statistics.rows import Row

_GIB_IN_GB = 2**30 / 1e9

MEMORY = "memory"
"""The measure of a claim that an amount of memory suffices; other claims have the name of their `Measure`."""


Reproduction = Literal[
    "reproduced",
    "not reproduced",
    "undecided",  # the interval here is missing, or holds no change as well
    "not judged",  # the figure measured here is a different quantity
    "not run",
    "no figure",  # the article gives none
]
"""Whether one published figure was reproduced here."""


class _Figure(NamedTuple):
    """A figure of a published table."""

    measure: str
    printed: str
    value: Printed | None = None
    """None if the table has none, or the article's run ran out of memory."""
    ran_out: bool = False
    """Whether one of the article's runs ran out of memory."""


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
    measure: str
    """`speedup`, `memory_ratio`, or `memory`: a limit in GB."""
    printed: str
    """The article's own figures, as in `8.0 s → 4.1 s`."""
    value: Printed | None
    """None if the article's run ran out of memory, or the table has none."""
    measured: Interval | None
    verdict: Reproduction
    reason: str


_PUBLISHED: TypeAdapter[Published] = TypeAdapter(Published)


def published_of(result: StudyResult) -> Published | None:
    """Returns the article that a study's configuration includes, or None if it reproduces no article."""
    published = result.config.study.get("published")
    if published is None:
        return None
    return _PUBLISHED.validate_python(published)


def claims_of(result: StudyResult) -> list[PublishedClaim]:
    """Returns every figure of the article beside what was measured, in the order of the study's comparisons.

    A comparison that the article does not cover gets one claim without a figure, so that no row is left out.
    """
    published = published_of(result)
    if published is None:
        return []
    claims: list[PublishedClaim] = []
    for row in rows_of(result):
        if row.variant.is_control:
            continue
        of_row = []
        for table, gpu, figure in _figures_of(published, row):
            claim = _judged(result, published, row, table, gpu, figure)
            # A limit belongs to the variant: it is not repeated for its further comparisons.
            if claim not in claims:
                of_row.append(claim)
        claims += of_row
    return claims


def notes_of_published(
    result: StudyResult, claims: Sequence[PublishedClaim]
) -> list[str]:
    """Returns notes that a reader of the claims needs."""
    published = published_of(result)
    if published is None:
        return []
    verdicts = Counter(claim.verdict for claim in claims)
    counts = []
    for verdict in get_args(Reproduction):
        if verdicts[verdict]:
            counts.append(f"{verdicts[verdict]} {verdict}")
    notes = []
    for table in published.tables:
        if table.note:
            notes.append(f"{table.place}: {table.note}")
    interval = f"{100 * result.confidence:g} % interval"
    device = result.environment.device["name"]
    return [
        f"Published: {published.article}.",
        f"{'; '.join(counts)}.",
        f"Reproduced: the published figure lies within the {interval} measured here, or is exceeded.",
        f"Speed-ups and memory are compared, times of different machines are not: this is {device}.",
        *notes,
        *published.notes,
    ]


def _figures_of(
    published: Published,
    row: Row,
) -> Iterator[tuple[PublishedTable, str, _Figure]]:
    """Yields the article's figures of one comparison, each with its table and card.

    A comparison that it does not cover has one without a value.
    """
    covered = row.comparison is None
    for table in published.tables:
        for column, gpu in enumerate(table.gpus):
            for figure in _figures_in(table, row, column):
                covered = True
                yield table, gpu, figure
    if not covered:
        yield (
            PublishedTable(place="", gpus=[]),
            "",
            _Figure(SPEEDUP.name, ""),
        )


def _figures_in(table: PublishedTable, row: Row, column: int) -> Iterator[_Figure]:
    """Yields a table's figures of one comparison on one card."""
    speedup = _speedup(table, row, column)
    if speedup is not None:
        yield speedup
    memory = _quotient(
        MEMORY_RATIO.name,
        table.memory_gb,
        row,
        column,
        "GB",
        more=True,
    )
    if memory is not None:
        yield memory
    line = table.memory_limit_gb.get(row.variant.name)
    limit = read_figure(line, column)
    if line and isinstance(limit, Printed):
        yield _Figure(MEMORY, f"{line.split()[column]} GB", limit)


def _speedup(table: PublishedTable, row: Row, column: int) -> _Figure | None:
    """Returns the factor or the saving that a table prints; else the quotient of its times or rates."""
    name = row.variant.name
    if row.reference == table.reference:
        saved = read_figure(table.time_saved.get(name), column)
        if isinstance(saved, Printed):
            text = table.time_saved[name].split()[column]
            # The speed-up of a share of the time that is saved, in per cent.
            value, low, high = (
                1 / (1 - share / 100) for share in (saved.value, saved.low, saved.high)
            )
            speedup = Printed(value, low, high, saved.below)
            return _Figure(SPEEDUP.name, f"{text} % of the time saved", speedup)
        factor = read_figure(table.speedup.get(name), column)
        if isinstance(factor, Printed):
            text = table.speedup[name].split()[column]
            return _Figure(SPEEDUP.name, f"×{text}", factor)
    return _quotient(
        SPEEDUP.name,
        table.time,
        row,
        column,
        table.unit,
        more=table.unit == "it/s",
    )


def _quotient(
    measure: str,
    lines: dict[str, str],
    row: Row,
    column: int,
    unit: str,
    *,
    more: bool,
) -> _Figure | None:
    """Returns candidate over reference (`more`), or reference over candidate; None if one of them has no figure."""
    texts = []
    for name in (row.reference, row.variant.name):
        if name in lines:
            text = lines[name].split()[column]
            texts.append(text if text == OUT_OF_MEMORY else f"{text} {unit}")
    printed = " → ".join(texts)
    reference = read_figure(lines.get(row.reference), column)
    candidate = read_figure(lines.get(row.variant.name), column)
    if reference is None or candidate is None:
        return None
    if OUT_OF_MEMORY in (candidate, reference):
        return _Figure(measure, printed, ran_out=True)
    if isinstance(candidate, str) or isinstance(reference, str):
        return None
    over, under = (candidate, reference) if more else (reference, candidate)
    quotient = Printed(
        over.value / under.value,
        low=over.low / under.high,
        high=over.high / under.low,
    )
    return _Figure(measure, printed, quotient)


def _judged(
    result: StudyResult,
    published: Published,
    row: Row,
    table: PublishedTable,
    gpu: str,
    figure: _Figure,
) -> PublishedClaim:
    """Returns the claim for one published figure: with the measured figure beside it, and the verdict."""
    at_shape = _at_shape(row, table)
    measured = _measured(at_shape, figure.measure) if at_shape else None
    not_run = _not_run(result, row, figure)
    if not_run is not None:
        verdict, reason = not_run
    elif at_shape is None:
        verdict = "not judged"
        reason = f"not measured at {table.shape}"
    else:
        verdict, reason = _verdict(result, published, at_shape, figure, measured, gpu)
    return PublishedClaim(
        variant=row.variant.name,
        reference="" if figure.measure == MEMORY else row.reference,
        shape=table.shape,
        gpu=gpu,
        place=table.place,
        measure=figure.measure,
        printed=figure.printed,
        value=figure.value,
        measured=measured,
        verdict=verdict,
        reason=reason,
    )


def _at_shape(row: Row, table: PublishedTable) -> Row | None:
    """Returns the row at the shape that a table is about; None if that was not measured."""
    for at_shape in row.shapes:
        same_size = table.size in (None, at_shape.shape.size)
        if same_size and table.batch_size in (None, at_shape.shape.batch_size):
            return at_shape
    return None


def _measured(row: Row, measure: str) -> Interval | None:
    if measure != MEMORY:
        ratio = row.beside_reference.get(measure)
        return ratio.interval if ratio else None
    peak = row.largest_memory_gib
    return None if peak is None else Interval(peak * _GIB_IN_GB)


_Reasoned = tuple[Reproduction, str]
"""A verdict and its reason."""


def _verdict(
    result: StudyResult,
    published: Published,
    row: Row,
    figure: _Figure,
    measured: Interval | None,
    gpu: str,
) -> _Reasoned:
    """Judges a figure of a comparison whose two sides both ran."""
    if figure.ran_out:
        reason = f"{gpu} ran out of memory, and this machine did not"
        return "not judged", reason
    if figure.value is None:
        return "no figure", "the article gives none"
    differing = _differing(result, published.setup)
    if differing:
        reason = f"measured here with {', '.join(differing)}"
        return "not judged", reason
    memory, _ = row.headline_memory or ("", 0.0)
    if figure.measure != SPEEDUP.name and memory != "peak_allocated_gib":
        reason = "here the memory of a process on a CPU, in the article that of a GPU"
        return "not judged", reason
    sides = [row.variant, result.variant(row.reference)]
    by_image = any(side.skips_by_image for side in sides)
    untrained = row.variant.config.random_weights
    if figure.measure == SPEEDUP.name and by_image and untrained:
        reason = "how many steps are skipped depends on the images, and untrained weights make others"
        return "not judged", reason
    return _compared(figure.measure, figure.value, measured)


def _differing(result: StudyResult, setup: PublishedSetup) -> list[str]:
    """Returns in what the study was measured otherwise than the article."""
    config = result.config
    settings = {
        "model": (config.model.name, setup.model),
        "scheduler": (config.scheduler.class_name, setup.scheduler),
        "steps": (config.workload.steps, setup.steps),
        "size": (config.shapes[0].size, setup.size),
        "images per call": (config.images_per_call, setup.images),
    }
    differing = []
    for name, (here, published) in settings.items():
        if published not in (None, here):
            differing.append(f"{name} {here} instead of {published}")
    return differing


def _not_run(result: StudyResult, row: Row, figure: _Figure) -> _Reasoned | None:
    """Returns why one of the sides has no figure here; running out of memory may be what the article reports, too."""
    sides = [row.variant]
    if figure.measure != MEMORY:
        sides.append(result.variant(row.reference))
    statuses = [side.status for side in sides]
    if figure.ran_out and Status.OUT_OF_MEMORY in statuses:
        return "reproduced", "ran out of memory here too"
    reasons = []
    for side in sides:
        if side.status is Status.OK:
            continue
        reason = _failure_text(side)
        reasons.append(reason if side is row.variant else f"{side.name}: {reason}")
    if not reasons:
        return None
    return "not run", "; ".join(reasons)


def _failure_text(variant: VariantResult) -> str:
    reason = variant.reason
    if not reason and variant.status is Status.NOT_ENGAGED:
        reason = "no evidence that its options took effect"
    return f"{variant.status} ({reason})" if reason else str(variant.status)


def _compared(measure: str, published: Printed, measured: Interval | None) -> _Reasoned:
    """Returns whether a published figure lies in the measured interval, widened by its rounding, or is exceeded."""
    if measured is None:
        return "not run", "it was not measured"
    if measure == MEMORY:
        if measured.estimate <= published.high:
            return "reproduced", "suffices here"
        return "not reproduced", "more is needed here"
    if measured.low is None or measured.high is None:
        return (
            "undecided",
            f"no interval, which needs {needed_processes(imported=False)} or more",
        )
    return _within(published, measured.low, measured.high, more=measure == SPEEDUP.name)


def _within(published: Printed, low: float, high: float, *, more: bool) -> _Reasoned:
    """Returns where a published ratio lies beside an interval; `more` is whether a larger ratio is better."""
    below = high < published.low
    above = low > published.high
    if below if more else above:
        return "not reproduced", "the whole interval falls short of it"
    if above if more else below:
        return "reproduced", "exceeded"
    # A figure that is no change itself is reproduced by an interval that holds none.
    change_published = published.low > 1 or published.high < 1
    if change_published and low <= 1 <= high:
        return "undecided", "within its interval, which holds no change as well"
    return "reproduced", "within its interval"
