"""Differences between pairs of images: by hand, against torchmetrics, and in the right order."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from torchmetrics.image import StructuralSimilarityIndexMeasure

from sdopt.errors import UsageError
from sdopt.quality import paired
from sdopt.quality.features import ClipFeatures, feature_extractor
from sdopt.quality.images import channels_first
from sdopt.quality.paired import (
    latents_error,
    perceptual_distances,
    pixel_differences,
    psnr_db,
)
from tests.quality.conftest import Change, blurred, noisy


def test_pixels_by_hand() -> None:
    black, other = np.zeros((1, 16, 16, 3), np.uint8), np.zeros((1, 16, 16, 3), np.uint8)
    other[0, :8] = 51
    found = pixel_differences(other, black)
    assert found.mse == pytest.approx((0.02,))
    assert psnr_db(found.mse[0]) == pytest.approx(16.9897, rel=1e-5)


def test_pixels_as_torchmetrics_has_them(drawings: np.ndarray) -> None:
    worse = noisy(drawings, 0.05)
    found = pixel_differences(worse, drawings)
    x, y = channels_first(worse) / 255, channels_first(drawings) / 255
    ssim = StructuralSimilarityIndexMeasure(data_range=1.0, reduction="none")(x, y)
    np.testing.assert_allclose(found.ssim, ssim, rtol=1e-3)


@pytest.mark.parametrize("n", [1, 16])
def test_the_same_images_are_identical(drawings: np.ndarray, clip: ClipFeatures, n: int) -> None:
    found = pixel_differences(drawings[:n], drawings[:n].copy())
    assert found.mse == (0.0,) * n
    assert found.ssim == pytest.approx((1.0,) * n, abs=1e-4)
    assert perceptual_distances(drawings[:n], drawings[:n], clip) == (0.0,) * n
    assert psnr_db(0) is None


@pytest.mark.parametrize("change", [noisy, blurred])
def test_the_worse_the_image_the_larger_the_difference(
    drawings: np.ndarray, clip: ClipFeatures, change: Change
) -> None:
    strengths = (0.02, 0.05, 0.2) if change is noisy else (0.7, 1.5, 4.0)
    worse = [change(drawings, strength) for strength in strengths]
    pixels = [pixel_differences(images, drawings) for images in worse]
    means = [
        [np.mean(found.mse) for found in pixels],
        [-np.mean(found.ssim) for found in pixels],
        [np.mean(perceptual_distances(images, drawings, clip)) for images in worse],
    ]
    for values in means:
        assert values == sorted(values)


@pytest.mark.skipif(importlib.util.find_spec("efficientnet_lite_pytorch") is None, reason="effnet is not installed")
def test_a_trained_network_finds_a_shift_of_a_pixel_smaller_than_another_drawing(drawings: np.ndarray) -> None:
    effnet = feature_extractor("effnet")
    some = drawings[:4]
    shifted = perceptual_distances(np.roll(some, 1, axis=2), some, effnet)
    other = perceptual_distances(drawings[4:8], some, effnet)
    assert max(shifted) < min(other)


def test_perceptual_distance_is_the_formula(drawings: np.ndarray, clip: ClipFeatures) -> None:
    one, other = drawings[:1], drawings[1:2]
    layers = []
    for x, y in zip(clip.maps(channels_first(one)), clip.maps(channels_first(other)), strict=True):
        cosines = torch.cosine_similarity(x[0], y[0], dim=1)
        layers.append(float((2 - 2 * cosines).mean()))
    assert perceptual_distances(one, other, clip) == pytest.approx((np.mean(layers),), rel=1e-4)


def test_errors_of_latents_by_hand() -> None:
    reference = np.array([[3.0, 4.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]], dtype=np.float16)
    latents = np.array([[3.0, 4.5], [1.0, 0.0], [1.0, 0.0], [np.nan, 1.0]], dtype=np.float16)
    first, *others = latents_error(latents, reference)
    assert first == pytest.approx(0.1)
    assert others == [0.0, None, None]


def test_lpips_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"torchvision is not installed; pip install 'sdopt\[lpips\]'"):
        paired.Lpips()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    with pytest.raises(UsageError, match=r"alexnet-owt-7be5be79\.pth is missing; download it from https://"):
        paired.Lpips()
