"""Rules on numbers that were made by hand: what passes, what fails, and that nothing passes by being absent."""

import json
import math
import re
import zlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdopt.config.composer import composer_of
from sdopt.contract import Contract
from sdopt.gate.calibration import Calibration, Fit
from sdopt.gate.judge import exit_code, judge
from sdopt.gate.paying import Claim, answer_claims
from sdopt.gate.rulings import UNIT_ROUNDOFF
from sdopt.record.comparisons import Comparison, Interval, ShapeRatios
from sdopt.record.configuration import RecordedConfig
from sdopt.record.files import JobError
from sdopt.record.records import Budget, Promise, Status, StudyResult, VariantResult
from sdopt.record.samples import Measurement, Memory, ShapeSamples, TimedImage
from sdopt.record.scores import BrokenImage, ImageRecord, Score, Spread
from sdopt.record.verdicts import Judgement, Payoff, Ruling, Verdict
from sdopt.report.comparing import comparison_of
from sdopt.report.markdown import written
from sdopt.report.summary import summary_of
from sdopt.report.sweep import Sweep
from sdopt.report.verdicts import verdict_markdown
from sdopt.schema import Gate, Rule
from sdopt.statistics.bounds import MINIMUM_PROMPTS
from sdopt.statistics.comparing import compare
from sdopt.statistics.measures import MEMORY_RATIO, SPEEDUP
from sdopt.statistics.ratios import LogRatio
from tests.records import disturb, reconfigure, recorded, retime, samples_of, timed

PROMPTS = 48
SPREADS = {
    "clip_score_x": Spread(0.0, 2.0, 99),
    "cmmd_x": Spread(0.0, 1.0, 99),
    "perceptual_x": Spread(1.0, 1.0, 9),
}
CALIBRATION = Calibration("emoji", {}, {}, SPREADS)
FIT = Fit(CALIBRATION)


def per_prompt(mean: float, spread: float, seed: int = 0) -> Score:
    values = np.random.default_rng(seed).standard_normal(PROMPTS)
    values = mean + spread * (values - values.mean()) / values.std()
    return Score(float(values.mean()), values.tolist())


def variant(
    name: str, *, role: str = "variant", seconds: float = 0.1, **fields: Any
) -> VariantResult:
    """Three processes of eight rounds."""
    random = np.random.default_rng(zlib.crc32(f"{name} {role}".encode()))
    measurements = [
        Measurement(
            number,
            shapes=[
                ShapeSamples(
                    calls=timed(
                        seconds * np.exp(0.01 * random.standard_normal(8)),
                        held_gib=[1.0] * 8,
                    ),
                    memory=Memory(
                        1.0,
                        fields.get("memory", 1.0)
                        * math.exp(0.001 * random.standard_normal()),
                    ),
                    traced={
                        "operators": 1.0
                        if role == "control" or name == "baseline"
                        else 2.0
                    },
                    timed_images=[TimedImage(0, 0, 0.0)],
                )
            ],
        )
        for number in range(3)
    ]
    fields.pop("memory", None)
    contract, claims = (
        Contract(fields.pop("contract", "lossy")),
        fields.pop("claims", []),
    )
    made: dict[str, Any] = {
        "status": Status.OK,
        "contract": contract,
        "promises": {"axis": Promise(contract, claims)},
        "denoiser_calls": 25,
        "images": [ImageRecord("a", 0, 0, 0, "images/a.png")],
        "measurements": measurements,
    }
    return VariantResult(
        name, role, {"axis": name}, [], RecordedConfig(), **(made | fields)
    )


def study(
    candidate: VariantResult, reference: VariantResult | None = None, **paired: Score
) -> StudyResult:
    reference = reference or variant("baseline", contract="exact")
    control = variant("control", role="control", seconds=0.1)
    edge = Comparison(candidate.name, reference.name, "it", quality=paired)
    edges = [edge, Comparison("control", reference.name, "nothing")]
    result = recorded([reference, candidate, control], edges, "pair")
    compare(result)
    return result


