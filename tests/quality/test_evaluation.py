"""From folders of images to scores: what a variant has by itself, what a pair has, and what neither may have."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sdopt import conclusion
from sdopt.conclusion import Conclusion
from sdopt.gate.rulings import against, bounds_of, require_finite
from sdopt.quality import evaluation
from sdopt.quality.evaluation import EvaluationError, Evaluator, Settings
from sdopt.quality.inputs import Pictures
from sdopt.quality.metrics import measured_metrics
from sdopt.record.records import StudyResult
from sdopt.record.scores import BrokenImage, ImageRecord
from sdopt.schema import Model, Quality, Rule
from tests.quality.conftest import noisy

AGAINST_BASELINE = Settings(measured_metrics(Quality(), Model()))


def kept(folder: Path, images: np.ndarray, seed: int = 0) -> Pictures:
    """The images as a variant's, a prompt each."""
    folder.mkdir()
    records = []
    for number, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{number}.png")
        records.append(
            ImageRecord(f"prompt {number}", number, 0, seed, f"{number}.png")
        )
    return Pictures(folder, records)


def test_a_failure_says_how_to_go_on(
    result: StudyResult,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def failing(*_given: object) -> None:
        raise EvaluationError("its process was killed")

    monkeypatch.setattr(conclusion, "evaluate_apart", failing)
    nothing: Any = None
    config = replace(result.config, quality=Quality())
    Conclusion(config, tmp_path, nothing, again="sdopt run resume=here").evaluate(
        result, "cpu"
    )
    said = capsys.readouterr().err
    assert (
        "its process was killed; `sdopt run resume=here` computes it without measuring again"
        in said
    )


@pytest.fixture
def plain(tmp_path: Path, drawings: np.ndarray) -> Pictures:
    return kept(tmp_path / "plain", drawings)


@pytest.fixture
def worse(tmp_path: Path, drawings: np.ndarray) -> Pictures:
    return kept(tmp_path / "worse", noisy(drawings, 0.2))


def test_the_baseline_is_at_no_distance_from_its_own_images(
    plain: Pictures, worse: Pictures
) -> None:
    evaluator = Evaluator(AGAINST_BASELINE)
    own, other = evaluator.of_variant(plain, plain), evaluator.of_variant(worse, plain)
    for name in ("kid_emojiclip", "cmmd_emojiclip"):
        assert own[name].estimate == pytest.approx(0, abs=1e-6)
        assert (other[name].estimate or 0) > 0.001
        assert len(other[name].leave_one_out) == 16
    assert own["cmmd_emojiclip"].note == "against the baseline's images"


def test_a_variant_with_fewer_prompts_is_still_scored(
    plain: Pictures, worse: Pictures
) -> None:
    few = Pictures(worse.folder, worse.records[:8])
    found = Evaluator(AGAINST_BASELINE).of_variant(few, plain)
    assert len(found["cmmd_emojiclip"].leave_one_out) == 8


def test_of_two_prompts_a_gate_asks_for_more_and_blames_no_image(
    tmp_path: Path, drawings: np.ndarray
) -> None:
    sides = [
        kept(tmp_path / name, images[:4])
        for name, images in (("one", drawings), ("two", noisy(drawings, 0.2)))
    ]
    one, two = (
        Pictures(
            side.folder,
            [
                replace(r, prompt_index=n // 2, image_index=n % 2)
                for n, r in enumerate(side.records)
            ],
        )
        for side in sides
    )
    score = Evaluator(AGAINST_BASELINE).of_variant(two, one)["cmmd_emojiclip"]
    require_finite("cmmd_emojiclip", score)
    bounds = bounds_of(score, 0.95)
    assert (
        "more prompts"
        in against(
            Rule("cmmd", "at_most"), "cmmd_emojiclip", bounds, 1.0, at_least=False
        ).reason
    )


def test_pairs_of_other_noise_have_no_distance(
    plain: Pictures, tmp_path: Path, drawings: np.ndarray
) -> None:
    evaluator = Evaluator(AGAINST_BASELINE)
    assert evaluator.of_pair(plain, kept(tmp_path / "other", drawings, seed=1)) == {}
    same = evaluator.of_pair(plain, kept(tmp_path / "same", drawings))
    assert same["mse"].estimate == 0
    assert same["psnr_db"].estimate is None
    assert same["psnr_db"].note == "the images are identical"
    assert same["ssim"].estimate == pytest.approx(1, abs=1e-4)
    assert same["perceptual_emojiclip"].estimate == pytest.approx(0, abs=1e-9)


def test_of_random_weights_only_pixels_and_latents_are_compared(
    plain: Pictures, worse: Pictures
) -> None:
    evaluator = Evaluator(Settings.of(Quality(), Model("emoji", "random"), "cpu"))
    assert evaluator.of_variant(plain, plain) == {}
    assert set(evaluator.of_pair(plain, worse)) == {"mse", "psnr_db", "ssim"}


def test_what_timed_calls_showed_at_a_further_size_stays(
    result: StudyResult, plain: Pictures
) -> None:
    baseline = result.baseline_variant
    baseline.images = list(plain.records)
    workload = replace(baseline.config.workload, size=[64, 96])
    baseline.config = replace(baseline.config, workload=workload)
    further = BrokenImage("non_finite at 96×96", "96x96b1", "pixels are NaN")
    baseline.trips = [BrokenImage("black", "", "of an earlier pass"), further]
    result.variants, result.comparisons, result.redrawn = [baseline], [], {}
    evaluation.evaluate(result, plain.folder, Settings(()), lambda _: None)
    assert baseline.trips == [further]


def test_networks_are_not_rounded_to_tf32(
    result: StudyResult, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A GPU rounds convolutions by default, and a figure would depend on where it was computed."""
    seen = []

    def evaluator(_settings: Settings) -> Evaluator:
        seen.append(
            (torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision())
        )
        return Evaluator(AGAINST_BASELINE)

    result.variants.clear()
    monkeypatch.setattr(evaluation, "Evaluator", evaluator)
    before = torch.backends.cudnn.allow_tf32
    evaluation.evaluate(result, tmp_path, AGAINST_BASELINE, lambda text: None)
    assert seen == [(False, "highest")]
    assert torch.backends.cudnn.allow_tf32 is before
