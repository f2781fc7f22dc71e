"""Rules on numbers that were made by hand: what passes, what fails, and that nothing passes by being absent."""

import json
import math
import zlib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from sdopt.analysis.timing import compare
from sdopt.errors import UsageError
from sdopt.gate.calibration import Calibration, read_calibration, write_calibration
from sdopt.gate.judge import exit_code, judge, worst
from sdopt.gate.rules import require_rules
from sdopt.report.verdicts import verdict_markdown, write_verdicts
from sdopt.results.records import (
    BrokenImage,
    Comparison,
    Environment,
    ImageRecord,
    Judgement,
    Measurement,
    Memory,
    Promise,
    RecordedConfig,
    Score,
    Spread,
    Status,
    StudyResult,
    VariantResult,
    Verdict,
)
from sdopt.schema import Gate, Rule
from tests.records import reconfigure

PROMPTS = 48
SPREADS = {"clip_score_x": Spread(0.0, 2.0, 99), "cmmd_x": Spread(0.0, 1.0, 99), "perceptual_x": Spread(1.0, 1.0, 9)}
CALIBRATION = Calibration("emoji", {}, {}, SPREADS)


def per_prompt(mean: float, spread: float, seed: int = 0) -> Score:
    values = np.random.default_rng(seed).standard_normal(PROMPTS)
    values = mean + spread * (values - values.mean()) / values.std()
    return Score(float(values.mean()), values.tolist())


def variant(name: str, *, role: str = "variant", seconds: float = 0.1, **fields: Any) -> VariantResult:
    """Three processes of eight rounds."""
    random = np.random.default_rng(zlib.crc32(f"{name} {role}".encode()))
    measurements = [
        Measurement(
            number,
            latency_s=(seconds * np.exp(0.01 * random.standard_normal(8))).tolist(),
            memory=Memory(1.0, fields.get("memory", 1.0) * math.exp(0.001 * random.standard_normal())),
        )
        for number in range(3)
    ]
    fields.pop("memory", None)
    contract, claims = fields.get("contract", "lossy"), fields.pop("claims", [])
    made: dict[str, Any] = {
        "status": Status.OK,
        "contract": contract,
        "promises": {"axis": Promise(contract, claims)},
        "denoiser_calls": 25,
        "images": [ImageRecord("a", 0, 0, 0, "images/a.png")],
        "measurements": measurements,
    }
    return VariantResult(name, role, {"axis": name}, [], RecordedConfig(), **(made | fields))


def study(candidate: VariantResult, reference: VariantResult | None = None, **paired: Score) -> StudyResult:
    reference = reference or variant("baseline", contract="exact")
    environment = Environment("0", None, None, "3", "here", {}, {"name": "a device"}, {}, "forkserver", [])
    control = variant("control", role="control", seconds=0.1)
    edge = Comparison(candidate.name, reference.name, "it", quality=paired)
    rows = [reference, candidate, control]
    result = StudyResult(
        "s", "pair", "2026-01-01T00:00:00", environment, RecordedConfig(), rows, [edge], reference.name
    )
    result.comparisons.append(Comparison("control", reference.name, "nothing"))
    compare(result)
    return result


def verdict(result: StudyResult, *rules: Rule, contract: str = "lossy", **settings: Any) -> Judgement:
    judge(result, Gate("g", {contract: list(rules)}, **settings), CALIBRATION)
    (found,) = result.judgements
    return found


def clip(candidate: float, spread: float = 0.5, **fields: Any) -> StudyResult:
    """A CLIP score that the candidate has lower than its reference, prompt by prompt."""
    base = per_prompt(25, 3)
    assert base.estimate is not None
    change = per_prompt(candidate, spread, seed=1)
    values = [a + b for a, b in zip(base.per_prompt, change.per_prompt, strict=True) if a is not None and b is not None]
    mine = Score(float(np.mean(values)), list(values))
    return study(
        variant("it", quality={"clip_score_x": mine}, **fields), variant("baseline", quality={"clip_score_x": base})
    )


NON_INFERIOR = Rule("clip_score", deviations=0.25)  # 0.25 · 2.0 = a margin of 0.5


