"""Derives every figure of a study, with its interval, once: see `Row`.

Ratios are those that `statistics.ratios.compare` recorded; everything else is derived here. A gate takes the same
estimates from `statistics.measures`, with one-sided bounds of its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from sdopt.hardware.cards import peak_of
from sdopt.record.comparisons import Comparison, Interval
from sdopt.record.records import StudyResult, VariantResult
from sdopt.record.verdicts import Judgement, Verdict
from sdopt.statistics.measures import RULED, SPEEDUP, Ratio, smallest_change, with_shape
from sdopt.statistics.ratios import latency, log_images, peak_memory_gib, ratios_between
from sdopt.statistics.rows import Row

IMAGES_PER_CALL = "throughput/images_per_call"
"""The figure of how many images a call makes, in studies whose times are shown per image."""

_LABELS = {"median": "p50"}
"""Names of estimators in figures, where they differ from their own."""

Figures = dict[str, float | None]
"""Figures by name; None for one that was not measured."""


def rows_of(result: StudyResult) -> list[Row]:
    """Returns the rows of a study: the baseline, then one for each comparison; variants without a comparison last."""
    at_shapes = [_rows_at(result.at(shape_index)) for shape_index in range(len(result.shapes))]
    rows = []
    for main, *further in zip(*at_shapes, strict=True):
        figures: Figures = {**main.figures, **_main_figures(result, main)}
        for row in (main, *further) if further else ():
            for name, value in row.figures.items():
                figures[with_shape(name, row.shape.name)] = value
        rows.append(replace(main, figures=_known(figures), further=tuple(further)))
    return rows


def first_rows(result: StudyResult, rows: Sequence[Row] = ()) -> dict[str, Row]:
    """Returns each variant's first row, of `rows` or of all, in the order of the variants."""
    first = {row.name: row for row in reversed(rows or rows_of(result))}
    return {variant.name: first[variant.name] for variant in result.variants}


def flat_figures(result: StudyResult, variant: VariantResult) -> dict[str, float]:
    """Returns the figures of one variant for a sweeper; ratios are those of its first comparison.

    The time of an image is always among them: jobs may differ in how many images a call makes.
    """
    row = first_rows(result)[variant.name]
    time = row.image_time if variant.status.measured else None
    return {**row.flat, "latency/image_s": time.estimate} if time else dict(row.flat)


def floor_range(result: StudyResult) -> tuple[float, float] | None:
    """Returns the smallest and the largest A/A floor of the comparisons; None if there is none.

    They differ in a study of several sessions, because each comparison has the floor of its own sessions.
    """
    floors = [comparison.shapes[0].floor for comparison in result.comparisons]
    measured = [floor for floor in floors if floor is not None]
    return (min(measured), max(measured)) if measured else None


# Rows ----------------------------------------------------------------------------------------------------------------


def _rows_at(result: StudyResult) -> list[Row]:
    """Returns the rows of a study with one shape."""
    candidates = {comparison.candidate for comparison in result.comparisons}
    alone = [variant for variant in result.variants if variant.name not in candidates]
    rows = [_row(result, variant, None) for variant in alone if variant.name == result.baseline]
    rows += [_row(result, result.variant(edge.candidate), edge) for edge in result.comparisons]
    return rows + [_row(result, variant, None) for variant in alone if variant.name != result.baseline]


def _row(result: StudyResult, variant: VariantResult, comparison: Comparison | None) -> Row:
    """Returns the row of a variant, with the figures that each shape has."""
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
    figures = {
        **_times(row, result.config.protocol.estimator),
        **_memory(variant),
        **_headline_figure(row),
        **_ratio_figures(row),
    }
    return replace(row, figures=_known(figures), stages_ms=_stages(variant), peak_rate=_peak_reached(result, row))


def _judgement(result: StudyResult, comparison: Comparison | None) -> Judgement | None:
    if comparison is None:
        return None
    for judgement in result.judgements:
        if (judgement.candidate, judgement.reference) == (comparison.candidate, comparison.reference):
            return judgement
    return None


def _ratios_over_baseline(result: StudyResult, variant: VariantResult) -> dict[str, Ratio]:
    """Returns the ratios of a variant over the study's baseline: those recorded, or else derived from the samples."""
    baseline = result.variant(result.baseline)
    edges = [edge for edge in result.comparisons if edge.candidate == variant.name]
    for edge in edges:
        if edge.reference == result.baseline:
            return _ratios(result, edge)
    if not (edges and variant.status.timed and baseline.status.timed):
        return {}
    ratios = ratios_between(result, variant, baseline)
    return _ratios(result, Comparison(variant.name, result.baseline, "", [ratios]))


