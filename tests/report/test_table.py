"""The tables of a study, in a terminal and as Markdown."""

import re
from io import StringIO

import pytest
from rich.console import Console

from sdopt.analysis.answer import answer_of
from sdopt.report.charts.comparisons import forest
from sdopt.report.markdown import code_block, markdown, markdown_table, sweep_markdown
from sdopt.report.quality import quality_columns, quality_heading, quality_rows
from sdopt.report.rows import rows_of
from sdopt.report.table import answer_group, sweep_table, terminal_table
from sdopt.results.comparisons import Comparison, Interval, ShapeRatios
from sdopt.results.records import Schedule, Status, StudyResult
from sdopt.results.samples import Evidence
from sdopt.results.scores import Score
from sdopt.tracking.projection import study_tags
from tests.records import reconfigure, retime

NAMES = ["[bold]markup[/bold]", "[/]", "a|b", "<b>&amp;</b>", "with\na line", "back\\slash", "[link=x", "a" * 90]


def rendered(result: StudyResult, width: int) -> str:
    text = StringIO()
    Console(file=text, width=width).print(terminal_table(result, width))
    return text.getvalue()


def renamed(result: StudyResult, old: str, new: str) -> StudyResult:
    result.variant(old).name = new
    for edge in result.comparisons:
        edge.candidate = new if edge.candidate == old else edge.candidate
        edge.reference = new if edge.reference == old else edge.reference
    return result


def twice_compared(result: StudyResult) -> None:
    """Compares bfloat16 with another variant too, to whose images its own are less alike."""
    edge = result.comparisons[0]
    edge.quality = {"psnr_db": Score(40.0)}
    again = Comparison("bfloat16", "batches of four", "nothing", shapes=[ShapeRatios(speedup=Interval(2.0), floor=1.1)])
    again.quality = {"psnr_db": Score(20.0)}
    result.comparisons.append(again)


def cells(markdown: str) -> list[list[str]]:
    return [re.split(r"(?<!\\)\|", line)[1:-1] for line in markdown.splitlines() if line.startswith("|")]


class TestRows:
    def test_the_baseline_comes_first_and_each_comparison_has_one(self, result: StudyResult) -> None:
        rows = rows_of(result)
        assert [row.variant for row in rows] == ["baseline", *(edge.candidate for edge in result.comparisons)]
        assert rows[0].speedup == rows[0].reference == ""
        assert all(row.reference == "baseline" for row in rows[1:])

    def test_a_variant_without_a_comparison_comes_last(self, result: StudyResult) -> None:
        result.comparisons = [edge for edge in result.comparisons if edge.candidate != "bfloat16"]
        assert rows_of(result)[-1].variant == "bfloat16"

    def test_a_variant_that_is_compared_twice_has_two(self, result: StudyResult) -> None:
        result.comparisons.append(
            Comparison("bfloat16", "batches of four", "nothing", [ShapeRatios(Interval(2.0), floor=1.1)])
        )
        rows = [row for row in rows_of(result) if row.variant == "bfloat16"]
        assert [row.reference for row in rows] == ["baseline", "batches of four"]
        assert rows[1].speedup == "2.00×"

    @pytest.mark.parametrize(
        ("seconds", "shown"),
        [
            (0.00123, "1.23 ms"),
            (0.0123, "12.3 ms"),
            (0.123, "123 ms"),
            (1.234, "1.23 s"),
            (12.34, "12.3 s"),
            (123.4, "123 s"),
        ],
    )
    def test_latency_has_three_digits_and_a_unit(self, result: StudyResult, seconds: float, shown: str) -> None:
        baseline = result.variant("baseline")
        baseline.measurements = baseline.measurements[:1]
        retime(baseline.measurements[0].shapes[0], [seconds])
        assert rows_of(result)[0].latency == shown

    def test_figures_have_their_intervals(self, result: StudyResult) -> None:
        edge = result.comparisons[0]
        edge.shapes[0].speedup, edge.shapes[0].floor = Interval(1.5, 1.25, 1.75, 0.95, 6), 1.01
        row = rows_of(result)[1]
        assert row.speedup == "1.50× [1.25, 1.75]"
        assert re.fullmatch(r"[\d.]+ m?s \[[\d.]+, [\d.]+\]", row.latency)
        assert re.fullmatch(r"\d+ MiB \([\d.]+×\)", row.memory)

    @pytest.mark.parametrize(("estimate", "marked"), [(1.05, True), (0.96, True), (1.2, False), (0.8, False)])
    def test_what_is_within_the_floor_is_marked(self, result: StudyResult, estimate: float, marked: bool) -> None:
        edge = result.comparisons[0]
        edge.shapes[0].speedup, edge.shapes[0].floor = Interval(estimate), 1.06
        assert rows_of(result)[1].speedup.startswith("≈") is marked

    def test_a_reason_stands_where_there_is_no_figure(self, result: StudyResult) -> None:
        [row] = [row for row in rows_of(result) if row.variant == "TensorFloat-32"]
        assert (row.latency, row.speedup, row.memory) == ("", "", "")
        assert "needs a CUDA device" in row.evidence

    def test_the_evidence_is_that_of_the_credited_option(self, result: StudyResult) -> None:
        result.variant("bfloat16").measurements[0].shapes[0].evidence = [
            Evidence("precision", "bf16", True, "products in bfloat16"),
            Evidence("attention", "default", True, "some kernel"),
        ]
        assert rows_of(result)[1].evidence == "products in bfloat16"


