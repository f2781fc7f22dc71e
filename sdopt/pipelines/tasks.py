"""Text-to-image, image-to-image and inpainting: each task's pipeline, its inputs, and the noise that it draws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdopt.errors import UsageError
from sdopt.pipelines.catalog import PACKAGED
from sdopt.pipelines.family import Family, family_named
from sdopt.pipelines.parts import Pipeline
from sdopt.record.images import open_picture
from sdopt.schema import Model, Task, Workload

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

_NEEDED: dict[str, tuple[str, ...]] = {
    "txt2img": (),
    "img2img": ("image",),
    "inpaint": ("image", "mask"),
}
_PACKAGED_INPUT = "packaged"
"""Name of the packaged image or mask, which suffices to measure speed and memory of any model."""

_PIPELINES = {
    "txt2img": "Pipeline",
    "img2img": "Img2ImgPipeline",
    "inpaint": "InpaintPipeline",
}


def pipeline_class(text_to_image: str, task: Task) -> Any:
    """Returns the class for a task with the components of a text-to-image pipeline. Raises UsageError without one."""
    import diffusers

    family = family_named(text_to_image)
    if task.kind not in family.tasks:
        raise UsageError(no_task(family, task))
    return getattr(diffusers, family.tasks[task.kind])


def no_task(family: Family, task: Task) -> str:
    """Returns that diffusers has no pipeline of a family for a task."""
    return f"task={task.kind}: diffusers has no such pipeline of {family.title}; choose task={' or '.join(family.tasks)}"


def task_of(class_name: str) -> Task:
    """Returns the task of a pipeline, by the name of its class."""
    # The suffix of text-to-image is one of the others' too.
    if class_name.endswith(_PIPELINES["inpaint"]):
        return Task("inpaint")
    return Task("img2img" if class_name.endswith(_PIPELINES["img2img"]) else "txt2img")


def require_inputs(
    task: Task, model: Model, workload: Workload, family: Family
) -> None:
    """Raises UsageError if an image that the task needs is missing or unreadable, or if it ignores a given one.

    `family` is the model's.
    """
    problems = []
    needed = _NEEDED[task.kind]
    for name in ("image", "mask"):
        file = getattr(task, name)
        if name not in needed:
            if file is not None:
                problems.append(
                    f"task.{name}={file}: task={task.kind} takes no {name}; leave it out"
                )
            continue
        path = _input(task, model, name)
        if path is None:
            problems.append(
                f"task.{name}: task={task.kind} needs an image here, as in task.{name}=/path/to/a.png, or packaged"
            )
            continue
        try:
            picture = open_picture(path)
        except UsageError as error:
            problems += [f"task.{name}={problem}" for problem in error.problems]
            continue
        if name == "mask":
            problems += [
                f"task.mask={path}: {problem}"
                for problem in _replaces_nothing(picture, model, workload)
            ]
    if task.kind == "txt2img" and task.strength != 1:
        problems.append(
            f"task.strength={task.strength}: task=txt2img starts from pure noise; leave it at 1"
        )
    elif family.steps_of(workload.steps, task.strength) < 1:
        problems.append(
            f"task.strength={task.strength}: leaves no step of workload.steps={workload.steps} to run; raise either"
        )
    if problems:
        raise UsageError(problems)


def _replaces_nothing(mask: Image, model: Model, workload: Workload) -> list[str]:
    """Returns the sizes at which a mask has no white area, with its largest value there."""
    # In the file, too: where grey meets black, scaling makes a rim that is brighter than both.
    largest = {"": _largest(mask.convert("L"))}
    if largest[""] >= _REPLACED:
        sizes = dict.fromkeys(shape.size for shape in workload.shapes(model))
        largest |= {
            f" at {size}×{size}": _largest(sized(mask, "mask", size)) for size in sizes
        }
    way_out = f"only areas from {_REPLACED} on are replaced; paint them white"
    return [
        f"replaces nothing{where}: its largest value is {value} of 255, and {way_out}"
        for where, value in largest.items()
        if value < _REPLACED
    ]


def _largest(mask: Image) -> int:
    return max(value for value, count in enumerate(mask.histogram()) if count)


_REPLACED = 128
"""The smallest grey value of a mask that diffusers takes for white: it rounds masks to black and white."""


def sized(picture: Image, name: str, size: int) -> Image:
    """Returns a picture as a call takes it for a role, `image` or `mask`."""
    return picture.convert("RGB" if name == "image" else "L").resize((size, size))


def remarks_on(task: Task, model: Model, workload: Workload) -> list[str]:
    """Returns in what an image and a mask are used otherwise than a user may think. Raises UsageError."""
    lines = []
    shapes: dict[str, tuple[int, int]] = {}
    for name, path in files_of(task, model).items():
        picture = open_picture(path)
        width, height = shapes[name] = picture.size
        if width != height and name == "image":
            size = workload.shapes(model)[0].size
            lines.append(
                f"task.image={path}: its {width}×{height} pixels are stretched to {size}×{size}"
            )
        ranges: Any = picture.getextrema()
        if name == "image" and all(high - low < _ONE_COLOUR for low, high in ranges):
            lines.append(f"task.image={path}: is of one colour everywhere")
        if name == "mask":
            lines += [
                f"task.mask={path}: {remark}"
                for remark in _remarks_on_mask(picture.convert("L"))
            ]
    if len({round(width / height, 2) for width, height in shapes.values()}) > 1:
        listed = ", ".join(
            f"{name} {width}×{height}" for name, (width, height) in shapes.items()
        )
        lines.append(
            f"task.mask: is of another shape than the image ({listed}); both are stretched to the same square"
        )
    return lines


def _remarks_on_mask(mask: Image) -> list[str]:
    counts = mask.histogram()
    between, all_of_them = sum(counts[_NEARLY : 256 - _NEARLY]), sum(counts)
    lines = []
    if between > _SOFT * all_of_them:
        lines.append(
            f"{100 * between / all_of_them:.0f} % of it are grey: diffusers rounds a mask to black and white, and "
            f"replaces what has {_REPLACED} or more of 255"
        )
    if not sum(counts[:_REPLACED]):
        lines.append("is white everywhere: the whole image is replaced")
    return lines


_ONE_COLOUR = 4
"""How far the values of a colour may differ that the eye does not tell apart."""

_NEARLY, _SOFT = 32, 0.02
"""How far a value may be from black or white, and the share of others that edges and JPEG's noise explain."""


