"""The specifications of plots: which rows they have, in which order, and that they say what the table says."""

import pytest

from sdopt.analysis.figures import Ratio
from sdopt.analysis.measures import SPEEDUP
from sdopt.analysis.summary import summary_of
from sdopt.analysis.words import seconds_text
from sdopt.report.charts import comparisons
from sdopt.report.charts.comparisons import break_even_plot, forest, interactions, main_effects, steps_of, waterfall
from sdopt.report.charts.parts import ratio_axis, ratio_ticks, shortened
from sdopt.report.charts.spec import Spec, whole
from sdopt.report.charts.times import distribution_plot, limit_plot, rounds_plot, stages_plot
from sdopt.report.charts.tradeoff import tradeoffs
from sdopt.report.tables import memory_cell
from sdopt.results.comparisons import BreakEven, Effect, Interval
from sdopt.results.records import StudyResult
from sdopt.results.samples import Interference
from sdopt.results.scores import BrokenImage, Score
from sdopt.schema import Sheet
from tests.records import reconfigure, retime
from tests.report.test_table import twice_compared


def rows(spec: Spec | None) -> list[dict[str, object]]:
    assert spec is not None
    found: list[dict[str, object]] = spec["data"]["values"]
    return found


def log_axes(spec: object) -> list[Spec]:
    """Every logarithmic scale of a specification."""
    if isinstance(spec, dict):
        own = [spec] if spec.get("type") == "log" else []
        return own + [scale for value in spec.values() for scale in log_axes(value)]
    return [scale for value in spec for scale in log_axes(value)] if isinstance(spec, list) else []


class TestAxes:
    @pytest.mark.parametrize(
        ("low", "high", "ticks"),
        [
            (0.9, 1.1, [0.9, 0.95, 1.0, 1.05, 1.1]),
            (1.0, 1.0, [1.0]),
            (0.5, 2.0, [0.5, 1.0, 1.5, 2.0]),
            (0.01, 20.0, [0.01, 0.1, 1.0, 10.0, 100.0]),
        ],
    )
    def test_of_a_ratio_are_ticked_at_round_figures(self, low: float, high: float, ticks: list[float]) -> None:
        assert ratio_ticks(low, high) == ticks

    def test_of_a_ratio_always_shows_one(self) -> None:
        low, high = ratio_axis("", [2.0, 3.0])["scale"]["domain"]
        assert low < 1
        assert high > 3

    def test_a_long_name_is_cut(self) -> None:
        assert shortened("a" * 80) == "a" * 57 + "…"
        assert shortened("a" * 58) == "a" * 58


class TestForest:
    def test_the_fastest_comes_first_and_the_control_last(self, result: StudyResult) -> None:
        speeds = {"bfloat16": 1.2, "batches of four": 1.5}
        for edge in result.comparisons:
            if edge.shapes[0].speedup:
                edge.shapes[0].speedup = Interval(speeds.get(edge.candidate, 2.0), 1.1, 3.0)
        assert [row["name"] for row in rows(forest(summary_of(result)))] == [
            "batches of four",
            "bfloat16",
            "baseline (A/A control)",
        ]

    def test_says_what_the_table_says(self, result: StudyResult) -> None:
        summary = summary_of(result)
        for row in rows(forest(summary, detailed=True))[:-1]:
            said = summary.row(str(row["name"]))
            assert said is not None
            assert said.speedup is not None
            assert (row["figure"], row["memory"]) == (said.speedup.text, str(memory_cell(said)))

    def test_images_are_those_of_the_comparison_with_the_baseline(self, result: StudyResult) -> None:
        twice_compared(result)
        shown = {row["name"]: row["images"] for row in rows(forest(summary_of(result), detailed=True))}
        assert shown["bfloat16"] == "40 dB"

    def test_its_axis_is_logarithmic(self, result: StudyResult) -> None:
        assert log_axes(forest(summary_of(result)))

    def test_without_a_speedup_there_is_none(self, result: StudyResult) -> None:
        for edge in result.comparisons:
            edge.shapes[0].speedup = None
        assert forest(summary_of(result)) is None


