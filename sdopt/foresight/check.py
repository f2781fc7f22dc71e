"""Holds predictions against published figures, each predicted without its chip, generation or publisher."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from sdopt.foresight.fitting import Data, half_width, labels, refused, state_of
from sdopt.foresight.latency import Array, Coefficients, generation_of
from sdopt.foresight.memory import Footprint, likely_of
from sdopt.foresight.published import Figure
from sdopt.foresight.software import Software
from sdopt.schema import Sheet

NEAR = 0.25
"""A device counts as well predicted if the median error of its figures is within this share."""

APART = 0.1
"""Two figures count as a pair whose order is known if they are this share apart."""


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
    peaks: float
    """Median error of the ratio of peak rates."""


@dataclass(frozen=True)
class Check:
    """The result of holding predictions against a file of figures."""

    by: str
    scores: list[Score]
    order: tuple[float, float, int]
    """Share of pairs of devices in the right order; the same by peak rates; number of pairs."""
    options: tuple[float, int]
    """Share of pairs of options on one device in the right order; number of pairs."""
    memory: list[tuple[str, int, float, float, float]]
    """Kind of memory, figures, median and 80th percentile of the error, and share that is below the floor."""
    fits: tuple[float, float, int]
    """Of the usual cards just too small and just large enough: share told right, share wrongly refused; number."""
    refusals: Mapping[str, int]
    rows: list[dict[str, Any]] = field(default_factory=list, repr=False)


def check(
    figures: Sequence[Figure], refusals: Sequence[str], sheets: Mapping[str, Sheet], found: Coefficients, by: str
) -> Check:
    """Predicts each figure without its group, and compares. `refusals` tell why other rows are no figures."""
    data = Data.of(figures, sheets)
    errors = data.errors(found, by) if data.figures else np.zeros(0)
    peaks = _ratio_of_peaks(data, by)
    groups = data.groups(by)
    seen = found.without.get("publisher", {})
    states: list[str] = []
    halves = np.zeros(len(errors))
    untold = data.table.untold(found.all) if data.figures else halves
    for index, (figure, group) in enumerate(zip(data.figures, groups, strict=True)):
        sheet, told = sheets[figure.card], by != "publisher" and figure.publisher in seen
        states.append(state_of(found.cards, sheets, figure.card, group if by != "publisher" else ""))
        own = "" if by == "generation" else generation_of(sheet)
        halves[index] = half_width(found.widths, labels(states[-1], figure.software, own, told), untold[index])
    scores = [_score(name, rows, data, errors, halves, peaks) for name, rows in _classes(data, states) if rows]
    others = (refused(figure, sheets) for figure in figures if not figure.memory)
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
        _order(data, errors, peaks),
        _options(data, errors),
        list(_memory(figures, sheets)),
        _fits(figures),
        dict(Counter([*refusals, *filter(None, others)]).most_common()),
        rows,
    )


def _classes(data: Data, states: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
    count = range(len(data.figures))
    yield "all", list(count)
    software = [figure.software for figure in data.figures]
    keys: Mapping[str, list[str]] = {
        "": list(states),
        "software: ": [each.application for each in software],
        "precision: ": [each.precision for each in software],
        "generation: ": data.groups("generation"),
    }
    for prefix, values in keys.items():
        for value in sorted(set(values)):
            yield prefix + value, [index for index in count if values[index] == value]


def _score(name: str, rows: Sequence[int], data: Data, errors: Array, halves: Array, peaks: Array) -> Score:
    chosen = np.array(rows)
    share = np.abs(np.expm1(errors[chosen]))
    by_device: dict[str, list[float]] = defaultdict(list)
    for row, error in zip(rows, share, strict=True):
        by_device[data.figures[row].card].append(error)
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
        _median(np.abs(np.expm1(peaks[chosen]))),
    )


def _median(values: Array) -> float:
    """Returns the median of the numbers among values; NaN if there are none."""
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else float("nan")


def _ratio_of_peaks(data: Data, by: str) -> Array:
    """Returns the errors of scaling the same work's time on other devices by the ratio of peak rates."""
    if not data.figures:
        return np.zeros(0)
    peaks = np.array([_peak(data.sheets[figure.card]) for figure in data.figures])
    scaled, groups = np.log(data.seconds * peaks), np.array(data.groups(by))
    errors = np.full(len(scaled), np.nan)
    alike = defaultdict(list)
    for index, figure in enumerate(data.figures):
        alike[figure.work, figure.software].append(index)
    for rows in alike.values():
        chosen = np.array(rows)
        for row in rows:
            others = chosen[groups[chosen] != groups[row]]
            if len(others):
                errors[row] = np.median(scaled[others]) - scaled[row]
    return errors


