"""The pictures of a study: contact sheets and plots, and the list of all reports."""

from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from sdopt.analysis.figures import Ratio
from sdopt.analysis.measures import SPEEDUP
from sdopt.report import catalog
from sdopt.report.catalog import REPORTS, Report, write_reports
from sdopt.report.contact_sheet import broken_sheet, comparison_sheet
from sdopt.report.plots import Bar, _chained, study_plot
from sdopt.results.records import BrokenImage, Interval, Judgement, StudyResult, Verdict
from tests.command import Finished
from tests.report.test_table import renamed


def opened(content: bytes | None) -> Image.Image:
    assert content is not None
    return Image.open(BytesIO(content)).convert("RGB")


class TestPictures:
    def test_a_sheet_has_a_column_for_each_variant_and_a_row_for_each_prompt(
        self, finished: Finished, result: StudyResult
    ) -> None:
        with Image.open(finished.folder / "comparison.png") as picture:
            whole = picture.size
        result.variants = [row for row in result.variants if row.name != "bfloat16"]
        result.variant("baseline").images = result.variant("baseline").images[:2]
        result.comparisons = [edge for edge in result.comparisons if edge.candidate != "bfloat16"]
        sheet = opened(comparison_sheet(result, finished.folder))
        assert whole[0] - sheet.size[0] == 168
        assert whole[1] - sheet.size[1] == 2 * 168

    def test_without_images_there_is_none(self, result: StudyResult, tmp_path: Path) -> None:
        for row in result.variants:
            row.images = []
        assert comparison_sheet(result, tmp_path) is None
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
        assert sheet.size == (150 + 2 * 168, 50 + 168)
        for left, shown in ((150, "baseline"), (318, "bfloat16")):
            with Image.open(finished.folder / result.variant(shown).images[1].path) as image:
                expected = image.convert("RGB").resize((160, 160), Image.Resampling.NEAREST)
            assert sheet.crop((left, 50, left + 160, 210)).tobytes() == expected.tobytes()

    @pytest.mark.parametrize("design", ["explicit", "cumulative"])
    def test_a_plot_of_the_comparisons(self, result: StudyResult, design: str) -> None:
        result.design = design
        picture = opened(study_plot(renamed(result, "bfloat16", "$cost$ [of] |it|")))
        assert len(set(picture.getdata())) > 10

    def test_a_gain_a_loss_and_what_is_neither_have_colours_of_their_own(self, result: StudyResult) -> None:
        shown = {}
        for name, interval in (("gain", Interval(2.0, 1.8, 2.2)), ("loss", Interval(0.5, 0.4, 0.6)), ("", Interval(1))):
            for edge in result.comparisons:
                edge.speedup, edge.floor = interval, 1.01
            shown[name] = {colour for _, colour in opened(study_plot(result)).getcolors(1 << 20) or []}
        blue, orange = (0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)
        assert [blue in shown[name] for name in ("gain", "loss", "")] == [True, False, False]
        assert [orange in shown[name] for name in ("gain", "loss", "")] == [False, True, False]

    def test_a_waterfall_goes_on_from_step_to_step_by_the_paired_speedups(self) -> None:
        def step(name: str, reference: str, interval: Interval) -> Bar:
            return Bar(name, reference, Ratio(SPEEDUP, interval, 1.0))

        steps = [step("+ a", "baseline", Interval(2.0, 1.8, 2.2)), step("+ b", "+ a", Interval(0.5, 0.4, 0.6))]
        chained = _chained([*steps, step("+ d", "+ c", Interval(3.0))])
        assert [(bar.start, bar.end) for bar in chained] == [(1.0, 2.0), (2.0, 1.0), (1.0, 3.0)]
        assert chained[1].whiskers == (0.8, 1.2)
        assert chained[2].whiskers is None

    def test_without_a_comparison_there_is_none(self, result: StudyResult) -> None:
        for edge in result.comparisons:
            edge.speedup = None
        assert study_plot(result) is None


class TestCatalog:
    def test_every_report_has_a_file_of_its_own(self) -> None:
        assert len({report.file for report in REPORTS}) == len({report.name for report in REPORTS}) == len(REPORTS)

    def test_a_run_has_those_that_show_something(self, finished: Finished) -> None:
        there = {report.file for report in REPORTS if (finished.folder / report.file).is_file()}
        assert there == {"table.md", "plot.png", "comparison.png"}

    def test_of_a_judged_study_the_verdicts_too(self, finished: Finished, result: StudyResult) -> None:
        result.judgements = [Judgement("bfloat16", "baseline", "it", "lossy", Verdict.PASS, [])]
        contents = {report.file: report.render(result, finished.folder) for report in REPORTS if not report.is_picture}
        assert all(contents.values())
        assert set(contents) == {"table.md", "verdicts.md", "verdicts.json", "verdicts.xml"}

    def test_one_that_cannot_be_made_keeps_no_other_from_being_written(
        self, result: StudyResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(_result: StudyResult, _folder: Path) -> bytes:
            raise ValueError("no ink")

        mine = Report("mine", "mine.txt", lambda result, _: result.name.encode())
        nothing = Report("nothing", "nothing.txt", lambda *_: None)
        monkeypatch.setattr(catalog, "REPORTS", (Report("broken", "broken.txt", broken), nothing, mine))
        found = [(report.name, str(error or "")) for report, error in write_reports(result, tmp_path)]
        assert found == [("broken", "no ink"), ("mine", "")]
        assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
