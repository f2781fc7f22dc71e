"""Rules against harm that a mean, a median or rounding to bytes hides, and gains that nothing explains."""

import pytest

from sdopt.record.scores import Score, Spread
from sdopt.record.verdicts import Ruling, Verdict
from sdopt.report.summary import summary_of
from sdopt.schema import Rule
from sdopt.statistics.scale import Images
from tests.gate.test_judge import (
    PROMPTS,
    judged,
    paying,
    per_prompt,
    study,
    variant,
    verdict,
)
from tests.records import known, retime, samples_of
from tests.trial.simulation import Scenario, Slow, verdicts_on_time

EVERY = Rule("mse", "every", limit=1e-4, of_floor=100, least=1e-7)


def mse(result_floor: float | None, worst: float, **sides: object) -> Ruling:
    """The ruling on a candidate that is right in all prompts but one."""
    result = study(
        variant("it", contract="equivalent"),
        mse=Score(worst / PROMPTS, [*[0.0] * (PROMPTS - 1), worst]),
    )
    if result_floor is not None:
        result.floors["numerical"] = {"mse": Spread(result_floor, 0.0, 24)}
    for key, value in sides.items():
        setattr(result.variant("it"), key, value)
    return next(
        r
        for r in verdict(result, EVERY, contract="equivalent").rulings
        if r.metric == "mse"
    )


class TestEveryPrompt:
    @pytest.mark.parametrize(
        ("floor", "worst", "expected", "limit"),
        [
            (
                1e-9,
                2e-7,
                Verdict.FAIL,
                1e-7,
            ),  # 67 dB: far above what an order of computation changes
            (
                1e-8,
                2e-7,
                Verdict.PASS,
                1e-6,
            ),  # a model that computes less precisely has a higher floor
            (
                1e-3,
                2e-4,
                Verdict.FAIL,
                1e-4,
            ),  # but never a higher limit than the rule's
            (0.0, 5e-8, Verdict.PASS, 1e-7),  # nor one of nothing
        ],
    )
    def test_one_wrong_image_of_many_fails(
        self, floor: float, worst: float, expected: Verdict, limit: float
    ) -> None:
        ruling = mse(floor, worst)
        assert ruling.verdict is expected
        assert ruling.margin == pytest.approx(limit)

    def test_without_a_floor_nothing_passes(self) -> None:
        ruling = mse(None, 0.0)
        assert ruling.verdict is Verdict.NOT_COMPARABLE
        assert (
            "was not measured: see the reason of the repeated baseline" in ruling.reason
        )
        other = study(
            variant("it", contract="equivalent"), mse=Score(0.0, [0.0] * PROMPTS)
        )
        other.floors["numerical"] = {"perceptual_x": Spread(0.0, 0.0, 24)}
        [ruling] = [
            r
            for r in verdict(other, EVERY, contract="equivalent").rulings
            if r.metric == "mse"
        ]
        assert ruling.verdict is Verdict.NOT_COMPARABLE
        assert "has no such score" in ruling.reason

    def test_of_another_precision_the_floor_says_nothing(self) -> None:
        ruling = mse(1e-9, 5e-5, choices={"axis": "it", "precision": "tf32"})
        assert (ruling.verdict, ruling.margin) == (Verdict.PASS, 1e-4)


def test_too_few_prompts_to_pass_are_named() -> None:
    """None of 48 has an upper bound of 6 %."""
    result = study(variant("it"), perceptual_x=per_prompt(0.0, 0.0))
    found = verdict(result, Rule("perceptual", "rarely", limit=1.0, share=0.05))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "59 prompts would" in str(found.rulings)


