"""The contract of an optimization: a frozen dataclass that changes a pipeline and afterwards proves that it did."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from sdopt.hardware.device import Device
from sdopt.measure.trace import Trace
from sdopt.schema import Model, Scheduler, Task, Workload

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline


class Stage(IntEnum):
    """When an optimization is applied; a later stage may build on an earlier one."""

    LOAD = 0
    COMPONENTS = 1
    WEIGHTS = 2
    CACHING = 3
    ATTENTION = 4
    QUANTIZE = 5
    LAYOUT = 6
    OFFLOAD = 7
    COMPILE = 8
    CALL = 9


class Contract(StrEnum):
    """What an optimization promises about the images."""

    EXACT = "exact"
    """The same bits."""
    EQUIVALENT = "equivalent"
    """The same mathematics in another order: results differ by rounding."""
    LOSSY = "lossy"
    """Something is approximated."""


@dataclass(frozen=True)
class Context:
    """What an optimization may look at to say whether it can run at one shape, before anything is loaded."""

    device: Device
    model: Model
    workload: Workload
    """With one size and one batch size; it is asked anew for each shape."""
    chosen: Mapping[str, "Optimization"]
    """All optimizations of the variant by axis (`precision`, `memory.vae_slicing`), this one included."""
    scheduler: Scheduler = field(default_factory=Scheduler)
    task: Task = field(default_factory=Task)
    shapes: int = 1
    """How many shapes one process serves, one after the other."""


@dataclass(frozen=True)
class Finding:
    """Evidence of one optimization: whether it took effect, a line that says so, and the facts behind it."""

    engaged: bool
    summary: str
    facts: dict[str, Any] = field(default_factory=dict)


Proof = Callable[[Trace], Finding]
"""Judges an optimization by the trace of one call, made after every optimization was applied."""

Inputs = dict[str, Any]
"""Arguments of one call of a pipeline: prompts, size, noise."""


@dataclass(frozen=True)
class Optimization:
    """One choice on one axis. Its fields are the keys of its yaml; a subclass overrides only what it needs.

    Attributes:
        stage: when it is applied.
        fixed_batch: whether calls of another batch size would be compiled or captured anew, or would draw visibly other
            images. Those of the quality pass are then drawn in batches of the workload's size.
        saves_operations: whether the denoiser leaves out operations, so that they are counted with it applied.
        loads_on_host: whether the pipeline is loaded into the host's memory, from where the option takes its weights
            to the device. A model that is larger than the device's memory can then run on it.
    """

    stage: ClassVar[Stage] = Stage.CALL
    fixed_batch: ClassVar[bool] = False
    saves_operations: ClassVar[bool] = False
    loads_on_host: ClassVar[bool] = False

    @property
    def traced_calls(self) -> int:
        """How many calls of the denoiser a trace must hold to show that the option took effect."""
        return 2

    @property
    def claims(self) -> frozenset[str]:
        """What the option is for: `latency`, `memory`, both or nothing; a gate checks that each claim pays."""
        return frozenset()

    @property
    def contract(self) -> Contract:
        """What the option promises about the images; a gate judges it by the rules of this promise."""
        return Contract.EXACT

    @property
    def diffusers_lines(self) -> tuple[str, ...]:
        """Code that does the same by hand to a pipeline `pipe` of diffusers; () where only sdopt has the option.

        A line that begins with `with` goes around each call of the pipeline.
        """
        return ()

    def conflicts(self, ctx: Context) -> list[str]:
        """Returns why it cannot run on this device, with this model or beside the other choices; [] if it can.

        `Variant.conflicts` asks every option. A study skips such a variant (`study.plan`); a command without any other
        variant ends with exit code 2.
        """
        return []

    def ineffective(self, ctx: Context) -> list[str]:
        """Returns why it would have no effect on a workload as small as this one; [] if it has one."""
        return []

    def files(self, model: Model, fetch: bool) -> list[Path]:
        """Returns the files that it reads beside those of the model.

        Args:
            model: the one that it changes.
            fetch: whether to download what is missing; workers read only what is there.

        Raises:
            UsageError: they are not there, or cannot be downloaded.
        """
        return []

    def disk_bytes(self, ctx: Context, weights: Callable[[], int]) -> int:
        """Returns the bytes of temporary files that it keeps on disk in each process, for as long as that lives.

        Args:
            ctx: the device, and what else is chosen.
            weights: returns the bytes of all weights of the pipeline; asking takes seconds.
        """
        return 0

    def parts(self, model: Model, dtype: "torch.dtype") -> dict[str, Any]:
        """Returns parts of the pipeline, by name, that take the place of the model's own.

        Args:
            model: the one that is loaded without these parts.
            dtype: type of the weights of the other parts.
        """
        return {}

    def load_kwargs(self) -> dict[str, Any]:
        """Returns what it adds to `from_pretrained`."""
        return {}

    def call_kwargs(self) -> dict[str, Any]:
        """Returns what it adds to each call of the pipeline."""
        return {}

    @property
    def prepares_inputs(self) -> bool:
        """Whether it has something to compute of the prompts before the first call."""
        return type(self).prepare_inputs is not Optimization.prepare_inputs

    def prepare_inputs(self, pipe: "DiffusionPipeline", prompts: Sequence[str]) -> Callable[[Inputs], Inputs] | None:
        """Computes what depends on prompts alone, once, after every option was applied and within their contexts.

        Args:
            pipe: the pipeline; what no call needs any more may be taken out of it.
            prompts: of all calls to come, each once.

        Returns:
            a function from the arguments of a call to those that the pipeline gets instead; None changes none.
        """
        return None

    def context(self, pipe: "DiffusionPipeline") -> AbstractContextManager[Any]:
        """Returns a context manager that is entered around each call of `pipe`; it restores what it changes."""
        return nullcontext()

    def apply(self, pipe: "DiffusionPipeline") -> Proof:
        """Changes the pipeline; returns the proof that judges, by a traced call, whether the change took effect."""
        raise NotImplementedError
