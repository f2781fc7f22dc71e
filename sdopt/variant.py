"""Defines `Variant`: one point of an ablation, in the form that is sent to a worker."""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdopt.contract import Contract, weakest
from sdopt.hardware.cards import emulated
from sdopt.hardware.device import Device
from sdopt.options.assumptions import plain_weights
from sdopt.options.base import Context, Optimization, Stage
from sdopt.options.lora import Lora, NoLora
from sdopt.options.patch import Patch
from sdopt.pipelines.catalog import ALT_DIFFUSION, missing_alt_diffusion, path_of
from sdopt.pipelines.factory import built
from sdopt.pipelines.loading import (
    family_of,
    guidance_of,
    name_of,
    pipeline_of,
    sampling_problems,
)
from sdopt.pipelines.sampling import few_steps
from sdopt.pipelines.tasks import no_task
from sdopt.pipelines.transformer_files import is_gguf, is_transformer
from sdopt.pipelines.twins import titles_of
from sdopt.record.choices import PATCH, as_choice
from sdopt.record.configuration import RecordedConfig
from sdopt.schema import (
    WORK,
    Hardware,
    Model,
    Protocol,
    Scheduler,
    Shape,
    Task,
    Workload,
)

_THREADS_PER_CORE = 4


@dataclass(frozen=True)
class Variant:
    """A named combination of options, with everything that a worker needs to run it.

    `choices` names the option of each axis (see `sdopt.record.choices`). Keys that the user changed are part of the
    name: `inductor(mode=max-autotune)`.
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
    """The prompts of the quality pass, starting with the timed prompts."""
    negatives: tuple[str, ...] = ()
    """The negative prompt of each of these, of the timed and of the quality pass's; () if there are none."""
    changed: Mapping[str, Any] = field(default_factory=dict)
    """The keys of its options that have other values than in the option's file, by full name."""
    config_dirs: tuple[str, ...] = ()
    """Folders with groups of the user's own, as a search path names them."""
    config: RecordedConfig = field(default_factory=RecordedConfig)
    """The composed configuration as recorded in results."""

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes at which the variant is timed; the first is the main shape."""
        return self.workload.shapes(self.model)

    @property
    def size(self) -> int:
        """Height and width in pixels, at the main shape."""
        return self.shapes[0].size

    @property
    def texts(self) -> tuple[str, ...]:
        """All different texts that its text encoders read."""
        return tuple(dict.fromkeys((*self.prompts, *self.pictured, *self.negatives)))

    @property
    def guidance_scale(self) -> float:
        """The guidance scale; see `Workload.guidance`."""
        return self.workload.guidance(self.model)

    @property
    def work(self) -> tuple[Model | Task | Scheduler | Workload, ...]:
        """The sections that determine the images."""
        return tuple(getattr(self, section) for section in WORK)

    def other_work(self, other: "Variant") -> bool:
        """Returns whether the two variants differ in model, task, scheduler or workload, and so in their images."""
        return self.work != other.work

    @property
    def number_types(self) -> frozenset[str]:
        """The half types that its options name, for weights or for arithmetic."""
        types = set()
        for option in self.optimizations.values():
            types |= {"float16", "bfloat16"} & {
                str(value) for value in vars(option).values()
            }
        return frozenset(types)

    @property
    def contract(self) -> Contract:
        """The weakest contract among the variant's optimizations."""
        return weakest(option.promised() for option in self.optimizations.values())

    def contract_on(self, device: Device) -> Contract:
        """Returns the weakest of what its optimizations promise on a device."""
        return weakest(
            option.contract_on(device) for option in self.optimizations.values()
        )

    @property
    def applied(self) -> list[tuple[str, Optimization]]:
        """The (axis, optimization) pairs in the order in which a worker applies them."""
        return sorted(self.optimizations.items(), key=lambda item: item[1].stage)

    @property
    def functions(self) -> list[str]:
        """The functions of users' files that it runs: they build its model, or change its pipeline."""
        patch = self.optimizations.get(PATCH)
        return [
            *filter(None, [self.model.factory]),
            *(patch.functions if isinstance(patch, Patch) else ()),
        ]

    def files(self, fetch: bool) -> list[Path]:
        """Returns the files that options read in addition to the model's; downloads missing files if `fetch` is true.

        Raises:
            UsageError: a file is missing, or cannot be downloaded.
        """
        files: list[Path] = []
        for option in self.optimizations.values():
            files += option.files(self.model, fetch)
        return files

    def folders_with(self, options: Collection[str]) -> list[Path]:
        """Returns the folders of the user's own groups that have one of some options' files."""
        folders = [Path(folder).absolute() for folder in self.config_dirs]
        used = []
        for folder in folders:
            if any((folder / file).is_file() for file in options):
                used.append(folder)
        return used

    def context(self, device: Device, shape: Shape | None = None) -> Context:
        """Returns the context for checking conflicts at a shape, by default the main shape."""
        return Context(
            emulated(device, self.hardware),
            self.model,
            self.workload.at(shape or self.shapes[0]),
            self.optimizations,
            self.scheduler,
            self.task,
            self.shapes,
        )

    def conflicts(self, device: Device) -> list[str]:
        """Returns all reasons why this variant cannot run on `device`, each with the choice that causes it.

        They are what each option states, at any shape (`Optimization.conflicts`, `lacking` and `ineffective`), and what
        concerns no option alone, such as the scheduler.
        """
        shapes_of: dict[str, list[Shape]] = {}
        for shape in self.shapes:
            ctx = self.context(device, shape)
            for axis, option in self.optimizations.items():
                for reason in [*option.obstacles(ctx), *option.ineffective(ctx)]:
                    line = f"{self._choice_on(axis)}: {reason}"
                    shapes_of.setdefault(line, []).append(shape)
        reasons = []
        for reason, shapes in shapes_of.items():
            somewhere = f" (at {'; '.join(map(str, shapes))})"
            everywhere = len(shapes) == len(self.shapes)
            reasons.append(reason if everywhere else reason + somewhere)
        return [
            *reasons,
            *self.undistilled(),
            *self._left_out(),
            *self._unsupported(),
            *self._in_blocks(),
            *self._crowded(device),
            *self._unsampled(),
        ]

    def _choice_on(self, axis: str) -> str:
        """Returns the option of an axis as a command line chooses it; without its name, by that of its class."""
        named = type(self.optimizations[axis]).__name__
        return as_choice(axis, self.choices.get(axis, named))

    def slow_here(self, device: Device) -> list[str]:
        """Returns why options are expected to make calls slower on a device, each with the choice that causes it."""
        ctx = self.context(device)
        reasons: list[str] = []
        for axis, option in self.optimizations.items():
            choice = self._choice_on(axis)
            reasons += [f"{choice}: {reason}" for reason in option.slow_here(ctx)]
        return reasons

    def _unsupported(self) -> list[str]:
        """Returns the conflicts of what diffusers does not have: AltDiffusion, or a task with this kind of pipeline."""
        family = family_of(self.model)
        reasons = missing_alt_diffusion() if family.pipeline == ALT_DIFFUSION else []
        reasons_here = [f"model={self.model.name}: {reason}" for reason in reasons]
        if self.task.kind not in family.tasks:
            reasons_here.append(no_task(family, self.task))
        known = pipeline_of(self.model)  # of a function, once that was called
        if known and family.is_unet and self.model.max_sequence_length is not None:
            reasons_here.append(
                f"model.max_sequence_length={self.model.max_sequence_length}: is for diffusion transformers"
            )
        step = family.latents.multiple * 8
        if not family.is_unet and any(shape.size % step for shape in self.shapes):
            reasons_here.append(
                f"workload.size: must be a multiple of {step} for {family.title}, whose tokens are squares"
            )
        if self.mixes_masks and any(shape.batch_size > 1 for shape in self.shapes):
            mixed = f"diffusers' {family.pipeline} gives images the masks of other prompts of their batch"
            reasons_here.append(
                f"workload.images_per_prompt={self.workload.images_per_prompt}: {mixed}: set workload.batch_size=1"
            )
        return reasons_here

    @property
    def mixes_masks(self) -> bool:
        """Whether a call of several prompts gives images the masks of other ones."""
        several = self.workload.images_per_prompt > 1
        return several and family_of(self.model).encoding.mixes

    @property
    def depends_on_batch(self) -> bool:
        """Whether an image depends on the other prompts of its call: on their masks, or on the longest of them."""
        return self.mixes_masks or family_of(self.model).encoding.padded

    def _in_blocks(self) -> list[str]:
        """Returns the conflicts of options that would read the blocks of a GGUF file as numbers."""
        if not is_gguf(self.model):
            return []
        reasons = []
        for axis, option in self.optimizations.items():
            if plain_weights in option.assumes and option.stage in (
                Stage.WEIGHTS,
                Stage.ATTENTION,
                Stage.QUANTIZE,
            ):
                reasons.append(
                    f"{self._choice_on(axis)}: reads weights, and those of a GGUF file are blocks of few bits"
                )
        return reasons

    def _left_out(self) -> list[str]:
        """Returns what its options would leave out of a model that a user's function builds, once that was built."""
        described = built(self.model)
        lines = described.left_out if described is not None else ()
        chosen = tuple(f"{self._choice_on(axis)}: " for axis in self.optimizations)
        return [line for line in lines if line.startswith(chosen)]

    def _unsampled(self) -> list[str]:
        """Returns the conflicts of a scheduler that would sample the model in another way than it was trained for."""
        spaced = self.scheduler.timesteps
        if spaced and self.workload.steps > (most := 10 * len(spaced)):
            return [
                f"workload.steps={self.workload.steps}: at most {most} fit between scheduler.timesteps"
            ]
        return sampling_problems(self.model, self.scheduler, self.workload.steps)

    def _crowded(self, device: Device) -> list[str]:
        """Returns the conflict, if any, of too many threads: thousands of them would block each other indefinitely."""
        threads, most = self.hardware.threads, _THREADS_PER_CORE * (os.cpu_count() or 1)
        if threads is None or threads <= most or not device.is_here:
            return []
        return [
            f"hardware.threads={threads}: at most {most} here, {_THREADS_PER_CORE} for each core"
        ]

    def undistilled(self) -> list[str]:
        """Returns the conflict, if any, of a few-step scheduler with a model that was not distilled for it."""
        lora = self.optimizations.get("lora")
        if (
            not self.scheduler.distilled
            or self.model.distilled
            or not isinstance(lora, NoLora | None)
        ):
            return []
        chosen = as_choice("scheduler", self.choices["scheduler"])
        solution = "choose lora=fused with such a LoRA (see experiment=few_steps), or set model.distilled=true"
        return [
            f"{chosen}: needs a model distilled to a few steps: {solution} if the model itself is distilled"
        ]

    def overdone(self) -> list[str]:
        """Returns a line for a model or a LoRA whose name says that it takes fewer steps and less guidance."""
        names = [(f"model={self.model.name}", name) for name in _names_of(self.model)]
        lora = self.optimizations.get("lora")
        if isinstance(lora, Lora):
            parts = (Path(lora.path or "").name, lora.weight_name)
            names.append(("lora", " ".join(filter(None, parts))))
        embedded = guidance_of(self.model).form == "embedded"
        asked = (self.workload.steps, self.guidance_scale, embedded)
        lines = {}
        for key, name in names:
            if problem := few_steps(name, *asked):
                lines[key] = f"{key}: {problem}"
        return list(lines.values())


def _names_of(model: Model) -> list[str]:
    """Returns what the author calls a model; of a file, by its name and by its title."""
    names = [name_of(model)]
    if is_transformer(model):
        names += titles_of(path_of(model))[1:]
    return names