def judged(*candidates: VariantResult, **settings: Any) -> dict[str, Judgement]:
    """Of several candidates of one study, by what they claim alone."""
    result = study(candidates[0])
    result.variants[2:2] = candidates[1:]
    result.comparisons[1:1] = [
        Comparison(row.name, "baseline", "it") for row in candidates[1:]
    ]
    compare(result)
    judge(result, Gate("g", **settings), FIT)
    return {found.candidate: found for found in result.judgements}


def paying(found: Judgement) -> Ruling:
    """The ruling on what a candidate claims."""
    (ruling,) = [ruling for ruling in found.rulings if ruling.rule == "must pay"]
    return ruling


def verdict(
    result: StudyResult, *rules: Rule, contract: str = "lossy", **settings: Any
) -> Judgement:
    judge(result, Gate("g", {contract: list(rules)}, **settings), FIT)
    (found,) = result.judgements
    return found


def clip(candidate: float, spread: float = 0.5, **fields: Any) -> StudyResult:
    """A CLIP score that the candidate has lower than its reference, prompt by prompt."""
    base = per_prompt(25, 3)
    assert base.estimate is not None
    change = per_prompt(candidate, spread, seed=1)
    values = [
        a + b
        for a, b in zip(base.per_prompt, change.per_prompt, strict=True)
        if a is not None and b is not None
    ]
    mine = Score(float(np.mean(values)), list(values))
    return study(
        variant("it", quality={"clip_score_x": mine}, **fields),
        variant("baseline", quality={"clip_score_x": base}),
    )


def end(row: VariantResult, status: Status) -> None:
    row.status, row.reason = status, "because"


NON_INFERIOR = Rule("clip_score", deviations=0.25)  # 0.25 · 2.0 = a margin of 0.5


class TestNonInferiority:
    @pytest.mark.parametrize(
        ("change", "spread", "expected"),
        [
            (-0.3, 0.5, Verdict.PASS),
            (-0.8, 0.5, Verdict.FAIL),
            (+5.0, 0.5, Verdict.PASS),
        ],
    )
    def test_the_whole_interval_decides(
        self, change: float, spread: float, expected: Verdict
    ) -> None:
        found = verdict(clip(change, spread), NON_INFERIOR)
        assert found.verdict is expected, found.rulings


def test_what_is_said_to_settle_it_is_enough_for_bounds() -> None:
    """Of five prompts there are none, however clear their mean: a command for five would be measured in vain."""
    result = clip(0.0)
    for row in result.variants:
        for score in row.quality.values():
            score.per_prompt = score.per_prompt[:4]
    [ruling] = [r for r in verdict(result, NON_INFERIOR).rulings if r.prompts]
    assert ruling.prompts == MINIMUM_PROMPTS
    assert f"about {MINIMUM_PROMPTS} prompts" in ruling.reason


