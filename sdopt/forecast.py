"""Asks an installed application what variants would take before they are measured; `sdopt plan` is one.

An application offers a function under the entry point `sdopt.forecast`: it takes variants, the machine and the way to
start a process, and returns an `Expected` for each variant and shape.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points

from sdopt.errors import UsageError
from sdopt.schema import Shape
from sdopt.variant import Variant
from sdopt.worker.forkserver import StartContext
from sdopt.worker.machine import Machine


@dataclass(frozen=True)
class Expected:
    """What a variant would take at one shape.

    Attributes:
        variant: its name.
        shape: size and batch size of the call.
        seconds: of one call; NaN where it cannot be told.
        text: seconds and memory, for a person.
    """

    variant: str
    shape: Shape
    seconds: float
    text: str


Forecast = Callable[[Sequence[Variant], Machine, StartContext], list[Expected]]


def expected(
    variants: Sequence[Variant], machine: Machine, context: StartContext
) -> list[Expected]:
    """Returns what variants would take on a machine, at each of their shapes.

    Raises:
        UsageError: no application that can tell is installed; or a model has no configuration here, because it was not
            fetched.
    """
    for entry in entry_points(group="sdopt.forecast"):
        forecast: Forecast = entry.load()
        return forecast(variants, machine, context)
    raise UsageError(
        "nothing that foretells times is installed; `pip install` sdopt again to have `sdopt plan`"
    )


def lines_of(
    variants: Sequence[Variant], machine: Machine, context: StartContext
) -> list[str]:
    """Returns `expected` as lines for a person."""
    try:
        found = expected(variants, machine, context)
    except UsageError as error:
        return [f"no prediction: {error}"]
    name = machine.device.name if machine.sheet is None else machine.sheet.name
    lines = [f"  {each.variant}, {each.shape}: {each.text}" for each in found]
    return [f"expected on {name}:", *lines]


def expected_call_s(
    variants: Sequence[Variant], machine: Machine, context: StartContext
) -> float | None:
    """Returns the seconds that are expected of a call, on average over variants and shapes; None if none is told."""
    try:
        seconds = [each.seconds for each in expected(variants, machine, context)]
    except UsageError:
        return None
    known = [value for value in seconds if not math.isnan(value)]
    return sum(known) / len(known) if known else None