class TestNonInferiority:
    @pytest.mark.parametrize(
        ("change", "spread", "expected"),
        [
            (0.0, 0.5, Verdict.PASS),
            (-0.3, 0.5, Verdict.PASS),
            (-0.45, 0.5, Verdict.INCONCLUSIVE),
            (-0.8, 0.5, Verdict.FAIL),
            (-0.3, 3.0, Verdict.INCONCLUSIVE),
            (+5.0, 0.5, Verdict.PASS),
        ],
    )
    def test_the_whole_interval_decides(self, change: float, spread: float, expected: Verdict) -> None:
        found = verdict(clip(change, spread), NON_INFERIOR)
        assert found.verdict is expected, found.rulings

    def test_an_open_rule_says_how_many_prompts_would_settle_it(self) -> None:
        (ruling,) = [r for r in verdict(clip(-0.3, 3.0), NON_INFERIOR).rulings if r.verdict is Verdict.INCONCLUSIVE]
        # ((1.645 + 0.842) · 3.0 / 0.2)² ≈ 1,392; the sample's deviation is a little larger.
        assert "about 14" in ruling.reason
        assert "prompts would settle it" in ruling.reason

    def test_identical_outputs_pass(self) -> None:
        assert verdict(clip(0.0, 0.0), NON_INFERIOR).verdict is Verdict.PASS

    def test_lower_is_better_is_turned_round(self) -> None:
        def cmmd(values: float) -> Score:
            return Score(values, leave_one_out=[values + 0.01 * math.sin(i) for i in range(PROMPTS)])

        worse, same = (
            study(variant("it", quality={"cmmd_x": cmmd(mine)}), variant("baseline", quality={"cmmd_x": cmmd(1.0)}))
            for mine in (3.0, 1.0)
        )
        rule = Rule("cmmd", deviations=0.25)
        assert verdict(worse, rule).verdict is Verdict.FAIL
        assert verdict(same, rule).verdict is Verdict.PASS

    def test_few_prompts_give_no_interval(self) -> None:
        result = clip(0.0)
        for row in result.variants:
            for score in row.quality.values():
                score.per_prompt = score.per_prompt[:5]
        assert verdict(result, NON_INFERIOR).verdict is Verdict.INCONCLUSIVE


class TestFailClosed:
    def test_a_missing_metric(self) -> None:
        found = verdict(study(variant("it")), NON_INFERIOR)
        assert found.verdict is Verdict.NOT_COMPARABLE
        assert "clip_score was not measured" in str(found.rulings)

    @pytest.mark.parametrize("where", ["estimate", "prompt"])
    def test_a_value_that_is_not_finite(self, where: str) -> None:
        result = clip(0.0)
        score = result.variant("it").quality["clip_score_x"]
        if where == "estimate":
            score.estimate = None
        else:
            score.per_prompt[3] = None
        assert verdict(result, NON_INFERIOR).verdict is Verdict.NOT_COMPARABLE

    def test_no_calibration(self) -> None:
        result = clip(0.0)
        judge(result, Gate("g", {"lossy": [NON_INFERIOR]}), None)
        assert result.judgements[0].verdict is Verdict.NOT_COMPARABLE
        assert "sdopt calibrate" in str(result.judgements[0].rulings)

    @pytest.mark.parametrize("status", [Status.FAILED, Status.OUT_OF_MEMORY, Status.KILLED, Status.TIMEOUT])
    def test_a_variant_that_failed(self, status: Status) -> None:
        found = verdict(clip(0.0, status=status, reason="because"), NON_INFERIOR)
        assert found.verdict is Verdict.NOT_COMPARABLE
        assert "because" in found.rulings[0].reason

    def test_a_variant_that_is_not_engaged_fails(self) -> None:
        assert verdict(clip(0.0, status=Status.NOT_ENGAGED), NON_INFERIOR).verdict is Verdict.FAIL

    def test_a_reference_that_failed_or_is_broken(self) -> None:
        for change in ({"status": Status.FAILED}, {"trips": [BrokenImage("black", "images/a.png", "all of it")]}):
            result = clip(0.0)
            for key, value in change.items():
                setattr(result.variant("baseline"), key, value)
            assert verdict(result, NON_INFERIOR).verdict is Verdict.NOT_COMPARABLE

    def test_other_prompts_seeds_or_models(self) -> None:
        for section, key, value in (("workload", "seed", 7), ("workload", "prompts", "x"), ("model", "name", "sd15")):
            result = clip(0.0)
            reconfigure(result.variant("it"), section, **{key: value})
            found = verdict(result, NON_INFERIOR)
            assert found.verdict is Verdict.NOT_COMPARABLE
            assert f"{section}.{key}" in found.rulings[0].reason

    def test_no_rules_for_the_contract(self) -> None:
        assert verdict(clip(0.0), NON_INFERIOR, contract="exact").verdict is Verdict.NOT_COMPARABLE

    def test_no_images(self) -> None:
        assert verdict(clip(0.0, images=[]), NON_INFERIOR).verdict is Verdict.NOT_COMPARABLE

    def test_a_study_that_compares_nothing_is_not_passed(self) -> None:
        assert worst([]) is Verdict.NOT_COMPARABLE