class TestFailClosed:
    """Nothing passes that is missing, not finite, failed, or of other work."""

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda r: r.variant("it").quality.clear(), "clip_score was not measured"),
            (
                lambda r: setattr(
                    r.variant("it").quality["clip_score_x"], "estimate", None
                ),
                "",
            ),
            (
                lambda r: (
                    r.variant("it")
                    .quality["clip_score_x"]
                    .per_prompt.__setitem__(3, None)
                ),
                "",
            ),
            (lambda r: end(r.variant("it"), Status.FAILED), "because"),
            (lambda r: end(r.variant("baseline"), Status.FAILED), ""),
            (
                lambda r: r.variant("baseline").trips.append(
                    BrokenImage("black", "images/a.png", "all of it")
                ),
                "",
            ),
            (
                lambda r: reconfigure(r.variant("it"), "workload", seed=7),
                "workload.seed",
            ),
            (
                lambda r: reconfigure(r.variant("it"), "model", name="sd15"),
                "model.name",
            ),
        ],
    )
    def test_what_cannot_be_compared(
        self, change: Callable[[StudyResult], object], said: str
    ) -> None:
        result = clip(0.0)
        change(result)
        found = verdict(result, NON_INFERIOR)
        assert found.verdict is Verdict.NOT_COMPARABLE
        assert said in str(found.rulings)

    def test_no_calibration_and_no_rules_for_the_contract(self) -> None:
        result = clip(0.0)
        judge(result, Gate("g", {"lossy": [NON_INFERIOR]}), Fit())
        assert result.judgements[0].verdict is Verdict.NOT_COMPARABLE
        assert "`sdopt calibrate model=emoji workload.steps=" in str(
            result.judgements[0].rulings
        )
        assert (
            verdict(clip(0.0), NON_INFERIOR, contract="exact").verdict
            is Verdict.NOT_COMPARABLE
        )

    def test_the_same_pixels_need_no_calibration(self) -> None:
        result = clip(0.0, 0.0)
        result.comparisons[0].quality["mse"] = Score(0.0, [0.0] * 48)
        judge(result, Gate("g", {"lossy": [NON_INFERIOR]}), Fit())
        assert result.judgements[0].verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"status": Status.NOT_ENGAGED}, ""),
        (
            {"trips": [BrokenImage("black", "images/07.png", "99 % are black")]},
            "images/07.png",
        ),
        ({"denoiser_calls": 13}, "13 times"),  # half the steps under the same name
    ],
)
def test_what_is_not_engaged_broken_or_another_work_fails(
    fields: dict[str, Any], named: str
) -> None:
    found = verdict(clip(0.0, **fields), NON_INFERIOR)
    assert found.verdict is Verdict.FAIL
    assert named in str(found.rulings)


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        (True, "the denoiser never ran in an observed call of it"),
        (False, "protocol.budget_s left no time for a call of it that counts them"),
    ],
)
def test_why_nothing_counted_the_steps_is_said(stages: bool, said: str) -> None:
    result = clip(0.0, denoiser_calls=None)
    result.budget = Budget(stages=stages)
    [steps] = [r for r in verdict(result, NON_INFERIOR).rulings if r.rule == "steps"]
    assert steps.reason == said


def test_options_of_several_contracts_are_judged_by_the_loosest_in_plain_words() -> (
    None
):
    result = clip(0.0)
    it = result.variant("it")
    it.choices["compiler"] = "mine"
    it.promises["compiler"] = Promise(Contract.EQUIVALENT, [])
    note = verdict(result, NON_INFERIOR).note
    assert "keep images more closely than others" in note
    assert "judged by what the loosest of them promises, lossy" in note


@pytest.mark.parametrize("chosen", [{"steps": 13}, {"guidance_scale": 1.0}])
def test_another_number_of_steps_or_no_guidance_is_a_choice(
    chosen: dict[str, Any],
) -> None:
    """Without guidance, transformers of many kinds call their denoiser half as often."""
    result = clip(0.0, denoiser_calls=13)
    reconfigure(result.variant("it"), "workload", **chosen)
    assert verdict(result, NON_INFERIOR).verdict is Verdict.PASS


