"""What a report is made of: sections of blocks, which HTML and Markdown write each in its own way."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from sdopt.report.charts.spec import Spec


@dataclass(frozen=True)
class Prose:
    """Sentences that follow each other; `strong` ones are what the reader came for."""

    text: str
    strong: bool = False


@dataclass(frozen=True)
class Notes:
    """Short remarks, a line each."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Code:
    """Lines to copy, with what they do."""

    title: str
    lines: Sequence[str]


@dataclass(frozen=True)
class Table:
    """A table; `badges` is the number of the column whose cells are verdicts or statuses, if there is one."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    badges: int | None = None


@dataclass(frozen=True)
class Facts:
    """Names and values, a pair a line."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Chart:
    """A plot, with several views if the reader may choose what it shows.

    Attributes:
        views: what a view shows, and its specification.
        choice: what the reader chooses among the views.
        caption: what to see in it.
        legend: what its numbers stand for, with a verdict each.
        file: the picture in the run's folder that shows the same; "" if there is none.
    """

    views: Sequence[tuple[str, Spec]]
    caption: str = ""
    choice: str = ""
    legend: Sequence[tuple[int, str, str]] = ()
    file: str = ""


@dataclass(frozen=True)
class Picture:
    """One image of a variant; `uri` is "" if it is the same as the baseline's."""

    variant: str
    uri: str
    caption: str = ""
    broken: str = ""


@dataclass(frozen=True)
class PromptImages:
    """The images of one prompt: the baseline's, and those of the variants."""

    prompt: str
    baseline: Picture
    variants: Sequence[Picture]


@dataclass(frozen=True)
class Gallery:
    """Images, those that differ most first; `width` is that of an image on the page, in pixels."""

    prompts: Sequence[PromptImages]
    width: int
    pixelated: bool
    caption: str
    file: str = "comparison.png"


@dataclass(frozen=True)
class Fold:
    """Blocks that are shown on request."""

    title: str
    blocks: Sequence["Block"]


Block = Prose | Notes | Code | Table | Facts | Chart | Gallery | Fold


@dataclass(frozen=True)
class Section:
    """A part of a report with a heading; a folded one shows its blocks on request."""

    key: str
    title: str
    blocks: Sequence[Block]
    folded: bool = False


@dataclass(frozen=True)
class Page:
    """A report: of a study, or of several with what comes before them."""

    title: str
    summary: Sequence[tuple[str, str]]
    """Facts below the title: model, device, date."""
    sections: Sequence[Section]
    studies: Sequence["Page"] = field(default=())
