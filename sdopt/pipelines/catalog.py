"""The models whose files come with sdopt: packaged weights, and configurations of published architectures."""

import json
from pathlib import Path

from sdopt.schema import Model

PACKAGED = Path(__file__).parents[1] / "reference"

ARCHITECTURES = Path(__file__).parent / "architectures"

_RETIRED = {"altdiffusion": "AltDiffusionPipeline"}
"""Class name of the diffusers pipeline, by the model's name."""

RETIRED = (
    "which diffusers has deprecated: it cannot find the class of its text encoder, so the model cannot be loaded; "
    "choose another model (sdopt runs StableDiffusionPipeline and StableDiffusionXLPipeline)"
)
"""Why such a model's pipeline cannot be loaded."""


def retired(model: Model) -> list[str]:
    """Returns why no supported version of diffusers can load a model; [] if no reason is known."""
    pipeline = _RETIRED.get(model.name)
    return [f"model={model.name}: is an {pipeline}, {RETIRED}"] if pipeline else []


def names_in_folder(folder: Path) -> str:
    """Lists the models whose files a folder holds, for messages."""
    return ", ".join(sorted(path.parent.name for path in folder.glob("*/model_index.json"))) or "missing"


def architecture_folder(model: Model) -> Path | None:
    """Returns the folder with the configurations of the model's architecture; None if sdopt does not have it."""
    folders = (PACKAGED / model.name, ARCHITECTURES / model.name)
    return next((folder for folder in folders if (folder / "model_index.json").is_file()), None)


def class_name_of(folder: Path) -> str:
    """Returns the class name of the pipeline in a folder."""
    return str(json.loads((folder / "model_index.json").read_text())["_class_name"])
