"""The figures of an evaluation and the card of a model: both are kept beside its weights."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from sdopt.apps.training.captions import FLOW_GUIDANCE, GUIDANCE, REFERENCES, STEPS
from sdopt.apps.training.clip import LEARNT
from sdopt.apps.training.data import BACKGROUNDS
from sdopt.apps.training.networks import (
    LENGTH,
    VOCABULARY,
    count_parameters,
    parameters,
)
from sdopt.apps.training.packages import DRAWINGS, EMOJIBASE, STYLES


@dataclass(frozen=True)
class CardFigure:
    """One line of an evaluation.

    Attributes:
        figure: what was measured.
        values: the value in `unit`; or several, in an order that `figure` names.
        unit: `dB`, `%`, `×` or "".
        target: the least value that is aimed at; None without a target.
    """

    figure: str
    values: tuple[float, ...]
    unit: str = ""
    target: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether all values meet the target; None without one."""
        return None if self.target is None else min(self.values) >= self.target

    @property
    def shown(self) -> str:
        """The rounded values with their unit."""
        digits = {"dB": ".1f", "%": ".0f", "×": ".1f"}.get(self.unit, ".3g")
        return (
            " → ".join(f"{value:{digits}}" for value in self.values)
            + f" {self.unit}".rstrip()
        )

    @property
    def aim(self) -> str:
        """The target and whether it is met; "" without one."""
        if self.target is None:
            return ""
        return f"at least {self.target:g} {self.unit}".rstrip() + (
            ": met" if self.met else ": missed"
        )


def write_evaluation(figures: Sequence[CardFigure], folder: Path) -> None:
    """Writes the figures to `evaluation.json` in a model's folder, one per line."""
    lines = ",\n".join(
        f" {json.dumps(asdict(figure), ensure_ascii=False)}" for figure in figures
    )
    (folder / "evaluation.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def read_evaluation(folder: Path) -> list[CardFigure]:
    """Reads what `write_evaluation` wrote; returns [] if the model was not evaluated."""
    file = folder / "evaluation.json"
    entries = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
    return [
        CardFigure(**{**entry, "values": tuple(entry["values"])}) for entry in entries
    ]


def read_recipe(folder: Path) -> dict[str, Any]:
    """Reads `recipe.json` of an exported model."""
    recipe: dict[str, Any] = json.loads(
        (folder / "recipe.json").read_text(encoding="utf-8")
    )
    return recipe


def write_card(folder: Path, model: str) -> None:
    """Writes `README.md` for a model from its weights, `recipe.json` and `evaluation.json`.

    Without an evaluation, the card names the command for it.
    """
    recipe = read_recipe(folder)
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
        loader=PackageLoader("sdopt.apps.training"),
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
        "FLOW_GUIDANCE": FLOW_GUIDANCE,
        "GUIDANCE": GUIDANCE,
        "LEARNT": LEARNT,
        "LENGTH": LENGTH,
        "REFERENCES": REFERENCES,
        "STEPS": STEPS,
        "STYLES": STYLES,
        "VOCABULARY": VOCABULARY,
    }
    return environment
