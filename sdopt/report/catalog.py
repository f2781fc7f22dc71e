"""Lists the reports of a study, for all code that writes, announces or logs them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from sdopt.record.files import write_atomically
from sdopt.report.answer import table_blocks
from sdopt.report.blocks import Page
from sdopt.report.charts.comparisons import study_plot
from sdopt.report.charts.times import stages_picture
from sdopt.report.charts.tradeoff import tradeoff_picture
from sdopt.report.contact_sheet import comparison_sheet
from sdopt.report.markdown import markdown_page, written
from sdopt.report.page.html import html_page
from sdopt.report.page.sections import study_page
from sdopt.report.summary import Summary
from sdopt.report.tables import published_blocks, to_csv
from sdopt.report.verdicts import junit, verdict_json, verdict_markdown
from sdopt.statistics.reproduction import claims_of

HTML, MARKDOWN = "report.html", "report.md"


@dataclass(frozen=True)
class ReportFile:
    """A file that is made from a result.

    Attributes:
        name: its content, in a word or two.
        file: its name in the run's folder and among a tracker's artifacts.
        render: makes its content; returns None if the study has nothing to show.
    """

    name: str
    file: str
    render: Callable[["Rendering"], bytes | None]

    @property
    def is_picture(self) -> bool:
        """Whether it is an image, which takes longer to draw than a text."""
        return self.file.endswith(".png")


class Rendering:
    """A study whose reports are made, and the run's folder; the page and its Markdown share what takes time."""

    def __init__(self, summary: Summary, folder: Path) -> None:
        self.summary, self.folder = summary, folder

    @cached_property
    def page(self) -> Page:
        """The page with its images; Markdown links to the pictures beside it."""
        return study_page(self.summary, self.folder)


def _of_verdicts(
    render: Callable[[Summary], bytes],
) -> Callable[[Rendering], bytes | None]:
    return lambda of: render(of.summary) if of.summary.result.judgements else None


def markdown_table(summary: Summary) -> str:
    """Returns the answer, the ranking, and the tables and notes below it, as Markdown."""
    return written(table_blocks(summary))


def published_markdown(summary: Summary) -> str:
    """Returns the figures of an article for all cards beside those measured; "" without an article."""
    blocks = published_blocks(summary.result, claims_of(summary.result))
    return (
        f"## {summary.result.name}: published and measured\n\n{written(blocks)}"
        if blocks
        else ""
    )


REPORTS = (
    ReportFile("table", "table.md", lambda of: markdown_table(of.summary).encode()),
    ReportFile("report", HTML, lambda of: html_page(of.page)),
    ReportFile("report as Markdown", MARKDOWN, lambda of: markdown_page(of.page)),
    ReportFile("table as data", "table.csv", lambda of: to_csv(of.summary).encode()),
    ReportFile("plot", "plot.png", lambda of: study_plot(of.summary)),
    ReportFile(
        "speed against quality",
        "tradeoff.png",
        lambda of: tradeoff_picture(of.summary),
    ),
    ReportFile("time by stage", "stages.png", lambda of: stages_picture(of.summary)),
    ReportFile(
        "images", "comparison.png", lambda of: comparison_sheet(of.summary, of.folder)
    ),
    ReportFile(
        "published figures",
        "published.md",
        lambda of: published_markdown(of.summary).encode() or None,
    ),
    ReportFile(
        "verdicts",
        "verdicts.md",
        _of_verdicts(lambda summary: verdict_markdown(summary).encode()),
    ),
    ReportFile("verdicts as data", "verdicts.json", _of_verdicts(verdict_json)),
    ReportFile("verdicts as JUnit", "verdicts.xml", _of_verdicts(junit)),
)


class RenderedReport(NamedTuple):
    """A report of a study: its content, None if it could not be made, and the error, also one of writing it."""

    report: ReportFile
    content: bytes | None
    error: Exception | None = None


def write_reports(summary: Summary, folder: Path) -> Iterator[RenderedReport]:
    """Writes every report of a study into the run's folder; yields each, also with its error.

    If one report cannot be made, the others are still written.
    """
    rendering = Rendering(summary, folder)
    for report in REPORTS:
        content = None
        try:
            content = report.render(rendering)
            if content is None:
                continue
            write_atomically(folder / report.file, content)
        except Exception as error:
            yield RenderedReport(report, content, error)
        else:
            yield RenderedReport(report, content)
