"""The table of metrics: names, what each of them needs, and that a row is all that a metric takes."""

from pathlib import Path

import numpy as np
import pytest
import torch

from sdopt.errors import UsageError
from sdopt.gate.calibration import Fit
from sdopt.gate.judge import judge
from sdopt.gate.rule_checks import require_rules
from sdopt.quality import metrics
from sdopt.quality.evaluation import Settings, evaluate
from sdopt.quality.features import ClipFeatures
from sdopt.quality.inputs import Inputs, Networks, Pictures
from sdopt.quality.metrics import (
    FAMILIES,
    MetricFamily,
    family_of,
    measured_metrics,
    slug,
)
from sdopt.record.files import write_result
from sdopt.record.records import StudyResult
from sdopt.record.scores import ImageRecord, Score
from sdopt.report.catalog import markdown_table
from sdopt.report.summary import summary_of
from sdopt.schema import Gate, Model, Quality, Rule
from sdopt.statistics.figures import first_rows
from tests.command import Finished, sdopt
from tests.records import known

PACKAGED, FULL_SIZE, UNTRAINED = Model(), Model("sd15", "hub"), Model("sd15", "random")


def names(quality: Quality, model: Model = PACKAGED) -> set[str]:
    return {metric.name for metric in measured_metrics(quality, model)}


def test_every_measured_metric_is_found_by_its_name_and_by_its_family() -> None:
    for metric in measured_metrics(Quality(lpips=True), PACKAGED):
        assert family_of(metric.name) is metric.family
        assert family_of(metric.family.name) is metric.family


def test_a_metric_without_a_unit_says_its_scale() -> None:
    """It is read below a table: whether -0.06 is good, and what 83 is out of."""
    for name, scale in (
        ("clip_score", "100 ·"),
        ("cmmd", "about 0"),
        ("kid", "about 0"),
    ):
        assert scale in metrics.family_of(name).meaning


def test_the_needs_and_limits_of_each_metric_fit() -> None:
    for family in FAMILIES:
        assert family.decides_from == 1 or family.least <= family.decides_from, (
            family.name
        )
        # Parity with the reference is all that random weights can show.
        assert not family.on_random_weights or (
            family.needs_pair and not family.over
        ), family.name


class TestMeasured:
    @pytest.mark.parametrize(
        ("quality", "model", "these", "not_those"),
        [
            (
                Quality(),
                PACKAGED,
                "mse clip_score_emojiclip cmmd_emojiclip perceptual_emojiclip",
                "lpips_alex",
            ),
            (Quality(lpips=True), PACKAGED, "lpips_alex", ""),
            (Quality(metrics=False), PACKAGED, "", "mse clip_score_emojiclip"),
            (
                Quality(
                    features=[
                        "inception",
                        "effnet",
                        "clip:openai/clip-vit-base-patch32",
                    ]
                ),
                FULL_SIZE,
                "fid_inception fid_effnet clip_score_clip_vit_base_patch32 perceptual_effnet",
                "perceptual_inception clip_score_effnet perceptual_clip_vit_base_patch32",
            ),
        ],
    )
    def test_are_those_that_suit(
        self, quality: Quality, model: Model, these: str, not_those: str
    ) -> None:
        found = names(quality, model)
        assert {*these.split()} <= found
        assert not {*not_those.split()} & found

    def test_over_features_that_are_named_alone(self) -> None:
        assert not [
            name
            for name in names(Quality(features=[]), FULL_SIZE)
            if family_of(name).over
        ]
        assert names(Quality(lpips=True), UNTRAINED) == {
            "mse",
            "psnr_db",
            "ssim",
            "latents_error",
        }
        with pytest.raises(UsageError, match="have the same name in the metrics"):
            measured_metrics(
                Quality(features=["clip:/a/clip", "clip:/b/clip"]), FULL_SIZE
            )


def test_the_worst_image_of_a_prompt_is_kept_beside_the_mean() -> None:
    records = [
        ImageRecord("a", prompt, image, 0, "x.png")
        for prompt in range(2)
        for image in range(8)
    ]
    several, single = Pictures(Path(), records), Pictures(Path(), records[::8])
    networks = Networks("cpu", None)
    found = Inputs(several, several, networks).by_prompt([*[0.0] * 15, 0.8])
    assert (found.per_prompt, found.worst) == ([0.0, 0.1], [0.0, 0.8])
    assert Inputs(several, several, networks).by_prompt([*[0.0] * 15, None]).worst == [
        0.0,
        None,
    ]
    assert Inputs(single, single, networks).by_prompt([0.0, 0.8]).worst == []


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ("emojiclip", "emojiclip"),
        ("clip:openai/clip-vit-large-patch14", "clip_vit_large_patch14"),
        ("clip:/home/me/My CLIP/", "my_clip"),
    ],
)
def test_features_in_names(features: str, expected: str) -> None:
    assert slug(features) == expected


