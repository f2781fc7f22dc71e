"""Fits the coefficients to published figures, and again without each chip, generation and publisher.

`python -m sdopt.foresight.fitting published.csv` writes `coefficients.json`: numbers only, none of the figures.
"""

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sdopt.foresight.costs import pass_costs
from sdopt.foresight.latency import (
    COEFFICIENTS,
    NAMES,
    Array,
    Case,
    Coefficients,
    Table,
    fit,
    generation_of,
)
from sdopt.foresight.published import TEXT, Figure, Work
from sdopt.foresight.software import Software
from sdopt.pipelines.catalog import ARCHITECTURES
from sdopt.schema import Sheet

KNOWN, EXTRAPOLATED = "known", "extrapolated"

FAMILY = 3
"""Devices of a generation that make it known."""

UNTOLD = ("cdna", "cdna2", "cdna3", "cdna4")
"""Generations about which the figures say too little: they are refused."""

_TINY_SHARE = 0.04
"""Work of a tiny autoencoder's decoder, as a share of the whole one's."""

LEVEL = 0.8
"""Share of figures that an interval is made to hold."""

GROUPS: Mapping[str, Callable[[Figure, Sheet], str]] = {
    "chip": lambda figure, sheet: str(sheet.chip),
    "generation": lambda figure, sheet: generation_of(sheet),
    "publisher": lambda figure, sheet: figure.publisher,
}
"""What can be left out whole."""


def case_of(card: str, sheet: Sheet, work: Work, software: Software) -> Case:
    """Counts what a published figure's work costs."""
    folder, size = ARCHITECTURES / work.architecture, (work.width, work.height)
    denoiser = pass_costs(folder, "unet", work.batch * work.samples, *size, software.attention)
    decoded = 1 if work.sliced else work.batch
    decoder = pass_costs(folder, "vae", decoded, *size, software.attention)
    decoder = decoder.times(work.batch / decoded * (_TINY_SHARE if work.tiny else 1))
    return Case(
        card, sheet, software, denoiser, decoder, work.steps, work.batch, work.architecture == "sdxl", work.part
    )


def why_not(sheet: Sheet) -> str:
    """Returns why no time is predicted for a card; "" if it can be."""
    if not (sheet.architecture and sheet.chip and sheet.vector.fp32):
        return "its data sheet lacks architecture, chip or vector.fp32"
    if sheet.architecture in UNTOLD:
        return f"too few published figures of {sheet.architecture.upper()} cards to learn from"
    if sheet.memory_gib < 5:
        return "cards of 4 GiB spill into system memory"
    return ""


@dataclass
class Data:
    """Published times as arrays, beside where each is from."""

    figures: list[Figure]
    sheets: Mapping[str, Sheet]
    table: Table
    seconds: Array
    weights: Array

    @classmethod
    def of(cls, figures: Sequence[Figure], sheets: Mapping[str, Sheet]) -> "Data":
        """Takes the figures that can be predicted."""
        kept = [figure for figure in figures if not refused(figure, sheets)]
        cases = [
            case_of(figure.card, sheets[figure.card], figure.work, figure.software)
            for figure in kept
            if figure.card and figure.work and figure.software
        ]
        together = Counter((figure.card, figure.publisher) for figure in kept)
        # Many figures of one publisher on one card share their mistakes.
        weights = np.array([together[figure.card, figure.publisher] ** -0.5 for figure in kept])
        seconds = np.array([figure.seconds for figure in kept])
        return cls(kept, sheets, Table.of(cases), seconds, weights / weights.mean() if kept else weights)

    def groups(self, by: str) -> list[str]:
        """Returns the chip, generation or publisher of each figure."""
        return [GROUPS[by](figure, self.sheets[str(figure.card)]) for figure in self.figures]

    def errors(self, found: Coefficients, by: str) -> Array:
        """Returns log(predicted / published) of each figure, each predicted without its group."""
        groups, errors = np.array(self.groups(by)), np.zeros(len(self.figures))
        for group in set(groups.tolist()):
            chosen = np.flatnonzero(groups == group)
            predicted = self.table.take(chosen).log_seconds(found.left_out(by, group))
            errors[chosen] = predicted - np.log(self.seconds[chosen])
        return errors

    def fit(self) -> Coefficients:
        """Fits to all figures, and without each group; then the widths of intervals from what was left out."""
        whole = fit(self.table, self.seconds, self.weights)
        without: dict[str, dict[str, Array]] = {}
        for by in GROUPS:
            groups = np.array(self.groups(by))
            without[by] = {}
            for group in sorted(set(groups.tolist())):
                rest = np.flatnonzero(groups != group)
                without[by][group] = fit(self.table.take(rest), self.seconds[rest], self.weights[rest], whole, most=6)
        cards = dict(Counter(str(figure.card) for figure in self.figures))
        found = Coefficients(whole, without, cards)
        return Coefficients(whole, without, cards, self._widths(found))

    def _widths(self, found: Coefficients) -> dict[str, float]:
        """Returns the factors of half-widths, so that intervals hold `LEVEL` of the errors by state and by class."""
        chip, generation = np.abs(self.errors(found, "chip")), np.abs(self.errors(found, "generation"))
        applications = [figure.software.application if figure.software else "" for figure in self.figures]
        states = [
            state_of(found.cards, self.sheets, str(figure.card), without=group)
            for figure, group in zip(self.figures, self.groups("chip"), strict=True)
        ]
        generations = self.groups("generation")
        known = [index for index, state in enumerate(states) if state == KNOWN]
        widths: dict[str, float] = {}
        for kind in ("application", "generation"):
            widths |= {f"{kind}.{name}": 1.0 for name in set(applications if kind == "application" else generations)}
        base = float(np.quantile(chip[known], LEVEL))
        widths[KNOWN] = base
        devices: dict[str, set[str]] = defaultdict(set)
        for figure, name in zip(self.figures, generations, strict=True):
            devices[name].add(str(figure.card))
        # Margins in turn, until every application and every generation of several devices has its share.
        for _ in range(20):
            for kind, names in (("application", applications), ("generation", generations)):
                for name in set(names):
                    rows = [index for index in known if names[index] == name]
                    if len(rows) < 20 or (kind == "generation" and len(devices[name]) < FAMILY):
                        continue
                    half = [
                        base * widths[f"application.{applications[index]}"] * widths[f"generation.{generations[index]}"]
                        for index in rows
                    ]
                    widths[f"{kind}.{name}"] *= float(np.quantile(chip[rows] / np.array(half), LEVEL))
        far = [
            max(own, other) if states[index] == EXTRAPOLATED else other
            for index, (own, other) in enumerate(zip(chip, generation, strict=True))
        ]
        for name in sorted(set(applications)):
            rows = [index for index, other in enumerate(applications) if other == name]
            widths[f"{EXTRAPOLATED}.{name}"] = float(np.quantile(np.array(far)[rows], LEVEL))
        return widths


