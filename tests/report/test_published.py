"""The figures of an article beside those measured, as a reader sees them."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from sdopt.analysis.summary import summary_of
from sdopt.report.answer import answer_shown
from sdopt.report.blocks import Cell, Fold, Table
from sdopt.report.catalog import REPORTS
from sdopt.report.page.html import html_page
from sdopt.report.page.sections import study_page
from sdopt.report.published import published_json, published_markdown
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


def test_a_terminal_names_the_file_that_has_them(published: StudyResult) -> None:
    text = StringIO()
    Console(file=text, width=120).print(answer_shown(summary_of(published), 120))
    assert "published.md" in text.getvalue()


def test_a_page_has_all_cards_and_every_reason(published: StudyResult) -> None:
    page = published_markdown(summary_of(published))
    rows = [line for line in page.splitlines() if line.startswith("| bfloat16")]
    assert [" T4 " in row for row in rows] == [True, False]
    assert "reproduced | exceeded" in rows[1]
    assert " ms → " in rows[1]
    assert "TensorFloat-32 needs a CUDA device" in page
    assert "A study (A. Author)" in page


def test_data_has_the_raw_figures(published: StudyResult) -> None:
    content = published_json(summary_of(published))
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
    assert [report.render(summary_of(result), tmp_path) for report in reports] == [None, None]


def test_the_report_shows_one_card_and_folds_the_others(published: StudyResult, tmp_path: Path) -> None:
    page = study_page(summary_of(published), tmp_path)
    [section] = [section for section in page.sections if section.key == "published"]
    shown, _, folded = section.blocks
    assert isinstance(shown, Table)
    assert isinstance(folded, Fold)
    assert set(map(str, shown.column("GPU"))) == {"A100", ""}
    assert "shape" not in shown.headings, "it is empty"
    [every] = folded.blocks
    assert isinstance(every, Table)
    assert set(map(str, every.column("GPU"))) == {"T4", "A100", ""}
    assert Cell("2.00×", "8.0 s → 4.0 s, Table 1") in every.column("published")
    html = html_page(page).decode()
    assert '<span class="figure">2.00×</span> <small>8.0 s → 4.0 s, Table 1</small>' in html
    assert '<span class="figure">2.50×</span> <small>[2.20, 2.80], ' in html
