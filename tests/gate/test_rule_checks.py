"""A gate whose rules could not be judged ends before anything is loaded."""

from dataclasses import replace
from pathlib import Path

import pytest

from sdopt.config.composer import composer_of
from sdopt.errors import UsageError
from sdopt.gate.calibration import FOLDER
from sdopt.gate.rule_checks import (
    applicable,
    remarks_on_rules,
    require_measured,
    require_rules,
)
from sdopt.gate.rulings import TESTED, UNIT_ROUNDOFF
from sdopt.pipelines.catalog import PACKAGED
from sdopt.record.scores import ImageRecord, Score
from sdopt.record.verdicts import Verdict
from sdopt.schema import TESTS, Gate, Model, Quality, Rule
from sdopt.study.designs import Plan
from tests.command import refused
from tests.gate.test_judge import gate_named, study, variant, verdict

SDXL = Model(name="sdxl", weights="hub", hub_id="x/y")


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A lossy option, bfloat16, beside the baseline."""
    with composer_of(["precision=bf16", "tracking=none"]) as composer:
        return composer.current.study.plan(composer)


def problems(
    plan: Plan, gate: Gate, quality: Quality | None = None, model: Model | None = None
) -> list[str]:
    quality = quality or Quality(prompt_count=96)
    drawn = ("a prompt",) * (quality.prompt_count or 0)
    baseline, *others = plan.variants
    plan = replace(plan, variants=(replace(baseline, pictured=drawn), *others))
    try:
        require_measured(plan, gate, quality, model or Model())
    except UsageError as error:
        return error.problems
    return []


class TestMeasured:
    def test_the_windows_of_mlperf_are_judged_by_its_two_features(
        self, plan: Plan
    ) -> None:
        clip, gate = "clip:openai/clip-vit-base-patch32", gate_named("mlperf_sdxl")
        assert (
            problems(
                plan,
                gate,
                Quality(features=[clip, "inception"], prompt_count=5000),
                SDXL,
            )
            == []
        )
        [said] = problems(plan, gate, Quality(features=[clip], prompt_count=5000), SDXL)
        assert "fid_inception" in said

    def test_features_that_are_not_named_are_asked_for(self, tmp_path: Path) -> None:
        found = refused(
            tmp_path,
            "run",
            "model=sdxl",
            "gate=default",
            "precision=bf16",
            "tracking=none",
            "quality.features=[]",
        )
        assert found.err.startswith(
            "sdopt: gate=default: perceptual (gate.rules.lossy[0], lossy[1], lossy[2]), "
            "cmmd (gate.rules.lossy[4]): measured only with features"
        )
        assert len(found.err.splitlines()) == 1
        assert "quality.features=[clip:openai/clip-vit-base-patch32]" in found.err
        assert not list(tmp_path.rglob("result.json"))

    def test_a_model_of_the_users_own_is_judged_without_a_clip(
        self, plan: Plan
    ) -> None:
        """By EfficientNet's features, which come along; what needs features of text is left out, and that is said."""
        gate, quality = (
            gate_named("default"),
            Quality(features=["effnet"], prompt_count=96),
        )
        assert problems(plan, gate, quality, SDXL) == []
        rules = {rule.metric for rule in applicable(gate, quality, SDXL).rules["lossy"]}
        assert {"perceptual", "cmmd"} <= rules
        assert "clip_score" not in rules
        [said] = remarks_on_rules(gate, quality, SDXL)
        assert said.startswith("gate=default: clip_score is not judged")
        assert "clip:" in said
        assert applicable(gate, Quality(), Model()) == gate

    def test_random_weights_are_judged_by_parity_alone(self, plan: Plan) -> None:
        assert problems(plan, gate_named("strict")) == []
        random = Model("sd15", "random")
        found = problems(plan, gate_named("default"), model=random)
        assert any("clip_score" in said and "random weights" in said for said in found)
        parity = Gate(
            "g",
            {
                "lossy": [
                    Rule("mse", "at_most", limit=1),
                    Rule("speedup", "at_least", limit=1),
                ]
            },
        )
        assert problems(plan, parity, model=random) == []

    def test_too_few_images_and_more_than_one_metric(self, plan: Plan) -> None:
        gate = Gate("g", {"lossy": [Rule("fid", "at_most", limit=1, confidence=None)]})
        [said] = problems(plan, gate, Quality(prompt_count=24))
        assert (
            "fid (gate.rules.lossy[0]): at least 2,000 images are needed, and 24 are drawn"
            in said
        )
        features = ["emojiclip", f"clip:{PACKAGED / 'clip'}"]
        [said] = problems(plan, gate, Quality(features=features, prompt_count=2000))
        assert "ambiguous: name one of fid_emojiclip, fid_clip" in said

    def test_a_score_of_another_program_comes_after_the_run(self, plan: Plan) -> None:
        gate = Gate("g", {"lossy": [Rule("score_imagereward", "at_least", limit=0)]})
        [said] = problems(plan, gate)
        assert "computed by another program" in said
        assert "quality.features" not in said

    def test_too_few_prompts_in_a_file(self, tmp_path: Path) -> None:
        prompts = tmp_path / "mine.txt"
        prompts.write_text("a cat\na dog\n")
        words = [f"workload.prompts='{prompts}'", "quality.prompt_count=5000"]
        gate = Gate("g", {"lossy": [Rule("fid", "at_most", limit=1, confidence=None)]})
        with composer_of(["precision=bf16", *words]) as composer:
            run = composer.current
            few = run.study.plan(composer)
        with pytest.raises(UsageError, match="needed, and 2 are drawn"):
            require_measured(few, gate, run.quality, run.model)

    def test_a_calibration_that_is_none(self, plan: Plan, tmp_path: Path) -> None:
        def with_calibration(file: Path, gate: str = "default") -> list[str]:
            return problems(plan, replace(gate_named(gate), calibration=str(file)))

        [said] = with_calibration(tmp_path / "typo.json")
        assert said.startswith(
            f"gate.calibration={tmp_path / 'typo.json'}: cannot be read (No such file"
        )
        (tmp_path / "other.json").write_text("{}")
        [said] = with_calibration(tmp_path / "other.json")
        assert "not a calibration" in said
        assert with_calibration(FOLDER / "emoji-10.json") == []
        assert with_calibration(tmp_path / "typo.json", "none") == []