def refused(figure: Figure, sheets: Mapping[str, Sheet]) -> str:
    """Returns why a published time is not predicted; "" if it can be."""
    if figure.refused:
        return figure.refused
    if not np.isfinite(figure.seconds):
        return "not a time"
    if figure.work is not None and figure.work.part == TEXT:
        return "text encoders alone are not described"
    return why_not(sheets[str(figure.card)])


def relatives(cards: Mapping[str, int], sheets: Mapping[str, Sheet], card: str, without: str = "") -> int:
    """Returns how many cards of a card's generation the figures are of, leaving out a chip or generation."""
    own = generation_of(sheets[card]) if card in sheets else ""
    others = [sheets[name] for name in cards if name in sheets]
    return sum(generation_of(other) == own and without not in (other.chip, own) for other in others)


def state_of(cards: Mapping[str, int], sheets: Mapping[str, Sheet], card: str, without: str = "") -> str:
    """Returns whether a card is of a generation that the figures know."""
    return KNOWN if relatives(cards, sheets, card, without) >= FAMILY else EXTRAPOLATED


def half_width(widths: Mapping[str, float], state: str, application: str, generation: str) -> float:
    """Returns the half-width of an 80 % interval on the log scale."""
    usual = widths[KNOWN] * widths.get(f"application.{application}", 1.0) * widths.get(f"generation.{generation}", 1.0)
    if state == KNOWN:
        return usual
    return max(usual, widths.get(f"{EXTRAPOLATED}.{application}", usual))


def save(found: Coefficients, path: Path = COEFFICIENTS) -> None:
    """Writes coefficients as JSON."""

    def numbers(values: Array) -> list[float]:
        return [round(float(value), 4) for value in values]

    content = {
        "names": NAMES,
        "all": numbers(found.all),
        "without": {
            by: {name: numbers(values) for name, values in folds.items()} for by, folds in found.without.items()
        },
        "cards": dict(sorted(found.cards.items())),
        "widths": {name: round(value, 4) for name, value in sorted(found.widths.items())},
    }
    lines = json.dumps(content, separators=(",", ":")).replace('"all"', '\n"all"').replace("],", "],\n")
    path.write_text(lines.replace('"cards"', '\n"cards"') + "\n", encoding="utf-8")


def main(argv: Sequence[str]) -> None:
    """Fits to a file of published figures, and writes the packaged coefficients."""
    from sdopt.config.groups import data_sheets
    from sdopt.foresight.published import read_figures

    sheets = data_sheets()
    save(Data.of(read_figures(Path(argv[0]), sheets), sheets).fit())


if __name__ == "__main__":
    main(sys.argv[1:])
