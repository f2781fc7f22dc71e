"""Verdicts follow the gate where one judged, else the intervals; code and command do what they say."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from sdopt.contract import Contract
from sdopt.record.comparisons import Interval, ShapeRatios
from sdopt.record.files import read_result
from sdopt.record.records import Status, StudyResult, VariantResult
from sdopt.record.scores import BrokenImage
from sdopt.record.verdicts import Judgement, Payoff, Ruling, Verdict
from sdopt.report.sentences.answer import described
from sdopt.report.sentences.objections import REPEATS
from sdopt.report.summary import summary_of
from sdopt.report.tables import evidence
from sdopt.schema import Gate
from sdopt.statistics.measures import ratio_text
from sdopt.statistics.rows import Row
from sdopt.statistics.scale import Images, Speed
from tests.records import known, reconfigure

RECORD = Path(__file__).parents[2] / "outputs" / "records" / "amd-epyc" / "quickstart"
NAME = "channels last"


@pytest.fixture(scope="module")
def recorded() -> StudyResult:
    return read_result(RECORD)


@pytest.fixture
def study(recorded: StudyResult) -> StudyResult:
    """One option against the baseline, without a gate."""
    found = deepcopy(recorded)
    found.variants = [
        v
        for v in found.variants
        if v.name in (found.baseline, NAME) or v.role == "control"
    ]
    found.comparisons = [
        edge for edge in found.comparisons if edge.candidate != "bfloat16"
    ]
    found.comparisons = [
        edge
        for edge in found.comparisons
        if edge.candidate in {v.name for v in found.variants}
    ]
    found.judgements, found.gate = [], ""
    for row in found.variants:
        row.measurements[0].shapes[0].traced = {
            "operators": 2.0 if row.name == NAME else 1.0
        }
    found.comparisons[0].shapes[0].floor = 1.02
    found.comparisons[0].shapes[0].memory_ratio = Interval(
        1.0, 0.99, 1.01, 0.95, 3, "process"
    )
    return found


def only(study: StudyResult) -> Row:
    [row] = summary_of(study).candidates
    return row


def timed(
    study: StudyResult, estimate: float, low: float | None, high: float | None
) -> Row:
    study.comparisons[0].shapes[0].speedup = Interval(
        estimate, low, high, 0.95, 3, "process"
    )
    return only(study)


class TestWithoutAGate:
    @pytest.mark.parametrize(
        ("estimate", "low", "high", "speed", "because"),
        [
            (1.05, 0.95, 1.15, Speed.CLOSE, "too small to count"),
            (
                1.03,
                1.005,
                1.05,
                Speed.CLOSE,
                "its interval includes changes too small to count",
            ),
            (1.025, 1.024, 1.026, Speed.FASTER, ""),
            (1.015, 1.012, 1.018, Speed.CLOSE, "baselines differed by as much"),
        ],
    )
    def test_the_interval_and_the_floor_decide(
        self,
        study: StudyResult,
        estimate: float,
        low: float,
        high: float,
        speed: Speed,
        because: str,
    ) -> None:
        row = timed(study, estimate, low, high)
        assert row.speed is speed
        assert because in row.because
        assert row.recommended is row.pays is (speed is Speed.FASTER)
        assert row.images is Images.NOT_JUDGED
        assert "images were not judged" in summary_of(study).notes[0]

    def test_what_was_interrupted_has_figures_and_no_verdict(
        self, study: StudyResult
    ) -> None:
        study.variant(NAME).status, study.variant(NAME).reason = (
            Status.INTERRUPTED,
            "interrupted after 4 of 4 rounds",
        )
        row = timed(study, 1.21, 1.08, 1.35)
        assert (row.speed, row.recommended, row.pays) == (None, False, False)
        assert row.speedup is not None
        assert (row.speedup.interval.estimate, row.because) == (
            1.21,
            "interrupted after 4 of 4 rounds",
        )
        assert summary_of(study).sentence.startswith(
            "Not all was measured (interrupted after 4 of 4 rounds); so far"
        )
        said = described(row, None)
        assert said.startswith(f"so far {NAME}: 1.21× [1.08, 1.35], not judged (inter")

    def test_what_saves_memory_at_the_same_speed_is_recommended_and_slower_is_a_trade(
        self, study: StudyResult
    ) -> None:
        study.comparisons[0].shapes[0].memory_ratio = Interval(
            0.5, 0.48, 0.52, 0.95, 3, "process"
        )
        row = timed(study, 0.5, 0.45, 0.55)
        assert (row.pays, row.recommended, row.gains, row.speed) == (
            True,
            False,
            ["memory_ratio"],
            Speed.SLOWER,
        )
        said = summary_of(study).sentence
        assert said.startswith(
            "Keep the baseline: channels last saves 50 % memory, 2.00× slower"
        )
        assert timed(study, 1.0, 0.95, 1.05).recommended
        assert (
            "saves 50 % memory, speed too close to call" in summary_of(study).sentence
        )

    def test_times_that_tell_another_change_than_the_paired_ratio_are_not_said(
        self, study: StudyResult
    ) -> None:
        for measurement in study.baseline_variant.measurements:
            for call in measurement.shapes[0].calls:
                call.seconds *= 2
        [baseline] = (row for row in summary_of(study).rows if row.is_baseline)
        before, after = baseline.time, timed(study, 2.0, 1.8, 2.2).time
        assert before is not None
        assert after is not None
        of_times, said = before.estimate / after.estimate, []
        for estimate in (of_times, 1.2 * of_times, 1 / of_times):
            row = timed(study, estimate, 0.9 * estimate, 1.1 * estimate)
            said.append(" → " in described(row, baseline))
        assert said == [True, False, False]

    def test_a_change_of_memory_too_small_to_count_is_no_gain(
        self, study: StudyResult
    ) -> None:
        study.comparisons[0].shapes[0].memory_ratio = Interval(
            0.93, 0.92, 0.94, 0.95, 3, "process"
        )
        assert timed(study, 1.21, 1.08, 1.35).gains == ["speedup"], (
            "16 MiB are 17 % here"
        )
        reconfigure(study, "protocol", smallest_memory_mib=0)
        assert timed(study, 1.21, 1.08, 1.35).gains == ["speedup", "memory_ratio"]

    def test_other_work_is_not_recommended_nor_what_changes_nothing_or_is_not_explained(
        self, study: StudyResult
    ) -> None:
        reconfigure(study.variant(NAME), "workload", steps=10)
        assert timed(study, 2.0, 1.9, 2.1).recommended, "fewer steps are a choice"
        traced = study.variant(NAME).measurements[0].shapes[0].traced
        study.variant(NAME).measurements[0].shapes[0].traced = {"operators": 1.0}
        row = timed(study, 1.3, 1.2, 1.4)
        assert (row.speed, row.recommended) == (Speed.FASTER, False)
        assert "trace shows no change" in summary_of(study).sentence
        study.variant(NAME).measurements[0].shapes[0].traced = traced
        reconfigure(study.variant(NAME), "workload", size=32)
        assert (
            timed(study, 2.0, 1.9, 2.1).because
            == "not the same work: workload.size (32 against 64)"
        )
        baseline, variant = study.variant(study.baseline), study.variant(NAME)
        reconfigure(
            variant, "workload", size=None, steps=baseline.config.workload.steps
        )
        baseline.denoiser_calls, variant.denoiser_calls = 25, 13
        row = timed(study, 2.0, 1.9, 2.1)
        assert (row.recommended, row.because) == (
            False,
            "not the same work: the denoiser ran 13 times per call, and 25 times in the baseline",
        )
        reconfigure(variant, "workload", guidance_scale=1.0)
        assert timed(study, 2.0, 1.9, 2.1).recommended, "no guidance is a choice"
        variant.choices, variant.config = baseline.choices, baseline.config
        variant.denoiser_calls = 25
        assert timed(study, 1.3, 1.2, 1.4).because == REPEATS
        assert any(line.endswith(REPEATS) for line in evidence(summary_of(study)))

    def test_of_several_shapes_one_that_is_slower_decides(
        self, study: StudyResult
    ) -> None:
        owners: list[StudyResult | VariantResult] = [study, *study.variants]
        for owner in owners:
            reconfigure(owner, "workload", size=[64, 96])
        for variant in study.variants:
            for measurement in variant.measurements:
                measurement.shapes.append(replace(measurement.shapes[0]))
        edge = study.comparisons[0]
        for compared in study.comparisons:
            compared.shapes.append(ShapeRatios(floor=1.02))
        edge.shapes[0].speedup = Interval(1.3, 1.2, 1.4, 0.95, 3, "process")
        edge.shapes[1].speedup = Interval(1.2, 1.1, 1.3, 0.95, 3, "process")
        row = only(study)
        assert (row.speed, row.gains) == (
            Speed.FASTER,
            ["speedup/64x64b1", "speedup/96x96b1"],
        )
        assert (
            "faster: 1.30× at 64×64, batch 1; 1.20× at 96×96, batch 1"
            in summary_of(study).sentence
        )
        edge.shapes[1].speedup = Interval(0.8, 0.7, 0.9, 0.95, 3, "process")
        assert (only(study).speed, only(study).recommended) == (Speed.SLOWER, False)


class TestSteps:
    """Variants that are compared with another one than the baseline."""

    def chain(self, study: StudyResult, recorded: StudyResult) -> Row:
        """Deep cache, here a step on top of channels last, which is slower than the baseline."""
        study.variants.append(deepcopy(recorded.variant("deep cache")))
        edge = deepcopy(
            next(
                edge for edge in recorded.comparisons if edge.candidate == "deep cache"
            )
        )
        edge.reference = NAME
        study.comparisons.append(edge)
        return known(summary_of(study).row("deep cache"))

    def test_the_gain_over_the_baseline_ranks_and_the_step_is_said_beside_it(
        self, study: StudyResult, recorded: StudyResult
    ) -> None:
        timed(study, 0.5, 0.45, 0.55)
        row = self.chain(study, recorded)
        direct = known(
            next(
                edge for edge in recorded.comparisons if edge.candidate == "deep cache"
            )
            .shapes[0]
            .speedup
        )
        assert row.speedup is not None
        assert row.speedup.interval.estimate == pytest.approx(direct.estimate)
        assert [each.name for each in summary_of(study).rows] == [
            "deep cache",
            "baseline",
            NAME,
        ]
        [step] = row.steps
        assert step.step_text == f"{ratio_text(direct)} on top of {NAME}"

    def test_it_is_no_better_than_what_it_is_built_on(
        self, study: StudyResult, recorded: StudyResult
    ) -> None:
        timed(study, 1.2, 1.1, 1.3)
        self.chain(study, recorded)
        study.gate = "default"
        bad = Ruling("at_most", "mse", Verdict.FAIL, "large")
        good = Ruling("at_most", "mse", Verdict.PASS, "small")
        study.judgements = [
            Judgement(
                NAME,
                study.baseline,
                "layout=channels_last",
                Contract.LOSSY,
                Verdict.FAIL,
                [bad],
            ),
            Judgement(
                "deep cache",
                NAME,
                "caching=deepcache",
                Contract.LOSSY,
                Verdict.PASS,
                [good],
                gains=["speedup"],
            ),
        ]
        row = known(summary_of(study).row("deep cache"))
        assert (row.decision, row.images, row.recommended) == (
            Verdict.PASS,
            Images.WORSE,
            False,
        )
        study.judgements[1].verdict = Verdict.INCONCLUSIVE
        row = known(summary_of(study).row("deep cache"))
        assert row.speed is Speed.FASTER
        assert row.because == f"{NAME}, on which it is built, fails the gate"
        sentence = summary_of(study).sentence
        assert sentence.startswith("Keep the baseline: none of 2 "), sentence
        assert sentence.endswith(f"images worse: {row.because}."), sentence


@pytest.mark.parametrize(
    ("command", "again"),
    [
        ("sdopt run gate=default precision=bf16", "sdopt run gate=easy precision=bf16"),
        ("sdopt run precision=bf16", "sdopt run precision=bf16 gate=easy"),
        ("", ""),
    ],
)
def test_the_command_names_the_gate_that_judged(
    study: StudyResult, command: str, again: str
) -> None:
    study.config = replace(study.config, gate=Gate("default"))
    study.variant(NAME).command = command
    assert timed(study, 1.5, 1.4, 1.6).command == command
    study.gate = "easy"
    assert only(study).command == again
    # As `sdopt gate … protocol.smallest_speedup=0.1` judges it.
    protocol = replace(study.config.protocol, smallest_speedup=0.1)
    study.config = replace(study.config, protocol=protocol)
    more = f"{again} protocol.smallest_speedup=0.1"
    assert only(study).command == (more if command else "")


@pytest.mark.parametrize("bounds", [(1.4, 1.6), (None, None)])
def test_an_option_whose_images_are_worse_is_never_to_be_measured_again(
    study: StudyResult, bounds: tuple[float | None, float | None]
) -> None:
    ruling = Ruling("at_most", "mse", Verdict.FAIL, "large", 0.02, margin=0.001)
    study.judgements = [
        Judgement(NAME, study.baseline, "", Contract.LOSSY, Verdict.FAIL, [ruling])
    ]
    low, high = bounds
    assert timed(study, 1.5, low, high).images is Images.WORSE
    said = summary_of(study).sentence
    assert said.startswith(f"Keep the baseline: {NAME} is 1.50× faster"), said
    assert "images worse" in said


@pytest.mark.parametrize("status", [Status.NOT_ENGAGED, Status.FAILED])
def test_what_failed_or_took_no_effect_is_not_recommended_whatever_its_times(
    study: StudyResult, status: Status
) -> None:
    study.variant(NAME).status, study.variant(NAME).reason = status, "the reason"
    row = timed(study, 1.5, 1.4, 1.6)
    assert not row.recommended
    assert "the reason" in row.because
    assert "the reason" in summary_of(study).sentence


def test_broken_images_are_worse_and_named(study: StudyResult) -> None:
    study.variant(NAME).trips = [
        BrokenImage("black", study.variant(NAME).images[0].path, "all zero")
    ]
    row = timed(study, 1.5, 1.4, 1.6)
    assert (row.images, row.recommended) == (Images.WORSE, False)
    assert "black" in row.because
    assert summary_of(study).sentence.count("black") == 1


def test_the_fastest_whose_images_can_be_used_leads(recorded: StudyResult) -> None:
    study = deepcopy(recorded)
    study.judgements = []
    for edge in study.comparisons:
        of_two_runs = Interval(1.5, None, None, 0.95, 1, "process")
        edge.shapes[0].speedup = of_two_runs
    broken = study.variant(summary_of(study).candidates[0].name)
    broken.trips = [BrokenImage("black", broken.images[0].path, "all zero")]
    first, second, *_ = summary_of(study).candidates
    assert first.variant is broken
    assert summary_of(study).sentence.startswith(
        f"Not enough runs to tell: {second.name} is "
    )


class TestWithAGate:
    def judged(
        self, study: StudyResult, verdict: Verdict, reason: str, gains: list[str]
    ) -> Row:
        timed(study, 1.21, 1.08, 1.35)
        rulings = [
            Ruling("at_most", "mse", Verdict.PASS, "small"),
            Ruling(
                "must pay",
                "",
                verdict,
                reason,
                payoff=next(
                    (p for p in get_args(Payoff) if reason.startswith(p)), None
                ),
            ),
        ]
        study.gate = "default"
        study.judgements = [
            Judgement(
                NAME,
                study.baseline,
                "layout=channels_last",
                Contract.EQUIVALENT,
                verdict,
                rulings,
                gains=gains,
            )
        ]
        return only(study)

    @pytest.mark.parametrize(
        ("verdict", "reason", "decision", "because"),
        [
            (
                Verdict.FAIL,
                "harm: speedup 0.9×",
                Verdict.FAIL,
                "It makes worse what it is meant to improve: it is 11 % slower",
            ),
            (
                Verdict.NOT_COMPARABLE,
                "the reference failed",
                Verdict.NOT_COMPARABLE,
                "Whether it gains anything was not judged: the reference failed",
            ),
        ],
    )
    def test_the_gate_has_the_last_word_and_says_it_once(
        self,
        study: StudyResult,
        verdict: Verdict,
        reason: str,
        decision: Verdict,
        because: str,
    ) -> None:
        row = self.judged(study, verdict, reason, [])
        assert (row.decision, row.because, row.recommended) == (
            decision,
            because,
            False,
        )

    def test_what_disturbed_several_rulings_is_said_once(
        self, study: StudyResult
    ) -> None:
        self.judged(study, Verdict.INCONCLUSIVE, "speedup 1.21×", [])
        [judgement] = study.judgements
        judgement.rulings += [
            Ruling("at_least", "speedup", Verdict.INCONCLUSIVE, "1.1 reaches 0.95"),
            Ruling(
                "at_most", "tail_ratio", Verdict.INCONCLUSIVE, "1.1 stays within 1.25"
            ),
        ]
        for ruling in judgement.rulings[1:]:
            ruling.doubt = "other work disturbed it"
        judgement.rulings.append(
            Ruling("undisturbed", "", Verdict.INCONCLUSIVE, "other work disturbed it")
        )
        said = "Other work disturbed it"
        assert only(study).because == said
        # What is slower is told with the same doubt as what is faster, whatever else is open.
        unjudged = Ruling("memory growth", "", Verdict.NOT_COMPARABLE, "one round")
        judgement.rulings.append(unjudged)
        judgement.verdict = Verdict.NOT_COMPARABLE
        timed(study, 0.77, 0.7, 0.85)
        slower = summary_of(study).sentence
        assert slower.startswith("Keep the baseline: channels last is 1.30× slower")
        assert slower.endswith(". Not confirmed: other work disturbed it.")