class TestValues:
    def test_exact_wants_every_prompt_to_be_the_same(self) -> None:
        rule = Rule("mse", "exact")
        same, other = (
            Score(0.0, [*[0.0] * PROMPTS]),
            Score(1e-9, [*[0.0] * (PROMPTS - 1), 1e-7]),
        )
        assert (
            verdict(
                study(variant("it", contract="exact"), mse=same), rule, contract="exact"
            ).verdict
            is Verdict.PASS
        )
        found = verdict(
            study(variant("it", contract="exact"), mse=other), rule, contract="exact"
        )
        assert found.verdict is Verdict.FAIL
        [exact] = [ruling for ruling in found.rulings if ruling.rule == "exact"]
        assert exact.reason == "1 of 48 prompts differ"
        assert exact.low is exact.high is None, "they were the worst prompt's"

    def test_of_several_images_of_a_prompt_the_worst_counts(self) -> None:
        """One image of eight that is another's has an eighth of its distance in the mean."""
        means, worst = [*[0.1] * 12, *[0.0] * 36], [*[0.8] * 12, *[0.0] * 36]
        rules = (
            Rule("perceptual", "every", limit=0.5),
            Rule("perceptual", "rarely", limit=0.5, share=0.08),
        )
        for rule in rules:
            hidden = study(variant("it"), perceptual_x=Score(0.025, [*means]))
            assert verdict(hidden, rule).verdict is Verdict.PASS
            shown = study(
                variant("it"), perceptual_x=Score(0.025, [*means], worst=[*worst])
            )
            assert verdict(shown, rule).verdict is Verdict.FAIL

    @pytest.mark.parametrize(
        ("rule", "verdicts"),
        [
            # A published window judges the estimate itself; equivalence is two-sided.
            (
                Rule("clip_score", "within", low=24.9, high=25.1, confidence=None),
                {0.0: 1, -0.2: 0, 0.2: 0},
            ),
            (
                Rule("clip_score", "equivalent", deviations=0.25),
                {0.0: 1, -2.0: 0, 2.0: 0},
            ),
        ],
    )
    def test_rules_that_are_two_sided(
        self, rule: Rule, verdicts: dict[float, int]
    ) -> None:
        for change, passes in verdicts.items():
            assert verdict(clip(change), rule).verdict is (
                Verdict.PASS if passes else Verdict.FAIL
            )