class TestWaterfall:
    def test_goes_on_from_step_to_step_by_the_paired_speedups(self, result: StudyResult) -> None:
        half, four = result.comparisons[:2]
        half.shapes[0].speedup, half.shapes[0].floor = Interval(2.0, 1.8, 2.2), 1.0
        four.shapes[0].speedup, four.shapes[0].floor, four.reference = Interval(0.5, 0.4, 0.6), 1.0, half.candidate
        assert [(step.start, step.end) for step in steps_of(summary_of(result))] == [(1.0, 2.0), (2.0, 1.0)]
        assert steps_of(summary_of(result))[1].bounds == (0.8, 1.2)
        four.reference = "TensorFloat-32"
        assert [step.start for step in steps_of(summary_of(result))] == [1.0, 1.0]

    def test_a_step_without_an_interval_has_no_bounds(self) -> None:
        assert comparisons.Step("a", "b", Ratio(SPEEDUP, Interval(3.0), 1.0)).bounds is None

    def test_without_a_step_there_is_none(self, result: StudyResult) -> None:
        result.comparisons = []
        assert waterfall(summary_of(result)) is None


class TestEffects:
    def test_mains_are_sorted_and_pairs_lie_below_the_diagonal(self, result: StudyResult) -> None:
        assert main_effects(summary_of(result)) is interactions(summary_of(result)) is None
        result.floor = 1.01
        result.effects = [
            Effect(("a=1",), Interval(0.9, 0.8, 0.95)),
            Effect(("b=1",), Interval(1.3, 1.2, 1.4), Interval(0.8)),
            Effect(("a=1", "b=1"), Interval(1.1)),
            Effect(("b=1", "c=1"), aliased_with=["a=1"]),
        ]
        assert [(row["name"], row["speed"]) for row in rows(main_effects(summary_of(result)))] == [
            ("b=1", "faster"),
            ("a=1", "slower"),
        ]
        result.floor = 1.2
        assert rows(main_effects(summary_of(result)))[1]["speed"] == "too close to call", (
            "two baselines differ by as much"
        )
        cells = {row["of"]: row for row in rows(interactions(summary_of(result)))}
        assert (cells["a=1 × b=1"]["column"], cells["a=1 × b=1"]["row"]) == ("a=1", "b=1")
        assert cells["b=1 × c=1"]["figure"] == "aliased with a=1"


class TestBreakEven:
    def test_has_those_whose_start_costs_more_than_a_call(self, result: StudyResult) -> None:
        half, four = result.comparisons[:2]
        for edge in result.comparisons:
            edge.break_even = None
        assert break_even_plot(summary_of(result)) is None
        half.shapes[0].speedup, half.shapes[0].floor = Interval(1.5, 0.9, 2.5), 1.01
        half.break_even = BreakEven(9.0, 5.0, 1.0, 30.0, 20.0, None, 0.95)
        four.break_even = BreakEven(4.5, 0.5, 1.0, 3.0)
        [row] = rows(break_even_plot(summary_of(result)))
        assert (row["name"], row["figure"], row["high"]) == (half.candidate, "30 [20, never]", 60.0)


class TestTradeoff:
    def test_each_metric_is_a_view_and_same_images_lie_beyond_all_others(self, result: StudyResult) -> None:
        assert tradeoffs(summary_of(result)) == []
        half, four = result.comparisons[:2]
        half.quality = {"psnr_db": Score(30.0), "mse": Score(0.001, [0.001])}
        four.quality = {"psnr_db": Score(None, note="the images are identical"), "mse": Score(0.0, [0.0])}
        [view] = tradeoffs(summary_of(result))
        points = {row["name"]: row for row in rows(view.spec)}
        assert view.metric == "psnr (dB) ↑"
        assert points["baseline"]["loss"] == points["batches of four"]["loss"] == pytest.approx(1.15 * 30)
        assert points["batches of four"]["loss_text"] == "same"
        assert [(number, name) for number, name, _ in view.legend] == [
            (1, "baseline"),
            (2, "bfloat16"),
            (3, "batches of four"),
        ]

    def test_the_legend_says_what_is_known_of_the_images(self, result: StudyResult) -> None:
        half = result.comparisons[0]
        half.shapes[0].speedup, half.shapes[0].floor, half.quality = Interval(2.0, 1.9, 2.1), 1.01, {"ssim": Score(0.9)}
        [view] = tradeoffs(summary_of(result))
        assert {name: str(kind) for _, name, kind in view.legend}["bfloat16"] == "not judged"
        result.variant("bfloat16").trips = [BrokenImage("black", "", "all")]
        [view] = tradeoffs(summary_of(result))
        assert {name: str(kind) for _, name, kind in view.legend}["bfloat16"] == "worse"


