"""No sentence of any surface claims what the record of a study lacks: kinds of studies × surfaces × claims."""

import json
import pickle
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sdopt.contract import Contract
from sdopt.gate.calibration import Fit
from sdopt.gate.judge import judge
from sdopt.record.comparisons import ShapeRatios
from sdopt.record.files import read_result
from sdopt.record.records import (
    IMPORTED,
    Budget,
    MeasurementSession,
    Schedule,
    Status,
    StudyResult,
    VariantResult,
)
from sdopt.record.scores import BrokenImage, Score
from sdopt.record.verdicts import Judgement, Ruling, Verdict
from sdopt.report.answer import answer_shown
from sdopt.report.answer_json import answer_of, to_json
from sdopt.report.catalog import markdown_table
from sdopt.report.comparing import comparison_of
from sdopt.report.markdown import markdown_page, written
from sdopt.report.page.sections import study_page
from sdopt.report.sentences.answer import unconfirmed
from sdopt.report.summary import Summary, summary_of
from sdopt.report.tables import to_csv
from sdopt.report.verdicts import footing_of, summary_markdown
from sdopt.schema import Gate, Model
from sdopt.statistics.comparing import compare
from sdopt.statistics.disturbance import count_rounds
from sdopt.statistics.figures import floor_range
from sdopt.statistics.ratios import MINIMUM_PROCESSES
from sdopt.tracking.contents import study_metrics, study_tags, variant_run
from tests.gate.test_judge import gate_named
from tests.records import reconfigure

RECORD = Path(__file__).parents[2] / "outputs" / "records" / "amd-epyc" / "quickstart"
OPTIONS = ("channels last", "deep cache")


def measured() -> StudyResult:
    """Two options, the baseline and its repetition, without a gate; each option was shown active."""
    result: StudyResult = pickle.loads(_measured())
    return result


@cache
def _measured() -> bytes:
    result = read_result(RECORD)
    result.variants = [
        row
        for row in result.variants
        if row.is_control or row.name in (result.baseline, *OPTIONS)
    ]
    names = {row.name for row in result.variants}
    result.comparisons = [
        edge for edge in result.comparisons if edge.candidate in names
    ]
    result.judgements, result.gate = [], ""
    compare(result)
    return pickle.dumps(result)


def judged() -> StudyResult:
    """The same with the verdicts of its gate."""
    whole, result = read_result(RECORD), measured()
    names = {edge.candidate for edge in result.comparisons}
    result.judgements = [
        deepcopy(one) for one in whole.judgements if one.candidate in names
    ]
    result.gate = whole.gate or "default"
    return result


def one_process() -> StudyResult:
    result = measured()
    for row in result.variants:
        row.measurements = row.measurements[:1]
    compare(result)
    return result


def ended_early() -> StudyResult:
    """Two of three processes of each variant were measured when it was interrupted."""
    result = measured()
    for row in result.variants:
        row.measurements, row.status = row.measurements[:2], Status.INTERRUPTED
    result.status = "interrupted"
    compare(result)
    return result


def killed() -> StudyResult:
    """One option was timed in a round when its process was killed, and nothing of the other one was."""
    result = measured()
    for row in result.variants:
        row.status, row.images, row.quality = Status.PENDING, [], {}
        row.measurements = row.measurements[:1]
        for samples in row.measurements[0].shapes:
            samples.calls = samples.calls[:1]
    result.variant(OPTIONS[1]).measurements = []
    result.status, result.finished = "running", None
    for edge in result.comparisons:
        edge.quality = {}
    compare(result)
    return result


def resumed() -> StudyResult:
    result = measured()
    result.sessions = [*result.sessions, MeasurementSession(result.started)]
    return result


