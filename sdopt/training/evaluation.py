"""Evaluates the family of models: one table of figures for the generator, and one for each companion."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sdopt.errors import UsageError

if TYPE_CHECKING:
    from sdopt.training.data import Dataset

JUDGE = "effnet"
"""The feature extractor for the generator: EfficientNet-lite0, trained on ImageNet, independent of the family."""

Note = Callable[[str], None]
"""Receives a short description of the current step."""


@dataclass(frozen=True)
class Figure:
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
        return " → ".join(f"{value:{digits}}" for value in self.values) + f" {self.unit}".rstrip()

    @property
    def aim(self) -> str:
        """The target and whether it is met; "" without one."""
        if self.target is None:
            return ""
        return f"at least {self.target:g} {self.unit}".rstrip() + (": met" if self.met else ": missed")


def share(found: np.ndarray) -> float:
    """Returns the percentage of true elements."""
    return 100 * float(np.mean(found))


def ranks(scores: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Returns the number of columns with a higher score than each row's own column; ties count half. float64 (n,).

    Args:
        scores: scores (n, m); higher is better.
        own: the correct column of each row, (n,).
    """
    right = scores[np.arange(len(scores)), own][:, None]
    higher: np.ndarray = (scores > right).sum(axis=1) + ((scores == right).sum(axis=1) - 1) / 2
    return higher


def write_evaluation(figures: Sequence[Figure], folder: Path) -> None:
    """Writes the figures to `evaluation.json` in a model's folder, one per line."""
    lines = ",\n".join(f" {json.dumps(asdict(figure), ensure_ascii=False)}" for figure in figures)
    (folder / "evaluation.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def read_evaluation(folder: Path) -> list[Figure]:
    """Reads what `write_evaluation` wrote; returns [] if the model was not evaluated."""
    file = folder / "evaluation.json"
    entries = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
    return [Figure(**{**entry, "values": tuple(entry["values"])}) for entry in entries]


def evaluate_family(model: Path, work: Path, note: Note) -> dict[Path, list[Figure]]:
    """Returns the figures of a pipeline and of its companions, by folder.

    Args:
        model: a pipeline exported by `sdopt train-reference`, or the packaged pipeline. Companions are sought beside
            it, and in `companions/` beside it.
        work: work folder of `sdopt train-reference`; a missing data set is downloaded and rendered there.
        note: called before each step.

    Raises:
        UsageError: the folder has no exported pipeline, or `effnet` is not installed.
        DataError: the data cannot be downloaded.
    """
    from sdopt.quality.features import feature_extractor, require_features

    require_features(JUDGE)
    if not (model / "recipe.json").is_file():
        raise UsageError(f"--model {model}: there is no recipe.json; name what `sdopt train-reference` exported")

    import torch
    from diffusers import StableDiffusionPipeline

    from sdopt.training.clip_evaluation import evaluate_clip
    from sdopt.training.companion_evaluation import evaluate_few_steps, evaluate_loras, evaluate_tiny
    from sdopt.training.generator_evaluation import evaluate_generator

    recipe = json.loads((model / "recipe.json").read_text())
    seed: int = recipe["seed"]
    dataset = _dataset(work, recipe, note)
    pipeline = StableDiffusionPipeline.from_pretrained(model, dtype=torch.float32, local_files_only=True)
    prompts = json.loads(model.with_name("prompts.json").read_text())
    figures = {model: evaluate_generator(pipeline, dataset, prompts, feature_extractor(JUDGE), seed=seed, note=note)}
    companions: dict[str, Callable[[Path], list[Figure]]] = {
        "clip": lambda folder: evaluate_clip(folder, dataset),
        "tiny_autoencoder": lambda folder: evaluate_tiny(folder, pipeline, dataset, prompts["training"], seed),
        "loras": lambda folder: evaluate_loras(folder, pipeline, dataset, work / "packages"),
        "loras/few_steps": lambda folder: evaluate_few_steps(folder, pipeline, dataset, prompts["gate"], seed),
    }
    for name, evaluate in companions.items():
        for folder in (model.parent / name, model.parent / "companions" / name):
            if (folder / "recipe.json").is_file():
                note(name.replace("_", " "))
                figures[folder] = evaluate(folder)
                break
    return figures


def _dataset(work: Path, recipe: dict[str, Any], note: Note) -> Dataset:
    from sdopt.training.data import Dataset, build

    if not (work / "data" / "records.json").is_file():
        note("fetching and rendering the data set")
        held_out = recipe["data"]["held_out_concepts"]
        build(work / "packages", held_out_concepts=held_out, seed=recipe["seed"]).save(work / "data")
    return Dataset.load(work / "data")
