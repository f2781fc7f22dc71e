"""After how many images a variant has repaid what it costs before the first one."""

import pytest

from sdopt.record.comparisons import BreakEven, Interval
from sdopt.record.records import StudyResult
from sdopt.report.notes import notes_of
from sdopt.report.page.sections import _break_even
from sdopt.report.summary import summary_of
from sdopt.statistics.break_even import (
    break_even,
    break_even_text,
    images_text,
    uncounted,
)
from sdopt.statistics.comparing import compare
from sdopt.statistics.figures import flat_figures
from tests.records import known


def started(result: StudyResult, name: str, load_s: float, cold_start_s: float) -> None:
    for measured in result.variant(name).measurements:
        measured.load_s = measured.shapes[0].cold_start_s = None
    first = result.variant(name).measurements[0]
    first.load_s, first.shapes[0].cold_start_s = load_s, cold_start_s


def level(result: StudyResult, speedup: Interval) -> BreakEven:
    candidate, reference = result.variant("bfloat16"), result.variant("baseline")
    return known(break_even(candidate, reference, Interval(2.0), speedup))


class TestBreakEven:
    def test_is_where_both_have_taken_equally_long(self, result: StudyResult) -> None:
        started(result, "baseline", 1.0, 2.0)
        started(result, "bfloat16", 3.0, 60.0)
        found = level(result, Interval(1.25, 1.1, 1.6, 0.95))
        assert (found.first_image_s, found.extra_s) == (63.0, 60.0)
        # A call of 2 s takes 1.6 s: 150 further calls make up for 60 s.
        assert found.images == pytest.approx(151)
        calls = found.images - 1 if found.images else 0
        assert 63.0 + calls * 1.6 == pytest.approx(3.0 + calls * 2.0)
        assert found.images_low == pytest.approx(1 + 60 / (2 - 2 / 1.6))
        assert found.images_high == pytest.approx(1 + 60 / (2 - 2 / 1.1))
        assert break_even_text(found) == "repaid after 151 images [81, 331]"

    def test_counts_what_an_earlier_run_compiled(self, result: StudyResult) -> None:
        """The package that was loaded is no gift: without that run, this one would have compiled."""
        started(result, "baseline", 1.0, 2.0)
        started(result, "bfloat16", 1.0, 2.5)
        result.variant("bfloat16").measurements[0].shapes[0].earlier_compile_s = 40.0
        found = level(result, Interval(1.25))
        assert (found.first_image_s, found.extra_s) == (3.5, 40.5)
        assert found.images == pytest.approx(1 + 40.5 / 0.4)
        compare(result)
        told = " ".join(notes_of(summary_of(result)))
        loaded = "Earlier runs compiled packages that were loaded here: bfloat16 in 40.0 s. The start-up includes this."
        assert loaded in told

    def test_a_loss_is_never_repaid(self, result: StudyResult) -> None:
        started(result, "baseline", 1.0, 2.0)
        started(result, "bfloat16", 1.0, 20.0)
        never = level(result, Interval(0.9, 0.8, 0.95, 0.95))
        assert break_even_text(never) == "never repaid: it is no faster"
        assert images_text(never) == "never"

    @pytest.mark.parametrize(
        "speedup", [Interval(0.9), Interval(0.9, 0.8, 1.1, 0.95)], ids=repr
    )
    def test_what_may_be_no_loss_is_not_said_to_be_one(
        self, result: StudyResult, speedup: Interval
    ) -> None:
        started(result, "baseline", 1.0, 2.0)
        started(result, "bfloat16", 1.0, 20.0)
        found = level(result, speedup)
        assert images_text(found) == "not known"
        assert "never" not in break_even_text(found)

    def test_a_gain_that_may_be_none_may_never_repay(self, result: StudyResult) -> None:
        started(result, "baseline", 1.0, 2.0)
        started(result, "bfloat16", 1.0, 20.0)
        perhaps = level(result, Interval(1.1, 0.9, 1.3, 0.95))
        assert perhaps.images_high is None
        assert break_even_text(perhaps).endswith(", never]")

    def test_is_said_everywhere_alike(self, result: StudyResult) -> None:
        started(result, "baseline", 1.0, 2.0)
        started(result, "bfloat16", 1.0, 200.0)
        compare(result)
        comparison = known(result.first_comparison("bfloat16"))
        assert comparison.break_even is not None
        said = "bfloat16 takes 198 s longer than baseline before the first image, "
        # Which of the two was faster is chance: both run the same kernels here.
        comparison.shapes[0].speedup, comparison.shapes[0].floor = (
            Interval(1.5, 1.4, 1.6, 0.95),
            1.0001,
        )
        comparison.break_even = level(result, comparison.shapes[0].speedup)
        [note] = [
            note
            for note in notes_of(summary_of(result))
            if note.startswith("Start-up: ")
        ]
        assert f"{said}{break_even_text(comparison.break_even)}" in note
        comparison.shapes[0].floor, comparison.break_even = (
            2.0,
            uncounted(comparison.break_even),
        )
        [note] = [
            note
            for note in notes_of(summary_of(result))
            if note.startswith("Start-up: ")
        ]
        assert (
            f"{said}and its times differ by no more than those of two identical baselines"
            in note
        )
        flat = flat_figures(result, result.variant("bfloat16"))
        assert (
            flat["start/extra_s"]
            == comparison.break_even.extra_s
            == pytest.approx(198.0)
        )
        assert not any(name.startswith("break_even/") for name in flat)
        assert "not known" in str(_break_even(summary_of(result)).blocks)
