"""A result as flat, named numbers: what is logged to a tracker, and what a sweeper may optimise."""

import numpy as np

from sdopt.analysis.timing import latency, paired, within_floor
from sdopt.hardware.cards import peak_of
from sdopt.results.records import StudyResult, VariantResult, Verdict


def metrics_of(result: StudyResult, variant: VariantResult) -> dict[str, float]:
    """Every figure of one variant by name; seconds, GiB, joules and TFLOP/s as the name says.

    A variant that failed has none: half a measurement would rank it beside those that were measured whole.
    Ratios are those of the first comparison in which the variant is the candidate.
    """
    found: dict[str, float] = {}
    if not variant.status.measured:
        return found
    samples = [sample for times in variant.samples.values() for sample in times]
    if samples:
        estimate = latency(variant, result.config["protocol"]["estimator"], result.confidence)
        assert estimate is not None
        images = variant.images_per_call
        found |= {
            "latency/p50_s": float(np.median(samples)),
            "latency/p95_s": float(np.quantile(samples, 0.95)),
            "latency/mean_s": float(np.mean(samples)),
            "latency/estimate_s": estimate.estimate,
            "throughput/images_per_s": images / estimate.estimate,
        }
        if estimate.low is not None and estimate.high is not None:
            found |= {"latency/p50_low_s": estimate.low, "latency/p50_high_s": estimate.high}
        if variant.tflop_per_image:
            found["compute/tflop_per_image"] = variant.tflop_per_image
            found["compute/achieved_tflops"] = variant.tflop_per_image * images / estimate.estimate
            peak = peak_rate(result, variant)
            if peak is not None:
                found["compute/peak_tflops"] = peak[1]
                found["compute/of_peak"] = found["compute/achieved_tflops"] / peak[1]
        price = variant.config["hardware"]["price_per_hour"]
        if price is not None:
            found["cost/per_1000_images"] = 1000 * price / 3600 * estimate.estimate / images
    medians: dict[str, list[float | None]] = {
        "latency/load_s": [m.load_s for m in variant.measurements],
        "latency/cold_start_s": [m.cold_start_s for m in variant.measurements],
        "latency/compile_s": [m.compile_s for m in variant.measurements],
        "compile/recompiles": [m.recompiles for m in variant.measurements],
    }
    for name, values in medians.items():
        known = [value for value in values if value is not None]
        if known:
            found[name] = float(np.median(known))
    joules = [joule for m in variant.measurements for joule in m.energy_j]
    if joules:
        found["energy/per_image_j"] = float(np.mean(joules)) / variant.images_per_call
    for stage in {name for m in variant.measurements for name in m.stages_s}:
        times = [sample for m in variant.measurements for sample in m.stages_s.get(stage, [])]
        if times:
            found[f"stage/{stage}_ms"] = 1000 * float(np.median(times))
    found |= _memory(variant)
    found |= _quality(result, variant)
    edge = next((edge for edge in result.comparisons if edge.candidate == variant.name), None)
    if edge and edge.speedup:
        pairs = [pair for found in paired(variant, result.variant(edge.reference)).values() for pair in found]
        mine, reference = ([s for pair in pairs for s in pair[side].latency_s] for side in (0, 1))
        found["speedup/p50"] = float(np.median(reference) / np.median(mine))
        found["speedup/paired"] = edge.speedup.estimate
        found["speedup/within_floor"] = float(within_floor(edge))
        if edge.speedup.low is not None and edge.speedup.high is not None:
            found |= {"speedup/paired_low": edge.speedup.low, "speedup/paired_high": edge.speedup.high}
    if edge and edge.memory_ratio:
        found["memory/ratio"] = edge.memory_ratio.estimate
    return found


def _quality(result: StudyResult, variant: VariantResult) -> dict[str, float]:
    """Scores of the variant, distances to its first reference, and what the gate said."""
    edge = next((edge for edge in result.comparisons if edge.candidate == variant.name), None)
    scores = variant.quality | (edge.quality if edge else {})
    found = {f"quality/{name}": score.estimate for name, score in scores.items() if score.estimate is not None}
    if variant.quality or variant.trips:
        found["quality/tripped_images"] = float(variant.broken_images)
    verdicts = [judgement.verdict for judgement in result.judgements if judgement.candidate == variant.name]
    if verdicts:
        found["gate/passed"] = float(all(verdict is Verdict.PASS for verdict in verdicts))
    return found


def peak_rate(result: StudyResult, variant: VariantResult) -> tuple[str, float] | None:
    """The dense rate that the data sheet gives for the types in which the variant's products ran, as evidence shows.

    By name (`bf16`) and in TFLOP/s; none without a sheet, or where the types are not seen or not on it.
    """
    sheet = result.environment.sheet
    types = [kind for m in variant.measurements for e in m.evidence for kind in e.facts.get("arithmetic", [])]
    return peak_of(sheet, types) if sheet and types else None


def _memory(variant: VariantResult) -> dict[str, float]:
    names = {
        "memory/loaded_process_gib": "process_loaded_gib",
        "memory/peak_process_gib": "process_peak_gib",
        "memory/loaded_allocated_gib": "cuda_loaded_gib",
        "memory/peak_allocated_gib": "cuda_peak_allocated_gib",
        "memory/peak_reserved_gib": "cuda_peak_reserved_gib",
        "memory/graph_pools_gib": "cuda_graph_pools_gib",
        "memory/nvml_process_gib": "nvml_process_gib",
    }
    memories = [m.memory for m in variant.measurements if m.memory]
    found = {name: [getattr(memory, field) for memory in memories] for name, field in names.items()}
    return {name: max(values) for name, values in found.items() if values and None not in values}