@pytest.mark.parametrize(
    ("unfit", "why", "fit"),
    [
        (
            Rule("brightness", margin=0.1),
            "neither more nor less of the metric is better",
            Rule("brightness", "equivalent", margin=0.1),
        ),
        (
            Rule("perceptual", margin=0.1),
            "test it with at_most",
            Rule("perceptual", "at_most", limit=0.1),
        ),
        (
            Rule("ssim", "equivalent", margin=1),
            "test it with at_least",
            Rule("ssim", "at_least", limit=0.9),
        ),
        (
            Rule("ssim", "every", limit=0.9),
            "more of this metric is better",
            Rule("mse", "every", limit=0.1),
        ),
        (
            Rule("clip_score", "rarely", limit=30, share=0.1),
            "test it with at_least",
            Rule("clip_score", "at_least", limit=30),
        ),
        (
            Rule("kid", "exact"),
            "has no value per prompt",
            Rule("kid", "at_most", limit=0.1),
        ),
    ],
)
def test_a_test_that_cannot_judge_a_metric_is_refused(
    unfit: Rule, why: str, fit: Rule
) -> None:
    with pytest.raises(
        UsageError,
        match=rf"lossy\[0\].metric={unfit.metric}: test={unfit.test}: .*{why}",
    ):
        require_rules(Gate("g", {"lossy": [unfit]}))
    require_rules(Gate("g", {"lossy": [fit]}))


