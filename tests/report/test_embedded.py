"""Tables of results within a Markdown page."""

import shutil
from pathlib import Path

import pytest

from sdopt.apps.loadtest.record import embedded
from sdopt.record.records import StudyResult
from sdopt.report.embedded import embed
from sdopt.report.tables import ranking
from sdopt.statistics.summary import summary_of
from tests.command import ROOT, Finished, refused, sdopt

END = "<!-- sdopt:end -->"


@pytest.fixture
def page(finished: Finished, tmp_path: Path) -> Path:
    """A page beside the finished study."""
    (tmp_path / "run").mkdir()
    shutil.copy(finished.folder / "result.json", tmp_path / "run")
    page = tmp_path / "PAGE.md"
    page.write_text(f"# Mine\n\n<!-- sdopt:table run -->\n9.99×\n{END}\n\nBetween.\n<!-- sdopt:answer run -->\n{END}\n")
    return page


def test_a_block_holds_the_figures_of_its_result_and_nothing_else_changes(page: Path, result: StudyResult) -> None:
    text = embed(page, {})
    assert "9.99×" not in text
    for row in ranking(summary_of(result)).cells:
        assert f"| {' | '.join(map(str, row))} |" in text
    assert text.startswith("# Mine\n\n<!-- sdopt:table run -->\n")
    assert "\n> " in text[text.index("\nBetween.\n") :]
    page.write_text(text)
    assert embed(page, {}) == text
    page.write_text(text, newline="\r\n")  # as editors on Windows write it
    assert embed(page, {}).encode() == page.read_bytes()


def test_the_command_writes_and_checks(page: Path) -> None:
    arguments = (page.parent, "report", "--readme", "PAGE.md")
    before = page.read_text()
    stale = sdopt(*arguments, "--check")
    assert (stale.code, page.read_text()) == (2, before)
    assert "run `sdopt report --readme PAGE.md`" in stale.err
    assert sdopt(*arguments).code == 0
    assert (sdopt(*arguments, "--check").code, page.read_text() != before) == (0, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "has no block"),
        ("<!-- sdopt:table run -->", f"PAGE.md:1: <!-- sdopt:table run --> has no {END}"),
        (f"\n<!-- sdopt:table run -->\n<!-- sdopt:table run -->\n{END}", "PAGE.md:2:"),
        (f"<!-- sdopt:tabel run -->\n{END}", "is not <!-- sdopt:table FOLDER -->"),
        (f"<!-- sdopt:table -->\n{END}", "is not <!-- sdopt:table FOLDER -->"),
        (f"<!-- sdopt:table nowhere -->\n{END}", "nowhere"),
    ],
)
def test_a_page_that_is_wrong_is_named_with_its_line(page: Path, text: str, message: str) -> None:
    page.write_text(text)
    assert message in refused(page.parent, "report", "--readme", "PAGE.md").err
    assert page.read_text() == text


@pytest.mark.parametrize("name", ["README.md", "sdopt/apps/serving/README.md"])
def test_the_pages_are_current(name: str) -> None:
    page = ROOT / name
    assert embed(page, {"load": embedded}) == page.read_text(encoding="utf-8"), f"run `sdopt report --readme {name}`"
