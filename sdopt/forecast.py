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
        fits: whether it may fit in the memory of the device.
    """

    variant: str
    shape: Shape
    seconds: float
    text: str
    fits: bool = True


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


def foreseen(
    variants: Sequence[Variant], machine: Machine, context: StartContext
) -> tuple[float | None, list[str], set[str]]:
    """Returns what variants would take on a card, by its data sheet; on this CPU what the first one would.

    That is the seconds of a call, on average over variants and shapes, or None if none is told; lines for a person; and
    the variants that do not fit, of those that were asked for.
    """
    sheet = machine.sheet
    try:
        forecast = expected(variants if sheet else variants[:1], machine, context)
    except UsageError as error:
        return None, [f"no prediction: {error}"], set()
    known = [
        expectation.seconds
        for expectation in forecast
        if not math.isnan(expectation.seconds)
    ]
    call_s = sum(known) / len(known) if known else None
    too_large = {
        expectation.variant for expectation in forecast if not expectation.fits
    }
    if sheet is None:
        return call_s, [], too_large
    lines = [
        f"  {expectation.variant}, {expectation.shape}: {expectation.text}"
        for expectation in forecast
    ]
    return call_s, [f"expected on {sheet.name}:", *lines], too_large
