"""The pictures of a study, which stand alone: contact sheets and plots; and the list of all reports."""

from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from sdopt.record.records import StudyResult
from sdopt.report import catalog
from sdopt.report.blocks import Page
from sdopt.report.catalog import (
    HTML,
    MARKDOWN,
    REPORTS,
    Rendering,
    ReportFile,
    write_reports,
)
from sdopt.report.charts.comparisons import study_plot
from sdopt.report.charts.times import stages_picture
from sdopt.report.charts.tradeoff import tradeoff_picture
from sdopt.report.contact_sheet import comparison_sheet
from sdopt.report.summary import Summary, summary_of
from tests.command import Finished
from tests.report.test_table import renamed

_CELL = 168
"""Of a sheet, with the gap beside it."""


def opened(content: bytes | None) -> Image.Image:
    assert content is not None
    return Image.open(BytesIO(content)).convert("RGB")


class TestSheets:
    def test_has_a_column_for_each_variant_and_two_rows_for_each_prompt(
        self, finished: Finished, result: StudyResult
    ) -> None:
        with Image.open(finished.folder / "comparison.png") as picture:
            whole = picture.size
        result.variants = [row for row in result.variants if row.name != "bfloat16"]
        result.variant("baseline").images = result.variant("baseline").images[:2]
        result.comparisons = [
            edge for edge in result.comparisons if edge.candidate != "bfloat16"
        ]
        sheet = opened(comparison_sheet(summary_of(result), finished.folder))
        assert whole[0] - sheet.size[0] == _CELL
        assert whole[1] - sheet.size[1] == 2 * 2 * _CELL

    def test_the_second_row_is_the_amplified_difference_to_the_reference(
        self, finished: Finished, result: StudyResult, tmp_path: Path
    ) -> None:
        for name, level in (
            ("baseline", 100),
            ("bfloat16", 103),
            ("batches of four", 140),
        ):
            result.variant(name).images = result.variant(name).images[:1]
            record = result.variant(name).images[0]
            record.path = f"{name}.png"
            record.digest = ""
            Image.new("RGB", (8, 8), (level, 100, 100)).save(tmp_path / record.path)
        sheet = opened(comparison_sheet(summary_of(result), tmp_path))
        found = {
            sheet.getpixel((150 + column * _CELL + 80, row))
            for column in (1, 2)
            for row in range(_CELL, sheet.height - 100)
        }
        assert {(3 * 16, 0, 0), (255, 0, 0)} <= found
        # What differs is the noise, and says nothing of the option.
        result.variant("batches of four").images[0].seed += 3
        sheet = opened(comparison_sheet(summary_of(result), tmp_path))
        column = {
            sheet.getpixel((150 + 2 * _CELL + 80, row))
            for row in range(_CELL, sheet.height - 100)
        }
        assert (255, 0, 0) not in column


@pytest.mark.parametrize("design", ["explicit", "cumulative"])
def test_a_plot_of_the_comparisons_where_there_are_figures(
    result: StudyResult, design: str
) -> None:
    result.design = design
    named = renamed(result, "bfloat16", "$cost$ [of] |it| <b> %d 'quoted' \"twice\"")
    assert len(set(opened(study_plot(summary_of(named))).getdata())) > 10
    for edge in result.comparisons:
        edge.shapes[0].speedup = None
    for row in result.variants:
        row.measurements = []
    assert {
        plot(summary_of(result))
        for plot in (study_plot, tradeoff_picture, stages_picture)
    } == {None}


class TestCatalog:
    def test_a_run_has_those_that_show_something(self, finished: Finished) -> None:
        there = {
            report.file
            for report in REPORTS
            if (finished.folder / report.file).is_file()
        }
        assert there == {
            *("table.md", "table.csv", "report.html", "report.md"),
            *("plot.png", "stages.png", "comparison.png"),
        }
        assert f"report: {finished.folder / 'report.html'}" in finished.out

    def test_one_that_cannot_be_made_keeps_no_other_from_being_written(
        self, result: StudyResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(_: Rendering) -> bytes:
            raise ValueError("no ink")

        mine = ReportFile(
            "mine", "mine.txt", lambda of: of.summary.result.name.encode()
        )
        nothing = ReportFile("nothing", "nothing.txt", lambda _: None)
        monkeypatch.setattr(
            catalog,
            "REPORTS",
            (ReportFile("broken", "broken.txt", broken), nothing, mine),
        )
        found = [
            (report.name, str(error or ""))
            for report, _, error in write_reports(summary_of(result), tmp_path)
        ]
        assert found == [("broken", "no ink"), ("mine", "")]
        assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]

    def test_the_page_and_its_markdown_are_made_of_one(
        self, result: StudyResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = []

        def page(summary: Summary, folder: Path) -> Page:
            made.append(folder)
            return Page(summary.result.name, [], [])

        monkeypatch.setattr("sdopt.report.catalog.study_page", page)
        pages = [report for report in REPORTS if report.file in (HTML, MARKDOWN)]
        monkeypatch.setattr(catalog, "REPORTS", pages)
        written = list(write_reports(summary_of(result), tmp_path))
        assert [content is not None for _, content, _ in written] == [True, True]
        assert made == [tmp_path]