def imported(times: bool = True) -> StudyResult:
    """The same images and times, as other programs left them."""
    result = measured()
    result.design, result.sessions = IMPORTED, []
    for row in result.variants:
        row.overrides, row.command, row.denoiser_calls, row.tflop_per_image = (
            [],
            "",
            None,
            None,
        )
        row.measurements = row.measurements if times else []
        for measurement in row.measurements:
            measurement.stages_s, measurement.load_s = {}, None
            for samples in measurement.shapes:
                samples.evidence, samples.traced, samples.cold_start_s = [], {}, None
                for call in samples.calls:
                    call.interference = None
    compare(result)
    return result


def imported_once() -> StudyResult:
    """Nobody made the baseline's images again, and there is one replicate."""
    result = imported()
    result.variants = [row for row in result.variants if not row.is_control]
    result.comparisons = [
        edge for edge in result.comparisons if edge.candidate in OPTIONS
    ]
    for row in result.variants:
        row.measurements = row.measurements[:1]
    compare(result)
    return result


def imported_and_judged() -> StudyResult:
    """A gate judged them; too few replicates and prompts leave some of its rules open."""
    result = imported_once()
    judge(result, gate_named("default"), Fit())
    return result


def without_images() -> StudyResult:
    result = measured()
    for row in result.variants:
        row.images, row.quality = [], {}
    for edge in result.comparisons:
        edge.quality = {}
    return result


def random_weights() -> StudyResult:
    result = measured()
    owners: list[StudyResult | VariantResult] = [result, *result.variants]
    for owner in owners:
        reconfigure(owner, "model", weights="random")
    return result


def random_weights_by_image() -> StudyResult:
    """Of a cache that skips by what blocks add: untrained weights add something else."""
    result = random_weights()
    result.variant(OPTIONS[1]).promises["caching"].by_image = True
    return result


def with_a_failure(name: str | None = None) -> StudyResult:
    """One variant, or the repeated baseline, failed before it was timed."""
    result = measured()
    for row in result.variants:
        if row.name == name or (name is None and row.is_control):
            row.status, row.reason, row.measurements, row.images = (
                Status.FAILED,
                "it broke",
                [],
                [],
            )
    compare(result)
    return result


def all_skipped() -> StudyResult:
    result = measured()
    for row in result.variants:
        row.measurements, row.images, row.quality = [], [], {}
        row.status = Status.SKIPPED if row.name in OPTIONS else Status.PENDING
        row.reason = "it cannot run here"
    for edge in result.comparisons:
        edge.quality = {}
    compare(result)
    return result


def not_traced() -> StudyResult:
    """Settings of the work, of which a trace has nothing to show, beside an option."""
    result = measured()
    row = result.variant(OPTIONS[0])
    row.choices = dict(result.variant(result.baseline).choices)
    reconfigure(row, "workload", steps=7)
    return result


def batches() -> StudyResult:
    result = measured()
    reconfigure(result.variant(OPTIONS[0]), "workload", batch_size=4)
    compare(result)
    return result


def given_up() -> StudyResult:
    """The first warm calls of an option showed that it is clearly slower."""
    result = measured()
    row = result.variant(OPTIONS[1])
    row.status, row.given_up, row.measurements = (
        Status.SLOWER,
        True,
        row.measurements[:1],
    )
    for samples in row.measurements[0].shapes:
        samples.trial_s, samples.trial_beside_s, samples.calls = (
            [9.0, 9.0],
            [1.0, 1.0, 1.0],
            [],
        )
    compare(result)
    return result


def within_a_budget() -> StudyResult:
    """An option was shown to be slower after two of the rounds."""
    result = measured()
    for measurement in result.variant(OPTIONS[0]).measurements:
        for samples in measurement.shapes:
            samples.calls = samples.calls[:2]
    result.budget = Budget(spent_s=20.0, settled={OPTIONS[0]: 2})
    compare(result)
    return result


def in_blocks() -> StudyResult:
    result = measured()
    result.schedule = replace(
        result.schedule, kind="blocks", reason="one process has room"
    )
    for session in result.sessions:
        session.schedule = "blocks"
    return result


def resumed_in_blocks() -> StudyResult:
    """All variants fitted beside each other at first, and did not when it was resumed."""
    result = resumed()
    result.sessions[-1].schedule = "blocks"
    result.schedule = Schedule("blocks", "one process has room")
    return result


