"""Gathers every figure of a study, with its interval, once.

Ratios are those that `statistics.ratios.compare` recorded; everything else is derived here. Tables, plots, Markdown,
trackers, data frames and a sweeper's objective all read these rows, so that they cannot disagree. A gate takes the same
estimates from `statistics.measures`, with one-sided bounds of its own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sdopt.hardware.cards import peak_of
from sdopt.record.comparisons import BreakEven, Comparison, Interval
from sdopt.record.records import StudyResult, VariantResult
from sdopt.record.scores import Score
from sdopt.record.verdicts import Judgement, Verdict
from sdopt.schema import Shape
from sdopt.statistics.giving_up import at_least_slower
from sdopt.statistics.measures import RULED, SPEEDUP, Measure, smallest_change, with_shape
from sdopt.statistics.ratios import exceeds, latency, log_images, peak_memory_gib, ratios_between

_LABELS = {"median": "p50"}
"""Flat names of estimators whose flat name differs from their own."""


IMAGES_PER_CALL = "throughput/images_per_call"
"""Flat name of how many images a call makes, in studies whose times are shown per image."""


@dataclass(frozen=True)
class Ratio:
    """How a candidate compares with its reference in one measure.

    Attributes:
        measure: the measure.
        interval: the ratio, with its bounds.
        floor: the ratio, at least 1, by which two identical baselines differed; None if it is not known.
        smallest: the smallest factor, at least 1, that counts.
        key: the key of the configuration that sets `smallest`.
    """

    measure: Measure
    interval: Interval
    floor: float | None
    smallest: float = 1.0
    key: str = ""

    @property
    def within_floor(self) -> bool:
        """Whether the ratio is no larger than the difference between two identical baselines, or that is not known."""
        return self.floor is None or not exceeds(self.interval.estimate, self.floor)

    @property
    def gain(self) -> int:
        """1 if the whole interval shows a gain that counts and the floor does not explain, -1 for such a harm, else 0.

        Without an interval or a floor nothing is shown.
        """
        low, high = self.gain_bounds
        if low is None or high is None or self.within_floor:
            return 0
        return 1 if low > self.smallest else -1 if high < 1 / self.smallest else 0

    @property
    def gain_bounds(self) -> tuple[float | None, float | None]:
        """The bounds, turned so that more than 1 is better; None without an interval."""
        low, high = self.interval.low, self.interval.high
        if low is None or high is None or self.measure.higher_is_better:
            return low, high
        return self.measure.gain(high), self.measure.gain(low)

    @property
    def excludes_gain(self) -> bool:
        """Whether the whole interval lies below a gain that counts; False without an interval or a floor."""
        _, high = self.gain_bounds
        return high is not None and self.floor is not None and high < self.smallest

    @property
    def text(self) -> str:
        """The ratio with its bounds."""
        return ratio_text(self.interval)


@dataclass(frozen=True)
class Figures:
    """Every figure of one variant and, where it is a candidate, of one comparison with a reference, at one shape.

    Times are in seconds, stages in milliseconds, memory in GiB, energy in joules; what was not measured is None, or
    missing from a mapping.
    """

    shape: Shape
    variant: VariantResult
    comparison: Comparison | None
    latency: Interval | None
    """One call, as `protocol.estimator` summarises it."""
    per_image: bool
    """Whether times are shown per image: calls of the study's variants make different numbers of images."""
    at_shape: dict[str, float | None]
    """The variant's own figures that each shape has, by flat names: `latency/p50_s`, `memory/peak_process_gib`, …"""
    at_main_shape: dict[str, float | None]
    """Those that only the main shape has, likewise: operations, interference, energy, loading, stages."""
    stages_ms: dict[str, float]
    peak: tuple[str, float] | None
    """The data sheet's dense peak rate for the types that ran: its name (`bf16`) and TFLOP/s; None if not known."""
    headline_memory: tuple[str, float] | None
    """The peak from which memory ratios are computed, with its name: the geometric mean of the processes."""
    largest_memory_gib: float | None
    """The same peak in the process that needs most: what limits are compared with."""
    ratios: dict[str, Ratio]
    """By measure (`speedup`, `memory_ratio`, `tail_ratio`): of the comparison."""
    overall: dict[str, Ratio]
    """The same over the study's baseline, whatever the reference: what variants are ranked by."""
    scores: dict[str, Score]
    """The variant's own quality metrics, and the distances to the reference's images."""
    judgement: Judgement | None
    """What the gate says of this comparison; None if it was not judged."""
    further: tuple["Figures", ...] = ()
    """The figures at the further shapes of the study; this object holds those at the main shape."""

    @property
    def images_per_call(self) -> int:
        """How many images one call makes at this shape."""
        return self.variant.config.images_per_call

    @property
    def image_time(self) -> Interval | None:
        """The time of one image: that of a call, divided by how many images it makes."""
        time, images = self.latency, self.images_per_call
        if time is None:
            return None
        low, high = (None if bound is None else bound / images for bound in (time.low, time.high))
        return replace(time, estimate=time.estimate / images, low=low, high=high)

    @property
    def time(self) -> Interval | None:
        """The time that stands beside those of other variants: of one call, or of one image (`per_image`)."""
        return self.image_time if self.per_image else self.latency

    @property
    def shapes(self) -> "tuple[Figures, ...]":
        """The figures at each shape, the main one first."""
        return (self, *self.further)

    @property
    def reference(self) -> str:
        """The name of the reference; "" without a comparison."""
        return self.comparison.reference if self.comparison else ""

    @property
    def is_step(self) -> bool:
        """Whether the reference is another variant than the baseline, as in a study that adds options one by one."""
        return self.ratios != self.overall

    @property
    def call_ms(self) -> dict[str, float]:
        """Milliseconds of one call by stage; of the denoiser, the sum of its steps, which a cache makes unequal.

        They are those of one image where times are shown per image.
        """
        steps = self.variant.denoiser_calls or self.variant.config.workload.steps
        images = self.images_per_call if self.per_image else 1
        found = {}
        for stage, value in self.stages_ms.items():
            calls = steps if stage.endswith("_step") else 1
            found[stage.removesuffix("_step")] = value * calls / images
        return found

    @property
    def verdict(self) -> Verdict | None:
        """The gate's verdict on this comparison; None if it was not judged."""
        return self.judgement.verdict if self.judgement else None

    @property
    def speedup(self) -> Ratio | None:
        """The speed-up of this comparison, as it was recorded."""
        return self.ratios.get(SPEEDUP.name)

    @property
    def at_least_slower(self) -> float | None:
        """How many times as long as the baseline's its calls take at least, if its timing ended early for that."""
        return at_least_slower(self.variant)

    @property
    def break_even(self) -> BreakEven | None:
        """The start-up cost, and after how many images it is repaid."""
        return self.comparison.break_even if self.comparison else None

    @property
    def flat_of_shape(self) -> dict[str, float | None]:
        """The figures that every shape has, by flat names; None for a figure that was not measured."""
        found = dict(self.at_shape)
        steps = {f"step/{name}": ratio for name, ratio in self.ratios.items()} if self.is_step else {}
        for name, ratio in (self.overall | steps).items():
            found |= _bounded(name, ratio.interval) | {f"{name}_within_floor": ratio.within_floor}
        if self.at_least_slower is not None:
            found[f"{SPEEDUP.name}_high"] = 1 / self.at_least_slower
        return found

    @property
    def flat(self) -> dict[str, float]:
        """Every figure by one name: a sweeper may optimise them, and a tracker logs the few that people compare.

        With several shapes, a plain name is the figure at the main shape, and `speedup/512x512b1` the one at that
        shape. A failed variant has no figures: partial measurements must not rank beside complete ones.
        """
        if not self.variant.status.measured:
            return {}
        scored = bool(self.variant.quality or self.variant.trips)
        found: dict[str, float | None] = {
            **self.flat_of_shape,
            **self.at_main_shape,
            **{f"quality/{name}": score.estimate for name, score in self.scores.items()},
            "quality/tripped_images": self.variant.broken_images if scored else None,
            "gate/passed": None if self.verdict is None else self.verdict is Verdict.PASS,
        }
        if (level := self.break_even) is not None:
            found |= {
                "start/first_image_s": level.first_image_s,
                "start/extra_s": level.extra_s,
                "break_even/images": level.images,
                "break_even/images_low": level.images_low,
                "break_even/images_high": level.images_high,
            }
        for row in self.shapes if self.further else ():
            found |= {with_shape(name, row.shape.name): value for name, value in row.flat_of_shape.items()}
        return {name: float(value) for name, value in found.items() if value is not None}


