"""Tells which options to try first: those that earlier measurements promise most of.

The order decides what a short search finds, and nothing else: each option is measured all the same. What this machine
has measured itself counts most, then what `sdopt plan` says of its card, then what sdopt's own records show of other
machines; an option that nothing is known of stands between those that were faster and those that were slower.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import median

from sdopt.errors import UsageError
from sdopt.forecast import expected
from sdopt.hardware.cards import CPU_BFLOAT16
from sdopt.hardware.device import Device
from sdopt.record.choices import difference, option_name
from sdopt.record.records import Status, StudyResult
from sdopt.statistics.figures import rows_of
from sdopt.study.cost import newest_results
from sdopt.variant import Variant
from sdopt.worker.forkserver import StartContext
from sdopt.worker.machine import Machine

RECORDED = Path(__file__).parent / "expected.json"
"""Median speed-ups in sdopt's own records, by kind of device and option; `python -m tests.reference` writes it."""

_UNKNOWN = 1.0
"""The speed-up of an option that nothing is known of."""


def expected_speedups(
    device: Device, results: Path, planned: dict[str, float]
) -> dict[str, float]:
    """Returns what a device promises of single options, by choice, as in `caching=deepcache`.

    They are medians of results of the same device below a folder, what is `planned`, and medians of sdopt's records of
    such devices.
    """
    return recorded_for(device) | planned | medians(results_of(device, results))


def planned_speedups(
    variants: Sequence[Variant], machine: Machine, context: StartContext
) -> dict[str, float]:
    """Returns what `sdopt plan` promises of options, by choice: of variants that differ in one from the first.

    A card is told by its data sheet; without one nothing is promised, since little of a processor can be told.
    """
    if machine.sheet is None:
        return {}
    try:
        forecast = expected(variants, machine, context)
    except UsageError:  # which the search says where it tells the time of a call
        return {}
    # Of several shapes the first one counts.
    seconds = {one.variant: one.seconds for one in reversed(forecast)}
    baseline, *alone = variants
    planned = {}
    for variant in alone:
        choices = changed_choices(variant.choices, baseline.choices)
        speedup = seconds[baseline.name] / seconds[variant.name]
        if len(choices) == 1 and not math.isnan(speedup):
            planned[choices[0]] = speedup
    return planned


def speedup_of(
    choices: Mapping[str, str],
    baseline: Mapping[str, str],
    expected: Mapping[str, float],
) -> float:
    """Returns the product of what is expected of each option that the baseline does not have."""
    product = _UNKNOWN
    for choice in changed_choices(choices, baseline):
        product *= expected.get(choice, _UNKNOWN)
    return product


def recorded_for(device: Device) -> dict[str, float]:
    """Returns the recorded speed-ups for a kind of device; an option without one there has that of another kind."""
    recorded = _recorded()
    expected: dict[str, float] = {}
    for kind, speedups in recorded.items():
        if kind != device.type:
            expected.update(speedups)
    expected.update(recorded.get(device.type, {}))
    if not device.is_cuda and device.attributes.get(CPU_BFLOAT16, True):
        expected.pop("precision=bf16", None)
    return expected


@cache
def _recorded() -> dict[str, dict[str, float]]:
    speedups: dict[str, dict[str, float]] = json.loads(RECORDED.read_text())
    return speedups


def results_of(device: Device, folder: Path) -> list[StudyResult]:
    """Returns the newest results of a device below a folder."""
    same = []
    for result, _ in newest_results(folder):
        if result.environment.device["name"] == device.name:
            same.append(result)
    return same


def medians(results: Iterable[StudyResult]) -> dict[str, float]:
    """Returns the median speed-up of each option that some results measured alone, by choice."""
    measured: dict[str, list[float]] = defaultdict(list)
    for result in results:
        for choice, speedup in single_speedups(result):
            measured[choice].append(speedup)
    typical = {}
    for choice in sorted(measured):
        typical[choice] = median(measured[choice])
    return typical


def single_speedups(result: StudyResult) -> list[tuple[str, float]]:
    """Returns the speed-up of each variant that differs from its reference in one option, and in nothing else."""
    if result.is_imported:
        return []
    speedups = []
    for row in rows_of(result):
        variant, ratio = row.variant, row.speedup_beside
        if ratio is None or variant.is_control:
            continue
        if variant.status is not Status.OK:
            continue  # what shows no effect says nothing of the option
        reference = result.variant(row.reference)
        choices = changed_choices(variant.choices, reference.choices)
        same_work = variant.config.workload == reference.config.workload
        if len(choices) == 1 and same_work:
            speedups.append((choices[0], ratio.interval.estimate))
    return speedups


def changed_choices(
    choices: Mapping[str, str], baseline: Mapping[str, str]
) -> list[str]:
    """Returns the options that one variant has and the other has not, by axis, as in `caching=deepcache`."""
    changed = difference(choices, baseline)
    return [f"{axis}={option_name(option)}" for axis, option in changed.items()]
