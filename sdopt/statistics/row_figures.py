"""Derives the figures of one variant, by name: those that each shape has, and those of the main shape alone."""

from collections.abc import Iterable, Mapping
from itertools import chain

import numpy as np

from sdopt.hardware.cards import peak_of
from sdopt.record.comparisons import Interval
from sdopt.record.records import StudyResult, VariantResult
from sdopt.record.samples import Call, Memory
from sdopt.record.verdicts import Verdict
from sdopt.statistics.measures import SPEEDUP
from sdopt.statistics.ratios import latency
from sdopt.statistics.rows import Row

IMAGES_PER_CALL = "throughput/images_per_call"
"""The figure of how many images a call makes, in studies whose times are shown per image."""

PASSED = "gate/passed"
"""The figure of whether a gate passes it: 1 or 0, and none where that is undecided."""

LAUNCH_BOUND = 0.8
"""If the device is busy for less than this share of a denoiser step, Python and kernel launches limit it."""

_LABELS = {"median": "p50"}
"""Names of estimators in figures, where they differ from their own."""

Figures = dict[str, float | None]
"""Figures by name; None for one that was not measured."""


def peak_rate(result: StudyResult, variant: VariantResult) -> tuple[str, float] | None:
    """Returns the data sheet's dense rate for the types in which the variant's matrix products ran, by its evidence.

    Gives the name (`bf16`) and TFLOP/s; None without a sheet, or if the types are unknown or not on it.
    """
    sheet = result.environment.sheet
    types: list[str] = []
    for measurement in variant.measurements:
        for evidence in measurement.main.evidence:
            arithmetic = evidence.facts.get("arithmetic")
            if isinstance(arithmetic, list):
                types += arithmetic
    return peak_of(sheet, types) if sheet and types else None


def _achieved_tflops(row: Row) -> float | None:
    tflop = row.variant.tflop_per_image
    if not row.latency or not tflop:
        return None
    images_per_s = row.images_per_call / row.latency.estimate
    return tflop * images_per_s


def peak_reached(result: StudyResult, row: Row) -> tuple[str, float] | None:
    """Returns the peak rate of a variant of which the rate that it reached is known; see `peak_rate`."""
    return peak_rate(result, row.variant) if _achieved_tflops(row) else None


def stages_ms(variant: VariantResult) -> dict[str, float]:
    """Returns the mean milliseconds of each stage: only means add up to the call, where steps differ."""
    samples: dict[str, list[float]] = {}
    for measurement in variant.measurements:
        for stage, times in measurement.stages_s.items():
            samples.setdefault(stage, []).extend(times)
    means = {}
    for stage, times in samples.items():
        if times:
            means[stage] = 1000 * float(np.mean(times))
    return means


def stage_peaks(variant: VariantResult) -> dict[str, float]:
    """Returns the peak of memory within each stage, in GiB.

    There are none where all stages have the same: that is what the process held before, as of the batches of the
    quality pass, and no stage needed.
    """
    peaks: dict[str, float] = {}
    for measurement in variant.measurements:
        for stage, peak in measurement.stages_gib.items():
            peaks[stage] = max(peak, peaks.get(stage, peak))
    held_before = len(peaks) > 1 and len(set(peaks.values())) == 1
    return {} if held_before else peaks


# Figures that each shape has ------------------------------------------------------------------------------------------


def shape_figures(row: Row, estimator: str) -> Figures:
    """Returns the figures of a variant that each shape has: times, memory and ratios."""
    return {
        **_times(row, estimator),
        **_memory(row.variant),
        **_headline_figure(row),
        **_ratio_figures(row),
    }


def _times(row: Row, estimator: str) -> Figures:
    variant = row.variant
    shapes = [measurement.main for measurement in variant.measurements]
    figures: Figures = {}
    for name in ("median", "mean"):
        center = latency(variant, name, 0.95)
        label = _LABELS.get(name, name)
        figures[f"latency/{label}_s"] = center.estimate if center else None
    seconds = list(chain.from_iterable(variant.samples.values()))
    if seconds:
        figures["latency/p95_s"] = float(np.quantile(seconds, 0.95))
    figures["latency/cold_start_s"] = _median(
        samples.cold_start_s for samples in shapes
    )
    figures["latency/compile_s"] = _median(samples.compile_s for samples in shapes)
    figures |= _of_time(row, estimator)
    figures["compile/graphs"] = _median(samples.graphs for samples in shapes)
    figures["compile/recompiles"] = _median(samples.recompiles for samples in shapes)
    return figures


