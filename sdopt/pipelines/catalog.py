"""The models whose files come with sdopt: packaged weights, and configurations of published architectures."""

import json
from pathlib import Path

from sdopt.schema import Model

PACKAGED = Path(__file__).parents[1] / "reference"

ARCHITECTURES = Path(__file__).parent / "architectures"


def names_in_folder(folder: Path) -> str:
    return ", ".join(sorted(path.parent.name for path in folder.glob("*/model_index.json"))) or "missing"


def architecture_folder(model: Model) -> Path | None:
    """Where the configurations of the architecture that the model names are; None where it names none."""
    folders = (PACKAGED / model.name, ARCHITECTURES / model.name)
    return next((folder for folder in folders if (folder / "model_index.json").is_file()), None)


def class_name_of(folder: Path) -> str:
    """The pipeline that a folder was saved from."""
    return str(json.loads((folder / "model_index.json").read_text())["_class_name"])
