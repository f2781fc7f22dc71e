"""Estimates the cost of a study: calls, time, memory and downloads.

Time and memory come from an earlier run of the same work on this device; without one, sdopt does not guess a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sdopt.errors import UsageError
from sdopt.pipelines.catalog import PACKAGED
from sdopt.pipelines.hub import download_bytes
from sdopt.pipelines.transformer_files import base_of, is_transformer
from sdopt.record.configuration import RecordedConfig
from sdopt.record.files import read_result
from sdopt.record.records import StudyResult
from sdopt.schema import Model, Protocol
from sdopt.statistics.ratios import latency, peak_memory_gib
from sdopt.statistics.words import gib_text
from sdopt.study.plan import warmup_calls
from sdopt.study.work import Sharing, programs_s, report_s, work_ahead
from sdopt.variant import Variant
from sdopt.worker.draws import draw_of, drawing_batch

PATIENCE_S = 600.0
"""From this long on, it is said before and while measuring what takes less time."""

SHORTER = "protocol.budget_s=600 ends in 10 min with what decides most; so do fewer variants or steps."
"""What shortens a study."""

_NEWEST = 30
"""Maximum number of earlier results to read: reading one takes some hundredths of a second."""


@dataclass(frozen=True)
class StudyCost:
    """The expected cost of a study; None for an unknown figure."""

    processes: int
    calls: int
    """Calls of the pipeline, without extra rounds and without the processes that `protocol.precision` adds."""
    calls_alone: float
    """The same in times of one call alone: some are made side by side, and some make several images."""
    seconds: float | None
    """Time of the whole command."""
    memory_gib: float | None
    """Peak memory of one process."""
    based_on: str
    """The source of time and memory."""
    downloads: dict[str, int | None]
    """Bytes that are not in the local cache, by repository of the hub."""
    starts: float = 0.0
    """Starts of processes, in times of one alone."""
    programs: int = 0
    """Programs that reports hand out."""
    compiling: int = 0
    """Variants that compile, which `seconds` does not have: nothing tells how long before the first of them did."""

    def time_s(
        self, protocol: Protocol, call_s: float, load_s: float, begun_after_s: float
    ) -> float:
        """Returns the seconds of the whole command, which has taken some to begin, as the display of progress counts."""
        measuring_s = self.calls_alone * call_s + self.starts * load_s
        of_programs = [load_s + call_s] * self.programs
        after_s = report_s(begun_after_s) + programs_s(protocol, of_programs)
        return begun_after_s + measuring_s + after_s


def calls_ahead(
    variants: Sequence[Variant],
    processes: int,
    rounds: int,
    protocol: Protocol,
    batch: int | None,
) -> int:
    """Returns how many calls of the pipeline a session makes: timed ones, those around them, and those for images.

    `variants` take part, the repeated baseline among them, by `processes` in all; `batch` is that of the quality pass.
    """
    # Loading; at each shape the cold start, the warm-up with the discarded round, and the evidence.
    calls_per_process = 1 + len(variants[0].shapes) * (
        2 + max(1, warmup_calls(variants, protocol)) + rounds
    )
    drawn = sum(draw_of(variant, batch).calls for variant in variants)
    return processes * calls_per_process + len(variants) * protocol.stage_calls + drawn


def cost_of(
    variants: Sequence[Variant],
    result: StudyResult,
    records: Path,
    sharing: Sharing,
    begun_after_s: float = 0.0,
) -> StudyCost:
    """Returns the expected cost of a study whose baseline is the first of `variants` and, once more, their last.

    `result` is its plan, `records` the folder that holds earlier results, `sharing` how its processes share the
    machine, and `begun_after_s` what the command took to begin.
    """
    cost = _untimed(variants, result.config, sharing)
    earlier = _earlier(result, records)
    if earlier is None:
        source = "no earlier run of this model and size on this device"
        weights = _weights_gib(result.config.model)
        if weights:
            source += f"; its files hold {gib_text(weights)} of weights"
        return replace(cost, based_on=source)
    study, folder = earlier
    baseline = study.baseline_variant
    steps = variants[0].workload.steps / baseline.config.workload.steps
    call_s = _call_s(study) * steps * _times_as_much(variants)
    loads = [m.load_s for m in baseline.measurements if m.load_s is not None]
    load_s = float(np.median(loads or [0.0]))
    protocol = result.config.protocol
    return replace(
        cost,
        seconds=cost.time_s(protocol, call_s, load_s, begun_after_s),
        memory_gib=peak_memory_gib(baseline),
        based_on=f"from {folder}",
    )


def _untimed(
    variants: Sequence[Variant],
    config: RecordedConfig,
    sharing: Sharing,
) -> StudyCost:
    """Returns the cost of a study in processes, calls and downloads."""
    protocol, quality = config.protocol, config.quality
    processes = len(variants) * config.replicates
    batch = drawing_batch(variants, quality.batch_size, config.gate.judges)
    calls = calls_ahead(variants, processes, protocol.rounds, protocol, batch)
    work = work_ahead(
        variants[:-1], config.replicates, protocol, quality, batch, sharing
    )
    starts = work.starts * len(variants)
    count = len(variants) - 1
    images = work.images_s([1.0] * count)
    return StudyCost(
        processes,
        calls,
        calls_alone=starts + work.calls * count + images + work.repeated,
        seconds=None,
        memory_gib=None,
        based_on="",
        downloads=_downloads(variants),
        starts=starts,
        programs=count - 1,
        compiling=sum(map(_compiles, variants)),
    )


def _downloads(variants: Sequence[Variant]) -> dict[str, int | None]:
    """Returns the bytes that are fetched of each repository of the hub; None where that is not known."""
    downloads = {}
    for model in dict.fromkeys(variant.model for variant in variants):
        fetched = base_of(model) if is_transformer(model) else model
        if fetched.weights == "hub":
            downloads[str(fetched.hub_id)] = download_bytes(fetched)
    return downloads


def _call_s(study: StudyResult) -> float:
    """Returns the seconds of a call of a study's baseline: the mean over the shapes, which are called equally often."""
    seconds = []
    for shape_index in range(len(study.shapes)):
        call = latency(study.baseline_variant.at(shape_index), "median", 0.95)
        if call is not None:
            seconds.append(call.estimate)
    return float(np.mean(seconds))


