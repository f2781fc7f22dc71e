"""The specifications of plots: which rows they have, in which order, and that they say what the table says."""

import json
import math
from pathlib import Path

import altair as alt
import pytest
from jsonschema import ValidationError  # type: ignore[import-untyped]

from sdopt.record.comparisons import Effect, Interval
from sdopt.record.files import read_result
from sdopt.record.records import StudyResult
from sdopt.record.samples import Interference
from sdopt.record.scores import Score
from sdopt.report.answer_json import answer_of, to_json
from sdopt.report.blocks import Chart
from sdopt.report.charts.comparisons import forest, interactions, waterfall
from sdopt.report.charts.parts import ratio_ticks
from sdopt.report.charts.spec import Spec
from sdopt.report.charts.times import rounds_plot, stages_plot
from sdopt.report.charts.tradeoff import tradeoffs
from sdopt.report.page.sections import text_sections
from sdopt.report.summary import summary_of
from sdopt.tracking.contents import study_metrics
from tests.command import ROOT
from tests.records import reconfigure, retime


def rows(spec: Spec | None) -> list[dict[str, object]]:
    assert spec is not None
    found: list[dict[str, object]] = spec["data"]["values"]
    return found


def thinned(spec: Spec) -> Spec:
    """The same with a few of its data: the schema looks at each of hundreds."""

    def few(node: Spec) -> Spec:
        values = node.get("values")
        return node | {"values": values[:2]} if isinstance(values, list) else node

    found: Spec = json.loads(json.dumps(spec), object_hook=few)
    return found


@pytest.mark.parametrize("name", ["quickstart", "hf_sdxl"])
@pytest.mark.walk(1)
def test_charts_are_as_the_schema_of_vega_lite_says(name: str) -> None:
    sections = text_sections(
        summary_of(read_result(ROOT / "outputs" / "records" / "amd-epyc" / name))
    )
    charts = [
        block
        for section in sections
        for block in section.blocks
        if isinstance(block, Chart)
    ]
    assert len(charts) > 2
    for chart in charts:
        for _, spec in chart.views:
            alt.Chart.from_dict(thinned(spec))
    with pytest.raises(ValidationError):
        alt.Chart.from_dict(charts[0].views[0][1] | {"layer": "none"})


def test_in_a_forest_the_fastest_comes_first_and_the_control_last(
    result: StudyResult,
) -> None:
    speeds = {"bfloat16": 1.2, "batches of four": 1.5}
    for edge in result.comparisons:
        if edge.shapes[0].speedup:
            edge.shapes[0].speedup = Interval(speeds.get(edge.candidate, 2.0), 1.1, 3.0)
    names = [row["name"] for row in rows(forest(summary_of(result)))]
    assert names == ["batches of four", "bfloat16", "repeated baseline"]


def test_a_waterfall_goes_on_from_step_to_step_by_the_paired_speedups(
    result: StudyResult,
) -> None:
    for row in result.variants:
        reconfigure(
            row, "workload", batch_size=1
        )  # ratios between calls of other numbers of images are derived anew
    half, four = result.comparisons[:2]
    half.shapes[0].speedup, half.shapes[0].floor = Interval(2.0, 1.8, 2.2), 1.0
    four.shapes[0].speedup, four.shapes[0].floor, four.reference = (
        Interval(0.5, 0.4, 0.6),
        1.0,
        half.candidate,
    )
    first, second = rows(waterfall(summary_of(result)))
    assert (first["start"], first["end"], first["joined"]) == (1.0, 2.0, True)
    assert (second["start"], second["end"], second["low"], second["high"]) == (
        2.0,
        1.0,
        0.8,
        1.2,
    )
    four.reference = "TensorFloat-32"
    assert [row["start"] for row in rows(waterfall(summary_of(result)))] == [1.0, 1.0]


def test_interactions_lie_below_the_diagonal(result: StudyResult) -> None:
    assert interactions(summary_of(result)) is None
    result.effects = [
        Effect(("a=1",), Interval(0.9, 0.8, 0.95)),
        Effect(("b=1",), Interval(1.3, 1.2, 1.4), Interval(0.8)),
        Effect(("a=1", "b=1"), Interval(1.1)),
        Effect(("b=1", "c=1"), aliased_with=["a=1"]),
    ]
    cells = {row["of"]: row for row in rows(interactions(summary_of(result)))}
    assert (cells["a=1 × b=1"]["column"], cells["a=1 × b=1"]["row"]) == ("a=1", "b=1")
    assert cells["b=1 × c=1"]["figure"] == "aliased with a=1"
    said = str(interactions(summary_of(result)))
    assert "On the diagonal the main effects; below it the interactions" in said
    largest = math.log(1.3)
    assert f"'values': [{-largest}, 0, {largest}]" in said, "no cell beyond the legend"
    assert study_metrics(summary_of(result)).items() >= {
        ("effect/a 1", 0.9),
        ("effect/a 1 and b 1", 1.1),
    }
    told = to_json(answer_of(summary_of(result), Path()))["effects"]
    assert [effect["options"] for effect in told] == [
        list(effect.options) for effect in result.effects
    ]
    assert told[1]["speedup"]["high"] == 1.4
    assert told[1]["memory_ratio"]["estimate"] == 0.8
    assert told[3]["aliased_with"] == ["a=1"]