@pytest.mark.parametrize(
    ("unfit", "said", "fit"),
    [
        (
            Rule("psnr_db", "at_least", limit=40),
            "test mse, .* with at_most; 40 dB is limit=0.0001",
            Rule("mse", "at_most", limit=0.0001),
        ),
        (
            Rule("fid", "at_most", limit=30),
            "confidence: null",
            Rule("fid", "at_most", limit=30, confidence=None),
        ),
    ],
)
def test_a_metric_without_an_interval_is_compared_as_it_is(
    unfit: Rule, said: str, fit: Rule
) -> None:
    with pytest.raises(
        UsageError, match=rf"lossy\[0\].metric={unfit.metric}: .*{said}"
    ):
        require_rules(Gate("g", {"lossy": [unfit]}))
    require_rules(Gate("g", {"lossy": [fit]}))


@pytest.mark.parametrize(
    ("unfit", "said"),
    [
        (
            Rule("speedup", margin=0.05),
            "test=non_inferior: speedup is a ratio to the reference",
        ),
        (
            Rule(
                "memory_ratio",
                "at_most",
                limits=dict.fromkeys(UNIT_ROUNDOFF, 1.0),
                of_seeds=1,
                of_floor=2,
            ),
            "a limit, and no limits, of_seeds, of_floor",
        ),
        (
            Rule("speedup", "at_least", limit=1, share=0.1, least=0.1),
            "and no share, least",
        ),
        (Rule("speedup", "at_least"), "give the rule a limit"),
        (
            Rule("first_image_s", "at_least", limit=60),
            "in seconds; test it with at_most, and give the rule a limit",
        ),
        (
            Rule("first_image_s", "at_most"),
            "in seconds; test it with at_most, and give the rule a limit",
        ),
    ],
)
def test_a_rule_that_cannot_judge_a_ratio_is_refused(unfit: Rule, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        require_rules(Gate("g", {"exact": [unfit]}))
    [problem] = refused.value.problems
    assert problem.startswith(f"gate.rules.exact[0].metric={unfit.metric}: ")
    assert said in problem
    fit = [Rule(unfit.metric, "at_most", limit=1)]
    if unfit.metric != "first_image_s":
        fit.append(Rule(unfit.metric, "at_least", limit=1))
    require_rules(Gate("g", {"exact": fit}))


@pytest.mark.parametrize(
    ("unfit", "said"),
    [
        (Rule("mse", "exact", limit=0.01), "test=exact takes no limit"),
        (Rule("mse", "at_most", limit=1, low=0.0), "test=at_most takes no low"),
        (Rule("clip_score", margin=1, high=3.0), "test=non_inferior takes no high"),
        (Rule("mse", "rarely", limit=1), "test=rarely needs share"),
        (Rule("mse", "every", limit=1, share=0.1), "test=every takes no share"),
        (
            Rule("mse", "at_most", limit=1, least=0.1),
            "least can only be used with of_seeds, deviations or of_floor",
        ),
        (
            Rule("ssim", "at_least", of_seeds=1, least=0.1),
            "test=at_least takes no least",
        ),
        (
            Rule("clip_score", "within", low=2.0, high=1.0),
            "low=2: must be below high=1",
        ),
        (
            Rule("clip_score", "within", low=1.0, high=2.0, margin=1),
            "test=within takes no margin",
        ),
        (Rule("speedup", "at_least", limit=-1), "above 0 in any case"),
        (Rule("memory_ratio", "at_most", limit=0), "above 0 in any case"),
    ],
)
def test_a_key_that_would_decide_nothing_is_refused(unfit: Rule, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        require_rules(Gate("g", {"lossy": [unfit]}))
    [problem] = refused.value.problems
    assert said in problem


def test_each_test_has_a_function() -> None:
    assert TESTED.keys() == TESTS.keys()


def test_a_result_of_too_few_images_is_not_judged_by_what_decides_nothing_then() -> (
    None
):
    many = [
        ImageRecord("a", number, 0, 0, f"images/{number}.png") for number in range(2000)
    ]
    for images, expected in (
        (many[:1999], Verdict.NOT_COMPARABLE),
        (many, Verdict.PASS),
    ):
        result = study(
            variant(
                "it", quality={"fid_x": Score(1.0, note="against a set")}, images=images
            )
        )
        assert (
            verdict(result, Rule("fid", "at_most", limit=2.0, confidence=None)).verdict
            is expected
        )