def resumed_interleaved() -> StudyResult:
    """The other way round: the last session is interleaved, and the first one was not."""
    result = resumed()
    result.sessions[0].schedule = "blocks"
    return result


def scores_taken_in() -> StudyResult:
    """Another program scored the images; sdopt computed nothing of them."""
    result = measured()
    for row in result.variants:
        row.quality = {"score_reward": Score(1.0, [1.0 for _ in row.images])}
    for edge in result.comparisons:
        edge.quality = {}
    return result


def two_shapes() -> StudyResult:
    """Larger images were timed as well; at them, the options gain nothing. Images were made at the first shape."""
    result = measured()
    owners: list[StudyResult | VariantResult] = [result, *result.variants]
    for owner in owners:
        reconfigure(owner, "workload", size=[64, 128])
    for row in result.variants:
        for measurement in row.measurements:
            measurement.shapes.append(
                deepcopy(result.variant(result.baseline).measurements[0].shapes[0])
            )
    for edge in result.comparisons:
        edge.shapes.append(ShapeRatios())
    compare(result)
    return result


KINDS: dict[str, Callable[[], StudyResult]] = {
    "measured": measured,
    "judged by a gate": judged,
    "one process": one_process,
    "interrupted": ended_early,
    "killed": killed,
    "resumed": resumed,
    "imported": imported,
    "imported images alone": lambda: imported(times=False),
    "imported once": imported_once,
    "imported and judged": imported_and_judged,
    "without images": without_images,
    "random weights": random_weights,
    "random weights, skipped by image": random_weights_by_image,
    "a failed variant": lambda: with_a_failure(OPTIONS[1]),
    "a failed repetition": with_a_failure,
    "all skipped": all_skipped,
    "not traced": not_traced,
    "batches": batches,
    "given up": given_up,
    "within a budget": within_a_budget,
    "in blocks": in_blocks,
    "resumed in blocks": resumed_in_blocks,
    "resumed interleaved": resumed_interleaved,
    "scores taken in": scores_taken_in,
    "two shapes": two_shapes,
}


def shown(summary: Summary) -> str:
    stream = StringIO()
    Console(file=stream, width=1000).print(answer_shown(summary, 1000))
    return stream.getvalue()


def tracked(summary: Summary) -> str:
    """What MLflow holds: tags and metrics of the study's run, and of those of its variants."""
    runs = [
        variant_run(summary, row, RECORD, images=False)
        for row in summary.result.variants
    ]
    held: list[Mapping[str, object]] = [
        study_tags(summary),
        study_metrics(summary),
        *(run.tags for run in runs),
        *(run.metrics for run in runs),
    ]
    return json.dumps(
        [{key: str(value) for key, value in one.items()} for one in held],
        ensure_ascii=False,
    )


SURFACES: dict[str, Callable[[Summary], str]] = {
    "terminal": shown,
    "table.md": markdown_table,
    "report.md": lambda summary: markdown_page(study_page(summary, RECORD, 0)).decode(),
    "table.csv": to_csv,
    "--json": lambda summary: json.dumps(
        to_json(answer_of(summary, RECORD)), ensure_ascii=False
    ),
    "MLflow": tracked,
    "step summary": lambda summary: (
        summary_markdown(summary) if summary.result.judgements else ""
    ),
    "compare": lambda summary: written(
        comparison_of(summary.result, deepcopy(summary.result))
    ),
    "in a program": repr,
}


def schedules(result: StudyResult) -> set[str]:
    """How its sessions laid out their rounds."""
    kinds = {session.schedule for session in result.sessions}
    return kinds or {result.schedule.kind}