def _ratios(result: StudyResult, comparison: Comparison) -> dict[str, Ratio]:
    candidate = result.variant(comparison.candidate)
    reference = result.variant(comparison.reference)
    if log_images(candidate, reference) and candidate.status.timed and reference.status.timed:
        # What earlier versions recorded was the ratio of calls.
        comparison = replace(comparison, shapes=[ratios_between(result, candidate, reference)])
    ratios = {}
    for name, measure in RULED.items():
        interval = measure.recorded(comparison)
        if interval is not None:
            smallest, key = smallest_change(measure, result.config.protocol, reference)
            ratios[name] = Ratio(measure, interval, measure.floor(result, comparison), smallest, key)
    return ratios


def peak_rate(result: StudyResult, variant: VariantResult) -> tuple[str, float] | None:
    """Returns the data sheet's dense rate for the types in which the variant's matrix products ran, by its evidence.

    Gives the name (`bf16`) and TFLOP/s; None without a sheet, or if the types are unknown or not on it.
    """
    sheet = result.environment.sheet
    types: list[str] = []
    for measurement in variant.measurements:
        for evidence in measurement.shapes[0].evidence:
            arithmetic = evidence.facts.get("arithmetic")
            types += arithmetic if isinstance(arithmetic, list) else []
    return peak_of(sheet, types) if sheet and types else None


def _achieved_tflops(row: Row) -> float | None:
    tflop = row.variant.tflop_per_image
    if not row.latency or not tflop:
        return None
    images_per_s = row.images_per_call / row.latency.estimate
    return tflop * images_per_s


def _peak_reached(result: StudyResult, row: Row) -> tuple[str, float] | None:
    return peak_rate(result, row.variant) if _achieved_tflops(row) else None


def _headline_memory(variant: VariantResult) -> tuple[str, float] | None:
    peak = peak_memory_gib(variant)
    for measurement in variant.measurements:
        if measurement.peak and peak is not None:
            name, _ = measurement.peak
            return name, peak
    return None


def _stages(variant: VariantResult) -> dict[str, float]:
    """Returns the mean milliseconds of each stage: only means add up to the call, where steps differ."""
    samples: dict[str, list[float]] = {}
    for measurement in variant.measurements:
        for stage, times in measurement.stages_s.items():
            samples.setdefault(stage, []).extend(times)
    return {stage: 1000 * float(np.mean(times)) for stage, times in samples.items() if times}


def stage_peaks(variant: VariantResult) -> dict[str, float]:
    """Returns the peak of memory within each stage, in GiB."""
    peaks: dict[str, float] = {}
    for measurement in variant.measurements:
        for stage, peak in measurement.stages_gib.items():
            peaks[stage] = max(peak, peaks.get(stage, peak))
    return peaks


# Figures that each shape has ------------------------------------------------------------------------------------------


def _times(row: Row, estimator: str) -> Figures:
    variant, time, images = row.variant, row.latency, row.images_per_call
    price = variant.config.hardware.price_per_hour
    shapes = [measurement.shapes[0] for measurement in variant.measurements]
    figures: Figures = {}
    for name in ("median", "mean"):
        center = latency(variant, name, 0.95)
        figures[f"latency/{_LABELS.get(name, name)}_s"] = center.estimate if center else None
    seconds = list(chain.from_iterable(variant.samples.values()))
    figures["latency/p95_s"] = float(np.quantile(seconds, 0.95)) if seconds else None
    figures["latency/cold_start_s"] = _median(samples.cold_start_s for samples in shapes)
    figures["latency/compile_s"] = _median(samples.compile_s for samples in shapes)
    if time is not None:
        figures |= _bounded(f"latency/{_LABELS.get(estimator, estimator)}", time, "_s")
        if row.per_image:
            figures |= {"latency/image_s": time.estimate / images, IMAGES_PER_CALL: images}
        figures["throughput/images_per_s"] = images / time.estimate
        if price is not None:
            figures["cost/per_1000_images"] = 1000 * price / 3600 * time.estimate / images
    figures["compile/graphs"] = _median(samples.graphs for samples in shapes)
    figures["compile/recompiles"] = _median(samples.recompiles for samples in shapes)
    return figures


_MEMORY = {
    "memory/loaded_process_gib": "process_loaded_gib",
    "memory/peak_process_gib": "peak_process_gib",
    "memory/loaded_allocated_gib": "cuda_loaded_gib",
    "memory/peak_allocated_gib": "cuda_peak_allocated_gib",
    "memory/peak_reserved_gib": "cuda_peak_reserved_gib",
    "memory/graph_pools_gib": "cuda_graph_pools_gib",
    "memory/elsewhere_gib": "cuda_elsewhere_gib",
    "memory/nvml_process_gib": "nvml_process_gib",
}
"""Fields of `Memory`, by the name of the figure."""