class TestTail:
    RULE = Rule("tail_ratio", "at_most", limit=1.25)

    @pytest.mark.parametrize(
        ("slow", "left_out", "expected"),
        [
            ({}, [], Verdict.PASS),
            (
                {0: 1, 1: 4, 2: 7},
                [],
                Verdict.FAIL,
            ),  # one slow call in each process moves no median
            ({1: 4}, [], Verdict.INCONCLUSIVE),
            ({0: 3}, [3], Verdict.PASS),  # a round that others disturbed does not count
        ],
    )
    def test_slow_calls(
        self, slow: dict[int, int], left_out: list[int], expected: Verdict
    ) -> None:
        candidate = variant("it", contract="exact")
        for process, number in slow.items():
            candidate.measurements[process].shapes[0].calls[number].seconds *= 2
        result = study(candidate)
        for samples in samples_of(*result.variants):
            retime(samples, left_out=left_out)
        found = verdict(result, self.RULE, contract="exact")
        ruling = next(r for r in found.rulings if r.metric == "tail_ratio")
        assert ruling.verdict is expected
        assert (
            ruling.estimate == pytest.approx(2.0, rel=0.05)
            or expected is not Verdict.FAIL
        )

    def test_of_independent_studies_few_are_false_and_slow_calls_are_seen(self) -> None:
        assert verdicts_on_time(Scenario(1.0), 60).count(Verdict.FAIL) == 0
        seen = verdicts_on_time(Scenario(0.3, rounds=6, slow=Slow(4, 1.5)), 60)
        assert seen.count(Verdict.FAIL) > 20
        assert seen.count(Verdict.PASS) < 5


@pytest.mark.parametrize(
    ("seconds", "expected", "estimate"),
    [
        (9, Verdict.PASS, 10),
        (9.5, Verdict.FAIL, 10.5),
        (None, Verdict.NOT_COMPARABLE, None),
    ],
)
def test_loading_and_the_first_call_make_the_first_image(
    seconds: float | None, expected: Verdict, estimate: float | None
) -> None:
    candidate = variant("it", contract="exact")
    first = candidate.measurements[0]
    first.load_s, first.shapes[0].cold_start_s = 1.0, seconds
    result = study(candidate)
    found = verdict(
        result, Rule("first_image_s", "at_most", limit=10), contract="exact"
    )
    ruling = next(r for r in found.rulings if r.metric == "first_image_s")
    assert (ruling.verdict, ruling.estimate) == (expected, estimate)
    result.judgements = [found]
    row = known(summary_of(result).row("it"))
    assert row.images is Images.NOT_JUDGED, "no rule was on them"


class TestEvidence:
    """A gain that sdopt's own trace does not explain is unproven, whatever the option says of itself."""

    def test_a_gain_with_the_same_trace_is_unproven(self) -> None:
        fast = variant("fast", seconds=0.05, claims=["latency"])
        assert paying(judged(fast)["fast"]).verdict is Verdict.PASS
        for samples in samples_of(fast):
            samples.traced = {"operators": 1.0}
        ruling = paying(judged(fast)["fast"])
        assert ruling.verdict is Verdict.INCONCLUSIVE
        assert "sdopt's own trace shows the same" in ruling.because

    def test_what_two_baselines_differ_by_explains_nothing(self) -> None:
        fast = variant("fast", seconds=0.05, claims=["latency"])
        fast.measurements[0].shapes[0].traced = {"operators": 1.0, "by chance": 3.0}
        result = study(fast)
        control = known(result.control)
        control.measurements[0].shapes[0].traced = {"operators": 1.0, "by chance": 2.0}
        found = verdict(result, Rule("speedup", "at_least", limit=0.5))
        assert paying(found).verdict is Verdict.INCONCLUSIVE

    def test_a_word_that_nothing_supports_is_no_evidence(self) -> None:
        """As of a hook that is attached, and changes neither the trace nor an image."""
        rule = Rule("mse", "exact")
        attached, other = (
            variant("attached", contract="exact"),
            variant("other", contract="exact"),
        )
        for samples in samples_of(attached):
            samples.traced = {"operators": 1.0}
        exact = Score(0.0, [0.0] * PROMPTS)
        found = verdict(study(attached, mse=exact), rule, contract="exact")
        [ruling] = [r for r in found.rulings if r.rule == "engaged"]
        assert (ruling.verdict, found.verdict) == (
            Verdict.INCONCLUSIVE,
            Verdict.INCONCLUSIVE,
        )
        assert "only the option's own word" in ruling.reason
        moved = Score(1e-9, [*[0.0] * (PROMPTS - 1), 1e-7])
        for result in (
            study(attached, mse=moved),
            study(other, mse=exact),
        ):  # other images, or another trace
            assert not [
                r
                for r in verdict(result, rule, contract="exact").rulings
                if r.rule == "engaged"
            ]