def active(result: StudyResult) -> int:
    """How many candidates have evidence of a trace for all that they add."""
    count = 0
    for row in result.candidates:
        added = {
            axis
            for axis in row.promises
            if row.choices.get(axis) != result.variant("baseline").choices.get(axis)
        }
        evidence = [
            item
            for m in row.measurements
            for samples in m.shapes
            for item in samples.evidence
        ]
        proven = {item.axis for item in evidence if item.engaged}
        count += bool(added) and added <= proven and row.status is Status.OK
    return count


def processes(result: StudyResult) -> int:
    return max(len(row.samples) for row in result.variants)


def fewest_rounds(result: StudyResult) -> int:
    """In how many rounds the variant was timed that was timed in the fewest; 0 without any."""
    return min(
        (max(map(len, row.samples.values())) for row in result.variants if row.samples),
        default=0,
    )


def has_times(result: StudyResult) -> bool:
    return any(row.samples for row in result.variants)


def compared(result: StudyResult) -> bool:
    return any(at.speedup for edge in result.comparisons for at in edge.shapes)


CLAIMS: dict[str, Callable[[StudyResult], bool]] = {
    r"verified active in a trace": lambda result: active(result) > 0,
    r"All \d+ were verified active": lambda result: (
        active(result) == len(result.candidates)
    ),
    r"two-sided 95 % intervals": lambda result: processes(result) >= MINIMUM_PROCESSES,
    r"interleaved rounds|Measured in blocks": lambda result: (
        has_times(result) and not result.is_imported
    ),
    r"\b3 processes per variant": lambda result: processes(result) >= 3,
    r"ratio of geometric means": compared,
    r"dentical baselines differed by|difference between two identical baselines": lambda result: (
        floor_range(result) is not None
    ),
    r"peak resident set|peak that PyTorch allocated": lambda result: (
        not result.is_imported and has_times(result)
    ),
    r"[Rr]andom weights": lambda result: result.config.random_weights,
    r"speed and memory are those of the real model;": lambda result: (
        result.config.random_weights
        and not any(row.skips_by_image for row in result.variants)
    ),
    r"Disturbed by other work|Calls that other work disturbed|\"sdopt.disturbed\"": lambda result: (
        count_rounds(result) is not None
    ),
    r"images (nearly )?identical|images similar|images visibly different": lambda result: (
        any("psnr_db" in edge.quality for edge in result.comparisons)
    ),
    r"The images were not judged": lambda result: (
        any(row.images for row in result.variants) and not result.judgements
    ),
    r"Images and pass or fail follow": lambda result: bool(result.judgements),
    r"speed follows the two-sided intervals": lambda result: (
        processes(result) >= MINIMUM_PROCESSES
    ),
    r"No times of a repeated baseline": lambda result: (
        result.control is None or not result.control.samples
    ),
    r"\d× (faster|slower)": compared,
    r"per image\b(?! is)": lambda result: result.per_image,
    r"protocol\.replicates|quality\.prompt_count": lambda result: (
        not result.is_imported
    ),
    r"\"device\": |\"torch\": ": lambda result: not result.is_imported,
    r"(?<!to )\b4 interleaved rounds": lambda result: fewest_rounds(result) == 4,
    r"interleaved rounds": lambda result: schedules(result) == {"interleaved"},
    r"[Mm]easured in blocks": lambda result: "blocks" in schedules(result),
    r"[Mm]easured in blocks \(": lambda result: schedules(result) == {"blocks"},
    r"B/A: the speed-up in B": compared,
    r"reward": lambda result: any(
        "score_reward" in row.quality for row in result.variants
    ),
    r"\"best/speedup\"|\"options/recommended\": \"[1-9]": lambda result: (
        summary_of(result).best is not None
    ),
    r"\"because\": \"recommended\"": lambda result: any(
        row.recommended for row in summary_of(result).rows
    ),
    r"What the two differ by is chance": lambda result: (
        result.control is not None
        and bool(result.control.samples or result.control.images)
    ),
    r"at least \d+\.\d×": lambda result: any(row.given_up for row in result.variants),
    r"gate's bounds|sdopt gate: |Interim analyses": lambda result: bool(
        result.judgements
    ),
    r"\"options/tried\": \"2": lambda result: (
        not any(row.status is Status.SKIPPED for row in result.candidates)
    ),
    r"Nothing was measured beside": lambda result: (
        not any(row.measurements for row in result.candidates)
    ),
    r"The study has not ended": lambda result: result.status == "running",
    r"[01] of 4 rounds were measured": lambda result: fewest_rounds(result) < 4,
    r"Measured in \d sessions": lambda result: len(result.sessions) > 1,
    r"images [a-z ]*(\([^)]*\))?(, not judged)? at 64×64|memory, 64×64|\"speedups\": \{\"": lambda result: (
        len(result.shapes) > 1
    ),
    r"does other work by choice": lambda result: any(
        row.config.workload.steps != result.config.workload.steps
        for row in result.candidates
    ),
}
"""What must be recorded, by the sentence that says it."""


