"""Damages documents: every key of a result, replaced by something else."""

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from sdopt.gate.calibration import Fit
from sdopt.gate.judge import judge
from sdopt.record.comparisons import Effect, Interval, ShapeRatios
from sdopt.record.files import parse_result, to_json
from sdopt.record.records import Precision, StudyResult, VariantResult
from sdopt.record.samples import GpuState, Interference, Measurement, TimedImage
from sdopt.statistics.ratios import compare
from tests.records import reconfigure

RESULT = Path(__file__).with_name("result.json")

REMOVED = object()
"""Stands for a key that is not there."""

WRONG: tuple[Any, ...] = (None, [], {}, "x", -1, 0, 1e400, float("nan"), 10**30, [None], REMOVED)
"""What takes the place of a value."""

Path_ = tuple[str | int, ...]


def document() -> dict[str, Any]:
    """A result in the present schema, as it is read from JSON, with something wherever there may be something."""
    found: dict[str, Any] = json.loads(_whole())
    return found


@cache
def _whole() -> bytes:
    """A small result, with a second shape, what its study did not record, and the verdicts of its gate."""
    result = parse_result(RESULT.read_bytes())
    owners: list[StudyResult | VariantResult] = [result, *result.variants]
    for owner in owners:
        reconfigure(owner, "workload", batch_size=[1, 2])
    for variant in result.variants:
        variant.inputs, variant.snippets = {"model": "0"}, {"precision": ["pipe.unet.to(torch.bfloat16)"]}
        for measurement in variant.measurements:
            _complete(measurement)
    result.precision = Precision({result.candidates[0].name: 3}, granted=3, stopped="the budget was spent")
    for comparison in result.comparisons:
        comparison.shapes.append(ShapeRatios())
    compare(result)
    result.effects = [Effect(("precision=bf16",), Interval(1.1), Interval(1.0), ["layout=channels_last"])]
    judge(result, result.config.gate, Fit())
    name = f"speedup/{result.shapes[0].name}"
    result.judgements[0].claims, result.judgements[0].gains = {name: 0.01}, [name]
    return to_json(result)


def _complete(measurement: Measurement) -> None:
    """Fills in whatever may be measured, and a second shape."""
    for call in measurement.shapes[0].calls:
        call.held_gib, call.interference = 0.1, Interference(0.0, 0.0, cpu_mhz=2000.0, cores=1.0)
        call.gpu = GpuState(1000, 1000, 50, 100.0, 200.0, ["power"], 0.0)
    call.left_out, measurement.shapes[0].traced = True, {"kernels": 1.0}
    measurement.shapes.append(replace(measurement.shapes[0]))
    measurement.shapes[0].timed_images, measurement.memory_after = [TimedImage(0, 0, 0.0)], measurement.shapes[0].memory
    measurement.energy_j = [1.0]
    measurement.pass_s, measurement.pass_held_gib = [call.seconds] * 10, [0.1] * 10


def keys(node: Any, here: Path_ = (), shape: Path_ = (), seen: set[Path_] | None = None) -> Iterator[Path_]:
    """Yields the path of every key, of lists only the first element."""
    seen = set() if seen is None else seen
    if shape in seen:
        return
    seen.add(shape)
    if here:
        yield here
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield from keys(value, (*here, key), (*shape, key if isinstance(node, dict) else "*"), seen)


def replaced(whole: Any, path: Path_, value: Any) -> Any:
    """Returns a copy of a document with another value at a path."""
    found = copy.copy(whole)
    if len(path) > 1:
        found[path[0]] = replaced(whole[path[0]], path[1:], value)
    elif value is REMOVED:
        del found[path[0]]
    else:
        found[path[0]] = value
    return found
