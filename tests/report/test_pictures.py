"""The pictures of a study, which stand alone: contact sheets and plots; and the list of all reports."""

from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from sdopt.analysis.summary import Summary, summary_of
from sdopt.contract import Contract
from sdopt.report import catalog
from sdopt.report.catalog import REPORTS, Report, write_reports
from sdopt.report.contact_sheet import broken_sheet, comparison_sheet
from sdopt.report.plots import stages_picture, study_plot, tradeoff_picture
from sdopt.results.comparisons import Interval
from sdopt.results.records import StudyResult
from sdopt.results.scores import BrokenImage, Score
from sdopt.results.verdicts import Judgement, Verdict
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
        result.comparisons = [edge for edge in result.comparisons if edge.candidate != "bfloat16"]
        sheet = opened(comparison_sheet(summary_of(result), finished.folder))
        assert whole[0] - sheet.size[0] == _CELL
        assert whole[1] - sheet.size[1] == 2 * 2 * _CELL

    def test_the_second_row_is_the_amplified_difference_to_the_reference(
        self, finished: Finished, result: StudyResult, tmp_path: Path
    ) -> None:
        for name, level in (("baseline", 100), ("bfloat16", 103), ("batches of four", 140)):
            result.variant(name).images = result.variant(name).images[:1]
            record = result.variant(name).images[0]
            record.path = f"{name}.png"
            Image.new("RGB", (8, 8), (level, 100, 100)).save(tmp_path / record.path)
        sheet = opened(comparison_sheet(summary_of(result), tmp_path))
        found = {
            sheet.getpixel((150 + column * _CELL + 80, row))
            for column in (1, 2)
            for row in range(_CELL, sheet.height - 100)
        }
        assert {(3 * 16, 0, 0), (255, 0, 0)} <= found

    def test_the_difference_is_that_to_the_reference_of_the_figures_below(
        self, result: StudyResult, tmp_path: Path
    ) -> None:
        half, four = result.comparisons[:2]
        four.reference = half.candidate
        for name, level in (("baseline", 100), (half.candidate, 140), (four.candidate, 143)):
            result.variant(name).images = result.variant(name).images[:1]
            record = result.variant(name).images[0]
            record.path = f"{name}.png"
            Image.new("RGB", (8, 8), (level, 100, 100)).save(tmp_path / record.path)
        sheet = opened(comparison_sheet(summary_of(result), tmp_path))
        last = {sheet.getpixel((150 + 2 * _CELL + 80, row)) for row in range(_CELL, sheet.height - 100)}
        assert (3 * 16, 0, 0) in last
        assert (255, 0, 0) not in last

    def test_a_long_name_is_not_cut(self, finished: Finished, result: StudyResult) -> None:
        before = opened(comparison_sheet(summary_of(result), finished.folder)).height
        after = opened(
            comparison_sheet(summary_of(renamed(result, "bfloat16", "precision=" + "b" * 200)), finished.folder)
        ).height
        assert after >= before + 5 * 17

    def test_without_images_there_is_none(self, result: StudyResult, tmp_path: Path) -> None:
        for row in result.variants:
            row.images = []
        assert comparison_sheet(summary_of(result), tmp_path) is None
        assert list(tmp_path.iterdir()) == []

    def test_broken_images_are_shown_beside_the_baselines(self, finished: Finished, result: StudyResult) -> None:
        assert broken_sheet(result, finished.folder) is None
        variant = result.variant("bfloat16")
        shown = variant.images[1].path
        variant.trips = [
            BrokenImage("black", shown, "all of it"),
            BrokenImage("clipping", shown, "too"),
            BrokenImage("alike", "", "all images"),
        ]
        sheet = opened(broken_sheet(result, finished.folder))
        assert sheet.size == (150 + 2 * _CELL, 27 + _CELL)
        for left, name in ((150, "baseline"), (150 + _CELL, "bfloat16")):
            with Image.open(finished.folder / result.variant(name).images[1].path) as image:
                expected = image.convert("RGB").resize((160, 160), Image.Resampling.NEAREST)
            assert sheet.crop((left, 27, left + 160, 187)).tobytes() == expected.tobytes()