class TestItMustPay:
    def test_rounds_of_one_process_prove_nothing(self) -> None:
        result = study(
            variant("it", seconds=0.05, claims=["latency"]),
            mse=Score(0.0, [0.0] * PROMPTS),
        )
        for row in result.variants:
            row.measurements = row.measurements[:1]
            retime(
                row.measurements[0].shapes[0],
                row.measurements[0].shapes[0].latency_s * 100,
            )
        compare(result)
        found = verdict(
            result, Rule("mse", "exact"), Rule("speedup", "at_least", limit=0.95)
        )
        assert found.verdict is Verdict.INCONCLUSIVE
        assert "3 processes per variant (protocol.replicates)" in paying(found).reason

    @pytest.mark.parametrize(
        ("change_mib", "seconds", "payoff"),
        [
            (-0.0005, 0.1, "no benefit"),
            (0.0005, 0.05, "it pays"),
            (-15, 0.1, "no benefit"),
            (-40, 0.1, "it pays"),
            (40, 0.05, "harm"),
        ],
    )
    def test_one_block_of_the_allocator_decides_nothing(
        self, change_mib: float, seconds: float, payoff: Payoff
    ) -> None:
        """CUDA's peaks are the same in every process: without a smallest effect any difference would be certain."""
        result = study(variant("it", seconds=seconds, claims=["latency", "memory"]))
        for samples in samples_of(*result.variants):
            samples.memory = Memory(0.1, 9.0, cuda_peak_allocated_gib=1.0)
        for samples in samples_of(result.variant("it")):
            samples.memory = Memory(
                0.1, 9.0, cuda_peak_allocated_gib=1.0 + change_mib / 1024
            )
        compare(result)
        assert paying(verdict(result)).payoff == payoff

    @pytest.mark.parametrize(
        ("before", "after", "limit", "device", "spare", "expected"),
        [
            # Of a model of 64 MiB, 10 % are 6 MiB: a limit never asks for less than what counts.
            (64 / 1024, 72 / 1024, 1.1, "cpu", None, Verdict.PASS),
            (64 / 1024, 88 / 1024, 1.1, "cpu", None, Verdict.FAIL),
            # Of 3 GiB on a card of 80 GiB, graphs take another half: what the card has to spare is no harm.
            (3.0, 3.5, 1.1, "cuda", None, Verdict.PASS),
            (3.0, 3.5, 1.1, "cuda", 0.001, Verdict.FAIL),
            (3.0, 3.5, 1.1, "cpu", None, Verdict.FAIL),
            (3.0, 3.5, 1.1, "cpu", 0.02, Verdict.PASS),
            # A rule that asks for less memory is not loosened.
            (3.0, 3.0, 0.9, "cuda", None, Verdict.FAIL),
        ],
    )
    def test_a_limit_on_memory(
        self,
        before: float,
        after: float,
        limit: float,
        device: str,
        spare: float | None,
        expected: Verdict,
    ) -> None:
        result = study(variant("it", memory=after), variant("baseline", memory=before))
        result.variant("control").measurements = result.variant("baseline").measurements
        result.environment.device |= {"type": device, "memory_total_gib": 80.0}
        found = verdict(
            result, Rule("memory_ratio", "at_most", limit=limit), spare_memory=spare
        )
        assert {r.verdict for r in found.rulings if r.metric == "memory_ratio"} == {
            expected
        }

    @pytest.mark.parametrize(
        ("claim", "answer"),
        [
            # A gain must exceed that of two equal baselines.
            (
                Claim(SPEEDUP, LogRatio(math.log(1.2), 0.001, 4.0, 3), 1.02, 1.1),
                "it pays",
            ),
            (Claim(SPEEDUP, LogRatio(math.log(1.2), 0.001, 4.0, 3), 1.02, 1.3), None),
            # A p value of 3.5 % is a gain, and one of 9 % is none.
            (
                Claim(SPEEDUP, LogRatio(math.log(1.2), 0.0663, 4.0, 3), 1.02, 1.1),
                "it pays",
            ),
            (
                Claim(SPEEDUP, LogRatio(math.log(1.2), 0.1, 4.0, 3), 1.02, 1.1),
                None,
            ),
            # An option that saves some memory, on top of one that takes much: what there is to spare is no harm.
            (
                Claim(
                    MEMORY_RATIO,
                    LogRatio(math.log(3.0), 0.001, 4.0, 3),
                    1.1,
                    1.01,
                    spared=4.0,
                ),
                "no benefit",
            ),
            (
                Claim(
                    MEMORY_RATIO,
                    LogRatio(math.log(3.0), 0.001, 4.0, 3),
                    1.1,
                    1.01,
                    spared=1.5,
                ),
                "harm",
            ),
        ],
    )
    def test_a_claim_by_itself(self, claim: Claim, answer: Payoff | None) -> None:
        answer_claims([claim], 0.95)
        assert claim.answer == answer

    def test_a_disturbed_claim_makes_no_other_one_easier(self) -> None:
        """Of two claims, a p value of 3.5 % is a gain only once the other one holds, which disturbed times cannot."""
        other = Claim(
            SPEEDUP,
            LogRatio(math.log(1.5), 0.001, 4.0, 3),
            1.02,
            1.1,
            disturbed="a run",
        )
        claim = Claim(SPEEDUP, LogRatio(math.log(1.2), 0.0663, 4.0, 3), 1.02, 1.1)
        answer_claims([other, claim], 0.95)
        assert (other.answer, claim.answer) == (None, None)

    def test_a_gain_must_hold_among_all_claims_of_the_study(self) -> None:
        """Alone it would pay; beside nine that gain nothing it may be the luckiest of ten."""
        options = [
            variant(f"idle {number}", seconds=0.1, claims=["latency"])
            for number in range(9)
        ]
        lucky = variant("lucky", claims=["latency"])
        lucky.measurements = [
            Measurement(
                n,
                shapes=[
                    ShapeSamples(
                        calls=timed([0.0955 + 0.0012 * n] * 8), traced={"operators": 2}
                    )
                ],
            )
            for n in range(3)
        ]
        assert paying(judged(lucky)["lucky"]).verdict is Verdict.PASS
        found = judged(lucky, *options)
        assert paying(found["lucky"]).verdict is Verdict.INCONCLUSIVE
        assert "could be chance: of 10 gains" in paying(found["lucky"]).reason
        assert not found["lucky"].gains
        fast = variant("fast", seconds=0.05, claims=["latency"])
        assert judged(fast, *options)["fast"].gains == ["speedup"]

    def test_memory_for_speed_is_harm_only_where_memory_is_claimed(self) -> None:
        for claims, expected in (
            (["latency"], Verdict.PASS),
            (["latency", "memory"], Verdict.FAIL),
        ):
            result = study(
                variant("it", seconds=0.05, memory=3.0, claims=claims),
                mse=Score(0.0, [0.0] * PROMPTS),
            )
            assert verdict(result, Rule("mse", "exact")).verdict is expected
        # Who claims nothing must not harm either.
        rules = [
            Rule("speedup", "at_least", limit=0.95),
            Rule("memory_ratio", "at_most", limit=1.1),
        ]
        for candidate, metric in (
            (variant("it", seconds=0.2), "speedup"),
            (variant("it", memory=3.0), "memory_ratio"),
        ):
            failed = [
                r.metric
                for r in verdict(study(candidate), *rules).rulings
                if r.verdict is Verdict.FAIL
            ]
            assert failed == [metric]


