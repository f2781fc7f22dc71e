"""Fits the coefficients to published figures, and again without each chip, generation and publisher.

`python -m sdopt.apps.foresight.fitting published.csv` writes `coefficients.json`: numbers only, none of the figures.
"""

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdopt.apps.foresight.latency import (
    BOTH,
    COEFFICIENTS,
    NAMES,
    Array,
    Case,
    Coefficients,
    RateTable,
    added,
    fit,
    generation_of,
)
from sdopt.apps.foresight.published import (
    CALL,
    STEP,
    TEXT,
    Figure,
    read_figures,
    upcasts_vae,
)
from sdopt.apps.foresight.software import SCORES, TRANSFORMERS, Software
from sdopt.config.groups import data_sheets
from sdopt.pipelines.catalog import ARCHITECTURES
from sdopt.pipelines.families import family_of_folder
from sdopt.schema import Sheet

KNOWN, EXTRAPOLATED = "known", "extrapolated"

FAMILY = 3
"""Devices of a generation that make it known."""

UNTOLD = ("cdna", "cdna2", "cdna3", "cdna4", "tegra")
"""Generations about which the figures say too little: they are refused."""

_TINY_SHARE = 0.04
"""Work of a tiny autoencoder's decoder, as a share of the whole one's."""

LEVEL = 0.8
"""Share of figures that an interval is made to hold."""

Z80 = 1.2816
"""Half-width of a normal distribution's 80 % interval, in standard deviations."""

_FEW = 2
"""Devices or publishers of which a class must be for half of what they tell of its width to count."""

_OF_BLOCKS = (TRANSFORMERS, "blocks_eager", "blocks_compiled")
"""Classes of the software of transformers."""

ALL, NEW, UNCOMMON = "all", "new ", "uncommon family"

GROUPS: Mapping[str, Callable[[Figure], str]] = {
    "chip": lambda figure: str(figure.sheet.chip),
    "generation": lambda figure: generation_of(figure.sheet),
    "publisher": lambda figure: figure.publisher,
    "both": lambda figure: f"{figure.sheet.chip}{BOTH}{figure.publisher}",
}
"""What can be left out whole; `both` are all figures of a chip, and all of a publisher."""


def case_of(figure: Figure) -> Case:
    """Counts what a published figure's work costs."""
    from sdopt.apps.foresight.trace import pass_costs

    work = figure.work
    software = figure.software
    if software.is_transformer:
        return _case_of_transformer(figure)
    folder = ARCHITECTURES / work.architecture
    size = (work.width, work.height)
    samples = work.batch * work.samples
    denoiser = pass_costs(folder, "unet", samples, *size, software.attention)
    decoded = 1 if work.sliced else work.batch
    decoder = pass_costs(folder, "vae", decoded, *size, software.attention)
    share = _TINY_SHARE if work.tiny else 1
    decoder = decoder.times(work.batch / decoded * share)
    return Case(
        figure.sheet,
        software,
        denoiser,
        decoder,
        work.steps,
        work.batch,
        work.part,
        upcasts_vae(work, software),
    )


