"""Keeps the worker of one variant warm, and calls it; blocks, so a server calls it from a thread of its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sdopt.apps.serving.config import Serving
from sdopt.hardware.device import Device
from sdopt.pipelines.loading import family_of, guidance_of
from sdopt.record.samples import Evidence
from sdopt.variant import Variant
from sdopt.worker.host import PipelineHost
from sdopt.worker.process import Worker
from sdopt.worker.protocol import Asked, Rendered


@dataclass(frozen=True)
class EngineWork:
    """What an image needs of its call; images of one call agree in it, or in all but the scale."""

    steps: int
    guidance_scale: float
    negative: bool
    """Whether they have negative prompts."""
    texts: tuple[str | None, ...] | None = None
    """Prompt and negative prompt, where images of one call must have the same."""


class Engine:
    """The worker of a variant."""

    def __init__(
        self, variant: Variant, serving: Serving, start: Callable[[], Worker]
    ) -> None:
        self.variant = variant
        self._start = start
        self._worker: Worker | None = None
        self.held_gib: float | None = None
        """Memory that the worker held after its last call."""
        sizes = sorted(shape.batch_size for shape in variant.shapes)
        self.largest = serving.largest(sizes)
        enough = next(size for size in sizes if size >= self.largest)
        self.batch_sizes = [size for size in sizes if size <= enough]
        """The batch sizes that are warmed."""
        self.pads = any(option.fixed_batch for option in variant.optimizations.values())
        """Whether a call that is not full is filled up, because another batch size would be compiled anew."""
        self.scale_by_image = scale_by_image(variant)
        """Whether the images of a call may differ in their guidance scales."""
        self._padded = family_of(variant.model).encoding.padded

    @property
    def pid(self) -> int | None:
        """The process id of the worker; None if there is none."""
        return (
            self._worker.pid
            if self._worker is not None and self._worker.alive
            else None
        )

    def start(self) -> None:
        """Starts a worker, and calls it at each batch size until it is warm. Raises WorkerError or OSError."""
        self.stop()
        self._worker = self._start()
        self._worker.ask(PipelineHost.prepare)
        recording = max(
            (option.recording_calls for option in self.variant.optimizations.values()),
            default=0,
        )
        prompts = self.variant.prompts
        negative = self.variant.workload.negative_prompt
        for size in self.batch_sizes:
            asked = [
                Asked(prompts[number % len(prompts)], number, negative)
                for number in range(size)
            ]
            for _ in range(2 + recording):
                warm = self._worker.ask(PipelineHost.render, asked, size, {})
                self.held_gib = warm.held_gib

    def prove(self) -> list[Evidence]:
        """Traces a call, and returns for each option whether it took effect. Raises WorkerError."""
        assert self._worker is not None
        return self._worker.ask(PipelineHost.prove).evidence

    def work_of(self, image: Asked, steps: int, scale: float) -> EngineWork:
        """Returns what an image needs of its call."""
        texts = (image.prompt, image.negative) if self._padded else None
        return EngineWork(steps, scale, image.negative is not None, texts)

    def together(self, one: EngineWork, other: EngineWork) -> bool:
        """Returns whether a call can draw images of both."""
        if self.scale_by_image:
            other = replace(other, guidance_scale=one.guidance_scale)
        return one == other

    def render(self, asked: Sequence[Asked], works: Sequence[EngineWork]) -> Rendered:
        """Draws images, at most `largest`, in one call; `works` has what each needs. Raises WorkerError."""
        assert self._worker is not None
        workload, work = self.variant.workload, works[0]
        assert all(self.together(work, other) for other in works)
        changes: dict[str, Any] = {}
        if work.steps != workload.steps:
            changes["num_inference_steps"] = work.steps
        if len({image_work.guidance_scale for image_work in works}) > 1:
            asked = [
                replace(image, guidance_scale=image_work.guidance_scale)
                for image, image_work in zip(asked, works, strict=True)
            ]
        elif work.guidance_scale != self.variant.guidance_scale:
            changes["guidance_scale"] = work.guidance_scale
        found = self._worker.ask(
            PipelineHost.render, asked, self.batch_for(len(asked)), changes
        )
        self.held_gib = found.held_gib
        return found

    def batch_for(self, images: int) -> int:
        """Returns the batch size of a call that draws some images."""
        return (
            next(size for size in self.batch_sizes if size >= images)
            if self.pads
            else images
        )

    def stop(self) -> None:
        """Ends the worker, gently if it still listens."""
        if self._worker is not None:
            self._worker.stop()

    def kill(self) -> None:
        """Ends the worker at once; a call that runs raises WorkerError."""
        if self._worker is not None:
            self._worker.kill()


def scale_by_image(variant: Variant) -> bool:
    """Returns whether the images of one call may have different guidance scales.

    They may where a transformer embeds the scale. A compiler would compile the call anew, or keep the scale that it has
    seen: its images of other scales have calls of their own.
    """
    if (
        family_of(variant.model).is_unet
        or guidance_of(variant.model).form != "embedded"
    ):
        return False
    return not any(option.compiles for option in variant.optimizations.values())


def unservable(variant: Variant, serving: Serving, device: Device) -> list[str]:
    """Returns the reasons why a variant cannot be served as asked; [] if it can."""
    workload, sizes = variant.workload, [shape.batch_size for shape in variant.shapes]
    found = variant.conflicts(device)
    if len({shape.size for shape in variant.shapes}) > 1:
        found.append(
            f"workload.size={workload.size}: a server makes images of one size; name one"
        )
    if variant.task.kind != "txt2img":
        found.append(
            f"task={variant.task.kind}: a server makes images from prompts alone; choose task=txt2img"
        )
    if workload.images_per_prompt != 1:
        found.append(
            f"workload.images_per_prompt={workload.images_per_prompt}: a request names its number as n"
        )
    if workload.latents is not None:
        found.append(
            f"workload.latents={workload.latents}: a request names its noise as seed; leave it out"
        )
    if serving.largest(sizes) > max(sizes):
        found.append(
            f"serving.max_batch={serving.max_batch}: larger than any batch size that is warmed; add it, as in "
            f"'workload.batch_size=[1,{serving.max_batch}]'"
        )
    if serving.window_ms and serving.largest(sizes) == 1:
        found.append(
            "serving.window_ms: has no effect on calls of one image; choose serving=single, or larger batches"
        )
    if "noise_sampler_seed" in variant.scheduler.options and max(sizes) > 1:
        found.append(
            "scheduler.options.noise_sampler_seed: draws the noise of all images of a call at once, so that an image "
            "depends on its place among others: set workload.batch_size=1, or choose another scheduler"
        )
    if serving.max_n > serving.queue:
        found.append(
            f"serving.max_n={serving.max_n}: at most serving.queue={serving.queue}"
        )
    return found + [
        f"{axis}: needs all prompts before the first call, and a server does not know them; leave it out"
        for axis, option in variant.optimizations.items()
        if option.prepares_inputs
    ]


def refused_work(
    variant: Variant, serving: Serving, device: Device, work: EngineWork
) -> dict[str, str]:
    """Returns by field why a request cannot be drawn with other steps or guidance than the workload's; {} if it can."""
    workload, scale = variant.workload, variant.guidance_scale
    other = {
        "num_inference_steps": (work.steps, workload.steps),
        "guidance_scale": (work.guidance_scale, scale),
    }
    changed = [field for field, (asked, own) in other.items() if asked != own]
    if changed and not serving.mixed:
        return {
            field: f"this server takes {other[field][1]:g} (serving.mixed=true allows others)"
            for field in changed
        }
    if work.steps > serving.max_steps and work.steps != workload.steps:
        return {
            "num_inference_steps": f"at most {serving.max_steps} (serving.max_steps)"
        }
    guidance = guidance_of(variant.model)
    if guidance.guides(work.guidance_scale) != (guided := guidance.guides(scale)):
        side = "above" if guided else "at most"
        return {
            "guidance_scale": f"must stay {side} {guidance.above:g}, as in what is served ({scale:g})"
        }
    if not changed:
        return {}
    if "guidance_scale" in changed and not guidance.counts(work.guidance_scale):
        return {
            "guidance_scale": "has no effect, since this server generates without guidance"
        }
    asked = replace(
        variant,
        workload=replace(
            workload, steps=work.steps, guidance_scale=work.guidance_scale
        ),
    )
    conflicts = asked.conflicts(device)
    return {changed[0]: "; ".join(conflicts)} if conflicts else {}
