"""The tables of a study, in a terminal and as Markdown."""

import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from sdopt.record.comparisons import Comparison, Interval, ShapeRatios
from sdopt.record.files import read_result
from sdopt.record.records import Schedule, Status, StudyResult
from sdopt.record.scores import Score
from sdopt.report.answer import answer_shown
from sdopt.report.blocks import Block, Cell, Notes, Table
from sdopt.report.catalog import markdown_table
from sdopt.report.charts.comparisons import forest
from sdopt.report.markdown import code_block, written
from sdopt.report.outcome import load_result
from sdopt.report.page.sections import text_sections
from sdopt.report.summary import summary_of
from sdopt.report.tables import quality_columns, quality_heading, quality_table, ranking
from sdopt.report.terminal import sections_shown, shown
from sdopt.tracking.contents import study_tags
from tests.command import ROOT
from tests.records import column, retime

NAMES = [
    "[bold]markup[/bold]",
    "[/]",
    "a|b",
    "<b>&amp;</b>",
    "with\na line",
    "back\\slash",
    "[link=x",
    "a" * 90,
]


def printed(result: StudyResult, width: int) -> str:
    text = StringIO()
    Console(file=text, width=width).print(answer_shown(summary_of(result), width))
    return text.getvalue()


def test_a_narrow_terminal_cuts_no_reason() -> None:
    result = read_result(ROOT / "outputs/records/amd-epyc/quickstart")
    failed = result.candidates[0]
    failed.status, failed.reason = Status.FAILED, f"{'it broke, ' * 40}at the end"
    lines = printed(result, 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert "at the end" in " ".join(map(str.strip, lines))


def rendered(result: StudyResult, width: int) -> str:
    """All sections, as `sdopt show --all` prints them."""
    text = StringIO()
    Console(file=text, width=width).print(
        sections_shown(list(text_sections(summary_of(result))), width)
    )
    return text.getvalue()


def renamed(result: StudyResult, old: str, new: str) -> StudyResult:
    result.variant(old).name = new
    for edge in result.comparisons:
        edge.candidate = new if edge.candidate == old else edge.candidate
        edge.reference = new if edge.reference == old else edge.reference
    return result


def cells(markdown: str) -> list[list[str]]:
    return [
        re.split(r"(?<!\\)\|", line)[1:-1]
        for line in markdown.splitlines()
        if line.startswith("|")
    ]


class TestRanking:
    @pytest.mark.parametrize(
        ("seconds", "shown"),
        [
            (0.00123, "1.23 ms"),
            (0.0123, "12.3 ms"),
            (0.123, "123 ms"),
            (1.234, "1.23 s"),
            (123.4, "123 s"),
        ],
    )
    def test_a_time_has_three_digits_and_a_unit(
        self, result: StudyResult, seconds: float, shown: str
    ) -> None:
        baseline = result.variant("baseline")
        baseline.measurements = baseline.measurements[:1]
        retime(baseline.measurements[0].shapes[0], [seconds])
        result.comparisons = []
        assert shown in [
            cell.figure
            for cell in column(ranking(summary_of(result)), "time per image")
        ]

    def test_a_reason_stands_where_there_is_no_figure(
        self, result: StudyResult
    ) -> None:
        summary = summary_of(result)
        table = ranking(summary)
        row = dict(
            zip(
                table.headings,
                next(row for row in table.cells if row[0].figure == "TensorFloat-32"),
                strict=True,
            )
        )
        assert (
            str(row["speed"]),
            str(row["speed-up per image"]),
            str(row["time per image"]),
        ) == ("skipped", "", "")
        assert "needs a CUDA device" in next(
            row.because for row in summary.rows if row.name == "TensorFloat-32"
        )


class TestTerminal:
    @pytest.mark.parametrize("name", NAMES)
    def test_names_are_shown_as_they_are_and_break_no_row(
        self, result: StudyResult, name: str
    ) -> None:
        result.comparisons[0].shapes[0].speedup = Interval(9.0, 8.0, 10.0)
        result.variant("TensorFloat-32").reason = f"it | broke <here> {name}"
        text = printed(renamed(result, "bfloat16", name), 80)
        assert "".join(name.split()) in "".join(text.split())
        rows = cells(markdown_table(summary_of(result)))
        assert len(rows) == 2 + 4
        assert len({len(row) for row in rows}) == 1
        assert not any("<" in cell for row in rows for cell in row)

    @pytest.mark.parametrize("width", [60, 80, 120, 240])
    def test_the_first_line_is_the_answer_and_each_row_is_one_line(
        self, result: StudyResult, width: int
    ) -> None:
        text, summary = printed(result, width), summary_of(result)
        lines = text.splitlines()
        assert max(map(len, lines)) <= width
        assert " ".join(text.split()).startswith(summary.sentence)
        # One screen; a narrower terminal wraps what this one holds.
        assert len(lines) <= 30 * max(1, 80 / width)
        head = next(
            number for number, line in enumerate(lines) if line.startswith("variant ")
        )
        for row in summary.rows:
            [line] = [
                line
                for line in lines[head + 1 :]
                if line.startswith(f"{row.name[:14]}") and "…: " not in line
            ]
            assert row.speed is None or width < 80 or str(row.speed) in line

    def test_what_a_narrow_one_leaves_out_are_details_and_then_columns(self) -> None:
        row = [Cell("a"), Cell("1.00×", "[0.90, 1.10]"), Cell("x" * 20)]
        table = Table(
            ("name", "figure", "needless"), [row], (), ("figure",), ("needless",)
        )

        def at(width: int) -> str:
            text = StringIO()
            blocks: list[Block] = [table]
            Console(file=text, width=width).print(shown(blocks, width))
            return text.getvalue()

        assert "[0.90, 1.10]" in at(80)
        assert "[0.90" not in at(36)
        assert "xxx" in at(36)
        assert "xxx" not in at(20)
        assert "1.00×" in at(20)

    def test_says_the_differences_of_all_sessions(self, result: StudyResult) -> None:
        """A study that was resumed has one for each set of sessions."""
        edge, other, *_ = [
            edge for edge in result.comparisons if edge.shapes[0].speedup
        ]
        for each in result.comparisons:
            each.shapes[0].floor = 1.02
        edge.shapes[0].speedup = other.shapes[0].speedup = Interval(1.05, 1.04, 1.06)
        assert "differed by 2.0 %;" in " ".join(printed(result, 100).split())
        assert "rect" in str(forest(summary_of(result)))
        edge.shapes[0].floor = 1.08
        summary = summary_of(result)
        verdicts = {row.name: str(row.speed) for row in summary.rows}
        assert (verdicts[edge.candidate], verdicts[other.candidate]) == (
            "too close to call",
            "faster",
        )
        said = " ".join(printed(result, 100).split())
        assert "differed by 2.0 to 8.0 %, by the sessions of a comparison;" in said
        assert "rect" not in str(forest(summary)), "no band fits both"
        assert study_tags(summary)["sdopt.floor"] == "1.0200 to 1.0800"


def test_notes_and_code_of_others_are_no_markup() -> None:
    text = written([Notes(["![x](https://x/x.png) <img src=x> a_b, `a_b`, *_b_*"])])
    assert text.endswith(
        "- !\\[x\\](https://x/x.png) &lt;img src=x&gt; a_b, `a_b`, \\*\\_b\\_\\*\n"
    )
    assert (
        code_block(["pipe()", "```", "<img src=x>"], "python")
        == "````python\npipe()\n```\n<img src=x>\n````\n"
    )


class TestQuality:
    def test_headings_say_the_unit_and_the_better_way(
        self, result: StudyResult
    ) -> None:
        assert quality_heading("clip_score_emojiclip") == "clip_score_emojiclip ↑"
        assert quality_heading("psnr_db") == "psnr (dB) ↑"
        assert quality_heading("cmmd_emojiclip") == "cmmd_emojiclip ↓"
        assert quality_heading("brightness") == "brightness"
        assert (
            quality_heading("a_metric_of_another_version")
            == "a_metric_of_another_version"
        )
        for row in result.variants[:2]:
            row.quality["clip_score_emojiclip"] = Score(25.0)
        assert (
            "↑ more is better, ↓ less is better. clip_score: 100 · cosine"
            in " ".join(rendered(result, 120).split())
        )

    def test_columns_are_in_the_order_of_reading_and_leave_out_what_is_not_tabulated(
        self, result: StudyResult
    ) -> None:
        for row in result.variants[:2]:
            row.quality = {
                "contrast": Score(0.1),
                "cmmd_emojiclip": Score(1.0),
                "clip_score_emojiclip": Score(25.0),
            }
        result.comparisons[0].quality = {
            "mse": Score(0.1),
            "ssim": Score(0.9),
            "psnr_db": Score(40.0),
        }
        assert quality_columns(result) == [
            "psnr_db",
            "ssim",
            "clip_score_emojiclip",
            "cmmd_emojiclip",
            "broken",
        ]

    def test_a_comparison_with_another_reference_has_a_row_that_names_it(
        self, result: StudyResult
    ) -> None:
        edge = result.comparisons[0]
        edge.quality = {"psnr_db": Score(40.0)}
        again = Comparison(
            "bfloat16",
            "batches of four",
            "nothing",
            [ShapeRatios(speedup=Interval(2.0), floor=1.1)],
        )
        again.quality = {
            "psnr_db": Score(20.0)
        }  # to whose images its own are less alike
        result.comparisons.append(again)
        table = quality_table(summary_of(result))
        assert table is not None
        shown = {str(row[0]): str(row[1]) for row in table.rows}
        assert shown["bfloat16"] == "40"
        assert shown["bfloat16 against batches of four"] == "20"

    def test_two_processes_have_no_intervals(self, result: StudyResult) -> None:
        for row in result.variants:
            row.measurements = [
                measurement
                for measurement in row.measurements
                if measurement.replicate < 2
            ]
        assert "no intervals (needs protocol.replicates=3 or more)" in markdown_table(
            summary_of(result)
        )
        result.schedule = Schedule("blocks", "memory")
        result.sessions = [replace(result.sessions[0], schedule="blocks")]
        note = "Measured in blocks (memory), 6 rounds, 2 processes per variant, no intervals (needs protocol"
        assert note in markdown_table(summary_of(result))
        assert "two-sided 95 %" not in markdown_table(summary_of(result))


def test_a_result_is_short_in_a_notebook_and_has_five_columns_for_a_paper() -> None:
    result = load_result(ROOT / "outputs" / "records" / "amd-epyc" / "quickstart")
    assert all(len(repr(row)) < 200 for row in result.variants)
    assert len(repr(result)) < 300
    table = result.paper_table()
    assert list(table.columns) == [
        "variant",
        "speed-up",
        "time (s)",
        "memory (GiB)",
        "images",
    ]
    assert table["speed-up"][0] == "1.92 [1.79, 2.05]"
    assert "baseline" in set(table["variant"])
