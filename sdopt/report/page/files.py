"""Writes a report into a folder."""

from pathlib import Path

from sdopt.errors import UnavailableError
from sdopt.record.files import write_atomically
from sdopt.report.blocks import Page
from sdopt.report.markdown import markdown_page
from sdopt.report.page.html import html_page

HTML, MARKDOWN = "report.html", "report.md"


def write_page(page: Page, folder: Path) -> list[Path]:
    """Writes `report.html` and `report.md`; returns their paths. Raises UnavailableError if that is impossible."""
    contents = {HTML: html_page(page), MARKDOWN: markdown_page(page)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            write_atomically(folder / name, content)
    except OSError as error:
        raise UnavailableError(f"{folder}: {error.strerror}; choose another folder with --output") from error
    return [folder / name for name in contents]