class TestTerminal:
    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("width", [80, 200])
    def test_names_are_shown_as_they_are(self, result: StudyResult, name: str, width: int) -> None:
        result.name = name
        text = rendered(renamed(result, "bfloat16", name), width)
        wanted = "".join(name.split())
        assert wanted in "".join(re.sub(r"[─━│]", "", text).split()) or all(
            text.count(letter) >= name.count(letter) for letter in set(name) - {"\n"}
        )
        assert name.split(maxsplit=1)[0][:12] in text

    @pytest.mark.parametrize("width", [80, 100, 129, 130, 160, 240])
    def test_fits_any_terminal_and_keeps_every_figure(self, result: StudyResult, width: int) -> None:
        text = rendered(result, width)
        assert max(map(len, text.splitlines())) <= width
        shown = "".join(text.split())
        for row in rows_of(result):
            for figure in (row.latency, row.speedup, row.memory):
                for part in figure.replace("[", " ").replace("(", " ").split("  "):
                    assert "".join(part.split()) in shown, part
            assert "".join(row.evidence.split())[:20] in shown

    def test_a_narrow_terminal_keeps_the_last_column_beside_several_references(self, result: StudyResult) -> None:
        renamed(result, "batches of four", "+ memory=vae_slicing")
        result.comparisons[0].reference = "+ memory=vae_slicing"
        text = rendered(result, 80)
        assert max(map(len, text.splitlines())) <= 80
        assert "memory" in text.splitlines()[3]
        row = next(line for line in text.splitlines() if line.startswith("  + memory=vae_slicing"))
        assert "MiB" in row
        assert "\n   against baseline " in text
        assert "\n   against + " in text

    def test_the_title_says_what_was_measured_and_with_what(self, result: StudyResult) -> None:
        text = rendered(result, 80)
        assert text.startswith("shared: emoji 32×32, 2 steps (DDIM), batch 1\n")
        for package in ("torch", "diffusers"):
            assert f"{package} {result.environment.packages[package]}" in text

    @pytest.mark.parametrize("width", [80, 160])
    def test_the_answer_has_a_verdict_and_a_reason_for_each_option(self, result: StudyResult, width: int) -> None:
        stream = StringIO()
        Console(file=stream, width=width).print(answer_group(result))
        assert max(map(len, stream.getvalue().splitlines())) <= width
        said = " ".join(stream.getvalue().split())
        answer = answer_of(result)
        assert f"Answer: {answer.sentence}" in said
        for option in answer.options:
            assert f"{option.worth} {option.option}" in said
            assert option.because[:30] in said
        assert "images were not judged" in said

    def test_says_the_floor_the_rounds_and_which_memory(self, result: StudyResult) -> None:
        text = " ".join(rendered(result, 100).split())
        assert "A/A floor: two identical baselines differed by" in text
        assert "6 interleaved rounds, 3 processes per variant, two-sided 95 % intervals" in text
        assert "peak resident set of the process and its child processes during a call" in text

    def test_says_the_floors_by_which_speedups_are_marked(self, result: StudyResult) -> None:
        """A study that was resumed has one for each set of sessions."""
        edge, other, *_ = [edge for edge in result.comparisons if edge.shapes[0].speedup]
        for each in result.comparisons:
            each.shapes[0].floor = 1.02
        edge.shapes[0].speedup = other.shapes[0].speedup = Interval(1.05, 1.04, 1.06)
        assert "differed by 2.0 %; ≈ marks" in " ".join(rendered(result, 100).split())
        assert "A/A floor" in str(forest(result))
        edge.shapes[0].floor = 1.08
        shown = {row.variant: row.speedup for row in rows_of(result)}
        assert (shown[edge.candidate][0], shown[other.candidate][0]) == ("≈", "1")
        said = " ".join(rendered(result, 100).split())
        assert "differed by 2.0 to 8.0 %, by the sessions of a comparison; ≈ marks" in said
        assert "A/A floor" not in str(forest(result)), "no band fits both"
        assert study_tags(result)["sdopt.floor"] == "1.0200 to 1.0800"

    def test_says_what_not_engaged_means_where_it_happens(self, result: StudyResult) -> None:
        assert "not_engaged" not in rendered(result, 100)
        result.variant("bfloat16").status = Status.NOT_ENGAGED
        assert "its figures are not credited to the option" in " ".join(rendered(result, 100).split())

    def test_of_a_sweep(self, result: StudyResult) -> None:
        rows = [(str(number), row) for number, row in enumerate(rows_of(result))]
        text = StringIO()
        Console(file=text, width=100).print(sweep_table(rows, 100))
        assert "sweep of 5 jobs" in text.getvalue()
        assert "in the same job" in text.getvalue()