def test_each_metric_is_a_view_and_same_images_lie_beyond_all_others(
    result: StudyResult,
) -> None:
    assert tradeoffs(summary_of(result)) is None
    half, four = result.comparisons[:2]
    half.quality = {"psnr_db": Score(30.0), "mse": Score(0.001, [0.001])}
    four.quality = {
        "psnr_db": Score(None, note="the images are identical"),
        "mse": Score(0.0, [0.0]),
    }
    chart = tradeoffs(summary_of(result))
    assert chart is not None
    [(metric, spec)] = chart.views
    points = {row["name"]: row for row in rows(spec)}
    assert metric == "psnr (dB) ↑"
    assert {point["label"] for point in points.values()} == {"1", "2", "3"}
    pictured = tradeoffs(summary_of(result), named=True)
    assert pictured is not None
    assert all(row["label"] == row["name"] for row in rows(pictured.views[0][1]))
    assert "The dashed line joins" in str(pictured.views[0][1])
    assert "equal lies beyond the scale" in str(pictured.views[0][1])
    assert (
        points["baseline"]["loss"]
        == points["batches of four"]["loss"]
        == pytest.approx(1.15 * 30)
    )
    assert points["batches of four"]["loss_text"] == "equal"
    assert [number for number, *_ in chart.legend] == [1, 2, 3]
    assert {name for _, name, _ in chart.legend} == {
        "baseline",
        "bfloat16",
        "batches of four",
    }  # the fastest first
    half.shapes[0].speedup = Interval(1.5, 0.5, 3.0)  # too close to call
    four.reference = "TensorFloat-32"
    chart = tradeoffs(summary_of(result))
    assert chart is not None
    [(_, spec)] = chart.views
    assert [point["speed"] for point in spec["layer"][0]["data"]["values"]] == [1.0]
    assert chart.caption.endswith("with the baseline's: batches of four.")


class TestTimes:
    def test_every_call_is_there_and_says_whether_it_decides(
        self, result: StudyResult
    ) -> None:
        reconfigure(result, "protocol", interference=0.02)
        first = result.variant("baseline").measurements[0]
        retime(
            first.shapes[0],
            interference=[
                Interference(share, 0.0) for share in (0.0, 0.5, 0.3, 0, 0, 0)
            ],
        )
        retime(first.shapes[0], left_out=[1])
        calls = rows(rounds_plot(summary_of(result)))
        assert len(calls) == sum(
            len(m.shapes[0].latency_s) for v in result.variants for m in v.measurements
        )
        mine = [
            call
            for call in calls
            if call["variant"] == "baseline" and call["process"] == 1
        ]
        kinds = ["decides", "disturbed, left out", "disturbed, but decides", "decides"]
        assert [call["kind"] for call in mine][:4] == kinds
        assert [call["round"] for call in mine] == [1, 2, 3, 4, 5, 6]

    def test_rounds_of_a_further_session_follow(self, result: StudyResult) -> None:
        for variant in result.variants:
            for measurement in variant.measurements[2:]:
                measurement.session = 1
        assert (
            max(
                int(str(call["round"]))
                for call in rows(rounds_plot(summary_of(result)))
            )
            == 12
        )

    def test_a_name_cannot_leave_the_expression(self, result: StudyResult) -> None:
        result.comparisons = []
        result.baseline = result.variants[0].name = 'it\'s \\ a "trap" +\n'
        spec = rounds_plot(summary_of(result))
        assert spec is not None
        assert (
            r"""datum.variant === "it's \\ a \"trap\" +\n" ?"""
            in spec["transform"][0]["calculate"]
        )

    def test_a_step_of_the_denoiser_counts_as_often_as_a_call_runs_it(
        self, result: StudyResult
    ) -> None:
        for variant in result.variants:
            variant.denoiser_calls = 5
            for measurement in variant.measurements:
                measurement.stages_s = {
                    "text_encoder": [0.01],
                    "denoiser_step": [0.1, 0.1],
                    "mine": [0.02],
                }
        spec = stages_plot(summary_of(result))
        assert spec is not None
        parts = [
            part
            for part in spec["layer"][0]["data"]["values"]
            if part["name"] == "baseline"
        ]
        assert [
            (part["stage"], round(part["from"]), round(part["to"])) for part in parts
        ] == [
            ("text encoder", 0, 10),
            ("denoiser", 10, 510),
            ("mine", 510, 530),
        ]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.9, 1.1, [0.9, 0.95, 1.0, 1.05, 1.1]),
        (1.0, 1.0, [1.0]),
        (0.7, 2.2, [1.0, 1.5, 2.0]),
        (0.08, 1.97, [0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 1.5]),
        (0.5, 5.4, [0.5, 1.0, 1.5, 2.0, 3.0, 5.0]),
        (0.01, 20.0, [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0]),
    ],
)
def test_a_ratio_is_ticked_at_round_figures(
    low: float, high: float, ticks: list[float]
) -> None:
    assert ratio_ticks(low, high) == ticks
