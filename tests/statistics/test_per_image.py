"""Calls that make different numbers of images are compared per image, wherever a figure is shown; tasks are not."""

import json
from collections.abc import Callable
from copy import deepcopy
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from sdopt.errors import UsageError
from sdopt.gate.differences import differences
from sdopt.gate.judge import judge
from sdopt.record.comparisons import Comparison, Interval
from sdopt.record.configuration import RecordedConfig
from sdopt.record.records import Status, StudyResult, VariantResult
from sdopt.record.samples import Measurement, ShapeSamples
from sdopt.record.scores import ImageRecord
from sdopt.record.verdicts import Verdict
from sdopt.report.answer import answer_shown
from sdopt.report.answer_json import answer_of
from sdopt.report.catalog import markdown_table
from sdopt.report.charts.comparisons import forest
from sdopt.report.charts.times import rounds_plot, stages_plot
from sdopt.report.comparing import comparison_of
from sdopt.report.markdown import markdown_page, written
from sdopt.report.outcome import Outcome
from sdopt.report.page.sections import study_page
from sdopt.report.summary import Summary, summary_of
from sdopt.report.sweep import Sweep
from sdopt.report.tables import to_csv
from sdopt.schema import Gate, Rule
from sdopt.search.config import search_file
from sdopt.search.findings import findings_of
from sdopt.statistics.break_even import break_even
from sdopt.statistics.comparing import compare
from sdopt.statistics.effects import effects_of
from sdopt.statistics.figures import flat_figures, rows_of
from sdopt.statistics.ratios import log_tail, speedup_drift
from sdopt.statistics.scale import Speed
from sdopt.study.plan import require_same_task
from sdopt.tracking.contents import judged_tags, logged_metrics
from tests.fixtures import Composers
from tests.gate.test_judge import FIT
from tests.records import known, reconfigure, recorded, timed

BATCH = "workload.batch_size=4"


def variant(name: str, seconds: float, role: str = "variant") -> VariantResult:
    """Three processes whose calls take about so many seconds, and their stages half of it."""
    measurements = [
        Measurement(
            number,
            shapes=[
                ShapeSamples(calls=timed([seconds * share, seconds * (share + 0.002)]))
            ],
            stages_s={"vae_decoder": [seconds / 2]},
        )
        for number, share in enumerate((1.0, 1.001, 0.999))
    ]
    return VariantResult(
        name,
        role,
        {},
        [],
        RecordedConfig(),
        status=Status.OK,
        measurements=measurements,
    )


@pytest.fixture
def study() -> StudyResult:
    """A call takes 1 s for an image, and 2 s for four: half as long for each."""
    rows = [
        variant("baseline", 1.0),
        variant(BATCH, 2.0),
        variant("again", 1.0, "control"),
    ]
    reconfigure(rows[1], "workload", batch_size=4)
    edges = [
        Comparison(BATCH, "baseline", BATCH),
        Comparison("again", "baseline", "nothing"),
    ]
    result = recorded(rows, edges)
    reconfigure(result, "protocol", replicates=3)
    compare(result)
    return result


def shown(summary: Summary) -> str:
    stream = StringIO()
    Console(file=stream, width=300).print(answer_shown(summary, 300))
    return stream.getvalue()


SURFACES: dict[str, Callable[[Summary], str]] = {
    "terminal": shown,
    "table.md": markdown_table,
    "report.md": lambda summary: markdown_page(study_page(summary, Path(), 0)).decode(),
    "--json": lambda summary: json.dumps(
        answer_of(summary, Path()).notes + [summary.sentence], ensure_ascii=False
    ),
    "plot": lambda summary: json.dumps(forest(summary), ensure_ascii=False),
    "MLflow": lambda summary: judged_tags(summary)["mlflow.note.content"],
    "in a program": repr,
    "paper": lambda summary: str(Outcome.of(summary.result).paper_table().to_dict()),
}


@pytest.mark.parametrize("surface", SURFACES)
def test_every_surface_has_the_ratio_of_one_image_and_says_so(
    study: StudyResult, surface: str
) -> None:
    text = SURFACES[surface](summary_of(study))
    assert ("'0.5'" if surface == "paper" else "2.00×") in text
    assert "per image" in text
    assert (
        "slower"
        not in text.replace("slower (", "").replace(
            "neither as faster nor as slower", ""
        )
        or surface == "plot"
    )