def _case_of_transformer(figure: Figure) -> Case:
    from sdopt.apps.foresight.transformers import (
        decoder_costs,
        denoiser_costs,
        encoding_costs,
        for_samples,
        words_of,
    )

    work = figure.work
    folder = ARCHITECTURES / work.architecture
    size = (work.width, work.height)
    one = denoiser_costs(
        folder,
        size,
        words_of(family_of_folder(folder), None),
        figure.software.attention == SCORES,
    )
    step = for_samples(one, work.batch * work.samples).times(work.calls)
    once = added(
        decoder_costs(folder, size).times(work.batch),
        encoding_costs(folder, max(work.calls, work.samples)),
    )
    return Case(
        figure.sheet, figure.software, step, once, work.steps, work.batch, work.part
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


class _Row(NamedTuple):
    """A figure that is left out with its group."""

    by: str
    card: str
    publisher: str
    classes: tuple[str, ...]
    """What the width of its interval goes by; see `labels`."""
    share: float
    """How much it counts where a width is estimated."""


@dataclass
class Data:
    """Published times as arrays, beside where each is from."""

    figures: list[Figure]
    table: RateTable
    seconds: Array

    @classmethod
    def of(cls, figures: Sequence[Figure]) -> "Data":
        """Takes the figures that can be predicted."""
        kept = []
        cases = []
        for figure in figures:
            if refused(figure):
                continue
            case = case_of(figure)
            if is_possible(figure, case):
                kept.append(figure)
                cases.append(case)
        seconds = [figure.seconds for figure in kept]
        return cls(kept, RateTable.of(cases), np.array(seconds))

    def groups(self, by: str) -> list[str]:
        """Returns the chip, generation or publisher of each figure."""
        return [GROUPS[by](figure) for figure in self.figures]

    def errors(self, found: Coefficients, by: str) -> Array:
        """Returns log(predicted / published) of each figure, each predicted without its group."""
        groups = np.array(self.groups(by))
        errors = np.zeros(len(self.figures))
        for group in set(groups.tolist()):
            chosen = np.flatnonzero(groups == group)
            predicted = self.table.take(chosen).log_seconds(found.left_out(by, group))
            errors[chosen] = predicted - np.log(self.seconds[chosen])
        return errors

    def fit(self) -> Coefficients:
        """Fits to all figures, and without each group; then the widths of intervals from what was left out."""
        everything = np.ones(len(self.figures), dtype=bool)
        whole = self._fitted(everything, None, 40)
        without: dict[str, dict[str, Array]] = {}
        for by in GROUPS:
            without[by] = {}
            for group in sorted(set(self.groups(by))):
                others = ~self._of(by, group)
                without[by][group] = self._fitted(others, whole, 12)
        cards = Counter[str]()
        blocks = Counter[str]()
        for figure in self.figures:
            of_kind = blocks if figure.software.is_transformer else cards
            of_kind[figure.card] += 1
        fitted = Coefficients(
            whole,
            without,
            dict(cards),
            {},
            dict(blocks),
            self._publishers(),
        )
        return replace(fitted, widths=self._widths(fitted))

    def _publishers(self) -> dict[str, int]:
        """Returns how many publishers gave figures of each family of transformers."""
        publishers: dict[str, set[str]] = {}
        for figure in self.figures:
            if figure.software.is_transformer:
                of_family = publishers.setdefault(family_title(figure), set())
                of_family.add(figure.publisher)
        return {family: len(names) for family, names in publishers.items()}

    def _fitted(self, kept: NDArray[np.bool_], start: Array | None, most: int) -> Array:
        """Fits to some figures: first what UNets tell, and then what transformers have of their own."""
        are_transformers = np.array(
            [figure.software.is_transformer for figure in self.figures]
        )
        unets = np.flatnonzero(kept & ~are_transformers)
        shared = fit(self.table.take(unets), self.seconds[unets], start, most)
        blocks = np.flatnonzero(kept & are_transformers)
        return fit(
            self.table.take(blocks), self.seconds[blocks], most=40, shared=shared
        )

    def _of(self, by: str, group: str) -> NDArray[np.bool_]:
        """Returns which figures are left out with a group."""
        if by == "both":
            chip, publisher = group.split(BOTH)
            return self._of("chip", chip) | self._of("publisher", publisher)
        return np.asarray(np.array(self.groups(by)) == group)

    def _rows(self, found: Coefficients) -> list["_Row"]:
        """Returns all figures as left out with each group: the chips' first, in the order of `GROUPS`."""
        rows = []
        counts = Counter(figure.publisher for figure in self.figures)
        for by in GROUPS:
            seen = by not in UNSEEN_BY
            for figure, group in zip(self.figures, self.groups(by), strict=True):
                software = figure.software
                cards = found.cards_of(software)
                generation = generation_of(figure.sheet)
                classes = labels(
                    state_of(cards, figure.sheet, left_out(by, group)),
                    software,
                    "" if by == "generation" else generation,
                    seen,
                    is_common(found, software, family_title(figure)),
                )
                share = 1.0
                if not seen or software.is_transformer:
                    share = counts[figure.publisher] ** -0.5
                rows.append(_Row(by, figure.card, figure.publisher, classes, share))
        return rows

    def _widths(self, found: Coefficients) -> dict[str, float]:
        """Returns by how much each class changes the half-width (log), so that intervals hold `LEVEL` of the errors.

        Each class gets what the others leave it, shrunk where it is of few devices, and the software of transformers
        where it is of few publishers. What is extrapolated has the errors of generations left out whole besides, and
        new publishers have those of publishers left out with the chip. There each publisher counts by the root of its
        figures, since a user is none of those with many.
        """
        rows = self._rows(found)
        shares = np.array([row.share for row in rows])
        off = np.concatenate([np.abs(self.errors(found, by)) for by in GROUPS])
        errors = np.log(np.maximum(off, 1e-6))
        classes: set[str] = set()
        for row in rows:
            classes.update(row.classes)
        chosen = {}
        for name in sorted(classes - {ALL}):
            sources = _sources_of(name)
            member = np.array([name in row.classes for row in rows])
            told = member & np.array([row.by in sources for row in rows])
            tellers = _tellers(name, [rows[n] for n in np.flatnonzero(told)])
            shrunk = tellers / (tellers + _FEW)
            if name == UNCOMMON:
                shrunk = 1.0
            chosen[name] = member, told, shrunk
        widths = dict.fromkeys(chosen, 0.0)
        widths[ALL] = float(np.quantile(errors[: len(self.figures)], LEVEL))
        total = np.full(len(rows), widths[ALL])
        for _ in range(20):
            for name, (member, told, share) in chosen.items():
                spare = errors[told] - total[told] + widths[name]
                left = _quantile(spare, shares[told], LEVEL)
                if name.startswith(NEW):  # which adds to what is known, or nothing
                    left = max(0.0, left, float(np.quantile(spare, LEVEL)))
                left *= share
                total[member] += left - widths[name]
                widths[name] = left
        return widths


def _tellers(name: str, rows: Sequence[_Row]) -> int:
    """Returns of how many devices a class is; of the software of transformers, of how many publishers.

    Their figures are of five cards, and differ by hosts and versions, which are the publishers'.
    """
    if name in _OF_BLOCKS:
        return len({row.publisher for row in rows})
    return len({row.card for row in rows})


def _sources_of(name: str) -> tuple[str, ...]:
    """Returns what has to be left out for the errors of figures to tell the width of a class."""
    if name.startswith(NEW) or name == UNCOMMON:
        return ("both",)
    if name == EXTRAPOLATED:
        return ("chip", "generation")
    return ("chip",)


def _quantile(values: Array, shares: Array, level: float) -> float:
    """Returns the quantile of values that count by their shares."""
    order = np.argsort(values)
    reached = (np.cumsum(shares[order]) - 0.5 * shares[order]) / shares.sum()
    return float(np.interp(level, reached, values[order]))


UNSEEN_BY = ("publisher", "both")
"""What leaves the publisher out."""


def left_out(by: str, group: str) -> str:
    """Returns the chip or the generation of a group that is left out; "" for a publisher."""
    return "" if by == "publisher" else group.partition(BOTH)[0]


def is_possible(figure: Figure, case: Case) -> bool:
    """Returns whether a figure's card could do its work in that time, whatever the software: not above its peak rate."""
    sheet = figure.sheet
    kind = figure.software.types[1]
    peak = sheet.half_accumulation or sheet.tensor.fp16
    if figure.work.part not in (CALL, STEP) or not peak or kind in ("fp32", "tf32"):
        return True
    steps = figure.work.steps if figure.work.part == CALL else 1
    fastest = max(float(peak), float(sheet.peak(kind) or 0.0)) * 1e12
    return figure.seconds >= steps * case.operations / fastest


def family_title(figure: Figure) -> str:
    """Returns the family of a figure's model, as messages call it."""
    return family_of_folder(ARCHITECTURES / figure.work.architecture).title


def is_common(found: Coefficients, software: Software, family: str) -> bool:
    """Returns whether several publishers gave figures of a family of transformers, or of what is no transformer."""
    return not software.is_transformer or found.publishers.get(family, 0) >= FAMILY


def refused(figure: Figure) -> str:
    """Returns why a published figure is no time that can be predicted; "" if it is one."""
    if not np.isfinite(figure.seconds):
        return "not a time"
    if figure.work.part == TEXT:
        return "text encoders alone are not described"
    return why_not(figure.sheet)


def relatives(cards: Mapping[str, int], sheet: Sheet, without: str = "") -> int:
    """Returns how many cards of a card's generation the figures are of, leaving out a chip or generation."""
    generation = generation_of(sheet)
    count = 0
    for card in cards:
        other = data_sheets()[card]
        if generation_of(other) == generation:
            count += without not in (other.chip, generation)
    return count


def state_of(cards: Mapping[str, int], sheet: Sheet, without: str = "") -> str:
    """Returns whether a card is of a generation that the figures know."""
    return KNOWN if relatives(cards, sheet, without) >= FAMILY else EXTRAPOLATED


def labels(
    state: str, software: Software, generation: str, seen: bool, common: bool = True
) -> tuple[str, ...]:
    """Returns the classes that the width of an interval goes by.

    Args:
        state: `known` or `extrapolated`.
        software: with what.
        generation: of the card; "" if it is left out.
        seen: whether other figures are of the same publisher; a user is a new one.
        common: whether several publishers gave figures of the model's family.
    """
    kind = "fp16" if software.precision == "bf16" else software.precision
    new = () if seen else (f"{NEW}{software.application}",)
    blocks = (software.name,) if software.is_transformer else ()
    return (
        ALL,
        state,
        software.application,
        *blocks,
        kind,
        *([generation] if generation else []),
        *([] if common else [UNCOMMON]),
        *new,
    )


def half_width(
    widths: Mapping[str, float], classes: Sequence[str], untold: float = 0.0
) -> float:
    """Returns the half-width of an 80 % interval on the log scale."""
    width = sum(widths.get(name, 0.0) for name in classes)
    return math.hypot(math.exp(width), Z80 * untold)


def save(found: Coefficients) -> None:
    """Writes coefficients to the packaged file."""

    def numbers(values: Array) -> list[float]:
        return [round(float(value), 4) for value in values]

    without = {}
    for by, folds in found.without.items():
        without[by] = {name: numbers(values) for name, values in folds.items()}
    content = {
        "names": NAMES,
        "all": numbers(found.all),
        "without": without,
        "cards": dict(sorted(found.cards.items())),
        "blocks": dict(sorted(found.blocks.items())),
        "publishers": dict(sorted(found.publishers.items())),
        "widths": {
            name: round(value, 4) for name, value in sorted(found.widths.items())
        },
    }
    text = json.dumps(content, separators=(",", ":"))
    text = text.replace('"all"', '\n"all"')
    text = text.replace("],", "],\n")
    text = text.replace('"cards"', '\n"cards"')
    COEFFICIENTS.write_text(f"{text}\n", encoding="utf-8")


def main(argv: Sequence[str]) -> None:
    """Fits to files of published figures, and writes the packaged coefficients."""
    figures: list[Figure] = []
    for path in argv:
        figures += read_figures(Path(path))[0]
    save(Data.of(figures).fit())


if __name__ == "__main__":
    main(sys.argv[1:])
