"""The figures of an evaluation, and how they are kept beside a model."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

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