def pictures_of(images: np.ndarray) -> Pictures:
    pictures = Pictures(
        Path(),
        [ImageRecord("a", number, 0, 0, "x.png") for number in range(len(images))],
    )
    vars(pictures)["images"] = images
    return pictures


@pytest.mark.parametrize("family", ["brightness", "contrast", "fine_detail"])
def test_changes_of_both_signs_do_not_cancel(drawings: np.ndarray, family: str) -> None:
    """Half of the images become paler, and the other half as much stronger."""
    some, pale = (
        drawings[:8],
        np.round(128 + (drawings[:8] - 128.0) / 2).astype(np.uint8),
    )
    mine, other = (
        pictures_of(np.concatenate([some, pale])),
        pictures_of(np.concatenate([pale, some])),
    )
    own = [
        known(family_of(family).compute(Inputs(each, each, Networks("cpu", None)), ""))
        for each in (mine, other)
    ]
    assert own[0].estimate == pytest.approx(own[1].estimate)
    changed = family_of(f"{family.removeprefix('fine_')}_error").compute(
        Inputs(mine, other, Networks("cpu", None)), ""
    )
    differences = np.abs(
        np.diff(np.array([each.per_prompt for each in own], dtype=float), axis=0)[0]
    )
    assert known(changed).per_prompt == pytest.approx(differences)
    assert min(differences) > 0


def test_the_clip_score_is_the_cosine_of_transformers_that_is_not_negative(
    clip: ClipFeatures, clip_folder: Path, drawings: np.ndarray
) -> None:
    """A model that scores by exp(logit_scale) · cos, as PickScore does with a scale of 100, scores the same."""
    from transformers import AutoTokenizer, CLIPImageProcessorPil

    prompts = ["red apple", "police officer", "red " * 100, "🍎 é"]
    tokenizer, processor = (
        kind.from_pretrained(clip_folder)
        for kind in (AutoTokenizer, CLIPImageProcessorPil)
    )
    words = tokenizer(
        prompts, return_tensors="pt", padding=True, truncation=True, max_length=24
    )
    with torch.inference_mode():
        seen = clip.model(**words, **processor(list(drawings[:4]), return_tensors="pt"))
        expected = 100 * seen.logits_per_image.diagonal() / clip.model.logit_scale.exp()
    pictures = Pictures(
        Path(),
        [
            ImageRecord(prompt, number, 0, 0, "x.png")
            for number, prompt in enumerate(prompts)
        ],
    )
    vars(pictures)["images"] = drawings[:4]
    given = Inputs(pictures, pictures, Networks("cpu", None))
    found = known(family_of("clip_score").compute(given, f"clip:{clip_folder}"))
    np.testing.assert_allclose(
        np.array(found.per_prompt, dtype=float), expected.clamp(min=0), atol=1e-3
    )


def redness(given: Inputs, _features: str) -> Score:
    """The metric of the test below: the mean of the red channel."""
    return given.by_prompt(given.pictures.images[..., 0].mean(axis=(1, 2)) / 255)


def test_a_row_is_all_that_a_metric_takes(
    finished: Finished,
    result: StudyResult,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = MetricFamily(
        "redness", "mean of the red channel", False, redness, unit="dB", headline=True
    )
    monkeypatch.setattr(metrics, "FAMILIES", (*FAMILIES, row))
    gate = Gate("g", {"lossy": [Rule("redness", margin=1, confidence=None)]})
    require_rules(gate)
    evaluate(
        result,
        finished.folder,
        Settings(measured_metrics(Quality(features=[]), PACKAGED)),
        lambda _: None,
    )
    scores = [
        result.variant(name).quality["redness"] for name in ("baseline", "bfloat16")
    ]
    assert all(
        score.estimate is not None and len(score.per_prompt) == 4 for score in scores
    )
    judge(result, gate, Fit())
    [ruling] = [each for each in result.judgements[0].rulings if each.metric]
    assert (ruling.metric, ruling.verdict) == ("redness", "pass"), ruling.reason
    assert "redness (dB) ↓" in markdown_table(summary_of(result))
    write_result(result, tmp_path)
    assert "redness" in sdopt(tmp_path, "show", "--all", ".").out, (
        "the terminal shows it too"
    )
    assert first_rows(result)["bfloat16"].flat["quality/redness"] == scores[1].estimate