@pytest.fixture(scope="module")
def said() -> dict[str, dict[str, str]]:
    """What each surface says, by the kind of study."""
    found: dict[str, dict[str, str]] = {}
    for kind, make in KINDS.items():
        summary = summary_of(make())
        found[kind] = {surface: write(summary) for surface, write in SURFACES.items()}
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_sentence_is_of_something_recorded(
    said: dict[str, dict[str, str]], kind: str
) -> None:
    result, wrong = KINDS[kind](), []
    for surface, text in said[kind].items():
        for claim, recorded in CLAIMS.items():
            if (place := re.search(claim, text)) and not recorded(result):
                wrong.append(
                    f"{surface}: …{text[max(0, place.start() - 60) : place.end() + 60]}…"
                )
    assert not wrong, "\n".join(wrong)


def test_every_claim_is_made_by_some_kind(said: dict[str, dict[str, str]]) -> None:
    everything = "\n".join(
        text for surfaces in said.values() for text in surfaces.values()
    )
    assert [claim for claim in CLAIMS if not re.search(claim, everything)] == []


def test_untrained_weights_and_own_files_are_told_apart_wherever_figures_meet(
    said: dict[str, dict[str, str]],
) -> None:
    """On a leaderboard, all files would be `folder`, and an untrained model the trained one of its name."""
    for kind in ("random weights", "random weights, skipped by image"):
        for surface in ("terminal", "table.md", "report.md", "--json", "MLflow"):
            assert "andom weights" in said[kind][surface], (kind, surface)
    titles = {
        Model().title,
        Model(weights="random").title,
        Model("folder", "path", path="~/models/one.safetensors").title,
        Model("folder", "path", path="~/models/other.safetensors").title,
        Model("folder", "hub", hub_id="owner/name").title,
        Model("factory", "factory", factory="/a/mine.py:make").title,
    }
    assert len(titles) == 6
    assert Model("sdxl", "hub", hub_id="owner/name").title == "sdxl"


def test_settings_of_the_work_are_not_counted_among_what_a_trace_shows(
    said: dict[str, dict[str, str]],
) -> None:
    assert "1 of 2 were verified active" in said["not traced"]["terminal"]
    assert "All 2 were verified active" in said["measured"]["terminal"]
    assert "verified active" not in said["imported"]["terminal"]


def test_what_is_of_the_first_shape_alone_names_it(
    said: dict[str, dict[str, str]],
) -> None:
    text = said["two shapes"]
    assert "at 64×64, batch 1" in text["terminal"].splitlines()[0]
    assert "images (not judged), 64×64, batch 1" in text["table.md"]
    assert "time, 64×64, batch 1" in text["report.md"]
    data = json.loads(text["--json"])
    speedups = next(
        row["speedups"] for row in data["candidates"] if row["name"] == OPTIONS[1]
    )
    assert [*speedups] == ["64x64b1", "128x128b1"]
    assert speedups["64x64b1"]["estimate"] > 1.5 > speedups["128x128b1"]["estimate"]


