"""Writes the program that uses a variant, from what a worker applies: options in their order, with every key.

It is diffusers' own code as far as diffusers has the options, and one call of `sdopt.optimize` for the others.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sdopt.hardware.device import Device
from sdopt.options.base import Optimization, loading_arguments
from sdopt.options.memory import TinyVae
from sdopt.options.patch import Patch
from sdopt.options.precision import FixedVae, Precision
from sdopt.pipelines.loading import marks_of, part_config, path_of
from sdopt.pipelines.sampling import draws_noise, scheduler_settings
from sdopt.programs.code import Code, Unwritable, call_of, function_code, literal
from sdopt.programs.loading import cast_of, loading_of
from sdopt.programs.work import Work
from sdopt.record.choices import is_plain, option_name, written_value
from sdopt.variant import Variant

_IMPORTS = ("import ", "from ")

_AROUND = "with "
"""Start of a line of an option that wraps each call of the pipeline."""


@dataclass(frozen=True)
class Written:
    """A program in its parts.

    Attributes:
        loading: loads the pipeline.
        setup: gives the pipeline its scheduler, its device and its options.
        work: what the pipeline is called with.
        noise: makes the noise of the measured image, which other images do not need.
        public: whether others can load the model.
    """

    loading: Code
    setup: Code
    work: Code
    noise: Code
    public: bool

    @property
    def lines(self) -> list[str]:
        """The part that a program with a pipeline `pipe` needs."""
        body = self.setup + self.work
        return [*body.imports, *body.lines, *call_of("pipe", body)]

    @property
    def text(self) -> str:
        """The whole program; it leaves `image`, and saves nothing."""
        whole = self.loading + self.setup + self.work + self.noise
        call = (*self.work.lines, *self.noise.lines, *call_of("pipe", whole))
        parts = [whole.imports, self.loading.lines, self.setup.lines, call]
        return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


SAVING = 'image.save("image.png")\n'
"""The last line of a program that is handed out."""


def written(variant: Variant, device: Device) -> Written:
    """Returns the program that generates the first image of a variant's quality pass on a device.

    Call it where the model's files are, in a process that may import diffusers.

    Raises:
        Unwritable: no program outside of sdopt does what was measured.
        UsageError: files of the model or of the task are missing.
    """
    if not variant.pictured:
        raise Unwritable("no image was made to compare its own with (quality.prompt_count=0)")
    work = Work(variant)
    setup = scheduler_code(variant) + Code(lines=tuple(work.adaptations())) + _placing(variant, device)
    if early := any(option.prepares_inputs for option in variant.optimizations.values()):
        setup += work.prompts()
    for part in _options(variant, work):
        setup += part
    call = work.call() if early else work.prompts() + work.call()
    return Written(loading_of(variant, device), setup, call, _noise(variant, work), variant.model.weights != "random")


def scheduler_code(variant: Variant) -> Code:
    """Returns the lines that give a pipeline the scheduler that the worker builds."""
    name = variant.scheduler.class_name
    own, marks = part_config(variant.model, "scheduler") or {}, marks_of(variant.model)
    settings = scheduler_settings(own, variant.scheduler, marks)
    given = "".join(f", {key}={literal(value)}" for key, value in settings.items())
    line = f"pipe.scheduler = {name}.from_config(pipe.scheduler.config{given})"
    return Code((f"from diffusers import {name}",), (line,))


def _placing(variant: Variant, device: Device) -> Code:
    """Returns the line that moves a pipeline to its device and casts its weights, as far as either is needed."""
    options = [option for _, option in variant.applied]
    # Options of diffusers that move weights begin with all of them in the host's memory; `sdopt.optimize` does not.
    by_hand = any(option.loads_on_host for option in options) and not _lacking(chosen_of(variant))
    place = [] if by_hand or not device.is_cuda else [literal(device_name(device))]
    weights = cast_of(variant)
    # What a function builds has the types that it gives.
    needed = weights is not None and (weights != "float32" or variant.model.weights == "factory")
    place += [f"torch.{weights}"] if needed else []
    if not place:
        return Code()
    return Code(("import torch",) if needed else (), (f"pipe.to({', '.join(place)})",))


def device_name(device: Device) -> str:
    """Returns the device as a program names it: the first card is `cuda`."""
    return device.type if not device.index else device.torch_name


Chosen = list[tuple[str, Optimization]]
"""Options with their axes, in the order in which a worker applies them."""


def chosen_of(variant: Variant) -> Chosen:
    """Returns the options that do something to a pipeline as diffusers loads it."""
    chosen = [(axis, option) for axis, option in variant.applied if not is_plain(axis, variant.choices[axis])]
    return [(axis, option) for axis, option in chosen if type(option) is not Precision or _further_lines(option)]


def _further_lines(option: Optimization) -> list[str]:
    """Returns what an option does, but the cast of all weights, which `_placing` has."""
    found = [line for line in option.diffusers_lines if not re.fullmatch(r"pipe\.to\(torch\.\w+\)", line)]
    return found if found != ["import torch"] else []


def _lacking(chosen: Chosen) -> list[str]:
    """Returns the axes of the options that diffusers has no code for; a function of a file is code itself."""
    return [axis for axis, option in chosen if not option.diffusers_lines and not isinstance(option, Patch)]


def _options(variant: Variant, work: Work) -> Iterator[Code]:
    """Yields the code of all options, in the order in which a worker applies them.

    One call of `sdopt.optimize` has all options around it that are not to come before or after a function of a file:
    it takes a pipeline only once, and applies them in their order.
    """
    chosen = chosen_of(variant)
    places = [place for place, (_, option) in enumerate(chosen) if isinstance(option, Patch)]
    if not places:
        yield _together(variant, chosen, work)
        return
    [place] = places
    before, after = chosen[:place], chosen[place + 1 :]
    if _lacking(before) and _lacking(after):
        raise Unwritable("its function runs between options that only sdopt has")
    yield _together(variant, before, work)
    patch = chosen[place][1]
    assert isinstance(patch, Patch)
    for function in patch.functions:
        yield function_code(function, "{}(pipe)")
    yield _together(variant, after, work)


def _together(variant: Variant, chosen: Chosen, work: Work) -> Code:
    if _lacking(chosen):
        return _optimize(variant, chosen, work)
    found = Code()
    for _, option in chosen:
        lines = _further_lines(option)
        imports = tuple(line for line in lines if line.startswith(_IMPORTS))
        around = tuple(line.removeprefix(_AROUND).removesuffix(":") for line in lines if line.startswith(_AROUND))
        changes = tuple(line for line in lines if not line.startswith((*_IMPORTS, _AROUND)))
        found += Code(imports, changes, around=around)
    return found


def _optimize(variant: Variant, chosen: Chosen, work: Work) -> Code:
    """Returns one call of `sdopt.optimize` for options, with all their keys that differ from their files."""
    imports, lines, groups = ["import sdopt"], [], dict[str, Any]()
    for axis, option in chosen:
        group, _, combines = axis.partition(".")
        name = option_name(variant.choices[axis])
        groups[group] = [*groups.get(group, []), name] if combines else name
        if (folder := _folder_of_class(option)) is not None:
            imports.append("import sys")
            lines.append(f"sys.path.append({literal(folder)})")
    axes = tuple(f"{axis}." for axis, _ in chosen)
    keys = {key: value for key, value in variant.changed.items() if key.startswith(axes)} | _other_vaes(variant, chosen)
    words = [literal(f"{key}={_value(key, value)}") for key, value in keys.items()]
    if any(option.prepares_inputs for _, option in chosen):
        words.append(f"prompts={work.all_texts}")
    if (own := _config_dir(variant, groups)) is not None:
        words.append(f"config_dir={literal(own)}")
    words += [f"{group}={literal(options)}" for group, options in groups.items()]
    return Code(tuple(imports), (*dict.fromkeys(lines), f"sdopt.optimize({', '.join(['pipe', *words])})"))


def _other_vaes(variant: Variant, chosen: Chosen) -> dict[str, str]:
    """Returns the keys that name a VAE where the pipeline does not say of which model it is, and so which fits."""
    model = variant.model
    if model.weights != "factory" and not (model.weights == "path" and path_of(model).is_file()):
        return {}
    found = {}
    for axis, option in chosen:
        if isinstance(option, TinyVae | FixedVae) and not {f"{axis}.hub_id", f"{axis}.path"} & variant.changed.keys():
            found[f"{axis}.path"] = str(option.files(model, fetch=False)[0].parent)
    return found


def _value(key: str, value: Any) -> str:
    """Returns the value of an option's key, of a path that is there the whole one: a program may run anywhere."""
    if isinstance(value, str) and key.endswith(("path", "folder")) and Path(value).expanduser().exists():
        value = str(Path(value).expanduser().absolute())
    return written_value(value)