class TestWires:
    def test_one_tripped_image_fails_and_is_named(self) -> None:
        found = verdict(clip(0.0, trips=[BrokenImage("black", "images/07.png", "99 % are black")]), NON_INFERIOR)
        assert found.verdict is Verdict.FAIL
        assert "images/07.png" in str(found.rulings)

    def test_half_the_steps_under_the_same_name_fail(self) -> None:
        found = verdict(clip(0.0, denoiser_calls=13), NON_INFERIOR)
        assert found.verdict is Verdict.FAIL
        assert "13 times" in str(found.rulings)

    def test_another_number_of_steps_is_a_choice(self) -> None:
        result = clip(0.0, denoiser_calls=13)
        reconfigure(result.variant("it"), "workload", steps=13)
        assert verdict(result, NON_INFERIOR).verdict is Verdict.PASS


class TestValues:
    def test_exact_wants_every_prompt_to_be_the_same(self) -> None:
        rule = Rule("mse", "exact")
        same, other = Score(0.0, [0.0] * PROMPTS), Score(1e-9, [0.0] * (PROMPTS - 1) + [1e-7])
        assert verdict(study(variant("it", contract="exact"), mse=same), rule, contract="exact").verdict is Verdict.PASS
        found = verdict(study(variant("it", contract="exact"), mse=other), rule, contract="exact")
        assert found.verdict is Verdict.FAIL
        assert "1 of 48" in str(found.rulings)

    SHARES = ((0.3, Verdict.PASS), (0.5, Verdict.INCONCLUSIVE), (0.8, Verdict.FAIL))

    @pytest.mark.parametrize(("value", "expected"), SHARES)
    def test_a_distance_is_held_against_a_share_of_that_between_seeds(self, value: float, expected: Verdict) -> None:
        result = study(variant("it"), perceptual_x=per_prompt(value, 0.2))
        assert verdict(result, Rule("perceptual", "at_most", of_seeds=0.5)).verdict is expected

    RARE = ((0, Verdict.PASS), (3, Verdict.INCONCLUSIVE), (12, Verdict.FAIL))

    @pytest.mark.parametrize(("wrong", "expected"), RARE)
    def test_a_few_pictures_that_went_wrong_are_seen(self, wrong: int, expected: Verdict) -> None:
        values: list[float | None] = [0.9] * wrong + [0.01] * (PROMPTS - wrong)
        result = study(variant("it"), perceptual_x=Score(0.1, values))
        found = verdict(result, Rule("perceptual", "rarely", of_seeds=0.75, share=0.08))
        assert found.verdict is expected
        assert f"{wrong} of 48 prompts exceed 0.75" in str(found.rulings)

    def test_a_share_belongs_to_rarely_alone(self) -> None:
        for rule in (Rule("perceptual", "rarely", limit=0.5), Rule("perceptual", "at_most", limit=0.5, share=0.1)):
            with pytest.raises(UsageError, match=r"gate\.rules\.lossy\[0\]: test=rarely takes a share"):
                require_rules(Gate("g", {"lossy": [rule]}))

    def test_a_published_window_judges_the_estimate_itself(self) -> None:
        rule = Rule("clip_score", "within", low=24.9, high=25.1, confidence=None)
        assert verdict(clip(0.0), rule).verdict is Verdict.PASS
        assert verdict(clip(-0.2), rule).verdict is Verdict.FAIL
        assert verdict(clip(+0.2), rule).verdict is Verdict.FAIL

    def test_equivalence_is_two_sided(self) -> None:
        for change, expected in ((0.0, Verdict.PASS), (-2.0, Verdict.FAIL), (2.0, Verdict.FAIL)):
            found = verdict(clip(change), Rule("clip_score", "equivalent", deviations=0.25))
            assert found.verdict is expected


