"""Writes the program that uses a variant, from what a worker applies: options in their order, with every key.

It is diffusers' own code as far as diffusers has the options, and one call of `sdopt.optimize` for the others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdopt.hardware.device import Device
from sdopt.options.base import Optimization, loading_arguments
from sdopt.options.memory import PrecomputedEmbeddings, TinyVae
from sdopt.options.patch import Patch
from sdopt.options.precision import FixedVae, Precision
from sdopt.pipelines.catalog import is_in_a_file
from sdopt.pipelines.loading import family_of, marks_of, part_config
from sdopt.pipelines.sampling import draws_noise, scheduler_settings
from sdopt.programs.code import Piece, Unwritable, call_of, function_code, literal
from sdopt.programs.loading import (
    cast_of,
    has_half_encoders,
    layers_left_out,
    loading_of,
    own_threads,
)
from sdopt.programs.work import Work
from sdopt.record.choices import is_plain, option_name, written_value
from sdopt.schema import Model
from sdopt.variant import Variant

if TYPE_CHECKING:
    import torch

_IMPORTS = ("import ", "from ")

_AROUND = "with "
"""Start of a line of an option that wraps each call of the pipeline, if it ends with a colon."""

SAVING = 'image.save("image.png")\n'
"""The last line of a program that is handed out."""


@dataclass(frozen=True)
class Written:
    """A program in its parts.

    Attributes:
        loading: loads the pipeline.
        setup: gives the pipeline its scheduler, its device and its options.
        work: what the pipeline is called with.
        noise: makes the noise of the measured image, which other images do not need.
        public: whether others can load the model.
        casting: gives a pipeline that a program has loaded the type of weights in which `loading` loads it.
        threads: the number of threads that the variant chooses, which `loading` sets too.
    """

    loading: Piece
    setup: Piece
    work: Piece
    noise: Piece
    public: bool
    casting: Piece
    threads: Piece

    @property
    def lines(self) -> list[str]:
        """The part that a program with a pipeline `pipe` needs."""
        body = self.threads + self.casting + self.setup + self.work
        return [*body.imports, *body.lines, *call_of(body)]

    @property
    def text(self) -> str:
        """The whole program; it leaves `image`, and saves nothing."""
        whole = self.loading + self.setup + self.work + self.noise
        call = [*self.work.lines, *self.noise.lines, *call_of(whole)]
        parts = (whole.imports, self.loading.lines, self.setup.lines, call)
        blocks = ["\n".join(lines) for lines in parts if lines]
        return "\n\n".join(blocks) + "\n"


def written(variant: Variant, device: Device) -> Written:
    """Returns the program that generates the first image of a variant's quality pass on a device.

    Call it where the model's files are, in a process that may import diffusers.

    Raises:
        Unwritable: no program outside of sdopt does what was measured.
        UsageError: files of the model or of the task are missing.
    """
    if not variant.pictured:
        raise Unwritable(
            "no image was made to compare its own with (quality.prompt_count=0)"
        )
    work = Work(variant)
    setup = layers_left_out(variant.model) + scheduler_code(variant)
    setup += Piece(lines=tuple(work.adaptations())) + _placing(variant, device)
    prompts_first = any(
        option.prepares_inputs for option in variant.optimizations.values()
    )
    if prompts_first:
        setup += work.prompts()
    for piece in _options(variant, device, work):
        setup += piece
    call = work.call()
    if not prompts_first:
        call = work.prompts() + call
    public = variant.model.weights != "random"
    casting = _casting(variant)
    if variant.model.weights == "factory":  # what it builds has the types that it gives
        setup, casting = casting + setup, Piece()
    loading = loading_of(variant, device)
    noise, threads = _noise(variant, work), own_threads(variant, device)
    return Written(loading, setup, call, noise, public, casting, threads)


def scheduler_code(variant: Variant) -> Piece:
    """Returns the lines that give a pipeline the scheduler that the worker builds."""
    name = variant.scheduler.class_name
    config = part_config(variant.model, "scheduler") or {}
    arguments = ["pipe.scheduler.config"]
    for key, value in scheduler_settings(
        config, variant.scheduler, marks_of(variant.model)
    ).items():
        arguments.append(f"{key}={literal(value)}")
    line = f"pipe.scheduler = {name}.from_config({', '.join(arguments)})"
    return Piece((f"from diffusers import {name}",), (line,))


def _placing(variant: Variant, device: Device) -> Piece:
    """Returns the line that moves a pipeline to its device, if that is needed."""
    if not device.is_cuda or _moves_itself(variant):
        return Piece()
    return Piece(lines=(f"pipe.to({literal(device_name(device))})",))


def _casting(variant: Variant) -> Piece:
    """Returns the line that casts the weights of a pipeline that is there.

    `pipe.to` would cast more of a transformer's than these.
    """
    weights = _cast_to(variant)
    if weights is None and has_half_encoders(variant.model):
        weights = cast_of(variant)
    if weights is None:
        return Piece()
    if family_of(variant.model).is_unet:
        return Piece(("import torch",), (f"pipe.to(torch.{weights})",))
    imports = ("import torch", "from sdopt.pipelines.parts import cast")
    return Piece(imports, (f"cast(pipe, torch.{weights})",))


def _cast_to(variant: Variant) -> str | None:
    """Returns the type that weights are cast to; None if they have it, or if options treat some otherwise."""
    weights = cast_of(variant)
    # What a function builds has the types that it gives.
    if weights == "float32" and variant.model.weights != "factory":
        return None
    return weights


def _moves_itself(variant: Variant) -> bool:
    """Returns whether options of diffusers move the weights: from the host's memory, where they must begin.

    `sdopt.optimize` takes a pipeline on its device.
    """
    on_host = any(option.loads_on_host for _, option in variant.applied)
    return on_host and not _lacking(chosen_of(variant))


def device_name(device: Device) -> str:
    """Returns the device as a program names it: the first card is `cuda`."""
    if device.index:
        return device.torch_name
    return device.type


# ----------------------------------------------------------------------------------------------------------- options

Chosen = list[tuple[str, Optimization]]
"""Options with their axes, in the order in which a worker applies them."""


def chosen_of(variant: Variant) -> Chosen:
    """Returns the options that do something to a pipeline as diffusers loads it."""
    chosen = []
    for axis, option in variant.applied:
        only_casts = type(option) is Precision and not _further_lines(
            option, variant.model
        )
        if not is_plain(axis, variant.choices[axis]) and not only_casts:
            chosen.append((axis, option))
    return chosen


def _further_lines(option: Optimization, model: Model) -> tuple[str, ...]:
    """Returns what an option does, but the cast of all weights, which loading has; () if it does nothing else."""
    lines = option.lines_for(model)
    return () if lines == ("import torch",) else lines


def _lacking(chosen: Chosen) -> list[str]:
    """Returns the axes of the options that diffusers has no code for; a function of a file is code itself."""
    return [
        axis
        for axis, option in chosen
        if not option.diffusers_lines and not isinstance(option, Patch)
    ]


def _options(variant: Variant, device: Device, work: Work) -> Iterator[Piece]:
    """Yields the code of all options, in the order in which a worker applies them.

    A function of a file comes between what is applied before and after it. `sdopt.optimize` takes a pipeline only once.
    """
    chosen = chosen_of(variant)
    for place, (_, option) in enumerate(chosen):
        if isinstance(option, Patch):
            before, after = chosen[:place], chosen[place + 1 :]
            if _lacking(before) and _lacking(after):
                raise Unwritable(
                    "its function runs between options that only sdopt has"
                )
            yield _together(variant, device, before, work)
            for function in option.functions:
                yield function_code(function, "{}(pipe)")
            yield _together(variant, device, after, work)
            return
    yield _together(variant, device, chosen, work)


def _together(variant: Variant, device: Device, chosen: Chosen, work: Work) -> Piece:
    """Returns the code of options that follow one another: all of it diffusers' own, or one call for all of them."""
    if _lacking(chosen):
        return _optimize(variant, chosen, work)
    whole = Piece()
    denoiser = f"pipe.{family_of(variant.model).denoiser}"
    for _, option in chosen:
        for of_unets in _further_lines(option, variant.model):
            line = of_unets.replace("pipe.unet", denoiser)
            if device.index:  # diffusers would move weights to the first card
                card = literal(device_name(device))
                line = line.replace("_cpu_offload()", f"_cpu_offload(device={card})")
            if line.startswith(_IMPORTS):
                whole += Piece(imports=(line,))
            elif line.startswith(_AROUND) and line.endswith(":"):
                context = line.removeprefix(_AROUND).removesuffix(":")
                whole += Piece(around=(context,))
            else:
                whole += Piece(lines=(line,))
    return whole