def ratio_text(interval: Interval) -> str:
    """Returns a ratio with its bounds."""
    return f"{interval.estimate:.2f}× {bounds_text(interval)}".rstrip()


def bounds_text(interval: Interval) -> str:
    """Returns the bounds of a ratio; "" without any."""
    known = interval.low is not None and interval.high is not None
    return f"[{interval.low:.2f}, {interval.high:.2f}]" if known else ""


def figures_of(result: StudyResult) -> list[Figures]:
    """Returns the rows of a study: the baseline, then one for each comparison; variants without a comparison last."""
    main, *further = [_figures_at(result.at(shape_index)) for shape_index in range(len(result.shapes))]
    return [replace(row, further=tuple(others)) for row, *others in zip(main, *further, strict=True)]


def _figures_at(result: StudyResult) -> list[Figures]:
    """Returns the rows of a study with one shape."""
    compared = {comparison.candidate for comparison in result.comparisons}
    alone = [variant for variant in result.variants if variant.name not in compared]
    baseline = [variant for variant in alone if variant.name == result.baseline]
    return [
        *(_figures(result, variant, None) for variant in baseline),
        *(_figures(result, result.variant(edge.candidate), edge) for edge in result.comparisons),
        *(_figures(result, variant, None) for variant in alone if variant not in baseline),
    ]