def _memory(variant: VariantResult) -> Figures:
    """Returns the largest of all processes of each kind of memory."""
    memories = list(chain.from_iterable(measurement.memories for measurement in variant.measurements))
    figures: Figures = {}
    for name, field in _MEMORY.items():
        values = [getattr(memory, field) for memory in memories]
        if values and None not in values:
            figures[name] = max(values)
    return figures


def _headline_figure(row: Row) -> Figures:
    if row.headline_memory is None:
        return {}
    name, peak = row.headline_memory
    return {f"memory/{name}": peak}


def _ratio_figures(row: Row) -> Figures:
    ratios = dict(row.over_baseline)
    if row.is_step:
        ratios |= {f"step/{name}": ratio for name, ratio in row.beside_reference.items()}
    figures: Figures = {}
    for name, ratio in ratios.items():
        figures |= _bounded(name, ratio.interval)
        figures[f"{name}_within_floor"] = ratio.within_floor
    if row.at_least_slower is not None:
        figures[f"{SPEEDUP.name}_high"] = 1 / row.at_least_slower
    return figures


# Figures of the main shape alone --------------------------------------------------------------------------------------


def _main_figures(result: StudyResult, row: Row) -> Figures:
    """Returns operations, interference, energy, loading, stages, scores, the gate's verdict and the start-up cost."""
    variant, images = row.variant, row.images_per_call
    energy = list(chain.from_iterable(measurement.energy_j for measurement in variant.measurements))
    needed = result.precision.needed if result.precision else {}
    figures = _operations(row) | _interference(variant)
    figures["precision/processes_needed"] = needed.get(variant.name)
    figures["energy/per_image_j"] = float(np.mean(energy)) / images if energy else None
    figures["latency/load_s"] = _median(measurement.load_s for measurement in variant.measurements)
    for stage, value in row.stages_ms.items():
        figures[f"stage/{stage}_ms"] = value
    for stage, peak in stage_peaks(variant).items():
        figures[f"stage/{stage}_peak_gib"] = peak
    for name, score in row.scores.items():
        figures[f"quality/{name}"] = score.estimate
    if variant.quality or variant.trips:
        figures["quality/tripped_images"] = variant.broken_images
    if row.verdict is not None:
        figures["gate/passed"] = row.verdict is Verdict.PASS
    return figures | _start(row)


def _operations(row: Row) -> Figures:
    achieved = _achieved_tflops(row)
    if achieved is None:
        return {}
    figures: Figures = {"compute/tflop_per_image": row.variant.tflop_per_image, "compute/achieved_tflops": achieved}
    if row.peak_rate is not None:
        _, tflops = row.peak_rate
        figures |= {"compute/peak_tflops": tflops, "compute/of_peak": achieved / tflops}
    return figures


def _interference(variant: VariantResult) -> Figures:
    """Returns the mean and the worst share that others took from a call, and what else was counted."""
    calls = list(chain.from_iterable(measurement.shapes[0].calls for measurement in variant.measurements))
    shares = [call.disturbed for call in calls if call.disturbed is not None]
    causes = [call.interference for call in calls if call.interference is not None]
    if not shares:
        return {}
    return {
        "interference/mean": float(np.mean(shares)),
        "interference/worst": max(shares),
        "interference/calls_left_out": sum(call.left_out for call in calls),
        "interference/major_faults": sum(cause.major_faults for cause in causes),
        "interference/switched_out": sum(cause.switched_out for cause in causes),
        "interference/cpu_mhz": _median(cause.cpu_mhz for cause in causes),
    }


def _start(row: Row) -> Figures:
    level = row.break_even
    if level is None:
        return {}
    return {
        "start/first_image_s": level.first_image_s,
        "start/extra_s": level.extra_s,
        "break_even/images": level.images,
        "break_even/images_low": level.images_low,
        "break_even/images_high": level.images_high,
    }


# Values ---------------------------------------------------------------------------------------------------------------


def _known(figures: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float(value) for name, value in figures.items() if value is not None}


def _bounded(name: str, interval: Interval, unit: str = "") -> Figures:
    """Returns an interval as figures: its estimate and, if it has any, its two-sided bounds."""
    return {f"{name}{unit}": interval.estimate, f"{name}_low{unit}": interval.low, f"{name}_high{unit}": interval.high}


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None
