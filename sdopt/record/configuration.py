"""Records the composed configuration of a study or a variant."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sdopt.schema import (
    AMOUNT,
    CHOICES,
    WORK,
    Gate,
    Hardware,
    Model,
    Protocol,
    Quality,
    Scheduler,
    Shape,
    Task,
    Tracking,
    Workload,
)


@dataclass(frozen=True)
class RecordedConfig:
    """The composed configuration of a study or of one variant: sections typed, options as they were composed."""

    model: Model = field(default_factory=Model)
    task: Task = field(default_factory=Task)
    scheduler: Scheduler = field(default_factory=Scheduler)
    workload: Workload = field(default_factory=Workload)
    protocol: Protocol = field(default_factory=Protocol)
    quality: Quality = field(default_factory=Quality)
    gate: Gate = field(default_factory=Gate)
    hardware: Hardware = field(default_factory=Hardware)
    tracking: Tracking = field(default_factory=Tracking)
    study: dict[str, Any] = field(default_factory=dict)
    """The design with its own keys."""
    options: dict[str, Any] = field(default_factory=dict)
    """By axis, the keys of its option (`_target_` and arguments), or of several options that combine, by name."""
    objective: tuple[str, ...] = ()
    """Names of the metrics that a sweeper optimises."""
    dry_run: bool = False

    @property
    def replicates(self) -> int:
        """Processes per variant."""
        return self.protocol.replicates or 1

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes of the timed calls, the main one first."""
        return self.workload.shapes(self.model)

    def at(self, shape_index: int) -> "RecordedConfig":
        """Returns the configuration with the shape at this index as its only one; for the main shape, itself."""
        if not shape_index:
            return self
        return replace(self, workload=self.workload.at(self.shapes[shape_index]))

    @property
    def images_per_call(self) -> int:
        """Number of images that one call of the pipeline makes at the main shape."""
        return self.shapes[0].batch_size * self.workload.images_per_prompt

    @property
    def lora(self) -> str:
        """The folder or repository and the file of a LoRA; "" without one. Many files have the same name."""
        chosen = self.options.get("lora") or {}
        if "path" not in chosen:
            return ""
        place = Path(chosen["path"]).name if chosen["path"] else "packaged"
        return "/".join(filter(None, (place, chosen.get("weight_name"))))

    @property
    def random_weights(self) -> bool:
        """Whether the model is untrained: its images show only how far variants agree."""
        return self.model.weights == "random"

    def flat(self) -> dict[str, Any]:
        """Returns every key by its full name, as on a command line (`workload.steps`), including the options' axes."""
        return dict(self._by_name)

    @cached_property
    def _by_name(self) -> dict[str, Any]:
        # Derived once: a tracker and a comparison ask each variant for it beside each other variant.
        sections = asdict(self)
        return _flat(sections | sections.pop("options"))

    def differing(
        self, other: "RecordedConfig", sections: Sequence[str]
    ) -> dict[str, tuple[Any, Any]]:
        """Returns the keys of some sections in which two configurations differ, by full name, with both values."""
        changed = {}
        for section in sections:
            theirs = vars(getattr(other, section))
            for key, value in vars(getattr(self, section)).items():
                if value != theirs[key]:
                    changed[f"{section}.{key}"] = value, theirs[key]
        return changed

    def incomparable_work(self, other: "RecordedConfig") -> dict[str, tuple[Any, Any]]:
        """Returns the keys of the work and the hardware in which two variants differ and must not, with both values.

        What a candidate may choose (`CHOICES`) is part of the comparison, and so is how many images a call makes
        (`AMOUNT`), because times are compared per image. A size of null is the model's.
        """
        differing = self.differing(other, (*WORK, "hardware"))
        if "workload.size" in differing:
            mine, theirs = self._sizes, other._sizes
            differing["workload.size"] = (mine, theirs)
            if mine == theirs:
                del differing["workload.size"]
        return {
            key: values
            for key, values in differing.items()
            if not key.startswith((*CHOICES, *AMOUNT))
        }

    def chosen_beside(self, other: "RecordedConfig") -> dict[str, tuple[Any, Any]]:
        """Returns the keys of the work that a variant chooses otherwise than another one, with both values."""
        keys = {
            "workload.steps": (self.workload.steps, other.workload.steps),
            "workload.guidance_scale": (
                self.workload.guidance(self.model),
                other.workload.guidance(other.model),
            ),
            "workload.negative_prompt": (
                self.workload.negative_prompt,
                other.workload.negative_prompt,
            ),
            "model": (self.model.name, other.model.name),
            "scheduler": (self.scheduler.class_name, other.scheduler.class_name),
            "scheduler.options": (self.scheduler.options, other.scheduler.options),
            "scheduler.timesteps": (
                self.scheduler.timesteps,
                other.scheduler.timesteps,
            ),
            "hardware.threads": (self.hardware.threads, other.hardware.threads),
        }
        return {key: values for key, values in keys.items() if values[0] != values[1]}

    def runs_as_often(self, other: "RecordedConfig") -> bool:
        """Returns whether the denoiser is to run as often in a call: no other steps, scheduler or scale are chosen."""
        scales = (
            self.workload.guidance(self.model),
            other.workload.guidance(other.model),
        )
        return (
            self.workload.steps == other.workload.steps
            and self.scheduler == other.scheduler
            and scales[0] == scales[1]
        )

    @property
    def _sizes(self) -> int | list[int]:
        """The sizes of the timed calls, in pixels; a single one is no list."""
        sizes = list(dict.fromkeys(shape.size for shape in self.shapes))
        return sizes[0] if len(sizes) == 1 else sizes


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= (
            _flat(value, f"{prefix}{key}.")
            if isinstance(value, dict) and value
            else {f"{prefix}{key}": value}
        )
    return flat