def test_the_answer_and_its_figures_are_per_image(study: StudyResult) -> None:
    summary = summary_of(study)
    [row] = summary.candidates
    assert row.speed is Speed.FASTER
    assert f"{BATCH} is 2.00× faster per image" in summary.sentence
    assert known(row.time).estimate == pytest.approx(0.5, rel=0.01)
    assert known(row.latency).estimate == pytest.approx(2, rel=0.01)
    assert row.call_ms["vae_decoder"] == pytest.approx(250)
    flat = row.flat
    assert (flat["latency/image_s"], flat["throughput/images_per_s"]) == pytest.approx(
        (0.5, 2), rel=0.01
    )
    assert "latency/image_s" in to_csv(summary).splitlines()[0]
    assert logged_metrics(summary, row.variant)["throughput/images_per_call"] == 4
    found = answer_of(summary, Path())
    assert (found.baseline.images_per_call, found.candidates[0].images_per_call) == (
        1,
        4,
    )
    for plot in (rounds_plot(summary), stages_plot(summary)):
        assert "of one image" in json.dumps(plot)


def test_a_ratio_that_an_earlier_version_recorded_of_calls_is_not_shown(
    study: StudyResult,
) -> None:
    study.comparisons[0].shapes[0].speedup = Interval(
        0.5, 0.49, 0.51, 0.95, 3, "process"
    )
    [row] = summary_of(study).candidates
    assert known(row.speedup).interval.estimate == pytest.approx(2)


def test_equal_calls_are_shown_as_calls(study: StudyResult) -> None:
    for row in study.variants:
        reconfigure(row, "workload", batch_size=4)
    compare(study)
    summary = summary_of(study)
    assert "2.00× slower (" in summary.sentence
    assert "per image" not in shown(summary)
    assert "latency/image_s" not in summary.rows[0].flat
    assert flat_figures(study, study.variants[0])["latency/image_s"] == pytest.approx(
        0.25, rel=0.01
    ), "for sweepers"


def test_a_gate_rules_on_images_not_on_calls(study: StudyResult) -> None:
    gate = Gate(
        "g",
        {
            "exact": [
                Rule("speedup", "at_least", limit=1.5),
                Rule("tail_ratio", "at_most", limit=0.75),
            ]
        },
    )
    judge(study, gate, FIT)
    [judged] = study.judgements
    rulings = {ruling.metric: ruling for ruling in judged.rulings if ruling.metric}
    assert {name: ruling.verdict for name, ruling in rulings.items()} == {
        "speedup": Verdict.PASS,
        "tail_ratio": Verdict.PASS,
    }
    assert "same work" not in {ruling.rule for ruling in judged.rulings}
    assert "per image" in judged.note
    assert known(log_tail(study.variants[1], study.variants[0])).ratio == pytest.approx(
        0.5
    )


def test_a_search_looks_for_the_fastest_image(study: StudyResult) -> None:
    finding = findings_of(study, search_file(), Gate())[BATCH]
    assert known(finding.speedup) == pytest.approx(2)
    row = finding.row
    assert known(row.latency).estimate == pytest.approx(2, rel=0.01)
    assert known(row.image_time).estimate == pytest.approx(0.5, rel=0.01)
    assert row.per_image


def test_effects_are_those_on_an_image(study: StudyResult) -> None:
    study.variants[1].choices = {
        "precision": "bf16"
    }  # which came with the larger batch
    [effect] = effects_of(study, ["precision=bf16"])
    assert known(effect.speedup).estimate == pytest.approx(2)


def test_the_start_is_repaid_where_as_many_images_took_as_long() -> None:
    candidate, reference = variant(BATCH, 2.0), variant("baseline", 1.0)
    reconfigure(candidate, "workload", batch_size=4)
    for row, load_s, first_s in ((candidate, 10.0, 3.0), (reference, 1.0, 1.0)):
        row.measurements[0].load_s, row.measurements[0].shapes[0].cold_start_s = (
            load_s,
            first_s,
        )
    images = known(
        known(break_even(candidate, reference, Interval(1.0), Interval(2.0))).images
    )
    assert 13 + (images - 4) * 0.5 == pytest.approx(2 + (images - 1) * 1.0)