def test_no_gate_is_advised_where_all_were_given_up_or_failed() -> None:
    """The baseline alone has images, and would have no others beside it with a gate."""
    result = given_up()
    row = result.variant(OPTIONS[1])
    row.images, row.quality = [], {}
    result.variants = [one for one in result.variants if one.name != OPTIONS[0]]
    result.comparisons = [
        edge for edge in result.comparisons if edge.candidate != OPTIONS[0]
    ]
    assert "not judged" not in str(summary_of(result).notes)
    result = measured()
    result.config = replace(result.config, gate=Gate("none"))
    assert "not judged" in str(summary_of(result).notes)
    for row in result.candidates:
        row.status, row.images, row.quality = Status.FAILED, [], {}
    assert "not judged" not in str(summary_of(result).notes)


def test_bounds_of_a_gate_are_not_said_to_be_the_narrower_ones() -> None:
    """Those of a gain are at the confidence of all claims together: of five, each at 99 %."""
    result = read_result(RECORD)
    said = [*summary_of(result).notes, *footing_of(result)]
    assert "two-sided intervals" in str(said)
    assert not re.search("narrower|wider", str(said))


def leave_open(result: StudyResult, ruling: Ruling) -> None:
    """Judges all comparisons of a result by one ruling that decides nothing."""
    for edge in result.comparisons:
        judged = edge.candidate, edge.reference, "", Contract.LOSSY, ruling.verdict
        result.judgements.append(Judgement(*judged, [ruling]))


def test_no_command_is_handed_out_where_none_is_known() -> None:
    """A gain that a gate leaves undecided, of times that another program took."""
    result = imported()
    leave_open(
        result, Ruling("non_inferior", "mse", Verdict.INCONCLUSIVE, "few prompts")
    )
    sentence = summary_of(result).sentence
    assert re.search("Not confirmed yet: [a-z]", sentence)
    assert "``" not in sentence
    assert "measure it again" not in sentence


def test_what_is_missing_is_not_to_be_measured_again() -> None:
    """As a calibration, without which the same command leaves the same rule open."""
    result = measured()
    missing = Ruling("non_inferior", "mse", Verdict.NOT_COMPARABLE, "no calibration")
    leave_open(result, missing)
    for row in result.candidates:
        row.command = "sdopt run precision=bf16"
    assert "no calibration" in summary_of(result).sentence
    assert "measure it again" not in summary_of(result).sentence
    too_few = Ruling("faster", "speedup", Verdict.INCONCLUSIVE, "few")
    for judgement in result.judgements:
        judgement.rulings.append(too_few)
    assert "measure it again" in summary_of(result).sentence


@pytest.mark.parametrize(
    ("prompts", "given"),
    [(200, " quality.prompt_count=200"), (10**6, ""), (None, "")],
)
def test_the_command_of_an_open_gain_draws_what_would_settle_it(
    prompts: int | None, given: str
) -> None:
    result = measured()
    ruling = Ruling("at_most", "mse", Verdict.INCONCLUSIVE, "few", prompts=prompts)
    leave_open(result, ruling)
    for row in result.candidates:
        row.command = "sdopt run precision=bf16"
    assert f"`sdopt run precision=bf16{given}`" in summary_of(result).sentence
    if given:
        for row in result.candidates:
            row.command = "sdopt run quality.prompt_count=16 precision=bf16"
        command = f"`sdopt run{given} precision=bf16`"
        assert command in summary_of(result).sentence, "named once"
    if prompts == 200:
        for row in result.variants:
            reconfigure(row, "workload", prompt_start=100)
        said = summary_of(result).sentence
        assert "workload.prompts has 140 left" in said
        assert "sdopt run" not in said


@pytest.mark.parametrize(
    "apart", [{"images_per_prompt": 2}, {"negative_prompt": "grey"}, {}]
)
def test_what_cannot_be_compared_is_not_to_be_measured_again(
    apart: dict[str, Any],
) -> None:
    result = measured()
    leave_open(result, Ruling("at_most", "mse", Verdict.INCONCLUSIVE, "few"))
    for row in result.candidates:
        row.command = "sdopt run precision=bf16"
        reconfigure(row, "workload", **apart)
    sentence = summary_of(result).sentence
    assert ("measure it again" in sentence) is not bool(apart)
    said = unconfirmed(summary_of(result).rows[0], summary_of(result).baseline)
    assert ("measure it again" in said) is not bool(apart)


