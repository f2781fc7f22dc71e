"""What sdopt knows of models without a hub: packaged weights, published architectures, the classes of AltDiffusion."""

import json
import re
from collections.abc import Callable, Collection, Mapping
from functools import cache, lru_cache, wraps
from importlib import import_module
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from sdopt.errors import UsageError, one_line
from sdopt.pipelines.family import FAMILIES, family_named
from sdopt.schema import Model

P = ParamSpec("P")
T = TypeVar("T")

PACKAGED = Path(__file__).parents[1] / "reference"

ARCHITECTURES = Path(__file__).parent / "architectures"

ALT_DIFFUSION = "AltDiffusionPipeline"

NOT_RUN = ("safety_checker", "feature_extractor", "image_encoder")
"""Parts of a pipeline that are not loaded: they would be timed too, or have nothing to do without further inputs."""

PIPELINES = tuple(family.pipeline for family in FAMILIES)
"""Class names of the pipelines that sdopt runs, as `model_index.json` has them."""

_NAMED = {"altdiffusion": ALT_DIFFUSION}
"""Class name of the pipeline, by the name of a model whose architecture does not come with sdopt."""

_ARCHITECTURE_OF = {
    "sd_turbo": "sd21_base",
    "sdxl_turbo": "sdxl",
    "sd35_large_turbo": "sd35_large",
}
"""Models that were distilled from another, and have its architecture."""

_DEPRECATED = "diffusers.pipelines.deprecated.alt_diffusion"

_ENCODER = "RobertaSeriesModelWithTransformation"

ALT_ENCODERS = (["alt_diffusion", _ENCODER], ["diffusers", _ENCODER])
"""AltDiffusion's text encoder as `model_index.json` names it: in a published folder, and in one saved since diffusers
moved it. diffusers finds neither, and loads such a folder only with a text encoder that it is given."""


def missing_alt_diffusion() -> list[str]:
    """Returns why AltDiffusion, which diffusers has deprecated, cannot be imported here; [] if it can."""
    try:
        for module in (
            "modeling_roberta_series",
            "pipeline_alt_diffusion",
            "pipeline_alt_diffusion_img2img",
        ):
            import_module(f"{_DEPRECATED}.{module}")
    except ImportError as error:
        reason = one_line(error)
        return [
            f"is an {ALT_DIFFUSION}, which the installed diffusers no longer imports ({reason}); choose model=sd15"
        ]
    return []


def part_class(library: str, class_name: str) -> Any:
    """Returns the class of a part by the two names that `model_index.json` gives it, which must have been checked."""
    if [library, class_name] in ALT_ENCODERS:
        library = f"{_DEPRECATED}.modeling_roberta_series"
    return getattr(import_module(library), class_name)


def state_of(file: Path) -> tuple[int, ...]:
    """Returns what changes with a file's content, for caches: nobody sets the time at which the kernel saw a change."""
    stat = file.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def once_per_state(
    read: Callable[Concatenate[Path, P], T],
) -> Callable[Concatenate[Path, P], T]:
    """Makes a function of a file answer again what it has answered, as long as the file stays as it is."""

    @lru_cache(maxsize=64)
    def read_state(_state: tuple[int, ...], *args: Any, **named: Any) -> T:
        return read(*args, **named)

    @wraps(read)
    def read_once(file: Path, /, *args: P.args, **named: P.kwargs) -> T:
        state = state_of(file) if file.exists() else ()
        return read_state(state, file, *args, **named)  # type: ignore[arg-type]  # all are hashable

    return read_once


def read_json(file: Path) -> Any:
    """Returns what a JSON file holds, parsed once as long as the file stays as it is: nobody may change the value."""
    return _parsed(file, state_of(file))


@lru_cache(maxsize=512)
def _parsed(file: Path, _state: tuple[int, ...]) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def parts_in(folder: Path) -> dict[str, tuple[str, str]]:
    """Returns the library and the class of each part of the pipeline in a folder, by its name; not those left out."""
    index = read_json(folder / "model_index.json")
    pairs = {
        name: value
        for name, value in index.items()
        if isinstance(value, list) and len(value) == 2
    }
    return {
        name: (library, class_name)
        for name, (library, class_name) in pairs.items()
        if library and class_name
    }


def names_in_folder(folder: Path) -> str:
    """Lists the models whose files a folder holds, for messages."""
    return (
        ", ".join(
            sorted(path.parent.name for path in folder.glob("*/model_index.json"))
        )
        or "missing"
    )


def path_of(model: Model) -> Path:
    """Returns the folder or the file of a model with `weights=path`."""
    return Path(str(model.path)).expanduser()


def is_in_a_file(model: Model) -> bool:
    """Returns whether a model lies in a file of the user's own, with its other networks or without them."""
    return model.weights == "path" and path_of(model).is_file()


def architecture_folder(model: Model) -> Path | None:
    """Returns the folder with the configurations of the model's architecture; None if sdopt does not have it."""
    return _folder_named(model.name)


@cache  # of each option that is checked, the family of its model is asked for several times
def _folder_named(model: str) -> Path | None:
    for folder in (
        PACKAGED / model,
        ARCHITECTURES / _ARCHITECTURE_OF.get(model, model),
    ):
        if (folder / "model_index.json").is_file():
            return folder
    return None


def distilled_of(architectures: Collection[str]) -> list[str]:
    """Returns the names of the models that were distilled from one of these architectures, and have no other."""
    return [name for name, of in _ARCHITECTURE_OF.items() if of in architectures]


def class_name_of(folder: Path) -> str:
    """Returns the class name of the pipeline in a folder; see `text_to_image`."""
    return text_to_image(read_json(folder / "model_index.json")["_class_name"])


def text_to_image(class_name: Any) -> str:
    """Returns the class name of the text-to-image pipeline that has the same parts as one for another task."""
    # The denoiser of a latent consistency model says itself that it takes the guidance scale.
    name = str(class_name).replace("LatentConsistencyModel", "StableDiffusion")
    name = name.replace("Lumina2Text2Img", "Lumina2")  # as it was published
    return re.sub("(Img2Img|Inpaint)Pipeline$", "Pipeline", name)


def require_kind(index: Mapping[str, Any], at: str) -> str:
    """Returns the class name of the text-to-image pipeline of a `model_index.json`.

    Raises UsageError, `at` the key that names the pipeline, if sdopt does not run it.
    """
    kind = text_to_image(index.get("_class_name"))
    if kind not in PIPELINES:
        raise UsageError(
            f"{at}: is a {index.get('_class_name')}; sdopt runs {', '.join(PIPELINES)}"
        )
    family = family_named(kind)
    first = family.encoders[0]
    if (
        len(family.encoders) > 1
        and index.get(family.encoders[1])
        and index.get(first, [None, None]) == [None, None]
    ):
        raise UsageError(
            f"{at}: has no {first}, as an SDXL refiner, which sdopt does not run; give the base model"
        )
    return kind


def parts_of(index: Mapping[str, Any]) -> list[str]:
    """Returns the parts of a pipeline that sdopt loads, by its `model_index.json`: without those that it has not."""
    family = family_named(text_to_image(index.get("_class_name")))
    lacking = [
        name for name in family.optional if index.get(name) in (None, [None, None])
    ]
    return [name for name in family.parts if name not in lacking]


def class_named(model: Model) -> str | None:
    """Returns the class name of the pipeline that a model's name stands for; None if it stands for none."""
    folder = architecture_folder(model)
    return _NAMED.get(model.name) if folder is None else class_name_of(folder)