def _of_time(row: Row, estimator: str) -> Figures:
    """Returns what follows from the time of a call: that of an image, the throughput, and the cost."""
    time = row.latency
    if time is None:
        return {}
    images = row.images_per_call
    label = _LABELS.get(estimator, estimator)
    figures = _bounded(f"latency/{label}", time, "_s")
    if row.per_image:
        figures["latency/image_s"] = time.estimate / images
        figures[IMAGES_PER_CALL] = images
    figures["throughput/images_per_s"] = images / time.estimate
    price = row.variant.config.hardware.price_per_hour
    if price is not None:
        figures["cost/per_1000_images"] = 1000 * price / 3600 * time.estimate / images
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
    memories: list[Memory] = []
    for measurement in variant.measurements:
        memories += measurement.memories
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
        for name, ratio in row.beside_reference.items():
            ratios[f"step/{name}"] = ratio
    figures: Figures = {}
    for name, ratio in ratios.items():
        figures |= _bounded(name, ratio.interval)
        figures[f"{name}_within_floor"] = ratio.within_floor
    if row.at_least_slower is not None:
        figures[f"{SPEEDUP.name}_high"] = 1 / row.at_least_slower
    return figures


# Figures of the main shape alone --------------------------------------------------------------------------------------


def main_figures(result: StudyResult, row: Row) -> Figures:
    """Returns operations, interference, energy, loading, stages, scores, the gate's verdict and the start-up cost."""
    variant = row.variant
    figures = _operations(row) | _interference(variant)
    if result.precision:
        needed = result.precision.needed.get(variant.name)
        figures["precision/processes_needed"] = needed
    figures["energy/per_image_j"] = _energy_per_image(row)
    load_s = [measurement.load_s for measurement in variant.measurements]
    figures["latency/load_s"] = _median(load_s)
    for stage, value in row.stages_ms.items():
        figures[f"stage/{stage}_ms"] = value
    for stage, peak in stage_peaks(variant).items():
        figures[f"stage/{stage}_peak_gib"] = peak
    for name, score in row.scores.items():
        figures[f"quality/{name}"] = score.estimate
    if variant.quality or variant.trips:
        figures["quality/tripped_images"] = variant.broken_images
    if row.verdict in (Verdict.PASS, Verdict.FAIL):
        figures[PASSED] = row.verdict is Verdict.PASS
    return figures | _start(row)


def _energy_per_image(row: Row) -> float | None:
    joules: list[float] = []
    for measurement in row.variant.measurements:
        joules += measurement.energy_j
    return float(np.mean(joules)) / row.images_per_call if joules else None


def _operations(row: Row) -> Figures:
    achieved = _achieved_tflops(row)
    if achieved is None:
        return {}
    figures: Figures = {
        "compute/tflop_per_image": row.variant.tflop_per_image,
        "compute/achieved_tflops": achieved,
    }
    if row.peak_rate is not None:
        _, tflops = row.peak_rate
        figures["compute/peak_tflops"] = tflops
        figures["compute/of_peak"] = achieved / tflops
    return figures


def _interference(variant: VariantResult) -> Figures:
    """Returns the mean and the worst share that others took from a call, and what else was counted."""
    calls: list[Call] = []
    for measurement in variant.measurements:
        calls += measurement.main.calls
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


def known_figures(figures: Mapping[str, float | None]) -> dict[str, float]:
    """Returns the figures that were measured."""
    figures_known = {}
    for name, value in figures.items():
        if value is not None:
            figures_known[name] = float(value)
    return figures_known


def _bounded(name: str, interval: Interval, unit: str = "") -> Figures:
    """Returns an interval as figures: its estimate and, if it has any, its two-sided bounds."""
    return {
        f"{name}{unit}": interval.estimate,
        f"{name}_low{unit}": interval.low,
        f"{name}_high{unit}": interval.high,
    }


def _median(values: Iterable[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return float(np.median(measured)) if measured else None


def busy_share(variant: VariantResult) -> float | None:
    """Returns the share of a denoiser step for which the device worked; None where either is not known.

    The work comes from a trace. The step's time comes from calls that were not traced, because tracing slows Python.
    """
    shares = []
    for measurement in variant.measurements:
        busy_s = measurement.main.denoiser_busy_s
        steps = measurement.stages_s.get("denoiser_step")
        if busy_s is not None and steps:
            shares.append(min(1.0, busy_s / float(np.mean(steps))))
    return _median(shares)