@pytest.mark.parametrize("seconds", [0.05, 0.8])
def test_of_a_study_that_others_disturbed_nothing_passes_and_time_decides_nothing(
    seconds: float,
) -> None:
    def beside_another(*claims: str) -> StudyResult:
        return disturb(
            study(
                variant("it", seconds=seconds, claims=[*claims]),
                mse=Score(0.0, [0.0] * PROMPTS),
            )
        )

    rules = Rule("mse", "exact"), Rule("speedup", "at_least", limit=0.95)
    found = verdict(beside_another("latency"), *rules)
    assert found.verdict is Verdict.INCONCLUSIVE
    [said] = {r.because for r in found.rulings if r.verdict is Verdict.INCONCLUSIVE}
    assert said.startswith(
        "other programs took more than 2 % from 24 of 24 calls of 'it' that decide"
    )
    assert paying(found).text.startswith("speedup ")
    assert paying(found).text.endswith(f"; but {said}")
    found = verdict(beside_another(), rules[0])
    assert [r.rule for r in found.rulings if r.verdict is Verdict.INCONCLUSIVE] == [
        "undisturbed"
    ]


class TestLooks:
    RULE = Rule("mse", "exact")

    @staticmethod
    def extend(result: StudyResult) -> None:
        """Three more processes of each variant."""

        def again(m: Measurement, seconds: list[float]) -> Measurement:
            return replace(
                m,
                replicate=m.replicate + 3,
                shapes=[replace(m.shapes[0], calls=timed(seconds))],
            )

        for row in result.variants:
            more = [
                again(m, [1.01 * s for s in m.shapes[0].latency_s])
                for m in row.measurements[-3:]
            ]
            row.measurements += more
        compare(result)

    def test_a_study_that_is_extended_cannot_pass_by_repetition(self) -> None:
        result = study(
            variant("it", seconds=0.05, claims=["latency"]),
            mse=Score(0.0, [0.0] * PROMPTS),
        )
        assert verdict(result, self.RULE).verdict is Verdict.PASS
        assert (
            verdict(result, self.RULE).verdict is Verdict.PASS
        )  # the same data again are the same look
        self.extend(result)
        found = verdict(result, self.RULE)
        assert found.verdict is Verdict.INCONCLUSIVE
        [ruling] = [ruling for ruling in found.rulings if ruling.rule == "looks"]
        assert "a new study can" in ruling.reason
        assert [
            (look.number, look.processes, look.rounds, look.verdict)
            for look in result.looks
        ] == [
            (1, 3, 24, Verdict.PASS),
            (2, 6, 48, Verdict.INCONCLUSIVE),
        ]

    def test_more_prompts_are_another_look(self) -> None:
        result = clip(0.0)
        assert verdict(result, NON_INFERIOR).verdict is Verdict.PASS
        for row in result.variants:
            row.images = [*row.images, ImageRecord("b", 1, 0, 0, "images/b.png")]
        assert verdict(result, NON_INFERIOR).verdict is Verdict.INCONCLUSIVE


