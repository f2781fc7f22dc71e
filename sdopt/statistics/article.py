"""The typed form of `study.published`: the figures of an article, by variant and card, as printed."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from pydantic import ConfigDict

from sdopt.errors import UsageError
from sdopt.record.configuration import RecordedConfig
from sdopt.schema import Shape, bounded


@dataclass(frozen=True)
class PublishedTable:
    """Figures of an article, by variant. A line holds one figure for each of `gpus`, as printed, with blanks between.

    `-` is no figure, `OOM` a run that ran out of memory, and `<3` something less than 3.
    """

    __pydantic_config__: ClassVar = ConfigDict(coerce_numbers_to_str=True)  # in a yaml, 40 is no string

    place: str
    """Where the article has the figures, such as the title of its table."""
    gpus: list[str]
    size: int | None = None
    """Height and width in pixels, if the study has a list of sizes."""
    batch_size: int | None = None
    """Prompts per call, if the study has a list of batch sizes."""
    reference: str | None = None
    """The variant that `speedup` and `time_saved` are relative to."""
    unit: str = bounded("s", choices=("s", "ms", "it/s"))
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
        return ", ".join(filter(None, [size, f"batch {self.batch_size}" if self.batch_size else ""]))

    def is_of(self, shape: Shape) -> bool:
        """Returns whether the figures are of calls of a shape."""
        return self.size in (None, shape.size) and self.batch_size in (None, shape.batch_size)

    @property
    def columns(self) -> tuple[dict[str, str], ...]:
        """All lines by variant, one mapping for each kind of figure."""
        return self.time, self.speedup, self.time_saved, self.memory_gb, self.memory_limit_gb


@dataclass(frozen=True)
class PublishedSetup:
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
class Published:
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


_FIGURE = re.compile(r"-|OOM|(<?)(-?\d+(?:\.(\d+))?)")


def read_figure(line: str | None, column: int) -> Printed | str | None:
    """Returns one figure of a table's line; `OOM` as it is; None where there is none."""
    text = line.split()[column] if line else "-"
    found = _FIGURE.fullmatch(text)
    if found is None or found[2] is None:
        return None if text == "-" else text
    value, half = float(found[2]), 0.5 * 10.0 ** -len(found[3] or "")
    return Printed(value, 0.0, value, below=True) if found[1] else Printed(value, value - half, value + half)


def _read_all(line: str) -> list[Printed | str | None]:
    return [read_figure(line, column) for column in range(len(line.split()))]


def require_published(published: Published, variants: Sequence[str]) -> None:
    """Raises UsageError for a figure that cannot be read, is of no variant of the study, or has no card."""
    problems = []
    for table in published.tables:
        at = f"study.published ({table.place})"
        named = [name for column in table.columns for name in column] + [table.reference or variants[0]]
        problems += [f"{at}: the study has no variant '{name}'" for name in named if name not in variants]
        for name, line in ((name, line) for column in table.columns for name, line in column.items()):
            if len(line.split()) != len(table.gpus):
                problems.append(f"{at}: '{name}' has {len(line.split())} figures for {len(table.gpus)} cards")
            problems += [
                f"{at}: '{name}': {text} is not a number" for text in line.split() if not _FIGURE.fullmatch(text)
            ]
        problems += [
            f"{at}: '{name}' saves {line} %; a saving must be less than 100 %"
            for name, line in table.time_saved.items()
            if any(isinstance(saved, Printed) and saved.high >= 100 for saved in _read_all(line))
        ]
        if (table.speedup or table.time_saved) and table.reference is None:
            problems.append(
                f"{at}: has speed-ups but no reference; set reference to the variant that they are relative to"
            )
    if problems:
        raise UsageError(list(dict.fromkeys(problems)))


def other_setup(setup: PublishedSetup, config: RecordedConfig) -> list[str]:
    """Returns in what a study's configuration differs from the article's, as in `2 steps instead of 50`."""
    workload = config.workload
    pairs = {
        "model": (config.model.name, setup.model),
        "scheduler": (config.scheduler.class_name, setup.scheduler),
        "steps": (workload.steps, setup.steps),
        "size": (config.shapes[0].size, setup.size),
        "images per call": (config.images_per_call, setup.images),
    }
    return [f"{what} {here} instead of {there}" for what, (here, there) in pairs.items() if there not in (None, here)]