def test_the_jobs_of_a_sweep_are_shown_per_image(
    study: StudyResult, tmp_path: Path
) -> None:
    jobs = {}
    for job, size in (("0", 1), ("1", 4)):
        jobs[job] = deepcopy(study)
        jobs[job].variants = [row for row in jobs[job].variants if row.name != BATCH]
        jobs[job].comparisons = [
            edge for edge in jobs[job].comparisons if edge.candidate != BATCH
        ]
        owners: list[StudyResult | VariantResult] = [jobs[job], *jobs[job].variants]
        for owner in owners:
            reconfigure(owner, "workload", batch_size=size)
    text = written(Sweep(tmp_path, jobs, {}).blocks())
    assert "time per image" in text
    assert "250 ms" in text
    one = written(Sweep(tmp_path, {"0": jobs["0"]}, {}).blocks())
    assert "per image" not in one


def test_two_results_are_not_compared_if_their_calls_differ(study: StudyResult) -> None:
    earlier = deepcopy(study)
    owners: list[StudyResult | VariantResult] = [earlier, *earlier.variants]
    for owner in owners:
        reconfigure(owner, "workload", batch_size=2)
    assert any(
        "workload.batch_size" in what and not waiver
        for what, waiver in differences(study, earlier)
    )
    text = written(comparison_of(earlier, study))
    assert "latency per image" in text
    assert "500 ms" in text


def test_a_variant_of_one_name_with_other_work_is_no_drift(study: StudyResult) -> None:
    """Another batch can be waived, since speed-ups are per image; another size cannot."""
    earlier = deepcopy(study)
    reconfigure(earlier.variant(BATCH), "workload", batch_size=2)
    [found] = [one for one in differences(study, earlier) if "workload" in one[0]]
    assert found[1] == "options"
    compare(earlier)
    sides = [
        (result.variant(BATCH), result.variant("baseline"))
        for result in (study, earlier)
    ]
    assert known(speedup_drift(sides[0], sides[1])).ratio == pytest.approx(2)
    reconfigure(earlier.variant(BATCH), "workload", batch_size=4, size=32)
    [found] = [one for one in differences(study, earlier) if "workload" in one[0]]
    assert not found[1]


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        (["workload.size:32"], ["workload.size=[64,32]", "-m workload.size=64,32"]),
        (
            ["workload.seed:5"],
            ["workload.seed is 5, and 0 in 'baseline'", "-m workload.seed=…"],
        ),
        (["workload.prompt_start:5"], ["workload.prompt_start is 5"]),
        (["workload.prompt_count:1"], ["workload.prompt_count is 1"]),
        (["workload.negative_prompt:grey"], []),
        (["model:sd_turbo"], ["workload.size is 512, and 64 in 'baseline'"]),
        (["workload.batch_size:4", "workload.images_per_prompt:2"], []),
        (["workload.steps:2", "scheduler:unipc", "workload.guidance_scale:1"], []),
    ],
)
def test_another_task_is_refused_before_anything_is_measured(
    composer: Composers, options: list[str], refused: list[str]
) -> None:
    made = composer(
        ["study=one_at_a_time", f"study.options=[{','.join(options)}]", "tracking=none"]
    )
    plan = made.current.study.plan(made)
    if not refused:
        require_same_task(plan)
        return
    with pytest.raises(UsageError) as error:
        require_same_task(plan)
    assert all(way in str(error.value) for way in refused)


def test_images_of_other_noise_are_said_not_to_be_compared(study: StudyResult) -> None:
    [row] = study.candidates
    row.images = [ImageRecord("a", 0, 0, 0, "images/a.png")]
    assert "other noise" not in str(summary_of(study).notes)
    reconfigure(row, "workload", batch_size=1, images_per_prompt=4)
    assert "they start from other noise" in str(summary_of(study).notes)


def test_what_is_chosen_otherwise_is_said_where_no_name_says_it(
    study: StudyResult,
) -> None:
    [row] = study.candidates
    reconfigure(
        row,
        "workload",
        batch_size=1,
        steps=4,
        guidance_scale=1.0,
        negative_prompt="grey",
    )
    row.name = study.comparisons[0].candidate = "few steps"
    compare(study)
    [note] = [note for note in summary_of(study).notes if "by choice" in note]
    assert "few steps" in note
    assert "workload.steps 25 → 4" in note
    assert "workload.guidance_scale 7.5 → 1.0" in note
    assert "workload.negative_prompt None → grey" in note
    assert {figures.per_image for figures in rows_of(study)} == {False}