class TestMarkdown:
    @pytest.mark.parametrize("name", NAMES)
    def test_every_row_has_the_same_cells_whatever_the_names(self, result: StudyResult, name: str) -> None:
        result.variant("TensorFloat-32").reason = f"it | broke <here> {name}"
        rows = cells(markdown_table(renamed(result, "bfloat16", name)))
        # The answer has a row for each option, and the table one for each variant.
        assert [len(row) for row in rows] == [4] * (2 + 3) + [7] * (2 + 5)
        assert not any("<" in cell for row in rows for cell in row)

    def test_begins_with_the_answer_and_says_what_was_measured(self, result: StudyResult) -> None:
        lines = markdown_table(result).splitlines()
        assert lines[0] == f"**{answer_of(result).sentence}**"
        assert any("emoji 32×32, 2 steps (DDIM), batch 1 · on " in line for line in lines)

    def test_notes_and_code_of_others_are_no_markup(self) -> None:
        text = markdown(("a",), [], ["![x](https://x/x.png) <img src=x> a_b, `a_b`, *_b_*"])
        assert text.endswith("- !\\[x\\](https://x/x.png) &lt;img src=x&gt; a_b, `a_b`, \\*\\_b\\_\\*\n")
        assert code_block(["pipe()", "```", "<img src=x>"], "python") == "````python\npipe()\n```\n<img src=x>\n````\n"

    def test_has_the_notes(self, result: StudyResult) -> None:
        text = markdown_table(result)
        assert "\n- A/A floor" in text
        assert "\n- Memory: " in text

    def test_of_a_sweep_has_a_column_for_the_job(self, result: StudyResult) -> None:
        rows = cells(sweep_markdown([("7", rows_of(result)[1])]))
        assert rows[0][0].strip() == "job"
        assert rows[2][0].strip() == "7"
        assert rows[2][1].strip() == "bfloat16"


class TestQuality:
    def test_headings_say_the_unit_and_the_better_way(self, result: StudyResult) -> None:
        assert quality_heading("clip_score_emojiclip") == "clip_score_emojiclip ↑"
        assert quality_heading("psnr_db") == "psnr (dB) ↑"
        assert quality_heading("cmmd_emojiclip") == "cmmd_emojiclip ↓"
        assert quality_heading("brightness") == "brightness"
        assert quality_heading("a_metric_of_another_version") == "a_metric_of_another_version"
        for row in result.variants[:2]:
            row.quality["clip_score_emojiclip"] = Score(25.0)
        for text in (markdown_table(result), rendered(result, 120)):
            assert "↑ more is better, ↓ less is better. clip_score: 100 · cosine" in " ".join(text.split())

    def test_columns_are_in_the_order_of_reading_and_leave_out_what_is_not_tabulated(self, result: StudyResult) -> None:
        for row in result.variants[:2]:
            row.quality = {"contrast": Score(0.1), "cmmd_emojiclip": Score(1.0), "clip_score_emojiclip": Score(25.0)}
        result.comparisons[0].quality = {"mse": Score(0.1), "ssim": Score(0.9), "psnr_db": Score(40.0)}
        assert quality_columns(result) == ["psnr_db", "ssim", "clip_score_emojiclip", "cmmd_emojiclip", "broken"]

    def test_a_comparison_with_another_reference_has_a_row_that_names_it(self, result: StudyResult) -> None:
        twice_compared(result)
        shown = {row[0]: row[1] for row in quality_rows(result, ["psnr_db"])}
        assert shown["bfloat16"] == "40"
        assert shown["bfloat16 against batches of four"] == "20"

    def test_two_processes_have_no_intervals(self, result: StudyResult) -> None:
        reconfigure(result, "protocol", replicates=2)
        assert "no intervals (needs protocol.replicates=3 or more)" in markdown_table(result)
        result.schedule = Schedule("blocks", "memory")
        note = "Measured in blocks (memory), 6 rounds, 2 to 3 processes per variant, no intervals (needs protocol"
        assert note in markdown_table(result)
        assert "two-sided 95 %" not in markdown_table(result)
