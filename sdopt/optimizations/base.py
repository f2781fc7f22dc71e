"""What an optimization is: a frozen dataclass that changes a pipeline and afterwards proves that it did."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from sdopt.hardware.device import Device
from sdopt.measure.trace import Trace
from sdopt.schema import Model, Workload

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


class Stage(IntEnum):
    """When an optimization is applied; the order in which they may build on each other."""

    LOAD = 0
    COMPONENTS = 1
    WEIGHTS = 2
    ATTENTION = 3
    LAYOUT = 4
    OFFLOAD = 5
    COMPILE = 6
    CALL = 7


class Contract(StrEnum):
    """What an optimization promises about the images."""

    EXACT = "exact"
    """The same bits."""
    EQUIVALENT = "equivalent"
    """The same mathematics in another order: differences of rounding."""
    LOSSY = "lossy"
    """Something is approximated."""


@dataclass(frozen=True)
class Context:
    """What an optimization may look at to say whether it can run: nothing is loaded yet."""

    device: Device
    model: Model
    workload: Workload
    chosen: Mapping[str, "Optimization"]
    """All optimizations of the variant by axis, this one included."""


@dataclass(frozen=True)
class Finding:
    """What a run showed of one optimization: whether it took effect, in one line, with the facts behind it."""

    engaged: bool
    summary: str
    facts: dict[str, Any] = field(default_factory=dict)


Proof = Callable[[Trace], Finding]
"""Reads the trace of one call of the pipeline, made after everything was applied."""


@dataclass(frozen=True)
class Optimization:
    """One choice on one axis. Fields are the keys of its yaml; a subclass sets what it needs and leaves the rest.

    Class attributes: `stage` orders the applications; `contract` is the promise about the images (a property where it
    depends on a field); `claims` names what it is for: `latency`, `memory`, or nothing.
    """

    stage: ClassVar[Stage] = Stage.CALL

    @property
    def claims(self) -> frozenset[str]:
        return frozenset()

    @property
    def contract(self) -> Contract:
        return Contract.EXACT

    def conflicts(self, ctx: Context) -> list[str]:
        """Reasons why it cannot run on this device, with this model or beside the other choices."""
        return []

    def engages(self, ctx: Context) -> list[str]:
        """Reasons why it cannot take effect on a workload as small as this one."""
        return []

    def load_kwargs(self) -> dict[str, Any]:
        """What it adds to `from_pretrained`."""
        return {}

    def call_kwargs(self) -> dict[str, Any]:
        """What it adds to each call of the pipeline."""
        return {}

    def context(self, pipe: "DiffusionPipeline") -> AbstractContextManager[Any]:
        """State of the process that lives for one call of `pipe`."""
        return nullcontext()

    def apply(self, pipe: "DiffusionPipeline") -> Proof:
        """Changes the pipeline; returns what will prove, from a traced call, that the change took effect."""
        raise NotImplementedError