class TestItMustPay:
    @pytest.mark.parametrize(
        ("seconds", "expected", "said"),
        [(0.05, Verdict.PASS, "it pays"), (0.1, Verdict.FAIL, "no benefit"), (0.8, Verdict.FAIL, "harm")],
    )
    def test_a_claim_of_latency(self, seconds: float, expected: Verdict, said: str) -> None:
        result = study(variant("it", seconds=seconds, claims=["latency"]), mse=Score(0.0, [0.0] * PROMPTS))
        found = verdict(result, Rule("mse", "exact"))
        assert found.verdict is expected
        assert said in str(found.rulings)

    def test_one_process_of_few_rounds_is_inconclusive(self) -> None:
        result = study(variant("it", seconds=0.05, claims=["latency"]), mse=Score(0.0, [0.0] * PROMPTS))
        for row in result.variants:
            row.measurements = row.measurements[:1]
            row.measurements[0].latency_s = row.measurements[0].latency_s[:4]
        compare(result)
        assert verdict(result, Rule("mse", "exact")).verdict is Verdict.INCONCLUSIVE

    def test_memory_for_speed_is_harm_only_where_memory_is_claimed(self) -> None:
        for claims, expected in ((["latency"], Verdict.PASS), (["latency", "memory"], Verdict.FAIL)):
            result = study(variant("it", seconds=0.05, memory=3.0, claims=claims), mse=Score(0.0, [0.0] * PROMPTS))
            assert verdict(result, Rule("mse", "exact")).verdict is expected

    def test_who_claims_nothing_must_still_not_harm(self) -> None:
        for fields, metric in (({"seconds": 0.2}, "speedup"), ({"memory": 3.0}, "memory_ratio")):
            result = study(variant("it", **fields))
            rules = [Rule("speedup", "at_least", limit=0.95), Rule("memory_ratio", "at_most", limit=1.1)]
            found = verdict(result, *rules)
            assert found.verdict is Verdict.FAIL
            (ruling,) = [r for r in found.rulings if r.verdict is Verdict.FAIL]
            assert ruling.metric == metric


class TestCodesAndReports:
    @pytest.mark.parametrize(
        ("verdicts", "code"),
        [
            ([], 0),
            ([Verdict.PASS], 0),
            ([Verdict.PASS, Verdict.FAIL], 1),
            ([Verdict.INCONCLUSIVE], 3),
            ([Verdict.NOT_COMPARABLE, Verdict.FAIL], 1),
            ([Verdict.PASS, Verdict.NOT_COMPARABLE], 3),
        ],
    )
    def test_exit_codes(self, verdicts: list[Verdict], code: int) -> None:
        judgements = [Judgement("c", "r", "", "lossy", verdict, []) for verdict in verdicts]
        assert exit_code(judgements) == code
        assert exit_code(judgements, report_only=True) == 0

    def test_files_for_ci(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
        result = clip(-2.0)
        result.variant("it").name = result.comparisons[0].candidate = "a | <b>\x07"
        found = verdict(result, NON_INFERIOR, Rule("fid", "at_most", limit=1.0))
        write_verdicts(result, result.judgements, tmp_path)
        kept = json.loads((tmp_path / "verdicts.json").read_text())
        assert kept["judgements"][0]["verdict"] == "fail"
        root = ElementTree.parse(tmp_path / "verdicts.xml").getroot()
        (suite,) = root
        assert suite.get("tests") == str(len(found.rulings))
        assert (suite.get("failures"), suite.get("errors")) == ("1", "1")
        summary = (tmp_path / "summary.md").read_text()
        assert "| a \\| &lt;b&gt;" in summary
        assert summary == verdict_markdown(result, result.judgements) + "\n"

    def test_claims_of_benefit_are_held_together_in_the_report(self) -> None:
        result = study(variant("quick", seconds=0.05, claims=["latency"]))
        found = verdict(result, contract="lossy")
        assert 0 < found.claims["speedup"] < 1e-4
        doubtful = Judgement("doubtful", "baseline", "", "lossy", Verdict.PASS, [], claims={"memory_ratio": 0.06})
        said = "1 of 2 claims of a gain hold together at 95% confidence (Holm): quick (latency)."
        assert said in verdict_markdown(result, [found, doubtful])
        assert verdict_markdown(study(variant("modest")), []).find("Holm") == -1

    def test_a_calibration_survives(self, tmp_path: Path) -> None:
        write_calibration(CALIBRATION, tmp_path / "c.json")
        assert read_calibration(tmp_path / "c.json") == CALIBRATION