class TestPlots:
    @pytest.mark.parametrize("design", ["explicit", "cumulative"])
    def test_a_plot_of_the_comparisons(self, result: StudyResult, design: str) -> None:
        result.design = design
        picture = opened(
            study_plot(summary_of(renamed(result, "bfloat16", "$cost$ [of] |it| <b> %d 'quoted' \"twice\"")))
        )
        assert len(set(picture.getdata())) > 10

    def test_a_gain_a_loss_and_what_is_neither_have_colours_of_their_own(self, result: StudyResult) -> None:
        shown = {}
        for name, interval in (("gain", Interval(2.0, 1.8, 2.2)), ("loss", Interval(0.5, 0.4, 0.6)), ("", Interval(1))):
            for edge in result.comparisons:
                edge.shapes[0].speedup, edge.shapes[0].floor = interval, 1.01
            picture = opened(study_plot(summary_of(result)))
            # Without the legend, which has all of them.
            shown[name] = set(picture.crop((0, 110, *picture.size)).getdata())
        blue, orange = (0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)
        assert [blue in shown[name] for name in ("gain", "loss", "")] == [True, False, False]
        assert [orange in shown[name] for name in ("gain", "loss", "")] == [False, True, False]

    def test_speed_against_quality_and_the_stages(self, result: StudyResult) -> None:
        assert tradeoff_picture(summary_of(result)) is None
        for edge in result.comparisons:
            edge.quality["psnr_db"] = Score(30.0)
        assert opened(tradeoff_picture(summary_of(result))).width == opened(stages_picture(summary_of(result))).width

    def test_without_figures_there_is_none(self, result: StudyResult) -> None:
        for edge in result.comparisons:
            edge.shapes[0].speedup = None
        for row in result.variants:
            row.measurements = []
        assert (
            study_plot(summary_of(result))
            is tradeoff_picture(summary_of(result))
            is stages_picture(summary_of(result))
            is None
        )


class TestCatalog:
    def test_every_report_has_a_file_of_its_own(self) -> None:
        assert len({report.file for report in REPORTS}) == len({report.name for report in REPORTS}) == len(REPORTS)

    def test_a_run_has_those_that_show_something(self, finished: Finished) -> None:
        there = {report.file for report in REPORTS if (finished.folder / report.file).is_file()}
        assert there == {
            *("table.md", "table.csv", "report.html", "report.md"),
            *("plot.png", "stages.png", "comparison.png"),
        }
        assert f"report: {finished.folder / 'report.html'}" in finished.out

    def test_of_a_judged_study_the_verdicts_too(self, finished: Finished, result: StudyResult) -> None:
        result.judgements = [Judgement("bfloat16", "baseline", "it", Contract.LOSSY, Verdict.PASS, [])]
        summary = summary_of(result)
        contents = {report.file: report.render(summary, finished.folder) for report in REPORTS if not report.is_picture}
        verdicts = {"verdicts.md", "verdicts.json", "verdicts.xml"}
        assert {file for file, content in contents.items() if content} == {
            "table.md",
            "table.csv",
            "report.html",
            "report.md",
            *verdicts,
        }

    def test_one_that_cannot_be_made_keeps_no_other_from_being_written(
        self, result: StudyResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(_summary: Summary, _folder: Path) -> bytes:
            raise ValueError("no ink")

        mine = Report("mine", "mine.txt", lambda summary, _: summary.result.name.encode())
        nothing = Report("nothing", "nothing.txt", lambda *_: None)
        monkeypatch.setattr(catalog, "REPORTS", (Report("broken", "broken.txt", broken), nothing, mine))
        found = [(report.name, str(error or "")) for report, error in write_reports(summary_of(result), tmp_path)]
        assert found == [("broken", "no ink"), ("mine", "")]
        assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
