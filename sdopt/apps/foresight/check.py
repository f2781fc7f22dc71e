"""Holds predictions against published figures, each predicted without its chip, generation or publisher."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from sdopt.apps.foresight.blueprints import likely_of
from sdopt.apps.foresight.fitting import (
    UNSEEN_BY,
    Data,
    family_title,
    half_width,
    is_common,
    labels,
    left_out,
    refused,
    state_of,
)
from sdopt.apps.foresight.latency import Coefficients
from sdopt.apps.foresight.published import Figure
from sdopt.apps.foresight.software import Software
from sdopt.schema import Sheet

if TYPE_CHECKING:
    import pandas as pd

NEAR = 0.25
"""A device counts as well predicted if the median error of its figures is within this share."""

APART = 0.1
"""Two figures count as a pair whose order is known if they are this share apart."""


@dataclass(frozen=True)
class CheckScore:
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
    scores: list[CheckScore]
    order: tuple[float, float, int]
    """Share of pairs of devices in the right order; the same by peak rates; number of pairs."""
    options: tuple[float, int]
    """Share of pairs of options on one device in the right order; number of pairs."""
    memory: list[tuple[str, int, float, float, float]]
    """Kind of memory, figures, median and 80th percentile of the error, and share that is below the floor."""
    refusals: Mapping[str, int]
    rows: list[dict[str, Any]] = field(default_factory=list, repr=False)


def check(
    figures: Sequence[Figure], refusals: Sequence[str], found: Coefficients, by: str
) -> Check:
    """Predicts each figure without its group, and compares. `refusals` tell why other rows are no figures."""
    table = _table(Data.of(figures), found, by)
    others = (refused(figure) for figure in figures if not figure.memory)
    memory = [figure for figure in figures if figure.memory]
    return Check(
        by,
        list(_scores(table)) if len(table) else [],
        _order(table),
        _options(table),
        list(_memory(memory)),
        dict(Counter([*refusals, *filter(None, others)]).most_common()),
        table[
            ["line", "gpu", "card", "seconds", "predicted", "low", "high", "state"]
        ].to_dict("records"),
    )


def _table(data: Data, found: Coefficients, by: str) -> "pd.DataFrame":
    """Returns a row for each figure: its prediction, that of the same work scaled by peak rates, and its classes.

    Errors and half-widths are on the logarithmic scale; `peaks` is NaN where no other group did the same work.
    """
    import pandas as pd

    seen, sheets = (
        found.without.get("publisher", {}),
        [figure.sheet for figure in data.figures],
    )
    table = pd.DataFrame(
        [vars(figure) for figure in data.figures],
        columns=[*Figure.__dataclass_fields__],
    )
    if not data.figures:
        return table.assign(predicted=[], low=[], high=[], state=[])
    table["group"], table["generation"] = data.groups(by), data.groups("generation")
    table["chip"], table["rate"] = (
        [sheet.chip for sheet in sheets],
        [_peak(sheet) for sheet in sheets],
    )
    table["application"] = [software.application for software in table.software]
    table["precision"] = [software.precision for software in table.software]
    table["family"] = [family_title(figure) for figure in data.figures]
    table["state"] = [
        state_of(found.cards_of(software), sheet, left_out(by, group))
        for sheet, software, group in zip(
            sheets, table.software, table.group, strict=True
        )
    ]
    # Of a generation that was left out, nothing is known by its name.
    generations = table.generation if by != "generation" else [""] * len(table)
    known = table.publisher.isin([*seen]) & (by not in UNSEEN_BY)
    classes = (
        labels(
            row.state,
            row.software,
            generation,
            is_known,
            is_common(found, row.software, row.family),
        )
        for row, generation, is_known in zip(
            table.itertuples(), generations, known, strict=True
        )
    )
    untold = data.table.untold(found.all)
    table["error"] = data.errors(found, by)
    table["half"] = [
        half_width(found.widths, names, features)
        for names, features in zip(classes, untold, strict=True)
    ]
    table["told"] = np.log(table.seconds) + table.error
    table["predicted"], table["low"], table["high"] = (
        np.exp(table.told + sign * table.half) for sign in (0, -1, 1)
    )
    scaled = np.log(table.seconds * table.rate)
    table["peaks"] = np.nan
    for _, rows in table.groupby(["work", "software"], sort=False):
        for index in rows.index:
            others = scaled[rows.index][(rows.group != rows.group[index]).to_numpy()]
            table.loc[index, "peaks"] = others.median() - scaled[index]
    return table


def _scores(table: "pd.DataFrame") -> Iterator[CheckScore]:
    yield _score("all", table)
    columns = {
        "": "state",
        "software: ": "application",
        "precision: ": "precision",
        "generation: ": "generation",
    }
    for prefix, column in columns.items():
        for value, rows in table.groupby(column):
            yield _score(f"{prefix}{value}", rows)


def _score(name: str, rows: "pd.DataFrame") -> CheckScore:
    share = np.expm1(rows.error).abs()
    devices = share.groupby(rows.card).median()
    return CheckScore(
        name,
        len(rows),
        len(devices),
        share.median(),
        share.quantile(0.8),
        devices.median(),
        (devices <= NEAR).mean(),
        (rows.error.abs() <= rows.half).mean(),
        float(np.exp(2 * rows.half.median())),
        np.expm1(rows.peaks).abs().median(),
    )


def _peak(sheet: Sheet) -> float:
    return float(
        sheet.half_accumulation or sheet.peak("fp16") or sheet.vector.fp32 or 1.0
    )


def _share(found: Sequence[bool]) -> float:
    return float(np.mean(found)) if found else np.nan


def _order(table: "pd.DataFrame") -> tuple[float, float, int]:
    """Returns how often the faster of two devices is told, where the same work was published of both."""
    right: list[bool] = []
    by_peaks: list[bool] = []
    for _, alike in table.groupby(["work", "software"], sort=False):
        for (_, first), (_, second) in combinations(
            alike.groupby("card", sort=False), 2
        ):
            true = np.log(first.seconds).median() - np.log(second.seconds).median()
            told = first.told.median() - second.told.median()
            if first.chip.iloc[0] != second.chip.iloc[0] and abs(true) > np.log1p(
                APART
            ):
                right.append(bool(true * told > 0))
                by_peaks.append(
                    bool(true * np.log(second.rate.iloc[0] / first.rate.iloc[0]) > 0)
                )
    return _share(right), _share(by_peaks), len(right)


def _options(table: "pd.DataFrame") -> tuple[float, int]:
    """Returns how often the faster of two ways to do the same work on one device is told, within one repository."""
    right = []
    for _, alike in table.groupby(["work", "card", "repository"], sort=False):
        for first, second in combinations(alike.itertuples(), 2):
            true = np.log(first.seconds / second.seconds)
            if _option_apart(first.software, second.software) and abs(true) > np.log1p(
                APART
            ):
                right.append(bool(true * (first.told - second.told) > 0))
    return _share(right), len(right)


def _option_apart(first: Software, second: Software) -> bool:
    """Returns whether two ways differ in what sdopt has options for: attention, compiling, precision.

    The rest must be equal: the program and its version.
    """
    if (first.application, first.torch) != (second.application, second.torch):
        return False
    one, other = (
        (software.attention, software.compiled, software.graphs, software.precision)
        for software in (first, second)
    )
    named = first.name == second.name or first.compiled != second.compiled
    return one != other and named


def _memory(
    figures: Sequence[Figure],
) -> Iterator[tuple[str, int, float, float, float]]:
    """Compares memory: it hardly depends on the card, so nothing needs to be left out."""
    for kind in sorted({figure.memory for figure in figures}):
        errors = np.array([
            np.array(likely_of(figure.work, figure.software, kind, figure.sheet.memory_gib)) / figure.gib - 1
            for figure in figures
            if figure.memory == kind
        ])  # fmt: skip
        share = np.abs(errors[:, 1])
        below = float(np.mean(errors[:, 0] <= 0.02))
        yield (
            kind,
            len(errors),
            float(np.median(share)),
            float(np.quantile(share, 0.8)),
            below,
        )
