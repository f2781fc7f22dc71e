"""What each rule of the packaged gates says, in a sentence, when it fails and when it is undecided."""

import re
from pathlib import Path

import pytest

from sdopt.contract import Contract
from sdopt.gate.rulings import bounds_of, two_sided
from sdopt.quality.metrics import FAMILIES
from sdopt.record.comparisons import Interval
from sdopt.record.files import read_result
from sdopt.record.scores import Score
from sdopt.record.verdicts import SINCE, Judgement, Ruling, Verdict
from sdopt.report.sentences.reasons import reasons_of, worst_prompt
from sdopt.report.sentences.rulings import family, sentence
from sdopt.schema import Rule
from sdopt.statistics.bounds import subtract
from sdopt.statistics.measures import SPEEDUP, Ratio
from sdopt.statistics.words import change_text
from tests.gate.test_judge import variant
from tests.records import recorded
from tests.report import reasons_page
from tests.report.reasons_page import ruled, rules

ROOT = Path(__file__).parents[2]

STATISTICS = re.compile(
    r"one-sided|bound|interval|straddl|non-inferior|p value|confidence|Holm|\["
)


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: f"{rule.metric} {rule.test}")
@pytest.mark.parametrize("verdict", [Verdict.FAIL, Verdict.INCONCLUSIVE])
def test_each_rule_says_what_is_different_by_how_much_and_how_much_is_allowed(
    rule: Rule, verdict: Verdict
) -> None:
    if verdict is Verdict.INCONCLUSIVE and not rule.how.has_bounds:
        pytest.skip("such a rule passes or fails")
    assert ruled(rule, verdict).verdict is verdict
    said = reasons_page.said(rule, verdict)
    assert not STATISTICS.search(said), said
    assert rule.metric not in said.split() or rule.metric in (
        "brightness",
        "contrast",
        "perceptual",
    ), said
    assert re.search("allowed|needed|the limit is", said) or rule.test == "exact", said
    assert re.search(r"\d", said), said
    assert said.startswith("Not enough ") == (verdict is Verdict.INCONCLUSIVE), said
    if verdict is Verdict.FAIL and reasons_page.has_worst_prompt(rule):
        assert "a red fox" in said or rule.test == "exact"


def test_each_check_of_a_gate_says_what_is_wrong_in_plain_words() -> None:
    for name, fails, is_open in reasons_page.CHECKED:
        for changes, verdict in (
            (fails, Verdict.FAIL),
            (is_open, Verdict.INCONCLUSIVE),
        ):
            said = reasons_page.asked(name, changes, verdict)
            assert not STATISTICS.search(said), said
            assert said == "–" or len(said) > 40, said


@pytest.mark.parametrize(
    ("metric", "estimate", "words"),
    [
        ("brightness", 0.043, "4.3 % of the range darker"),
        ("brightness", -0.043, "4.3 % of the range brighter"),
        ("contrast", 0.02, "2 % of the range less contrast"),
        ("fine_detail", -0.001, "0.1 % of the range less fine detail"),
        ("fine_detail", 0.001, "0.1 % of the range more fine detail"),
    ],
)
def test_a_change_has_its_direction(metric: str, estimate: float, words: str) -> None:
    """The gate's difference is the candidate's value less the reference's only where more is better."""
    better = next(each.higher_is_better for each in FAMILIES if each.name == metric)
    assert (better is None) == (metric in ("brightness", "contrast"))
    ruling = Ruling(
        "equivalent", metric, Verdict.FAIL, "", estimate, estimate, estimate, 0.005
    )
    unknown = f"{words} than the baseline's (0.5 % allowed)"
    assert unknown in sentence(ruling)
    share = f"{2 * abs(estimate):.1%} ".replace(".0", "").replace("%", " %")
    said = sentence(ruling, whole=0.5)
    assert share in said
    assert "(1 % allowed)" in said


def test_an_image_that_gets_darker_is_said_to_be_darker() -> None:
    dark, light = Score(0.30, [0.30] * 20), Score(0.34, [0.34] * 20)
    difference = subtract(
        dark, light, -1.0
    )  # as `RuleContext` does for a property of which neither way is better
    bounds = bounds_of(difference, 0.95)
    ruling = two_sided(
        Rule("brightness", "equivalent", margin=0.005),
        "brightness",
        bounds,
        -0.005,
        0.005,
    )
    assert sentence(ruling, whole=0.5) == (
        "Images are 8 % darker than the baseline's (1 % allowed)"
    )


