"""Holds predictions against published figures, each predicted without its chip, generation or publisher."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sdopt.foresight.fitting import Data, half_width, refused, state_of
from sdopt.foresight.latency import Array, Coefficients, generation_of
from sdopt.foresight.memory import likely_of
from sdopt.foresight.published import Figure
from sdopt.schema import Sheet

NEAR = 0.25
"""A device counts as well predicted if the median error of its figures is within this share."""


@dataclass(frozen=True)
class Score:
    """How well a class of figures is predicted; errors are shares of the published time."""

    name: str
    figures: int
    devices: int
    median: float
    p80: float
    devices_median: float
    devices_near: float
    covered: float
    width: float
    """Upper end of the median interval, divided by its lower end."""


@dataclass(frozen=True)
class Check:
    """The result of holding predictions against a file of figures."""

    by: str
    scores: list[Score]
    memory: list[tuple[str, int, float, float, float]]
    """Kind of memory, figures, median and 80th percentile of the error, and share that is below the floor."""
    refusals: Mapping[str, int]
    rows: list[dict[str, Any]] = field(default_factory=list, repr=False)


def check(figures: Sequence[Figure], sheets: Mapping[str, Sheet], found: Coefficients, by: str = "chip") -> Check:
    """Predicts each figure without its group, and compares."""
    data = Data.of(figures, sheets)
    errors = data.errors(found, by) if data.figures else np.zeros(0)
    groups = data.groups(by)
    states = [_state(found, sheets, figure, by, group) for figure, group in zip(data.figures, groups, strict=True)]
    halves = np.array(
        [
            half_width(found.widths, state, figure.software.application, generation_of(sheets[str(figure.card)]))
            for figure, state in zip(data.figures, states, strict=True)
            if figure.software
        ]
    )
    scores = [_score(name, rows, data, errors, halves) for name, rows in _classes(data, states) if rows]
    refusals = Counter(
        reason for figure in figures if not np.isfinite(figure.gib) and (reason := refused(figure, sheets))
    )
    rows = [
        {
            "line": figure.line,
            "gpu": figure.gpu,
            "card": figure.card,
            "seconds": figure.seconds,
            "predicted": float(figure.seconds * np.exp(error)),
            "low": float(figure.seconds * np.exp(error - half)),
            "high": float(figure.seconds * np.exp(error + half)),
            "state": state,
        }
        for figure, error, half, state in zip(data.figures, errors, halves, states, strict=True)
    ]
    return Check(
        by,
        scores,
        list(_memory(figures, sheets)),
        dict(refusals.most_common()),
        rows,
    )


def _state(found: Coefficients, sheets: Mapping[str, Sheet], figure: Figure, by: str, group: str) -> str:
    return state_of(found.cards, sheets, str(figure.card), without=group if by != "publisher" else "")


def _classes(data: Data, states: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
    count = range(len(data.figures))
    yield "all", list(count)
    software = [figure.software for figure in data.figures]
    keys: Mapping[str, list[str]] = {
        "": list(states),
        "software: ": [each.application if each else "" for each in software],
        "precision: ": [each.precision if each else "" for each in software],
        "generation: ": data.groups("generation"),
    }
    for prefix, values in keys.items():
        for value in sorted(set(values)):
            yield prefix + value, [index for index in count if values[index] == value]


def _score(name: str, rows: Sequence[int], data: Data, errors: Array, halves: Array) -> Score:
    chosen = np.array(rows)
    share = np.abs(np.expm1(errors[chosen]))
    by_device: dict[str, list[float]] = defaultdict(list)
    for row, error in zip(rows, share, strict=True):
        by_device[str(data.figures[row].card)].append(error)
    medians = np.array([np.median(found) for found in by_device.values()])
    return Score(
        name,
        len(rows),
        len(medians),
        float(np.median(share)),
        float(np.quantile(share, 0.8)),
        float(np.median(medians)),
        float(np.mean(medians <= NEAR)),
        float(np.mean(np.abs(errors[chosen]) <= halves[chosen])),
        float(np.exp(2 * np.median(halves[chosen]))),
    )


def _memory(figures: Sequence[Figure], sheets: Mapping[str, Sheet]) -> Iterator[tuple[str, int, float, float, float]]:
    """Compares memory: it hardly depends on the card, so nothing needs to be left out."""
    found = defaultdict(list)
    for figure in figures:
        if not np.isfinite(figure.gib) or figure.refused or not (figure.work and figure.software):
            continue
        floor, likely = likely_of(figure.work, figure.software, figure.memory, sheets[str(figure.card)].memory_gib)
        found[figure.memory].append((likely / figure.gib - 1, floor / figure.gib - 1))
    for kind, pairs in sorted(found.items()):
        errors = np.array(pairs)
        share = np.abs(errors[:, 0])
        below = float(np.mean(errors[:, 1] <= 0.02))
        yield kind, len(pairs), float(np.median(share)), float(np.quantile(share, 0.8)), below
