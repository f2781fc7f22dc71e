"""A gate whose rules could not be judged ends before anything is loaded."""

from dataclasses import replace
from pathlib import Path

import pytest

from sdopt.errors import UsageError
from sdopt.gate.calibration import FOLDER
from sdopt.gate.rule_checks import applicable, remarks_on_rules, require_measured, require_rules
from sdopt.gate.rulings import UNIT_ROUNDOFF
from sdopt.pipelines.catalog import PACKAGED
from sdopt.record.scores import ImageRecord, Score
from sdopt.record.verdicts import Verdict
from sdopt.schema import Gate, Model, Rule
from tests.command import refused
from tests.fixtures import Composers
from tests.gate.test_judge import study, variant, verdict


def problems(composer: Composers, *overrides: str) -> list[str]:
    made = composer(["tracking=none", *overrides])
    run = made.current
    try:
        require_measured(run.study.plan(made), run.gate, run.quality, run.model)
    except UsageError as error:
        return error.problems
    return []


class TestMeasured:
    def test_the_windows_of_mlperf_are_judged_by_its_two_features(self, composer: Composers) -> None:
        made = composer(["gate=mlperf_sdxl", "precision=bf16"])
        features = ["clip:openai/clip-vit-base-patch32", "inception"]
        quality = replace(made.current.quality, features=features, prompt_count=5000)
        plan = made.current.study.plan(made)
        require_measured(plan, made.current.gate, quality, Model(name="sdxl", weights="hub", hub_id="x/y"))
        with pytest.raises(UsageError, match="fid_inception"):
            require_measured(plan, made.current.gate, replace(quality, features=features[:1]), Model(name="sdxl"))

    def test_features_that_are_not_named_are_asked_for(self, tmp_path: Path) -> None:
        found = refused(
            tmp_path, "run", "model=sdxl", "gate=default", "precision=bf16", "tracking=none", "quality.features=[]"
        )
        assert found.err.startswith(
            "sdopt: gate=default: perceptual (gate.rules.lossy[0], lossy[1], lossy[2]), "
            "cmmd (gate.rules.lossy[4]): measured only with features"
        )
        assert len(found.err.splitlines()) == 1
        assert "quality.features=[clip:openai/clip-vit-base-patch32]" in found.err
        assert not list(tmp_path.rglob("result.json"))

    def test_a_model_of_the_users_own_is_judged_without_a_clip(self, composer: Composers) -> None:
        """By EfficientNet's features, which come along; what needs features of text is left out, and that is said."""
        chosen = ["model=sdxl", "gate=default", "precision=bf16", "quality.features=[effnet]"]
        assert problems(composer, *chosen) == []
        run = composer(chosen).current
        rules = {rule.metric for rule in applicable(run.gate, run.quality, run.model).rules["lossy"]}
        assert {"perceptual", "cmmd"} <= rules
        assert "clip_score" not in rules
        [said] = remarks_on_rules(run.gate, run.quality, run.model)
        assert said.startswith("gate=default: clip_score is not judged")
        assert "clip:" in said
        packaged = composer(["gate=default"]).current
        assert applicable(packaged.gate, packaged.quality, packaged.model) == packaged.gate

    def test_random_weights_are_judged_by_parity_alone(self, composer: Composers) -> None:
        for gate in ("default", "strict", "report_only", "none"):
            assert problems(composer, f"gate={gate}", "precision=bf16") == []
        random = ["model=sd15", "model.weights=random", "gate=default"]
        assert any(
            "clip_score" in said and "random weights" in said for said in problems(composer, *random, "precision=bf16")
        )
        parity = (
            "+gate.rules={lossy: [{metric: mse, test: at_most, limit: 1}, {metric: speedup, test: at_least, limit: 1}]}"
        )
        assert problems(composer, "model=sd15", "model.weights=random", parity, "precision=bf16") == []

    def test_too_few_images_and_more_than_one_metric(self, composer: Composers) -> None:
        rule = "+gate.rules={lossy: [{metric: fid, test: at_most, limit: 1, confidence: null}]}"
        [said] = problems(composer, rule, "precision=bf16", "quality.prompt_count=24")
        assert "fid (gate.rules.lossy[0]): at least 2,000 images are needed, and 24 are drawn" in said
        features = f"quality.features=[emojiclip,'clip:{PACKAGED / 'clip'}']"
        [said] = problems(composer, rule, "precision=bf16", features, "quality.prompt_count=2000")
        assert "ambiguous: name one of fid_emojiclip, fid_clip" in said

    def test_a_calibration_that_is_none(self, composer: Composers, tmp_path: Path) -> None:
        judged = ["gate=default", "precision=bf16"]
        [said] = problems(composer, *judged, f"gate.calibration={tmp_path / 'typo.json'}")
        assert said.startswith(f"gate.calibration={tmp_path / 'typo.json'}: cannot be read (No such file")
        (tmp_path / "other.json").write_text("{}")
        [said] = problems(composer, *judged, f"gate.calibration={tmp_path / 'other.json'}")
        assert "not a calibration" in said
        assert problems(composer, *judged, f"gate.calibration={FOLDER / 'emoji-10.json'}") == []
        assert problems(composer, "gate=none", "precision=bf16", "gate.calibration=typo.json") == []