def test_an_option_that_one_process_does_not_show_is_not_counted() -> None:
    result = measured()
    row = result.variant(OPTIONS[0])
    [item, *_] = [
        item
        for item in row.measurements[-1].shapes[0].evidence
        if item.axis in row.promises
    ]
    row.measurements[-1].shapes[0].evidence = [
        replace(each, engaged=False) if each is item else each
        for each in row.measurements[-1].shapes[0].evidence
    ]
    if row.choices[item.axis] != result.variant("baseline").choices[item.axis]:
        assert "1 of 2 were verified active" in shown(summary_of(result))


def test_a_comparison_of_two_results_has_every_shape() -> None:
    earlier, later = two_shapes(), two_shapes()
    for measurement in later.variant(OPTIONS[0]).measurements:
        for call in measurement.shapes[1].calls:
            call.seconds *= 2
    compare(later)
    lines = written(comparison_of(earlier, later)).splitlines()
    [place] = [
        number
        for number, line in enumerate(lines)
        if line.startswith("| channels last, 128×128")
    ]
    assert "| B/A |  |  | 0.50×" in lines[place + 2]
    assert sum(", 64×64, batch 1 | A |" in line for line in lines) == len(
        later.variants
    )


def test_a_baseline_of_broken_images_is_neither_kept_nor_gained_on() -> None:
    """Half precision may draw black images; what is faster than that is like nothing that anybody wants."""
    result = measured()
    baseline = result.variant(result.baseline)
    baseline.trips = [BrokenImage("black", baseline.images[0].path, "all are 0")]
    summary = summary_of(result)
    assert summary.best is None
    assert summary.sentence.startswith("Images of the baseline are broken (black): ")
    result.variants = [row for row in result.variants if row.name != OPTIONS[1]]
    result.comparisons = result.comparisons[:1]
    assert "Keep the baseline" not in summary_of(result).sentence


def test_a_terminal_says_which_images_are_broken_where_no_gate_judged() -> None:
    result = measured()
    result.config = replace(result.config, gate=Gate())
    broken = result.variant(OPTIONS[0])
    broken.trips = [BrokenImage("black", broken.images[0].path, "all are 0")]
    said = shown(summary_of(result))
    assert f"{OPTIONS[0]}: 1 of {len(broken.images)} images are broken: black" in said
    assert "images (not judged)" not in said
    assert "The other images were not judged" in said
    result.variants = [row for row in result.variants if row.name != OPTIONS[1]]
    result.comparisons = result.comparisons[:1]
    assert not any("images were not" in note for note in summary_of(result).notes)


def test_a_gate_that_has_not_judged_yet_is_not_asked_for() -> None:
    """Of a study that its gate was to judge, "measure again with gate=default" leads in a circle."""
    result = measured()
    assert result.config.gate.judges
    result.status = "interrupted"
    assert summary_of(result).notes[-1] == (
        "The images were not judged: resuming measures what is missing, and then gate=default judges."
    )
    result.status = "finished"
    assert "run `sdopt gate <folder> gate=default`" in summary_of(result).notes[-1]


def test_what_was_not_traced_is_not_said_to_show_no_change() -> None:
    """The step below a gain failed: sdopt has no trace of it, and so none that shows no change."""
    result = measured()
    gain, step = result.variant(OPTIONS[1]), result.variant(OPTIONS[0])
    result.first_comparison(gain.name).reference = step.name  # type: ignore[union-attr]
    step.status, step.measurements, step.images = Status.FAILED, [], []
    compare(result)
    row = summary_of(result).row(gain.name)
    assert row is not None
    assert (
        row.because == f"{step.name}, which it is compared with, has the status failed"
    )