class TestTimes:
    def test_every_call_is_there_and_says_whether_it_decides(self, result: StudyResult) -> None:
        reconfigure(result, "protocol", interference=0.02)
        first = result.variant("baseline").measurements[0]
        retime(first.shapes[0], interference=[Interference(share, 0.0) for share in (0.0, 0.5, 0.3, 0, 0, 0)])
        retime(first.shapes[0], left_out=[1])
        calls = rows(rounds_plot(summary_of(result)))
        assert len(calls) == sum(len(m.shapes[0].latency_s) for v in result.variants for m in v.measurements)
        mine = [call for call in calls if call["variant"] == "baseline" and call["process"] == 1]
        assert [call["kind"] for call in mine][:4] == [
            "decides",
            "disturbed, left out",
            "disturbed, but decides",
            "decides",
        ]
        assert [call["round"] for call in mine] == [1, 2, 3, 4, 5, 6]

    def test_rounds_of_a_further_session_follow(self, result: StudyResult) -> None:
        for variant in result.variants:
            for measurement in variant.measurements[2:]:
                measurement.session = 1
        assert max(int(str(call["round"])) for call in rows(rounds_plot(summary_of(result)))) == 12

    def test_no_layer_is_without_marks(self, result: StudyResult) -> None:
        def shown(found: StudyResult) -> list[str]:
            spec = rounds_plot(summary_of(found))
            assert spec is not None
            return [layer["transform"][0]["filter"] for layer in spec["layer"]]

        assert len(shown(result)) == 6
        result.variants, result.comparisons = result.variants[:1], []
        assert set(shown(result)) == {"datum.who === 'baseline'"}

    def test_a_name_cannot_leave_the_expression(self, result: StudyResult) -> None:
        result.comparisons = []
        result.baseline = result.variants[0].name = "it's \\ a 'trap' +\n"
        spec = rounds_plot(summary_of(result))
        assert spec is not None
        assert r"datum.variant === 'it\'s \\ a \'trap\' +\n'" in spec["transform"][0]["calculate"]

    def test_the_distribution_is_sorted_by_the_latencies_of_the_table(self, result: StudyResult) -> None:
        shown = rows(distribution_plot(summary_of(result)))
        assert shown == sorted(shown, key=lambda row: float(str(row["estimate"])))
        table = {name: seconds_text(row.latency) for name, row in summary_of(result).first.items() if row.latency}
        assert {str(row["name"]): row["figure"] for row in shown} == table

    def test_a_step_of_the_denoiser_counts_as_often_as_a_call_runs_it(self, result: StudyResult) -> None:
        for variant in result.variants:
            variant.denoiser_calls = 5
            for measurement in variant.measurements:
                measurement.stages_s = {"text_encoder": [0.01], "denoiser_step": [0.1, 0.1], "mine": [0.02]}
        spec = stages_plot(summary_of(result))
        assert spec is not None
        parts = [part for part in spec["layer"][0]["data"]["values"] if part["name"] == "baseline"]
        assert [(part["stage"], round(part["from"]), round(part["to"])) for part in parts] == [
            ("text encoder", 0, 10),
            ("denoiser", 10, 510),
            ("mine", 510, 530),
        ]

    def test_the_limit_is_the_peak_where_that_is_known(self, result: StudyResult) -> None:
        assert rows(limit_plot(summary_of(result)))[0]["peak"] == "not known"
        result.environment.sheet = Sheet("mine", ["mine"], 8.0, 100.0)
        for variant in result.variants:
            variant.tflop_per_image = None
        assert limit_plot(summary_of(result)) is None

    def test_without_a_call_there_is_none(self, result: StudyResult) -> None:
        for variant in result.variants:
            variant.measurements = []
        assert (
            rounds_plot(summary_of(result))
            is distribution_plot(summary_of(result))
            is stages_plot(summary_of(result))
            is limit_plot(summary_of(result))
            is None
        )


def test_a_whole_one_fits_its_container_or_a_width() -> None:
    assert whole({})["width"] == "container"
    assert (whole({}, 300)["width"], whole({}, 300)["background"]) == (300, "white")