@pytest.mark.parametrize(
    ("unfit", "why", "fit"),
    [
        (
            Rule("brightness", margin=0.1),
            "neither more nor less of the metric is better",
            Rule("brightness", "equivalent", margin=0.1),
        ),
        (Rule("perceptual", margin=0.1), "test it with at_most", Rule("perceptual", "at_most", limit=0.1)),
        (Rule("ssim", "equivalent", margin=1), "test it with at_least", Rule("ssim", "at_least", limit=0.9)),
        (Rule("ssim", "every", limit=0.9), "more of this metric is better", Rule("mse", "every", limit=0.1)),
        (
            Rule("clip_score", "rarely", limit=30, share=0.1),
            "test it with at_least",
            Rule("clip_score", "at_least", limit=30),
        ),
        (Rule("kid", "exact"), "has no value per prompt", Rule("kid", "at_most", limit=0.1)),
    ],
)
def test_a_test_that_cannot_judge_a_metric_is_refused(unfit: Rule, why: str, fit: Rule) -> None:
    with pytest.raises(UsageError, match=rf"lossy\[0\].metric={unfit.metric}: test={unfit.test}: .*{why}"):
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
        (Rule("fid", "at_most", limit=30), "confidence: null", Rule("fid", "at_most", limit=30, confidence=None)),
    ],
)
def test_a_metric_without_an_interval_is_compared_as_it_is(unfit: Rule, said: str, fit: Rule) -> None:
    with pytest.raises(UsageError, match=rf"lossy\[0\].metric={unfit.metric}: .*{said}"):
        require_rules(Gate("g", {"lossy": [unfit]}))
    require_rules(Gate("g", {"lossy": [fit]}))


@pytest.mark.parametrize(
    ("unfit", "said"),
    [
        (Rule("speedup", margin=0.05), "test=non_inferior: speedup is a ratio to the reference"),
        (Rule("memory_ratio", "within", low=0.9, high=1.1), "test=within"),
        (Rule("tail_ratio", "exact"), "test=exact"),
        (Rule("speedup", "rarely", limit=1, share=0.1), "test=rarely"),
        (Rule("memory_ratio", "at_most", of_seeds=1), "a limit, and no of_seeds"),
        (Rule("speedup", "at_least", limits=dict.fromkeys(UNIT_ROUNDOFF, 1.0)), "a limit, and no limits"),
        (Rule("tail_ratio", "at_most", limit=1.1, of_floor=2), "a limit, and no of_floor"),
        (Rule("speedup", "at_least"), "give the rule a limit"),
        (Rule("speedup", "at_least", limit=1, share=0.1, least=0.1), "and no share, least"),
        (Rule("first_image_s", "at_least", limit=60), "in seconds; test it with at_most, and give the rule a limit"),
        (Rule("first_image_s", "at_most"), "in seconds; test it with at_most, and give the rule a limit"),
    ],
)
def test_a_rule_that_cannot_judge_a_ratio_is_refused(unfit: Rule, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        require_rules(Gate("g", {"exact": [unfit]}))
    [problem] = refused.value.problems
    assert problem.startswith(f"gate.rules.exact[0].metric={unfit.metric}: ")
    assert said in problem
    tests = ("at_most",) if unfit.metric == "first_image_s" else ("at_least", "at_most")
    require_rules(Gate("g", {"exact": [Rule(unfit.metric, test, limit=1) for test in tests]}))


def test_a_result_of_too_few_images_is_not_judged_by_what_decides_nothing_then() -> None:
    many = [ImageRecord("a", number, 0, 0, f"images/{number}.png") for number in range(2000)]
    for images, expected in ((many[:1999], Verdict.NOT_COMPARABLE), (many, Verdict.PASS)):
        result = study(variant("it", quality={"fid_x": Score(1.0, note="against a set")}, images=images))
        assert verdict(result, Rule("fid", "at_most", limit=2.0, confidence=None)).verdict is expected