def figures_by_variant(result: StudyResult, rows: Sequence[Figures] = ()) -> dict[str, Figures]:
    """Returns each variant's first row, of `rows` or of all, in the order of the variants."""
    first = {row.variant.name: row for row in reversed(rows or figures_of(result))}
    return {variant.name: first[variant.name] for variant in result.variants}


def floor_range(result: StudyResult) -> tuple[float, float] | None:
    """Returns the smallest and the largest A/A floor of the comparisons; None if there is none.

    They differ in a study of several sessions, because each comparison has the floor of its own sessions.
    """
    floors = [comparison.shapes[0].floor for comparison in result.comparisons if comparison.shapes[0].floor is not None]
    return (min(floors), max(floors)) if floors else None


def flat_figures(result: StudyResult, variant: VariantResult) -> dict[str, float]:
    """Returns the flat figures of one variant for a sweeper; ratios are those of its first comparison.

    The time of an image is always among them: jobs may differ in how many images a call makes.
    """
    row = figures_by_variant(result)[variant.name]
    time = row.image_time if variant.status.measured else None
    return row.flat | ({"latency/image_s": time.estimate} if time else {})


def _figures(result: StudyResult, variant: VariantResult, comparison: Comparison | None) -> Figures:
    estimator, measured = result.config.protocol.estimator, variant.measurements
    time = latency(variant, estimator, result.confidence) if variant.status.timed else None
    images, price = variant.config.images_per_call, variant.config.hardware.price_per_hour
    name, peak = next((m.peak[0] for m in measured if m.peak), None), peak_memory_gib(variant)
    memory = None if name is None or peak is None else (name, peak)
    energy = [joules for measurement in measured for joules in measurement.energy_j]
    tflop, stages_ms = variant.tflop_per_image, _stages(variant)
    per_s = images / time.estimate if time else None
    achieved = tflop * per_s if tflop and per_s else None
    peak_tflops = peak_rate(result, variant) if achieved else None
    sides = (comparison.candidate, comparison.reference) if comparison else None
    return Figures(
        shape=variant.config.shapes[0],
        variant=variant,
        comparison=comparison,
        latency=time,
        per_image=result.per_image,
        at_shape={
            **_latencies(variant),
            **_bounded(f"latency/{_LABELS.get(estimator, estimator)}", time, "_s"),
            **(
                {"latency/image_s": time.estimate / images, IMAGES_PER_CALL: images}
                if time and result.per_image
                else {}
            ),
            "throughput/images_per_s": per_s,
            "cost/per_1000_images": 1000 * price / 3600 * time.estimate / images
            if time and price is not None
            else None,
            "compile/graphs": _median(measurement.shapes[0].graphs for measurement in measured),
            "compile/recompiles": _median(measurement.shapes[0].recompiles for measurement in measured),
            **_memory(variant),
            **({f"memory/{memory[0]}": memory[1]} if memory else {}),
        },
        at_main_shape={
            "compute/tflop_per_image": tflop if achieved else None,
            "compute/achieved_tflops": achieved,
            "compute/peak_tflops": peak_tflops[1] if peak_tflops else None,
            "compute/of_peak": achieved / peak_tflops[1] if achieved and peak_tflops else None,
            **_interference(variant),
            "precision/processes_needed": result.precision.needed.get(variant.name) if result.precision else None,
            "energy/per_image_j": float(np.mean(energy)) / images if energy else None,
            "latency/load_s": _median(measurement.load_s for measurement in measured),
            **{f"stage/{stage}_ms": value for stage, value in stages_ms.items()},
        },
        stages_ms=stages_ms,
        peak=peak_tflops,
        headline_memory=memory,
        largest_memory_gib=max(variant.peaks_gib, default=None),
        ratios=_ratios(result, comparison) if comparison else {},
        overall=_overall(result, variant),
        scores=variant.quality | (comparison.quality if comparison else {}),
        judgement=next((judged for judged in result.judgements if (judged.candidate, judged.reference) == sides), None),
    )


