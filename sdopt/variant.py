"""One point of an ablation, as a worker receives it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from sdopt.hardware.cards import emulated
from sdopt.hardware.device import Device
from sdopt.optimizations.base import Context, Contract, Optimization
from sdopt.results.records import RecordedConfig
from sdopt.schema import WORK, Hardware, Model, Protocol, Scheduler, Task, Workload


@dataclass(frozen=True)
class Variant:
    """A name, the options chosen on each axis, and everything that a worker needs to run it.

    `choices` names the option of each axis; where a user changed a key of it, the change is part of the name
    (`inductor(mode=max-autotune)`).
    """

    name: str
    choices: Mapping[str, str]
    overrides: tuple[str, ...]
    model: Model
    task: Task
    scheduler: Scheduler
    workload: Workload
    protocol: Protocol
    hardware: Hardware
    optimizations: Mapping[str, Optimization]
    prompts: tuple[str, ...]
    pictured: tuple[str, ...] = ()
    """The prompts of the quality pass; those that are timed come first."""
    config: RecordedConfig = field(default_factory=RecordedConfig)
    """The composed configuration, as it is recorded."""

    @property
    def size(self) -> int:
        """Height and width in pixels."""
        return self.workload.size or self.model.size

    @property
    def guidance_scale(self) -> float:
        """Weight of the prompt (Ho and Salimans 2022); above 1 every step runs the denoiser on two samples."""
        own = self.workload.guidance_scale
        return self.model.guidance_scale if own is None else own

    @property
    def work(self) -> tuple[Model | Task | Scheduler | Workload, ...]:
        """The sections that say which images are asked for."""
        return tuple(getattr(self, section) for section in WORK)

    def other_work(self, other: "Variant") -> bool:
        """Returns whether other images are asked for, whatever its options promise."""
        return self.work != other.work

    @property
    def contract(self) -> Contract:
        """The weakest promise among its optimizations."""
        order = list(Contract)
        return max((option.contract for option in self.optimizations.values()), key=order.index, default=Contract.EXACT)

    @property
    def applied(self) -> list[tuple[str, Optimization]]:
        """The optimizations by axis, in the order in which they are applied."""
        return sorted(self.optimizations.items(), key=lambda item: item[1].stage)

    def context(self, device: Device) -> Context:
        """Returns what options may look at before they run on `device`."""
        return Context(emulated(device, self.hardware), self.model, self.workload, self.optimizations)

    def conflicts(self, device: Device) -> list[str]:
        """Every reason why this variant cannot run on `device`, each with the choice at fault."""
        ctx = self.context(device)
        return [
            f"{axis}={self.choices.get(axis, type(option).__name__)}: {reason}"
            for axis, option in self.optimizations.items()
            for reason in [*option.conflicts(ctx), *option.engages(ctx)]
        ]