def _optimize(variant: Variant, chosen: Chosen, work: Work) -> Piece:
    """Returns one call of `sdopt.optimize` for options, with all their keys that differ from their files."""
    imports, lines = ["import sdopt"], []
    for _, option in chosen:
        folder = _folder_of_class(option)
        if folder is not None:
            imports.append("import sys")
            lines.append(f"sys.path.append({literal(folder)})")
    arguments = ["pipe"]
    for key, value in _keys(variant, chosen).items():
        arguments.append(literal(f"{key}={_value(key, value)}"))
    if any(option.prepares_inputs for _, option in chosen):
        arguments.append(f"prompts={work.all_texts}")
    groups = _groups(variant, chosen)
    config_dir = _config_dir(variant, groups)
    if config_dir is not None:
        arguments.append(f"config_dir={literal(config_dir)}")
    for group, names in groups.items():
        arguments.append(f"{group}={literal(names)}")
    call = f"sdopt.optimize({', '.join(arguments)})"
    return Piece(tuple(imports), (*dict.fromkeys(lines), call))


def _groups(variant: Variant, chosen: Chosen) -> dict[str, str | list[str]]:
    """Returns the options by group: a name, or a list of names in a group whose options combine."""
    groups: dict[str, str | list[str]] = {}
    for axis, _ in chosen:
        group, _, combines = axis.partition(".")
        name = option_name(variant.choices[axis])
        if combines:
            groups[group] = [*groups.get(group, []), name]
        else:
            groups[group] = name
    return groups


