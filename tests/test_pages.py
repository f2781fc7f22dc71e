"""Figures of records within the repository's pages."""

import shutil
from pathlib import Path

import pytest

from sdopt.record.records import StudyResult
from sdopt.report.summary import summary_of
from sdopt.report.tables import ranking
from tests.command import ROOT, Finished
from tests.pages import NOT_MEASURED, PAGES, RULINGS, current, filled

END = "<!-- sdopt:end -->"


@pytest.fixture
def page(finished: Finished, tmp_path: Path) -> Path:
    """A page beside the finished study."""
    (tmp_path / "run").mkdir()
    shutil.copy(finished.folder / "result.json", tmp_path / "run")
    page = tmp_path / "PAGE.md"
    page.write_text(
        f"# Mine\n\n<!-- sdopt:table run -->\n9.99×\n{END}\n\nBetween.\n<!-- sdopt:answer run -->\n{END}\n"
    )
    return page


def test_a_block_holds_the_figures_of_its_result_and_nothing_else_changes(
    page: Path, result: StudyResult
) -> None:
    text = filled(page)
    assert "9.99×" not in text
    for row in ranking(summary_of(result)).cells:
        assert f"| {' | '.join(map(str, row))} |" in text
    assert text.startswith("# Mine\n\n<!-- sdopt:table run -->\n")
    assert "\n> " in text[text.index("\nBetween.\n") :]
    page.write_text(text)
    assert filled(page) == text


def test_a_record_that_is_not_there_yet_is_said_to_be_so(page: Path) -> None:
    page.write_text(f"<!-- sdopt:tradeoff later -->\n{END}\n")
    assert NOT_MEASURED in filled(page)
    (page.parent / "run").rename(page.parent / "later")
    assert "](later/tradeoff.png)" in filled(page)


@pytest.mark.parametrize("name", [*PAGES, *RULINGS])
def test_the_pages_are_current(name: str) -> None:
    assert current(name) == (ROOT / name).read_text(encoding="utf-8"), (
        "run `python -m tests.pages`"
    )
