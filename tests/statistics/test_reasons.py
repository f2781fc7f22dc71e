"""What each rule of the packaged gates says, in a sentence, when it fails and when it is undecided."""

import re
from dataclasses import replace

import numpy as np
import pytest

from sdopt.config.composer import gate_of
from sdopt.config.paths import CONF
from sdopt.gate.rulings import against, bounds_of, every, exact, rarely, two_sided
from sdopt.quality.metrics import FAMILIES
from sdopt.record.scores import Score
from sdopt.record.verdicts import Judgement, Ruling, Verdict
from sdopt.schema import Rule
from sdopt.statistics.bounds import Bounds, subtract
from sdopt.statistics.measures import FIRST_IMAGE, RULED
from sdopt.statistics.reasons import reasons_of
from sdopt.statistics.ruling_sentences import family, sentence

GATES = sorted(
    path.stem for path in (CONF / "gate").glob("*.yaml") if path.stem != "none"
)

STATISTICS = re.compile(
    r"one-sided|bound|interval|straddl|non-inferior|p value|confidence|Holm|\["
)


def rules() -> list[Rule]:
    """Returns every rule of the packaged gates, each once."""
    found: dict[str, Rule] = {}
    for gate in GATES:
        for of_contract in gate_of([f"gate={gate}"]).gate.rules.values():
            found |= {f"{rule.metric} {rule.test}": rule for rule in of_contract}
    return list(found.values())


def ruled(rule: Rule, verdict: Verdict) -> Ruling:
    """Returns a ruling as the gate makes it, of figures that lead to a verdict."""
    failing = verdict is Verdict.FAIL
    if rule.metric in RULED or rule.metric == FIRST_IMAGE:
        return of_ratio(rule, failing)
    limit = rule.limit or rule.margin or rule.low or 0.1
    values = limit * (
        (4 if failing else 1.2) + (0.1 if failing else 3.0) * np.sin(np.arange(32))
    )
    score = Score(float(values.mean()), list(map(float, values)))
    bounds = bounds_of(score, rule.confidence or 0.95)
    few_prompts: list[float | None] = [
        *[4 * limit] * (16 if failing else 2),
        *[0.0] * 30,
    ]
    few = replace(score, per_prompt=few_prompts)
    worse = Bounds(
        -bounds.estimate,
        -(bounds.high or 0),
        -(bounds.low or 0),
        bounds.deviation,
        bounds.n,
    )
    made = {
        "exact": lambda: exact(rule, rule.metric, score),
        "every": lambda: every(rule, rule.metric, score, limit),
        "rarely": lambda: rarely(rule, rule.metric, few, limit),
        "equivalent": lambda: two_sided(rule, rule.metric, bounds, -limit, limit),
        "within": lambda: two_sided(rule, rule.metric, bounds, 0.0, limit),
        "non_inferior": lambda: against(
            rule, rule.metric, worse, -limit, at_least=True
        ),
        "at_most": lambda: against(rule, rule.metric, bounds, limit, at_least=False),
        "at_least": lambda: against(rule, rule.metric, worse, -limit, at_least=True),
    }
    return made[rule.test]()


def of_ratio(rule: Rule, failing: bool) -> Ruling:
    """Returns a ruling on a speed-up or another ratio, of an interval beyond the limit or on both sides of it."""
    limit, at_least = rule.limit or 1.0, rule.test == "at_least"
    estimate = limit * (0.8 if at_least else 1.25)
    half = 0.01 if failing else 0.6
    bounds = Bounds(estimate, estimate - half, estimate + half, 0.1, 3, "process")
    return against(rule, rule.metric, bounds, limit, at_least)


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: f"{rule.metric} {rule.test}")
@pytest.mark.parametrize("verdict", [Verdict.FAIL, Verdict.INCONCLUSIVE])
def test_each_rule_says_what_is_different_by_how_much_and_how_much_is_allowed(
    rule: Rule, verdict: Verdict
) -> None:
    if verdict is Verdict.INCONCLUSIVE and rule.test in ("exact", "every"):
        pytest.skip("such a rule passes or fails")
    ruling = ruled(rule, verdict)
    assert ruling.verdict is verdict
    said = sentence(ruling, worst="a red fox")
    assert not STATISTICS.search(said), said
    assert rule.metric not in said.split() or rule.metric in (
        "brightness",
        "contrast",
    ), said
    assert "allowed" in said or rule.test == "exact", said
    assert re.search(r"\d", said), said
    assert said.startswith("Not enough ") == (verdict is Verdict.INCONCLUSIVE), said
    if verdict is Verdict.FAIL and not (
        rule.metric in RULED or rule.metric == FIRST_IMAGE
    ):
        assert "a red fox" in said or rule.test == "exact"


@pytest.mark.parametrize(
    ("metric", "estimate", "words"),
    [
        ("brightness", 0.043, "4.3 % darker"),
        ("brightness", -0.043, "4.3 % brighter"),
        ("contrast", 0.02, "2 % less contrast"),
        ("fine_detail", -0.001, "0.1 % less fine detail"),
        ("fine_detail", 0.001, "0.1 % more fine detail"),
    ],
)
def test_a_change_has_its_direction(metric: str, estimate: float, words: str) -> None:
    """The gate's difference is the candidate's value less the reference's only where more is better."""
    better = next(each.higher_is_better for each in FAMILIES if each.name == metric)
    assert (better is None) == (metric in ("brightness", "contrast"))
    ruling = Ruling(
        "equivalent", metric, Verdict.FAIL, "", estimate, estimate, estimate, 0.005
    )
    assert f"{words} than the baseline's (0.5 % allowed)" in sentence(ruling)


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
    assert (
        sentence(ruling) == "Images are 4 % darker than the baseline's (0.5 % allowed)"
    )


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
    assert said[0].startswith("Images are 4 % darker")
    assert "what images show" in said[1]


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
        "its speed is 0.992× to 1.06×, and a gain counts from 1.0 % on: more processes would settle it"
        in said
    )
    assert (
        "it takes 0.897× to 0.945× the memory at 64x64b1, and a saving counts from 19.1 % on"
        in said
    )