@pytest.mark.parametrize(
    ("values", "reason", "limit"),
    [
        ((0.04,), "at least 0.04 [1], above", "0.005"),
        ((-0.001,), "at least -0.001 [1], not below", "-0.005"),
        ((0.001,), "at most 0.001 [1], not above", "0.005"),
        ((-0.015, 0.021), "[-0.0", "0.005"),
    ],
)
def test_a_change_either_way_is_told_beside_the_nearer_limit(
    values: tuple[float, ...], reason: str, limit: str
) -> None:
    scores = [value for value in values for _ in range(20 // len(values))]
    bounds = bounds_of(Score(sum(scores) / len(scores), [*scores]), 0.95)
    rule = Rule("brightness", "equivalent", margin=0.005)
    ruling = two_sided(rule, "brightness", bounds, -0.005, 0.005)
    begins = reason.replace("[1]", "(one-sided 95 %)")
    assert ruling.reason.startswith(begins), ruling.reason
    assert f"the limit {limit}" in ruling.reason, ruling.reason


def test_every_metric_that_a_rule_may_name_has_words() -> None:
    unnamed = [each.name for each in FAMILIES if family(each.name) != each.name]
    assert not unnamed
    assert family("perceptual_clip_vit_large_patch14") == "perceptual"
    assert family("speedup/512x512b1") == "speedup"


def test_rules_that_lack_the_same_are_named_together() -> None:
    lacking = "no calibration for mine: run sdopt calibrate"
    rulings = [
        Ruling(test, "perceptual_effnet", Verdict.NOT_COMPARABLE, lacking)
        for test in ("at_most", "every")
    ]
    rulings.append(Ruling("at_most", "colour_error", Verdict.NOT_COMPARABLE, lacking))
    judgement = Judgement("a", "b", "", None, Verdict.NOT_COMPARABLE, rulings)  # type: ignore[arg-type]
    [said] = reasons_of(judgement)
    assert said.count(lacking) == 1
    assert "colours" in said


def test_rules_on_one_property_are_one_reason() -> None:
    def failed(metric: str, rule: str) -> Ruling:
        return Ruling(rule, metric, Verdict.FAIL, "", 0.04, 0.04, 0.04, 0.005)

    rulings = [
        failed("brightness", "equivalent"),
        failed("brightness_error", "at_most"),
        failed("perceptual_effnet", "at_most"),
        failed("perceptual_effnet", "every"),
        failed("perceptual_clip", "at_most"),
    ]
    said = reasons_of(Judgement("a", "b", "", None, Verdict.FAIL, rulings))  # type: ignore[arg-type]
    assert len(said) == 2
    assert said[0].startswith("Images are 4 % of the range darker")
    assert "in what they show" in said[1]


def test_the_largest_excess_comes_first_and_properties_are_told_as_shares() -> None:
    """Of a fine detail of 0.0031 before, 0.0007 more is much; of what is allowed it is less than the darker images."""
    judgement = Judgement(
        "it",
        "baseline of then",
        SINCE,
        Contract.LOSSY,
        Verdict.FAIL,
        [
            Ruling("equivalent", "fine_detail", Verdict.FAIL, "", 7e-4, margin=5e-4),
            Ruling("equivalent", "brightness", Verdict.FAIL, "", 0.018, margin=0.005),
            Ruling("at_least", "speedup", Verdict.FAIL, "", 0.1, margin=0.95),
        ],
    )
    scores = {"fine_detail": Score(0.0038), "brightness": Score(0.342)}
    it = variant("it", quality=scores)
    brightness, detail, speed = reasons_of(judgement, recorded([it], [], "pair"))
    others = "those of the earlier result"
    assert brightness == f"Images are 5 % darker than {others} (1.4 % allowed)"
    assert detail == f"Images have 23 % more fine detail than {others} (16 % allowed)"
    assert speed.startswith("Its speed-up")


def test_too_few_images_that_are_equal_are_not_said_to_differ() -> None:
    few = "has no interval; more prompts would settle it"
    rulings = [
        Ruling("at_most", metric, Verdict.INCONCLUSIVE, few, 0.0, margin=0.0)
        for metric in ("perceptual_effnet", "colour_error")
    ]
    judgement = Judgement("a", "b", "", None, Verdict.INCONCLUSIVE, rulings)  # type: ignore[arg-type]
    assert reasons_of(judgement) == [
        "Not enough prompts to tell: no image differs from the baseline's: more prompts would settle it"
    ]


def test_that_it_had_no_effect_comes_first() -> None:
    rulings = [
        Ruling("rarely", "colour_error", Verdict.INCONCLUSIVE, "few", 0.0, margin=0.05),
        Ruling("engaged", "", Verdict.INCONCLUSIVE, "every image is the same"),
    ]
    said = reasons_of(
        Judgement("a", "b", "", Contract.LOSSY, Verdict.INCONCLUSIVE, rulings)
    )
    assert said[0] == "Every image is the same"


def test_that_a_gain_is_open_is_no_second_reason_beside_the_speed_that_it_claims() -> (
    None
):
    found = (
        "speedup 1.02× [0.9, 1.06] (one-sided 95 % bounds) straddles a gain of 1.0 %"
    )
    rulings = [
        Ruling("at_least", "speedup", Verdict.INCONCLUSIVE, "", 1.02, 0.9, 1.06, 0.95),
        Ruling("must pay", "", Verdict.INCONCLUSIVE, found),
    ]
    judgement = Judgement("a", "b", "", None, Verdict.INCONCLUSIVE, rulings)  # type: ignore[arg-type]
    assert len(reasons_of(judgement)) == 2
    judgement.claims = {"speedup": 0.3}
    [said] = reasons_of(judgement)
    assert said.startswith("Not enough runs to tell: it is between 11 % slower")
    judgement.claims["memory_ratio"] = 0.3
    assert len(reasons_of(judgement)) == 2


def test_speed_at_each_shape_is_a_reason_of_its_own() -> None:
    rulings = [
        Ruling("at_least", f"speedup/{n}", Verdict.FAIL, "", 0.8, 0.8, 0.8, 1.0)
        for n in ("64x64b1", "64x64b4")
    ]
    said = reasons_of(Judgement("a", "b", "", None, Verdict.FAIL, rulings))  # type: ignore[arg-type]
    assert len(said) == 2
    assert said[0].startswith("It is 25 % slower at 64x64b1")


def test_a_gain_that_is_open_is_said_without_statistics() -> None:
    found = "speedup 1.02× [0.992, 1.06] (one-sided 95 % bounds) straddles a gain of 1.0 %: more processes would settle it"
    memory = "memory_ratio/64x64b1 0.921× [0.897, 0.945] (one-sided 95 % bounds) excludes a gain of 19.1 %"
    said = sentence(Ruling("must pay", "", Verdict.INCONCLUSIVE, f"{found}; {memory}"))
    assert not STATISTICS.search(said), said
    assert (
        "it is between 0.81 % slower and 6 % faster, and a gain counts from 1.0 % on: more processes would settle it"
        in said
    )
    assert (
        "it takes 5.5 to 10 % less memory at 64x64b1, and a gain counts from 19.1 % on"
        in said
    )


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (
            "speedup 0.9× [0.85, 0.95] (one-sided 95 % bounds)",
            "it is 5.3 to 18 % slower",
        ),
        (
            "speedup 1.02× has no interval: that takes 3 processes per variant (protocol.replicates)",
            "it is 2 % faster, in too few runs to tell: it takes 3 processes per variant (protocol.replicates)",
        ),
        (
            "speedup 1.02× has no interval: that takes times of 3 replicates",
            "it is 2 % faster, in too few runs to tell: it takes times of 3 replicates",
        ),
        (
            "speedup 1.02× [1.01, 1.03] (one-sided 95 % bounds) is no more than the 4.0 % by which two differ",
            "it is 1 to 3 % faster, which is no more than the 4.0 % by which two differ",
        ),
    ],
)
def test_a_claim_is_told_in_a_sentence(reason: str, words: str) -> None:
    ruling = Ruling("must pay", "", Verdict.INCONCLUSIVE, reason)
    assert sentence(ruling).endswith(words)