def _earlier(result: StudyResult, records: Path) -> tuple[StudyResult, Path] | None:
    """Returns the newest finished result of the same work on the same device, with its folder."""
    for study, folder in newest_results(records):
        baseline = study.baseline_variant
        if (
            _work(study) == _work(result)
            and baseline.status.measured
            and latency(baseline, "median", 0.95)
        ):
            return study, folder
    return None


def newest_results(records: Path) -> Iterator[tuple[StudyResult, Path]]:
    """Yields the newest results below a folder, with their folders; those that cannot be read are passed over."""
    files = sorted(
        records.glob("**/result.json"),
        key=lambda path: path.stat().st_mtime,
        reverse=True,
    )
    for file in files[:_NEWEST]:
        try:
            yield read_result(file), file.parent
        except UsageError:
            continue


def _work(result: StudyResult) -> tuple[object, ...]:
    """Returns what decides how long a call of the baseline takes, but for the number of its steps."""
    baseline = result.baseline_variant
    config: RecordedConfig = baseline.config
    device = result.environment.device
    return (
        device["name"],
        # An RTX 3060 has 8 or 12 GB, and other rates with them.
        round(device["memory_total_gib"]) if device["type"] == "cuda" else None,
        config.model,
        config.shapes,
        config.workload.images_per_prompt,
        config.workload.guidance(config.model),
        (config.task.kind, config.task.strength),
        config.scheduler.class_name,
        config.hardware.threads,
        baseline.choices,
    )


def _compiles(variant: Variant) -> bool:
    return any(option.compiles for option in variant.optimizations.values())


def _times_as_much(variants: Sequence[Variant]) -> float:
    """Returns how many times the work of the first variant's call one of all variants does, on average."""
    work = []
    for variant in variants:
        config = variant.config
        work.append(config.images_per_call * config.workload.steps)
    return float(np.mean(work)) / work[0]


def _weights_gib(model: Model) -> float | None:
    """Returns the size of local weights as they are stored; None where they are not local, or random."""
    folder = {
        "packaged": PACKAGED / model.name,
        "path": Path(str(model.path)).expanduser(),
    }.get(model.weights)
    if folder is None:
        return None
    files = [folder] if folder.is_file() else list(folder.rglob("*.safetensors"))
    return sum(file.stat().st_size for file in files) / 2**30 or None