def files_of(task: Task, model: Model) -> dict[str, Path]:
    """Returns the input files of a task, by their role: `image`, `mask`."""
    return {
        name: path
        for name in _NEEDED[task.kind]
        if (path := _input(task, model, name)) is not None
    }


def _input(task: Task, model: Model, name: str) -> Path | None:
    """Returns the user's file for a role; the packaged file if the user asks for it, or if the model is packaged."""
    file = getattr(task, name)
    if file is None and (PACKAGED / model.name).is_dir():
        file = _PACKAGED_INPUT
    if file == _PACKAGED_INPUT:
        return PACKAGED / "inputs" / f"{name}.webp"
    return None if file is None else Path(file).expanduser()


def inputs_of(
    task: Task, model: Model, size: int, images: int, with_size: bool = False
) -> dict[str, Any]:
    """Returns further arguments of the pipeline call besides prompts, steps and noise: image and mask, one per output.

    A single input for all would be encoded once, with the noise of the first output: outputs would depend on the batch.
    `with_size` says whether a call with an image has to be told its size too.
    """
    if task.kind == "txt2img":
        return {"height": size, "width": size}
    arguments: dict[str, Any] = {"strength": task.strength}
    for name, path in files_of(task, model).items():
        argument = "image" if name == "image" else "mask_image"
        arguments[argument] = [sized(open_picture(path), name, size)] * images
    if task.kind == "inpaint" or with_size:
        arguments |= {"height": size, "width": size}
    return arguments


def adapt(pipe: Pipeline, task: Task) -> None:
    """Makes diffusers' inpainting accept a text-to-image model whose latents do not have four channels.

    diffusers recognises a text-to-image denoiser by that number, though any number would work.
    """
    unet = getattr(pipe, "unet", None)
    if (
        task.kind == "inpaint"
        and unet is not None
        and unet.config.in_channels == pipe.vae.config.latent_channels
    ):
        unet.register_to_config(in_channels=4)


@contextmanager
def noise_in_float32(pipe: Pipeline) -> Iterator[None]:
    """Makes a pipeline draw its noise on the CPU in float32, image by image, and only then cast it.

    diffusers draws in the type in which it computes: half precision would start from other noise than single precision.
    """
    from diffusers.models.autoencoders import vae

    drawing = (
        type(pipe).prepare_latents.__globals__,
        vars(vae),
        type(pipe.scheduler).step.__globals__,
    )
    with ExitStack() as stack:
        for names in (names for names in drawing if "randn_tensor" in names):
            stack.callback(names.__setitem__, "randn_tensor", names["randn_tensor"])
            names["randn_tensor"] = _randn
        yield


def _randn(
    shape: Sequence[int],
    generator: Sequence[torch.Generator] | torch.Generator,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    layout: Any = None,
) -> torch.Tensor:
    import torch

    generators = generator if isinstance(generator, Sequence) else [generator]
    rows = [
        torch.randn((shape[0] // len(generators), *shape[1:]), generator=generator)
        for generator in generators
    ]
    return torch.cat(rows).to(device=device, dtype=dtype)