def _folder_of_class(option: Optimization) -> str | None:
    """Returns the folder from which a user's own option is imported; None for one of sdopt's."""
    package = type(option).__module__.partition(".")[0]
    file = getattr(sys.modules.get(package), "__file__", None)
    if package == "sdopt" or file is None:
        return None
    place = Path(file).absolute()
    return str(place.parent.parent if place.name == "__init__.py" else place.parent)


def _config_dir(variant: Variant, groups: dict[str, Any]) -> str | None:
    """Returns the folder of the user's own that has one of some groups' options; None if sdopt has all of them."""
    names = [f"{group}/{name}.yaml" for group, named in groups.items() for name in _as_list(named)]
    holding = [folder for folder in variant.config_dirs if any((Path(folder) / name).is_file() for name in names)]
    if len(holding) > 1:
        raise Unwritable("its options are in several folders, and sdopt.optimize takes one")
    return str(Path(holding[0]).absolute()) if holding else None


def _as_list(named: str | Sequence[str]) -> Sequence[str]:
    return [named] if isinstance(named, str) else named


def _noise(variant: Variant, work: Work) -> Code:
    """Returns what starts the call from the noise of the measured image, which is drawn in float32 on the CPU."""
    dtype: torch.dtype = loading_arguments(option for _, option in variant.applied).get("dtype", torch.float32)
    noise = work.noise(str(dtype))
    own = part_config(variant.model, "scheduler") or {}
    further = variant.task.kind != "txt2img" or draws_noise(own, variant.scheduler, variant.workload.steps)
    if dtype is torch.float32 or not further:
        return noise
    return noise + Code(("from sdopt.pipelines.tasks import noise_in_float32",), around=("noise_in_float32(pipe)",))