def _keys(variant: Variant, chosen: Chosen) -> dict[str, Any]:
    """Returns the keys of options that have other values than in their files, or that a pipeline alone cannot tell."""
    keys: dict[str, Any] = {}
    for axis, option in chosen:
        changed = {
            key: value
            for key, value in variant.changed.items()
            if key.startswith(f"{axis}.")
        }
        keys |= changed
        named = changed.keys() & {f"{axis}.hub_id", f"{axis}.path"}
        if (
            isinstance(option, TinyVae | FixedVae)
            and not named
            and _is_of_unknown_origin(variant)
        ):
            keys[f"{axis}.path"] = str(
                option.files(variant.model, fetch=False)[0].parent
            )
        length = variant.model.max_sequence_length
        if (
            isinstance(option, PrecomputedEmbeddings)
            and option.max_sequence_length is None
            and length is not None
        ):
            keys[f"{axis}.max_sequence_length"] = length
    return keys


def _is_of_unknown_origin(variant: Variant) -> bool:
    """Returns whether a pipeline of diffusers does not say of which model it is, and so which other VAE fits."""
    return variant.model.weights == "factory" or is_in_a_file(variant.model)


def _value(key: str, value: Any) -> str:
    """Returns the value of an option's key; of a path that is there the whole one, since a program may run anywhere."""
    if isinstance(value, str) and key.endswith(("path", "folder")):
        path = Path(value).expanduser()
        if path.exists():
            return written_value(str(path.absolute()))
    return written_value(value)


def _folder_of_class(option: Optimization) -> str | None:
    """Returns the folder from which a user's own option is imported; None for one of sdopt's."""
    package = type(option).__module__.partition(".")[0]
    file = getattr(sys.modules.get(package), "__file__", None)
    if package == "sdopt" or file is None:
        return None
    folder = Path(file).absolute().parent
    if Path(file).name == "__init__.py":
        folder = folder.parent
    return str(folder)


def _config_dir(variant: Variant, groups: dict[str, str | list[str]]) -> str | None:
    """Returns the folder of the user's own that has one of some groups' options; None if sdopt has all of them."""
    files = []
    for group, names in groups.items():
        listed = [names] if isinstance(names, str) else names
        files += [f"{group}/{name}.yaml" for name in listed]
    holding = variant.folders_with(files)
    if len(holding) > 1:
        raise Unwritable(
            "its options are in several folders, and sdopt.optimize takes one"
        )
    return str(holding[0]) if holding else None


# ------------------------------------------------------------------------------------------------------------- noise


def _noise(variant: Variant, work: Work) -> Piece:
    """Returns what starts the call from the noise of the measured image, which is drawn in float32 on the CPU."""
    import torch

    options = [option for _, option in variant.applied]
    dtype: torch.dtype = loading_arguments(options).get("dtype", torch.float32)
    noise = work.noise(str(dtype))
    if dtype is torch.float32:
        return noise
    config = part_config(variant.model, "scheduler") or {}
    if not work.draws_itself and not draws_noise(
        config, variant.scheduler, variant.workload.steps
    ):
        return noise
    # What the call draws itself, diffusers draws in the type in which it computes.
    imports = ("from sdopt.pipelines.tasks import noise_in_float32",)
    return noise + Piece(imports, around=("noise_in_float32(pipe)",))
