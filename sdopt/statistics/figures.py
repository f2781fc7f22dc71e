"""Derives the rows of a study, with every figure and its interval, once: see `Row`.

Ratios are those that `statistics.comparing.compare` recorded; everything else is derived here. A gate takes the same
estimates from `statistics.measures`, with one-sided bounds of its own.
"""

from collections.abc import Sequence
from dataclasses import replace

from sdopt.record.comparisons import Comparison
from sdopt.record.records import StudyResult, VariantResult
from sdopt.record.verdicts import Judgement
from sdopt.statistics.comparing import ratios_between
from sdopt.statistics.measures import RULED, Ratio, smallest_change, with_shape
from sdopt.statistics.pairs import log_images
from sdopt.statistics.ratios import latency, peak_memory_gib
from sdopt.statistics.row_figures import (
    Figures,
    known_figures,
    main_figures,
    peak_reached,
    shape_figures,
    stages_ms,
)
from sdopt.statistics.rows import Row


def rows_of(result: StudyResult) -> list[Row]:
    """Returns the rows of a study: the baseline, then one for each comparison; variants without a comparison last."""
    at_shapes = [result.at(number) for number in range(len(result.shapes))]
    rows = []
    for name, edge in _order(result):
        main, *further = [_row(at, name, edge) for at in at_shapes]
        figures: Figures = {**main.figures, **main_figures(result, main)}
        if further:
            figures |= _with_shapes([main, *further])
        row = replace(main, figures=known_figures(figures), further=tuple(further))
        rows.append(row)
    return rows


def _with_shapes(rows: Sequence[Row]) -> Figures:
    """Returns the figures of a variant at several shapes, by names that end in the shape's."""
    figures: Figures = {}
    for row in rows:
        for name, value in row.figures.items():
            figures[with_shape(name, row.shape.name)] = value
    return figures


def first_rows(result: StudyResult, rows: Sequence[Row] = ()) -> dict[str, Row]:
    """Returns each variant's first row, of `rows` or of all, in the order of the variants."""
    first = {row.name: row for row in reversed(rows or rows_of(result))}
    return {variant.name: first[variant.name] for variant in result.variants}


def flat_figures(result: StudyResult, variant: VariantResult) -> dict[str, float]:
    """Returns the figures of one variant for a sweeper; ratios are those of its first comparison.

    The time of an image is always among them: jobs may differ in how many images a call makes.
    """
    row = first_rows(result)[variant.name]
    figures = dict(row.flat)
    if variant.status.measured and row.image_time:
        figures["latency/image_s"] = row.image_time.estimate
    return figures


def floor_range(result: StudyResult) -> tuple[float, float] | None:
    """Returns the smallest and the largest A/A floor of the comparisons; None if there is none.

    They differ in a study of several sessions, because each comparison has the floor of its own sessions.
    """
    floors = [comparison.shapes[0].floor for comparison in result.comparisons]
    measured = [floor for floor in floors if floor is not None]
    if not measured:
        return None
    return min(measured), max(measured)


# Rows ----------------------------------------------------------------------------------------------------------------


def _order(result: StudyResult) -> list[tuple[str, int | None]]:
    """Returns the variants in the order of their rows, each with the number of its comparison."""
    compared = [
        (edge.candidate, number) for number, edge in enumerate(result.comparisons)
    ]
    candidates = {name for name, _ in compared}
    alone = [row.name for row in result.variants if row.name not in candidates]
    # The baseline is the first of those that are compared with nothing.
    first = [name for name in alone if name == result.baseline]
    last = [name for name in alone if name != result.baseline]
    return [
        *((name, None) for name in first),
        *compared,
        *((name, None) for name in last),
    ]


def _row(result: StudyResult, name: str, number: int | None) -> Row:
    """Returns the row of a variant in a comparison, with the figures that each shape has."""
    variant = result.variant(name)
    comparison = None if number is None else result.comparisons[number]
    time = None
    if variant.status.timed:
        time = latency(variant, result.config.protocol.estimator, result.confidence)
    row = Row(
        variant=variant,
        shape=variant.config.shapes[0],
        comparison=comparison,
        is_baseline=variant.name == result.baseline,
        latency=time,
        per_image=result.per_image,
        headline_memory=_headline_memory(variant),
        beside_reference=_ratios(result, comparison) if comparison else {},
        over_baseline=_ratios_over_baseline(result, variant),
        scores=variant.quality | (comparison.quality if comparison else {}),
        judgement=_judgement(result, comparison),
    )
    figures = shape_figures(row, result.config.protocol.estimator)
    return replace(
        row,
        figures=known_figures(figures),
        stages_ms=stages_ms(variant),
        peak_rate=peak_reached(result, row),
    )


def _judgement(result: StudyResult, comparison: Comparison | None) -> Judgement | None:
    if comparison is None:
        return None
    for judgement in result.judgements:
        same_candidate = judgement.candidate == comparison.candidate
        if same_candidate and judgement.reference == comparison.reference:
            return judgement
    return None


def _ratios_over_baseline(
    result: StudyResult,
    variant: VariantResult,
) -> dict[str, Ratio]:
    """Returns the ratios of a variant over the study's baseline: those recorded, or else derived from the samples."""
    baseline = result.baseline_variant
    edges = [edge for edge in result.comparisons if edge.candidate == variant.name]
    for edge in edges:
        if edge.reference == result.baseline:
            return _ratios(result, edge)
    timed = variant.status.timed and baseline.status.timed
    if not edges or not timed:
        return {}
    ratios = ratios_between(result, variant, baseline)
    derived = Comparison(
        variant.name,
        result.baseline,
        credit="",
        shapes=[ratios],
    )
    return _ratios(result, derived)


def _ratios(result: StudyResult, comparison: Comparison) -> dict[str, Ratio]:
    candidate, reference = result.sides(comparison)
    timed = candidate.status.timed and reference.status.timed
    if timed and log_images(candidate, reference):
        # What earlier versions recorded was the ratio of calls.
        derived = ratios_between(result, candidate, reference)
        comparison = replace(comparison, shapes=[derived])
    ratios = {}
    for name, measure in RULED.items():
        interval = measure.recorded(comparison)
        if interval is None:
            continue
        floor = measure.floor(result, comparison)
        smallest, key = smallest_change(measure, result.config.protocol, reference)
        ratios[name] = Ratio(measure, interval, floor, smallest, key)
    return ratios


def _headline_memory(variant: VariantResult) -> tuple[str, float] | None:
    peak = peak_memory_gib(variant)
    if peak is None:
        return None
    for measurement in variant.measurements:
        if measurement.peak:
            name, _ = measurement.peak
            return name, peak
    return None
