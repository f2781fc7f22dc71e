"""Text-to-image, image-to-image and inpainting: each task's pipeline, its inputs, and the noise that it draws."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdopt.errors import UsageError
from sdopt.pipelines.catalog import PACKAGED
from sdopt.results.images import open_image
from sdopt.schema import Model, Task, Workload

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline

_NEEDED: dict[str, tuple[str, ...]] = {"txt2img": (), "img2img": ("image",), "inpaint": ("image", "mask")}
_PACKAGED_INPUT = "packaged"
"""Name of the packaged image or mask, which suffices to measure speed and memory of any model."""

_PIPELINES = {"txt2img": "Pipeline", "img2img": "Img2ImgPipeline", "inpaint": "InpaintPipeline"}


def pipeline_class(text_to_image: str, task: Task) -> Any:
    """Returns the class for a task with the components of a text-to-image pipeline of `catalog.PIPELINES`."""
    import diffusers

    return getattr(diffusers, text_to_image.removesuffix("Pipeline") + _PIPELINES[task.kind])


def task_of(class_name: str) -> Task:
    """Returns the task of a pipeline, by the name of its class."""
    # The suffix of text-to-image is one of the others' too.
    kinds = (kind for kind, suffix in reversed(_PIPELINES.items()) if class_name.endswith(suffix))
    return Task(kind=next(kinds, "txt2img"))


def require_inputs(task: Task, model: Model, workload: Workload) -> None:
    """Raises UsageError if an image that the task needs is missing or unreadable, or if it ignores a given one."""
    problems = []
    needed = _NEEDED[task.kind]
    for name in ("image", "mask"):
        given = getattr(task, name)
        if name not in needed:
            if given is not None:
                problems.append(f"task.{name}={given}: task={task.kind} takes no {name}; leave it out")
            continue
        path = _input(task, model, name)
        if path is None:
            problems.append(
                f"task.{name}: task={task.kind} needs an image here, as in task.{name}=/path/to/a.png, or packaged"
            )
            continue
        try:
            open_image(path)
        except UsageError as error:
            problems += [f"task.{name}={problem}" for problem in error.problems]
    if task.kind == "txt2img" and task.strength != 1:
        problems.append(f"task.strength={task.strength}: task=txt2img starts from pure noise; leave it at 1")
    elif task.steps_of(workload.steps) < 1:
        problems.append(
            f"task.strength={task.strength}: leaves no step of workload.steps={workload.steps} to run; raise either"
        )
    if problems:
        raise UsageError(problems)


def files_of(task: Task, model: Model) -> dict[str, Path]:
    """Returns the input files of a task, by their role: `image`, `mask`."""
    return {name: path for name in _NEEDED[task.kind] if (path := _input(task, model, name)) is not None}


def _input(task: Task, model: Model, name: str) -> Path | None:
    """Returns the user's file for a role; the packaged file if the user asks for it, or if the model is packaged."""
    given = getattr(task, name)
    if given is None and (PACKAGED / model.name).is_dir():
        given = _PACKAGED_INPUT
    if given == _PACKAGED_INPUT:
        return PACKAGED / "inputs" / f"{name}.webp"
    return None if given is None else Path(given).expanduser()


def inputs_of(task: Task, model: Model, size: int, images: int) -> dict[str, Any]:
    """Returns further arguments of the pipeline call besides prompts, steps and noise: image and mask, one per output.

    A single input for all would be encoded once, with the noise of the first output: outputs would depend on the batch.
    """
    if task.kind == "txt2img":
        return {"height": size, "width": size}
    arguments: dict[str, Any] = {"strength": task.strength}
    for name, path in files_of(task, model).items():
        argument, mode = ("image", "RGB") if name == "image" else ("mask_image", "L")
        arguments[argument] = [open_image(path).convert(mode).resize((size, size))] * images
    if task.kind == "inpaint":
        arguments |= {"height": size, "width": size}
    return arguments


def adapt(pipe: "DiffusionPipeline", task: Task) -> None:
    """Makes diffusers' inpainting accept a text-to-image model whose latents do not have four channels.

    diffusers recognises a text-to-image denoiser by that number, though any number would work.
    """
    if task.kind == "inpaint" and pipe.unet.config.in_channels == pipe.vae.config.latent_channels:
        pipe.unet.register_to_config(in_channels=4)


@contextmanager
def noise_in_float32(pipe: "DiffusionPipeline") -> Iterator[None]:
    """Makes a pipeline draw its noise on the CPU in float32, image by image, and only then cast it.

    diffusers draws in the type in which it computes: half precision would start from other noise than single precision.
    """
    from diffusers.models.autoencoders import vae

    drawing = (type(pipe).prepare_latents.__globals__, vars(vae), type(pipe.scheduler).step.__globals__)
    with ExitStack() as stack:
        for names in (names for names in drawing if "randn_tensor" in names):
            stack.callback(names.__setitem__, "randn_tensor", names["randn_tensor"])
            names["randn_tensor"] = _randn
        yield


def _randn(
    shape: Sequence[int],
    generator: "Sequence[torch.Generator] | torch.Generator",
    device: "torch.device | None" = None,
    dtype: "torch.dtype | None" = None,
    layout: Any = None,
) -> "torch.Tensor":
    import torch

    generators = generator if isinstance(generator, Sequence) else [generator]
    rows = [torch.randn((shape[0] // len(generators), *shape[1:]), generator=generator) for generator in generators]
    return torch.cat(rows).to(device=device, dtype=dtype)
