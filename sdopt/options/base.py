"""Defines `Optimization`: a frozen dataclass that changes a pipeline and then proves that the change took effect."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from sdopt.contract import NOTHING, Contract
from sdopt.errors import UsageError
from sdopt.hardware.cards import Feature, missing
from sdopt.hardware.device import Device
from sdopt.measure.trace import Trace
from sdopt.options.declarations import Excludes, Extra
from sdopt.pipelines.loading import family_of
from sdopt.pipelines.parts import Pipeline
from sdopt.schema import Configured, Model, Scheduler, Shape, Task, Workload

if TYPE_CHECKING:
    import torch


class Stage(IntEnum):
    """The order in which optimizations are applied; a later stage may build on an earlier one."""

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


@dataclass(frozen=True)
class Context:
    """The information from which an option decides, before anything is loaded, whether it can run at one shape."""

    device: Device
    model: Model
    workload: Workload
    """The workload with a single size and batch size; conflicts are checked once per shape."""
    chosen: Mapping[str, Optimization]
    """All optimizations of the variant, including this one, by axis (`precision`, `memory.vae_slicing`)."""
    scheduler: Scheduler = field(default_factory=Scheduler)
    task: Task = field(default_factory=Task)
    shapes: tuple[Shape, ...] = ()
    """The shapes that one process runs, one after the other; () where they are not known."""

    @property
    def steps(self) -> int:
        """Number of steps that a call runs: tasks that start from an image leave the first ones out."""
        family = family_of(self.model)
        return family.steps_of(self.workload.steps, self.task.strength)


@dataclass(frozen=True)
class Finding:
    """Evidence about one optimization: whether it took effect, a summary line, and the underlying facts."""

    engaged: bool
    summary: str
    facts: dict[str, Any] = field(default_factory=dict)

    def also(self, summary: str, engaged: bool = True, **facts: Any) -> Finding:
        """Returns the finding with further evidence, which must be there too."""
        return Finding(
            self.engaged and engaged, f"{self.summary}; {summary}", self.facts | facts
        )


Proof = Callable[[Trace], Finding]
"""Checks from the trace of one call, made after all optimizations were applied, whether an optimization took effect.

