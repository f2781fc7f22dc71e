"""The parts of a report: sections of blocks, which are written as HTML and as Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from sdopt.report.charts.spec import Spec


@dataclass(frozen=True)
class Prose:
    """A paragraph of sentences; a `strong` one holds the main result."""

    text: str
    strong: bool = False


@dataclass(frozen=True)
class Notes:
    """Short remarks, a line each."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Code:
    """Lines to copy, with their purpose."""

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
        views: name and specification of each view.
        choice: label of the choice among the views.
        caption: explains the plot.
        legend: the meaning of its numbers, with a verdict each.
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