SCORES = json.loads((Path(__file__).parent / "bf16_scores.json").read_text())["mse"]
"""Of the packaged model, recorded: what honest options differ by from a bfloat16 baseline."""


@cache
def gate_named(name: str) -> Gate:
    with composer_of([f"gate={name}"]) as composer:
        return composer.current.gate


def rule_of_mse(gate: str) -> Rule:
    return next(
        rule for rule in gate_named(gate).rules["equivalent"] if rule.metric == "mse"
    )


class TestPrecision:
    @staticmethod
    def against(
        option: str, precision: dict[str, Any] | None, gate: str = "default"
    ) -> Judgement:
        values: list[float | None] = [*SCORES[option]]
        result = study(
            variant("it", contract="equivalent"),
            mse=Score(float(np.mean(SCORES[option])), values),
        )
        if precision is not None:
            result.variant("baseline").config.options["precision"] = precision
        return verdict(result, rule_of_mse(gate), contract="equivalent")

    def test_honest_options_pass_on_a_bfloat16_baseline_alone(self) -> None:
        for option, gate in product(SCORES, ("default", "strict")):
            for weights, expected in (
                ("bfloat16", Verdict.PASS),
                ("float16", Verdict.FAIL),
                ("float32", Verdict.FAIL),
            ):
                found = self.against(
                    option, {"weights": weights, "autocast": None}, gate
                )
                assert found.verdict is expected, (option, gate, weights)

    def test_the_limits_are_multiples_of_what_the_type_rounds(self) -> None:
        for gate, multiple in (("default", 2), ("strict", 1)):
            limits = rule_of_mse(gate).limits
            for kind, roundoff in UNIT_ROUNDOFF.items():
                assert limits[kind] == pytest.approx(
                    max(limits["float32"], multiple * roundoff**2), rel=0.01
                )

    @pytest.mark.parametrize("precision", [None, {"bits": 4}, {"weights": "int8"}])
    def test_a_precision_that_is_not_known_is_not_judged(
        self, precision: dict[str, Any] | None
    ) -> None:
        found = self.against("channels last", precision)
        assert found.verdict is Verdict.NOT_COMPARABLE
        assert "--precision float32" in str(found.rulings)


class TestCodesAndReports:
    @pytest.mark.parametrize(
        ("verdicts", "code"),
        [
            ([Verdict.PASS], 0),
            ([Verdict.PASS, Verdict.FAIL], 1),
            ([Verdict.INCONCLUSIVE], 3),
            ([Verdict.NOT_COMPARABLE, Verdict.FAIL], 1),
            ([Verdict.PASS, Verdict.NOT_COMPARABLE], 3),
        ],
    )
    def test_exit_codes(self, verdicts: list[Verdict], code: int) -> None:
        judgements = [
            Judgement("c", "r", "", Contract.LOSSY, verdict, []) for verdict in verdicts
        ]
        assert exit_code(judgements, Gate()) == code
        assert exit_code(judgements, Gate(report_only=True)) == 0
        open_passes = 0 if {*verdicts} <= {Verdict.PASS, Verdict.INCONCLUSIVE} else code
        lenient = Gate(undecided_passes=True)
        assert exit_code(judgements, lenient) == open_passes

    @pytest.mark.parametrize(
        ("verdict", "errors", "code"),
        [
            (Verdict.FAIL, [2, 3], 1),
            (Verdict.INCONCLUSIVE, [2], 3),
            (Verdict.PASS, [2], 2),
        ],
    )
    def test_in_a_sweep_a_regression_counts_most(
        self, verdict: Verdict, errors: list[int], code: int
    ) -> None:
        job = study(variant("it"))
        for edge in job.comparisons:
            edge.shapes[0].speedup = Interval(1.0)
        job.judgements = [Judgement("it", "baseline", "", Contract.EXACT, verdict, [])]
        reconfigure(job, "gate", rules={"exact": [Rule("max_abs")]})
        failed = {
            str(number): JobError(error, ["why"])
            for number, error in enumerate(errors, start=1)
        }
        assert Sweep(Path(), {"0": job}, failed).exit_code == code

    @pytest.mark.parametrize(
        ("report_only", "status", "code"),
        [(False, Status.OK, 3), (True, Status.OK, 0), (False, Status.SKIPPED, 0)],
    )
    def test_a_gate_that_judged_nothing_has_passed_nothing(
        self, report_only: bool, status: Status, code: int
    ) -> None:
        job = study(variant("it"))
        gate = Gate("g", {"lossy": [NON_INFERIOR]}, report_only=report_only)
        job.config = replace(job.config, gate=gate)
        job.comparisons, job.status, job.variant("it").status = [], "finished", status
        judge(job, gate, FIT)
        assert job.judgements == []
        assert Sweep(Path(), {"0": job}, {}).exit_code == code

    def test_claims_of_benefit_are_held_together_in_the_report(self) -> None:
        result = study(variant("quick", seconds=0.05, claims=["latency"]))
        found = verdict(result, contract="lossy")
        assert 0 < found.claims["speedup"] < 1e-4
        doubtful = Judgement(
            "doubtful",
            "baseline",
            "",
            Contract.LOSSY,
            Verdict.PASS,
            [],
            claims={"memory_ratio": 0.06},
        )
        said = "1 of 2 expected gains are shown, allowing for how many were looked for: quick (latency)."
        result.judgements = [found, doubtful]
        assert said in verdict_markdown(summary_of(result))
        assert "Holm" not in verdict_markdown(summary_of(study(variant("modest"))))


