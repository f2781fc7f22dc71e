"""Writes the cards of the models: what each is, its data, training, evaluation and limits."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from sdopt.training.data import BACKGROUNDS
from sdopt.training.degradations import LEARNT
from sdopt.training.evaluation import read_evaluation
from sdopt.training.networks import count_parameters, parameters
from sdopt.training.packages import DRAWINGS, EMOJIBASE, STYLES
from sdopt.training.prompts import REFERENCES
from sdopt.training.sheet import GUIDANCE, STEPS
from sdopt.training.tokenizer import LENGTH, VOCABULARY


def write_card(folder: Path, model: str) -> None:
    """Writes `README.md` for a model from its weights, `recipe.json` and `evaluation.json`.

    Without an evaluation, the card names the command for it.

    Args:
        folder: the exported model.
        model: `emoji`, `clip`, `loras` or `tiny_autoencoder`: the template, and the name of the packaged folder.
    """
    recipe = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))
    text = _environment().get_template(f"{model}.md.j2").render(
        recipe=recipe,
        trainings=history(recipe),
        figures=read_evaluation(folder),
        networks=parameters(folder),
        sizes={
            file.stem: {"parameters": count_parameters(file), "bytes": file.stat().st_size}
            for file in folder.glob("*.safetensors")
        },
        bytes_of_networks=sum(file.stat().st_size for file in folder.glob("*/*.safetensors")),
    )  # fmt: skip
    (folder / "README.md").write_text(text, encoding="utf-8")


def history(recipe: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the recipes of all trainings that led to the weights, in order."""
    earlier = history(recipe["started_from"]) if "started_from" in recipe else []
    return [*earlier, recipe]


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("sdopt.training"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["count"] = "{:,}".format
    environment.filters["percent"] = "{:.0%}".format
    environment.globals |= {
        "BACKGROUNDS": BACKGROUNDS,
        "DRAWINGS": DRAWINGS,
        "EMOJIBASE": EMOJIBASE,
        "GUIDANCE": GUIDANCE,
        "LEARNT": LEARNT,
        "LENGTH": LENGTH,
        "REFERENCES": REFERENCES,
        "STEPS": STEPS,
        "STYLES": STYLES,
        "VOCABULARY": VOCABULARY,
    }
    return environment
