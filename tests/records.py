"""Changes to records that tests make by hand."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from sdopt.record.comparisons import Comparison
from sdopt.record.configuration import RecordedConfig
from sdopt.record.records import Environment, StudyResult, VariantResult
from sdopt.record.samples import Call, GpuState, Interference, ShapeSamples
from sdopt.report.blocks import Cell, Table

T = TypeVar("T")


def known(found: T | None) -> T:
    """Returns what must be there."""
    assert found is not None
    return found


def recorded(
    rows: Sequence[VariantResult],
    comparisons: list[Comparison],
    design: str = "explicit",
) -> StudyResult:
    """A study of variants, of which the first one is the baseline, on a CPU."""
    device = {"name": "a device", "type": "cpu"}
    environment = Environment(
        "0", None, None, "3", "here", {}, device, {}, "forkserver", []
    )
    started, config = "2026-01-01T00:00:00", RecordedConfig()
    return StudyResult(
        "s", design, started, environment, config, list(rows), comparisons, rows[0].name
    )


def reconfigure(
    owner: StudyResult | VariantResult, section: str, **changes: Any
) -> None:
    """Replaces keys of one section of a recorded configuration."""
    changed: dict[str, Any] = {
        section: replace(getattr(owner.config, section), **changes)
    }
    owner.config = replace(owner.config, **changed)


def samples_of(*rows: VariantResult) -> list[ShapeSamples]:
    """Returns those of all processes of some variants, at each shape."""
    return [
        samples
        for row in rows
        for measurement in row.measurements
        for samples in measurement.shapes
    ]


def timed(seconds: Iterable[float], **of_calls: Sequence[Any]) -> list[Call]:
    """Timed calls, one after the other; `of_calls` are other fields of `Call`, a value for each."""
    calls = [Call(float(each), number) for number, each in enumerate(seconds)]
    for name, values in of_calls.items():
        for call, value in zip(calls, values, strict=True):
            setattr(call, name, value)
    return calls


def retime(
    samples: ShapeSamples,
    seconds: Iterable[float] | None = None,
    *,
    interference: Interference | Sequence[Interference | None] | None = None,
    held_gib: Sequence[float] | None = None,
    gpu: Sequence[GpuState] | None = None,
    left_out: Collection[int] | None = None,
) -> None:
    """Exchanges what is recorded of timed calls; other times are of as many calls as there are of them.

    One interference is that of all calls.
    """
    if seconds is not None:
        before, samples.calls = samples.calls, timed(seconds)
        for call, other in zip(samples.calls, before, strict=False):
            vars(call).update(vars(other) | {"seconds": call.seconds})
    if isinstance(interference, Interference):
        interference = [interference] * len(samples.calls)
    for name, values in (
        ("interference", interference),
        ("held_gib", held_gib),
        ("gpu", gpu),
    ):
        for number, call in enumerate(samples.calls if values is not None else ()):
            setattr(
                call, name, values[number] if values and number < len(values) else None
            )
    for call in samples.calls if left_out is not None else ():
        call.left_out = left_out is not None and call.round in left_out


def disturb(result: StudyResult) -> StudyResult:
    """Lets other programs take a third of the processor from each timed call; returns the same result."""
    reconfigure(result, "protocol", interference=0.02)
    for samples in samples_of(*result.variants):
        retime(samples, interference=Interference(0.3, 0.0))
    return result


def column(table: Table, heading: str) -> list[Cell]:
    """Returns the cells below a heading."""
    index = list(table.headings).index(heading)
    return [row[index] for row in table.cells]