class TestSeveralShapes:
    """The candidate is twice as fast at the main shape; what it is at the further one decides as well."""

    @staticmethod
    def two_shapes(further: float) -> StudyResult:
        made = study(
            variant("fast", seconds=0.05, claims=["latency"], contract="exact")
        )
        owners: list[StudyResult | VariantResult] = [made, *made.variants]
        for owner in owners:
            reconfigure(owner, "workload", size=[64, 96])
        for row in made.variants:
            for measurement in row.measurements:
                seconds = 0.4 / further if row.name == "fast" else 0.4
                spread = np.random.default_rng(
                    zlib.crc32(f"{row.name} {measurement.replicate}".encode())
                )
                times = (seconds * np.exp(0.01 * spread.standard_normal(8))).tolist()
                measurement.shapes.append(
                    ShapeSamples(calls=timed(times), memory=Memory(1.0, 1.0))
                )
        for edge in made.comparisons:
            edge.shapes.append(ShapeRatios())
        compare(made)
        return made

    @pytest.mark.parametrize(
        ("further", "expected"), [(2.0, Verdict.PASS), (0.5, Verdict.FAIL)]
    )
    def test_a_rule_on_speed_holds_at_each(
        self, further: float, expected: Verdict
    ) -> None:
        rule = Rule("speedup", "at_least", limit=0.95)
        found = verdict(
            self.two_shapes(further), rule, contract="exact", must_pay=False
        )
        assert [ruling.metric for ruling in found.rulings if ruling.metric] == [
            "speedup/64x64b1",
            "speedup/96x96b1",
        ]
        assert found.verdict is expected

    def test_two_results_are_compared_at_each(self) -> None:
        made = self.two_shapes(0.5)
        text = written(comparison_of(made, deepcopy(made)))
        for shape, speedup in (("64×64", "2.0"), ("96×96", "0.5")):
            [line] = re.findall(rf"\| fast, {shape}.*\| A \|.*", text)
            assert f"| {speedup}" in line
        assert text.count("| B/A |") == 2, "none of the repeated baseline"

    def test_a_harm_at_one_is_no_gain_of_the_option(self) -> None:
        made = self.two_shapes(0.5)
        judge(made, Gate("g"), FIT)
        [found] = made.judgements
        assert found.gains == ["speedup/64x64b1"]
        assert paying(found).verdict is Verdict.FAIL
        assert paying(found).payoff == "harm"