def _peak(sheet: Sheet) -> float:
    return float(sheet.half_accumulation or sheet.peak("fp16") or sheet.vector.fp32 or 1.0)


def _order(data: Data, errors: Array, peaks: Array) -> tuple[float, float, int]:
    """Returns how often the faster of two devices is told, where the same work was published of both."""
    alike = defaultdict(lambda: defaultdict(list))  # type: ignore[var-annotated]
    for index, figure in enumerate(data.figures):
        alike[figure.work, figure.software][figure.card].append(index)
    right: list[bool] = []
    by_peaks: list[bool] = []
    for devices in alike.values():
        for first, second in combinations(devices, 2):
            if data.sheets[first].chip == data.sheets[second].chip:
                continue
            true, told = (
                np.median(values[devices[first]]) - np.median(values[devices[second]])
                for values in (np.log(data.seconds), np.log(data.seconds) + errors)
            )
            if abs(true) > np.log1p(APART):
                right.append(bool(true * told > 0))
                ratio = np.log(_peak(data.sheets[second]) / _peak(data.sheets[first]))
                by_peaks.append(bool(true * ratio > 0))
    return (float(np.mean(right)), float(np.mean(by_peaks)), len(right)) if right else (np.nan, np.nan, 0)


def _options(data: Data, errors: Array) -> tuple[float, int]:
    """Returns how often the faster of two ways to do the same work on one device is told, within one publisher."""
    alike = defaultdict(list)
    for index, figure in enumerate(data.figures):
        alike[figure.work, figure.card, figure.publisher].append(index)
    right = []
    for rows in alike.values():
        for first, second in combinations(rows, 2):
            if not _option_apart(data.figures[first].software, data.figures[second].software):
                continue
            true = np.log(data.seconds[first] / data.seconds[second])
            if abs(true) > np.log1p(APART):
                right.append(bool(true * (true + errors[first] - errors[second]) > 0))
    return (float(np.mean(right)), len(right)) if right else (np.nan, 0)


def _option_apart(first: Software, second: Software) -> bool:
    """Returns whether two ways differ in what sdopt has options for: attention, compiling, precision.

    The rest must be equal: the program and its version.
    """
    if (first.application, first.torch) != (second.application, second.torch):
        return False
    one, other = ((each.attention, each.compiled, each.graphs, each.precision) for each in (first, second))
    named = first.name == second.name or first.compiled != second.compiled
    return one != other and named


_CARDS_GIB = (4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 80)


def _fits(figures: Sequence[Figure]) -> tuple[float, float, int]:
    """Returns how often it is told whether a published amount fits on the usual cards next to it.

    `tight` counts as fitting: an allocator that reserved more gives it up where there is less.
    """
    right, refused_wrongly = [], []
    for figure in figures:
        if not figure.memory:
            continue
        beside = [
            *[size for size in _CARDS_GIB if size < figure.gib][-1:],
            *[size for size in _CARDS_GIB if size >= figure.gib][:1],
        ]
        for size in beside:
            floor, likely = likely_of(figure.work, figure.software, figure.memory, float(size))
            told = Footprint(floor, likely).verdict(size) != "does not fit"
            right.append(told == (figure.gib <= size))
            refused_wrongly.append(not told and figure.gib <= size)
    return (float(np.mean(right)), float(np.mean(refused_wrongly)), len(right)) if right else (np.nan, np.nan, 0)


def _memory(figures: Sequence[Figure], sheets: Mapping[str, Sheet]) -> Iterator[tuple[str, int, float, float, float]]:
    """Compares memory: it hardly depends on the card, so nothing needs to be left out."""
    found = defaultdict(list)
    for figure in figures:
        if not figure.memory:
            continue
        floor, likely = likely_of(figure.work, figure.software, figure.memory, sheets[figure.card].memory_gib)
        found[figure.memory].append((likely / figure.gib - 1, floor / figure.gib - 1))
    for kind, pairs in sorted(found.items()):
        errors = np.array(pairs)
        share = np.abs(errors[:, 0])
        below = float(np.mean(errors[:, 1] <= 0.02))
        yield kind, len(pairs), float(np.median(share)), float(np.quantile(share, 0.8)), below