Its `Finding` is the evidence. One that is not `engaged`, in any process at any shape, makes the variant `not_engaged`.
"""

Assumption = Callable[[Any], list[str]]
"""Checks what an option assumes of a pipeline that a program has built; returns what breaks it (see `assumptions`)."""

Need = Feature | Extra
"""What an option cannot do without: a feature of the card, or a package."""

Inputs = dict[str, Any]
"""Arguments of one pipeline call: prompts, size, noise."""


@dataclass(frozen=True)
class Optimization(Configured):
    """One option of one axis. Its fields are the keys of its yaml file; a subclass overrides only what it needs.

    `contract`, `claims` and `diffusers_lines` are class variables of most subclasses, and properties of those where a
    field decides.

    Attributes:
        stage: when the option is applied.
        fixed_batch: whether another batch size would be compiled or captured again, or would give visibly different
            images. The quality pass then uses the batch size of the workload.
        saves_operations: whether the denoiser skips operations, so that operations are counted with the option applied;
            None if the images decide how many, so that none are counted.
        assumes: what the option takes for granted of a pipeline that a program has built; see `assumptions`.
        keeps_structure: whether later changes of the denoiser's layers or their settings would have no effect.
        keeps_weights: whether parameters that take the places of the denoiser's own would have no effect.
        unet_only: why the option cannot change a transformer; None if it can.
        needs: features of the card, and packages. Those of the base classes count too.
        excludes: options that it cannot be combined with. Those of the base classes count too.
        loads_on_host: whether the pipeline is loaded into host memory, from where the option moves its weights to the
            device. A model that is larger than the device's memory can then run on the device.
    """

    stage: ClassVar[Stage] = Stage.CALL
    fixed_batch: ClassVar[bool] = False
    saves_operations: ClassVar[bool | None] = False
    loads_on_host: ClassVar[bool] = False
    unet_only: ClassVar[str | None] = None
    needs: ClassVar[tuple[Need, ...]] = ()
    excludes: ClassVar[tuple[Excludes, ...]] = ()
    assumes: ClassVar[tuple[Assumption, ...]] = ()
    keeps_structure: ClassVar[bool] = False
    keeps_weights: ClassVar[bool] = False

    def fixed_for(self, model: Model) -> bool:
        """Returns whether another batch size than the timed one is not to be drawn with a model, as `fixed_batch`."""
        return self.fixed_batch

    @property
    def compiles(self) -> bool:
        """Whether the option replaces modules by compiled ones, which the first calls build."""
        return self.stage is Stage.COMPILE

    @property
    def sets_process(self) -> bool:
        """Whether it sets something of the whole process while a call runs, so that no other call may run then."""
        return False

    @property
    def recording_calls(self) -> int:
        """Number of calls at a shape, after its first one, that still record graphs; memory is measured after them."""
        return 0

    @property
    def traced_calls(self) -> int:
        """Number of denoiser calls that a trace must contain to show that the option took effect."""
        return 2

    @property
    def claims(self) -> frozenset[str]:
        """The gains that the option claims: `latency`, `memory`, both or none; a gate checks each claim."""
        return NOTHING

    @property
    def contract(self) -> Contract:
        """The option's promise about the images; a gate applies the rules of this contract."""
        return Contract.EXACT

    def contract_on(self, device: Device) -> Contract:
        """Returns what the option promises about the images on a device: its `contract`, or less."""
        del device
        return self.promised()

    def promised(self) -> Contract:
        """Returns its `contract`, which an option may hold as a word of its yaml."""
        return self.contract

    def claimed(self) -> frozenset[str]:
        """Returns its `claims`, which an option may hold as a word of its yaml."""
        return self.claims

    def located(self) -> Optimization:
        """Returns the option with whole paths of the files that it names, which a worker finds from any folder."""
        return self

    @property
    def diffusers_lines(self) -> tuple[str, ...]:
        """Equivalent code for a diffusers pipeline `pipe`; () if only sdopt has the option.

        A line that begins with `with` and ends with a colon wraps each call of the pipeline.
        """
        return ()

    def lines_for(self, model: Model) -> tuple[str, ...]:
        """Returns `diffusers_lines` as a model's pipeline takes them."""
        del model
        return self.diffusers_lines

    def conflicts(self, ctx: Context) -> list[str]:
        """Returns the conflicts that the option computes from values; what it declares is in `needs` and `excludes`.

        Of two options that conflict, either may say so, and one is enough: it finds the other in `ctx.chosen`, and
        names it in the reason. `Variant.conflicts` asks every option of a variant, at each shape. A study skips
        a variant with conflicts (`study.plan`); if no variant remains, the command ends with exit code 2.
        """
        return []

    def lacking(self, ctx: Context) -> list[str]:
        """Returns the keys that the user must set before the option can run with this model; [] if there are none.

        They are conflicts too, but the option fits: `sdopt doctor` says what it needs.
        """
        return []

    def obstacles(self, ctx: Context) -> list[str]:
        """Returns everything that keeps the option from running: the kind of model, the keys to set, the conflicts."""
        return self.unfit(ctx) or [*self.lacking(ctx), *self.incompatible(ctx)]

    def incompatible(self, ctx: Context) -> list[str]:
        """Returns why the option cannot run with this device and the other choices, as declared or computed."""
        return [*self.unmet(ctx), *self.excluded(ctx), *self.conflicts(ctx)]

    def unmet(self, ctx: Context) -> list[str]:
        """Returns what the device lacks of the option's `needs`; if it lacks nothing, the packages that are missing."""
        features: list[str] = []
        packages: list[str] = []
        for need in self.all_needs():
            if isinstance(need, Feature):
                features += missing(ctx.device, need)
            else:
                packages += need.missing(ctx.device)
        return features or packages

    def excluded(self, ctx: Context) -> list[str]:
        """Returns the reasons of those options of the variant that the option `excludes`."""
        reasons = []
        for rule in self.all_excludes():
            other = ctx.chosen.get(rule.axis)
            if other is None or (rule.axis == "compiler" and not other.compiles):
                continue
            if rule.forbids(type(other)):
                reasons.append(rule.reason)
        return reasons

    @classmethod
    def all_needs(cls) -> tuple[Need, ...]:
        """Returns what the class and its base classes need."""
        needs = (vars(base).get("needs", ()) for base in cls.__mro__)
        return tuple(chain.from_iterable(needs))

    @classmethod
    def all_excludes(cls) -> tuple[Excludes, ...]:
        """Returns what the class and its base classes exclude."""
        rules = (vars(base).get("excludes", ()) for base in cls.__mro__)
        return tuple(chain.from_iterable(rules))

    def unfit(self, ctx: Context) -> list[str]:
        """Returns why the option is not for this kind of model, as `unet_only` declares; [] if it is."""
        family = family_of(ctx.model)
        if self.unet_only is None or family.is_unet:
            return []
        return [
            f"not for {family.title}, whose denoiser is a transformer: {self.unet_only}"
        ]

    def bypassed(self, pipe: Pipeline) -> list[str]:
        """Returns what of a pipeline that users' code has made the option would leave out or break; [] if nothing."""
        reasons: list[str] = []
        for assumption in self.assumes:
            reasons += assumption(pipe)
        return reasons

    def broken(self, pipe: Pipeline) -> list[str]:
        """Returns what speaks against the option on a program's own pipeline; [] if nothing does."""
        return self.bypassed(pipe)

    def comes_after(self, pipe: Pipeline) -> Mapping[str, str]:
        """Returns methods of a pipeline that the option has to come after, with what to say if one is called later."""
        return {}

    def wraps(self) -> Mapping[str, Callable[[Any], Any]]:
        """Returns for methods of a pipeline what makes the one of it that takes its place."""
        return {}

    def refusals(self, call: Inputs) -> list[str]:
        """Returns why the option cannot do what the arguments of a call ask for; [] if it can."""
        return []

    def ineffective(self, ctx: Context) -> list[str]:
        """Returns the reasons why the option would have no effect on a workload this small; [] if it has an effect."""
        return []

    def slow_here(self, ctx: Context) -> list[str]:
        """Returns why the option is expected to make calls slower on this device, on which it runs all the same."""
        return []

    def files(self, model: Model, fetch: bool) -> list[Path]:
        """Returns the files that the option reads in addition to those of the model.

        Raises:
            UsageError: a file is missing, or cannot be downloaded.
        """
        return []

    def disk_bytes(self, ctx: Context, weights: Callable[[], int]) -> int:
        """Returns the bytes of temporary files that the option keeps on disk for the lifetime of each process.

        Args:
            ctx: the device, and the variant's other options.
            weights: returns the bytes of all weights of the pipeline; a call takes seconds.
        """
        return 0

    def parts(self, model: Model, dtype: torch.dtype) -> dict[str, Any]:
        """Returns the pipeline components, by name, that replace the model's own."""
        return {}

    def parts_for(
        self, pipe: Pipeline, model: Model, dtype: torch.dtype
    ) -> dict[str, Any]:
        """Returns the components that replace those of a pipeline that is already loaded, and that it leaves as it is.

        Args:
            pipe: the pipeline, before its weights are cast.
            model: what is known of its origin.
            dtype: the type that the weights of the other components will have.
        """
        return self.parts(model, dtype)

    def load_kwargs(self) -> dict[str, Any]:
        """Returns the option's keyword arguments for `from_pretrained`."""
        return {}

    def call_kwargs(self) -> dict[str, Any]:
        """Returns the option's keyword arguments for each pipeline call."""
        return {}

    @property
    def prepares_inputs(self) -> bool:
        """Whether the option computes something from the prompts before the first call."""
        return type(self).prepare_inputs is not Optimization.prepare_inputs

    def prepare_inputs(
        self, pipe: Pipeline, prompts: Sequence[str]
    ) -> Callable[[Inputs], Inputs] | None:
        """Computes values that depend on the prompts alone, once, after all options were applied and in their contexts.

        Args:
            pipe: the pipeline; components that calls no longer need may be removed.
            prompts: the distinct prompts of all later calls.

        Returns:
            A function from the arguments of a call to the arguments that the pipeline gets instead, or None for no
            change.
        """
        return None

    def context(self, pipe: Pipeline) -> AbstractContextManager[Any]:
        """Returns a context manager that wraps each call of `pipe` and restores the settings that it changes."""
        return nullcontext()

    def begin_process(self) -> None:
        """Changes settings of the process before a pipeline is loaded in it, and before the device is used."""

    def apply(self, pipe: Pipeline) -> Proof:
        """Changes the pipeline; returns a proof that checks, from a traced call, whether the change took effect."""
        raise NotImplementedError


def existing(files: Sequence[Path], key: str) -> list[Path]:
    """Returns files that an option reads. Raises UsageError, with the option's `key`, if one is missing."""
    for file in files:
        if not file.is_file():
            raise UsageError(f"{key}: {file}: no such file")
    return [*files]


def loading_arguments(options: Iterable[Optimization]) -> dict[str, Any]:
    """Returns the keyword arguments of all options for `from_pretrained`.

    Args:
        options: in the order in which they are applied; of an argument that several give, the last one counts.
    """
    arguments: dict[str, Any] = {}
    for option in options:
        arguments |= option.load_kwargs()
    return arguments
