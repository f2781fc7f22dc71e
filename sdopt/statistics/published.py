"""Holds the figures of an article, as it prints them, and reads them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sdopt.errors import UsageError
from sdopt.schema import Configured


@dataclass(frozen=True)
class PublishedTable(Configured):
    """Figures of an article, by variant. A line holds one figure for each of `gpus`, as printed, with blanks between.

    `-` is no figure, `OOM` a run that ran out of memory, and `<3` something less than 3.
    """

    place: str
    """Where the article has the figures, such as the title of its table."""
    gpus: list[str]
    size: int | None = None
    """Height and width in pixels, if the study has a list of sizes."""
    batch_size: int | None = None
    """Prompts per call, if the study has a list of batch sizes."""
    reference: str | None = None
    """The variant that `speedup` and `time_saved` are relative to."""
    unit: Literal["s", "ms", "it/s"] = "s"
    """Unit of the figures in `time`."""
    time: dict[str, str] = field(default_factory=dict)
    """Latencies or rates; if the article gives no speed-up, it is computed from them."""
    speedup: dict[str, str] = field(default_factory=dict)
    """Time of the reference divided by that of the variant."""
    time_saved: dict[str, str] = field(default_factory=dict)
    """Percentage by which the variant's time is shorter than the reference's."""
    memory_gb: dict[str, str] = field(default_factory=dict)
    """Peak memory; ratios are computed from it."""
    memory_limit_gb: dict[str, str] = field(default_factory=dict)
    """Memory that suffices for the variant according to the article."""
    note: str = ""
    """A note for the reader of these figures."""

    @property
    def shape(self) -> str:
        """The shape that the figures belong to; "" if the study has only one."""
        size = f"{self.size}×{self.size}" if self.size else ""
        batch = f"batch {self.batch_size}" if self.batch_size else ""
        return ", ".join(filter(None, [size, batch]))

    @property
    def columns(self) -> tuple[dict[str, str], ...]:
        """All lines by variant, one mapping for each kind of figure."""
        return (
            self.time,
            self.speedup,
            self.time_saved,
            self.memory_gb,
            self.memory_limit_gb,
        )


@dataclass(frozen=True)
class PublishedSetup(Configured):
    """What the figures were measured with, as far as the study's own configuration says it; null is not compared."""

    model: str | None = None
    """`model.name`."""
    scheduler: str | None = None
    """`scheduler.class_name`."""
    steps: int | None = None
    """`workload.steps`."""
    size: int | None = None
    """Height and width in pixels; null also where the study has a list of sizes."""
    images: int | None = None
    """Images of one call; null also where the study has a list of batch sizes."""


@dataclass(frozen=True)
class Published(Configured):
    """What an article says of the variants of a study."""

    article: str
    """Title and publisher."""
    gpu: str
    """The card of its main figures: shown where this machine has none of the cards in its tables."""
    setup: PublishedSetup = field(default_factory=PublishedSetup)
    """What the figures were measured with."""
    tables: list[PublishedTable] = field(default_factory=list)
    """The figures, as they stand in the article."""
    notes: list[str] = field(default_factory=list)
    """Settings that the article does not state, and what a preset uses in place of the article's software."""


@dataclass(frozen=True)
class Printed:
    """A printed figure with the bounds implied by its rounding."""

    value: float
    low: float
    high: float
    below: bool = False
    """Whether the article says that it is less than `value`."""


OUT_OF_MEMORY = "OOM"
"""What a table prints where a run had too little memory."""

_FIGURE = re.compile(r"-|OOM|(?P<below><?)(?P<number>-?\d+(?:\.(?P<decimals>\d+))?)")


def read_figure(line: str | None, column: int) -> Printed | str | None:
    """Returns one figure of a table's line; `OOM` as it is; None where there is none."""
    text = line.split()[column] if line else "-"
    if text == "-":
        return None
    match = _FIGURE.fullmatch(text)
    if match is None or match["number"] is None:
        return text
    value = float(match["number"])
    if match["below"]:
        return Printed(value, 0.0, value, below=True)
    half = 0.5 * 10.0 ** -len(match["decimals"] or "")
    return Printed(value, value - half, value + half)


def require_published(published: Published, variants: Sequence[str]) -> None:
    """Raises UsageError for a figure that cannot be read, is of no variant of the study, or has no card."""
    problems: list[str] = []
    for table in published.tables:
        place = f"study.published ({table.place})"
        for problem in _problems_of(table, variants):
            problems.append(f"{place}: {problem}")
    if problems:
        raise UsageError(list(dict.fromkeys(problems)))


def _problems_of(table: PublishedTable, variants: Sequence[str]) -> Iterator[str]:
    lines: list[tuple[str, str]] = []
    for column in table.columns:
        lines += column.items()
    names = [name for name, _ in lines]
    for name in [*names, table.reference or variants[0]]:
        if name not in variants:
            yield f"the study has no variant '{name}'"
    for name, line in lines:
        yield from _problems_of_line(name, line, len(table.gpus))
    yield from _impossible(table)
    if table.reference is None and (table.speedup or table.time_saved):
        yield (
            "has speed-ups but no reference; "
            "set reference to the variant that they are relative to"
        )


def _impossible(table: PublishedTable) -> Iterator[str]:
    """Yields the figures that no measurement can have."""
    for name, line in table.time_saved.items():
        if any(saved.high >= 100 for _, saved in _printed(line)):
            yield f"'{name}' saves {line} %; a saving must be less than 100 %"
    for name, line in [*table.time.items(), *table.memory_gb.items()]:
        for text, figure in _printed(line):
            if figure.low <= 0:
                yield (
                    f"'{name}': {text}: of times and memory ratios are computed: "
                    "give a number above 0, or -"
                )


def _problems_of_line(name: str, line: str, cards: int) -> Iterator[str]:
    texts = line.split()
    if len(texts) != cards:
        yield f"'{name}' has {len(texts)} figures for {cards} cards"
    for text in texts:
        if not _FIGURE.fullmatch(text):
            yield f"'{name}': {text} is not a number"


def _printed(line: str) -> Iterator[tuple[str, Printed]]:
    """Yields the numbers of a table's line: each as it stands there, and what it says."""
    for text in line.split():
        figure = read_figure(text, 0)
        if isinstance(figure, Printed):
            yield text, figure
