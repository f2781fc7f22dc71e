"""The figures of an article beside those measured, as a reader sees them."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from sdopt.report.catalog import REPORTS
from sdopt.report.page.blocks import Fold, Table
from sdopt.report.page.html import html_page
from sdopt.report.page.sections import study_page
from sdopt.report.published import HEADINGS, published_json, published_markdown, published_tables
from sdopt.report.table import terminal_table
from sdopt.results.comparisons import Interval
from sdopt.results.records import StudyResult

_PAGES = {"published.md", "published.json"}


@pytest.fixture
def published(result: StudyResult) -> StudyResult:
    """The finished study with figures of an article on two cards."""
    result.config.study["published"] = {
        "article": "A study (A. Author)",
        "gpu": "A100",
        "setup": {"model": "emoji"},
        "tables": [
            {
                "place": "Table 1",
                "gpus": ["T4", "A100"],
                "time": {"baseline": "29.8 8.0", "bfloat16": "16.4 4.0", "TensorFloat-32": "20 5"},
            }
        ],
    }
    result.comparisons[0].shapes[0].speedup = Interval(2.5, 2.2, 2.8)
    return result


def shown(result: StudyResult, width: int) -> str:
    text = StringIO()
    Console(file=text, width=width).print(terminal_table(result, width))
    return text.getvalue()


@pytest.mark.parametrize("width", [80, 160])
def test_a_terminal_has_one_card_and_names_the_others(published: StudyResult, width: int) -> None:
    table = shown(published, width)
    below = " ".join(table[table.index("published on A100") :].split())
    for part in (
        "2.00×",
        "8.0 s → 4.0 s",
        "2.50× [2.20, 2.80]" if width == 160 else "[2.20, 2.80]",
        "reproduced",
        "not run",
        "figures for T4 too",
        "no figure",
    ):
        assert part in below
    assert "29.8" not in below
    assert all(len(line) <= width for line in table.splitlines())


def test_a_page_has_all_cards_and_every_reason(published: StudyResult) -> None:
    page = published_markdown(published)
    rows = [line for line in page.splitlines() if line.startswith("| bfloat16")]
    assert [row.split(" | ")[4] for row in rows] == ["T4", "A100"]
    assert "reproduced | exceeded" in rows[1]
    assert " ms → " in rows[1].split(" | ")[HEADINGS.index("as measured")]
    assert "TensorFloat-32 needs a CUDA device" in page
    assert "A study (A. Author)" in page


def test_data_has_the_raw_figures(published: StudyResult) -> None:
    content = published_json(published)
    assert content is not None
    data = json.loads(content)
    assert data["article"] == "A study (A. Author)"
    [claim] = [c for c in data["claims"] if c["variant"] == "bfloat16" and c["gpu"] == "A100"]
    assert claim["published"]["value"] == 2
    assert claim["measured"]["high"] == 2.8
    assert claim["ratio"]["estimate"] == pytest.approx(1.25)
    assert claim["verdict"] == "reproduced"
    assert len(claim["amounts"]) == 2


def test_are_reports_of_a_study_with_an_article_alone(result: StudyResult, tmp_path: Path) -> None:
    reports = [report for report in REPORTS if report.file in _PAGES]
    assert len(reports) == 2
    assert [report.render(result, tmp_path) for report in reports] == [None, None]
    assert not published_tables(result, wide=False)
    assert "published" not in shown(result, 80)


def test_the_report_shows_one_card_and_folds_the_others(published: StudyResult, tmp_path: Path) -> None:
    page = study_page(published, tmp_path)
    [section] = [section for section in page.sections if section.key == "published"]
    shown, _, folded = section.blocks
    assert isinstance(shown, Table)
    assert isinstance(folded, Fold)
    assert {row[shown.headings.index("GPU")] for row in shown.rows} == {"A100", ""}
    assert "shape" not in shown.headings, "it is empty"
    [every] = folded.blocks
    assert isinstance(every, Table)
    assert {row[every.headings.index("GPU")] for row in every.rows} == {"T4", "A100", ""}
    cells = [row[every.headings.index("published")] for row in every.rows]
    assert "2.00× (8.0 s → 4.0 s, Table 1)" in cells
    html = html_page(page).decode()
    assert '<span class="figure">2.00×</span> <small>(8.0 s → 4.0 s, Table 1)</small>' in html
    assert '<span class="figure">2.50×</span> <small>[2.20, 2.80] (' in html