def _latencies(variant: VariantResult) -> dict[str, float | None]:
    samples = [sample for times in variant.samples.values() for sample in times]
    summaries = {_LABELS.get(name, name): latency(variant, name, 0.95) for name in ("median", "mean")}
    return {
        **{f"latency/{name}_s": time.estimate if time else None for name, time in summaries.items()},
        "latency/p95_s": float(np.quantile(samples, 0.95)) if samples else None,
        "latency/cold_start_s": _median(m.shapes[0].cold_start_s for m in variant.measurements),
        "latency/compile_s": _median(m.shapes[0].compile_s for m in variant.measurements),
    }


def _stages(variant: VariantResult) -> dict[str, float]:
    """Returns the mean milliseconds of each stage: only means add up to the call, where steps differ."""
    samples: dict[str, list[float]] = {}
    for measurement in variant.measurements:
        for stage, times in measurement.stages_s.items():
            samples.setdefault(stage, []).extend(times)
    return {stage: 1000 * float(np.mean(times)) for stage, times in samples.items() if times}


def peak_rate(result: StudyResult, variant: VariantResult) -> tuple[str, float] | None:
    """Returns the data sheet's dense rate for the types in which the variant's matrix products ran, by its evidence.

    Gives the name (`bf16`) and TFLOP/s; None without a sheet, or if the types are unknown or not on it.
    """
    sheet = result.environment.sheet
    shown = [e.facts.get("arithmetic") for m in variant.measurements for e in m.shapes[0].evidence]
    types = [kind for kinds in shown if isinstance(kinds, list) for kind in kinds]
    return peak_of(sheet, types) if sheet and types else None


def _interference(variant: VariantResult) -> dict[str, float | None]:
    """Returns the mean and the worst share that others took from a call, and what else was counted."""
    calls = [call for measurement in variant.measurements for call in measurement.shapes[0].calls]
    known = [call.disturbed for call in calls if call.disturbed is not None]
    found = [call.interference for call in calls if call.interference is not None]
    if not known:
        return {}
    return {
        "interference/mean": float(np.mean(known)),
        "interference/worst": max(known),
        "interference/calls_left_out": sum(call.left_out for call in calls),
        "interference/major_faults": sum(one.major_faults for one in found),
        "interference/switched_out": sum(one.switched_out for one in found),
        "interference/cpu_mhz": _median(one.cpu_mhz for one in found),
    }


def _memory(variant: VariantResult) -> dict[str, float]:
    """Returns the largest of all processes of each kind of memory."""
    names = {
        "loaded_process": "process_loaded_gib",
        "peak_process": "peak_process_gib",
        "loaded_allocated": "cuda_loaded_gib",
        "peak_allocated": "cuda_peak_allocated_gib",
        "peak_reserved": "cuda_peak_reserved_gib",
        "graph_pools": "cuda_graph_pools_gib",
        "elsewhere": "cuda_elsewhere_gib",
        "nvml_process": "nvml_process_gib",
    }
    memories = [memory for measurement in variant.measurements for memory in measurement.memories]
    found = {name: [getattr(memory, field) for memory in memories] for name, field in names.items()}
    return {f"memory/{name}_gib": max(values) for name, values in found.items() if values and None not in values}


def _overall(result: StudyResult, variant: VariantResult) -> dict[str, Ratio]:
    """Returns the ratios of a variant over the study's baseline: those recorded, or else derived from the samples."""
    baseline = result.variant(result.baseline)
    edges = [edge for edge in result.comparisons if edge.candidate == variant.name]
    recorded = next((edge for edge in edges if edge.reference == result.baseline), None)
    if recorded is None and edges and variant.status.timed and baseline.status.timed:
        ratios = ratios_between(result, variant, baseline)
        recorded = Comparison(variant.name, result.baseline, "", [ratios])
    return _ratios(result, recorded) if recorded else {}


def _ratios(result: StudyResult, comparison: Comparison) -> dict[str, Ratio]:
    protocol, candidate = result.config.protocol, result.variant(comparison.candidate)
    reference = result.variant(comparison.reference)
    if log_images(candidate, reference) and candidate.status.timed and reference.status.timed:
        # What earlier versions recorded was the ratio of calls.
        comparison = replace(comparison, shapes=[ratios_between(result, candidate, reference)])
    return {
        name: Ratio(
            measure, interval, measure.floor(result, comparison), *smallest_change(measure, protocol, reference)
        )
        for name, measure in RULED.items()
        if (interval := measure.recorded(comparison)) is not None
    }


def _bounded(name: str, interval: Interval | None, unit: str = "") -> dict[str, float | None]:
    """Returns an interval by flat names: its estimate and, if it has any, its two-sided bounds."""
    if interval is None:
        return {}
    return {f"{name}{unit}": interval.estimate, f"{name}_low{unit}": interval.low, f"{name}_high{unit}": interval.high}


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None