def test_limits_that_ask_for_a_gain_or_a_value_say_so() -> None:
    def failed(metric: str, test: str, value: float, limit: float) -> str:
        return sentence(
            Ruling(test, metric, Verdict.FAIL, "", value, value, value, limit)
        )

    assert failed("speedup", "at_least", 1.05, 1.2).endswith("(20 % faster needed)")
    assert failed("memory_ratio", "at_most", 0.95, 0.9).endswith(
        "(10 % less memory needed)"
    )
    assert failed("clip_score", "at_least", 30.0, 31.69).endswith(
        "(at least 31.69 needed)"
    )
    assert failed("clip_score", "within", 32.0, 31.81).endswith(
        "(at most 31.81 allowed)"
    )


def test_the_page_has_what_each_rule_says() -> None:
    assert reasons_page.PAGE.read_text(encoding="utf-8") == reasons_page.page()


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (1.92, "1.92× faster"),
        (0.5, "2.00× slower"),
        (0.998, "0.2 % slower"),
        (1.0042, "0.4 % faster"),
        (1.0002, "as fast"),
    ],
)
def test_a_change_is_never_told_as_one_time(factor: float, words: str) -> None:
    ratio = Ratio(SPEEDUP, Interval(factor), floor=None)
    assert change_text(ratio) == words


def test_what_is_wrong_is_no_finding_while_it_is_undecided() -> None:
    why = "it was not measured after two or more calls"
    for verdict, said in (
        (Verdict.FAIL, f"It{why[2:]}"),
        (
            Verdict.INCONCLUSIVE,
            f"Whether memory grows with each call cannot be told: {why}",
        ),
    ):
        assert sentence(Ruling("memory growth", "", verdict, why)) == said


def test_the_worst_prompt_by_likeness_is_the_least_alike() -> None:
    result = read_result(ROOT / "outputs/records/amd-epyc/quickstart")
    edge = next(edge for edge in result.comparisons if edge.quality)
    images = result.variant(edge.candidate).images
    worst = images[-1]
    alike = [0.9] * (1 + max(image.prompt_index for image in images))
    alike[worst.prompt_index] = 0.1
    edge.quality["ssim"] = Score(0.8, [*alike])
    ruling = Ruling("at_least", "ssim", Verdict.FAIL, "", 0.8, 0.7, 0.9, 0.95)
    judgement = Judgement(
        *(edge.candidate, edge.reference, "all of it", Contract.LOSSY),
        *(Verdict.FAIL, [ruling]),
    )
    assert worst_prompt(ruling, judgement, result) == worst.called
