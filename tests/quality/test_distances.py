"""Distances of pairs and of sets of images, against torchmetrics and arithmetic; reference sets; what is refused."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.kid import KernelInceptionDistance

from sdopt.errors import UsageError
from sdopt.quality import paired
from sdopt.quality.distances import SquaredMMD, cmmd, fid, kid
from sdopt.quality.features import ClipFeatures
from sdopt.quality.images import channels_first
from sdopt.quality.paired import (
    latents_error,
    perceptual_distances,
    pixel_differences,
    psnr_db,
)
from sdopt.quality.reference_sets import ReferenceSet, reference_set
from tests.quality.conftest import noisy

Distance = Callable[..., SquaredMMD]


def sample(n: int, d: int, seed: int, shift: float = 0.0) -> Tensor:
    """Features with unequal variances, as networks have them."""
    return (
        torch.randn(n, d, generator=torch.Generator().manual_seed(seed))
        * torch.logspace(0, -1, d)
        + shift
    )


def gathered(values: Tensor, clip: ClipFeatures) -> ReferenceSet:
    return ReferenceSet.of_features("reference", values, clip)


@pytest.mark.parametrize(("n", "m"), [(100, 80), (12, 80), (80, 12), (2, 2)])
def test_fid_is_that_of_torchmetrics_at_full_rank_and_below(
    clip: ClipFeatures, n: int, m: int
) -> None:
    x, y = sample(n, 24, 3, shift=0.1).double(), sample(m, 24, 4).double()
    module = torch.nn.Identity()
    module.num_features = 24  # type: ignore[assignment]
    metric = FrechetInceptionDistance(feature=module)
    metric.update(x, real=False)
    metric.update(y, real=True)
    found = fid(x, gathered(y, clip))
    assert math.isfinite(found)
    assert found == pytest.approx(float(metric.compute()), rel=1e-5)


@pytest.mark.parametrize("n", [4, 30])
def test_kid_is_that_of_torchmetrics_with_all_images_in_one_subset(
    clip: ClipFeatures, n: int
) -> None:
    x, y = sample(n, 24, 6, shift=0.2).double(), sample(n, 24, 7).double()
    metric = KernelInceptionDistance(
        feature=torch.nn.Identity(), subsets=1, subset_size=n
    )
    metric.update(x, real=False)
    metric.update(y, real=True)
    assert kid(gathered(y, clip))(x) == pytest.approx(
        float(metric.compute()[0]), rel=1e-9
    )


def test_cmmd_is_the_authors_but_for_the_likeness_of_each_image_to_itself(
    clip: ClipFeatures,
) -> None:
    x, y = (
        torch.nn.functional.normalize(sample(n, 24, n, shift=0.1).double())
        for n in (50, 70)
    )
    kernels = [
        (-torch.cdist(a, b).square() / 200).exp() for a, b in ((x, x), (y, y), (x, y))
    ]
    biased = 1000 * float(kernels[0].mean() + kernels[1].mean() - 2 * kernels[2].mean())
    extra = [(k.diagonal().mean() - (k.sum() - k.diagonal().sum()) / (n * (n - 1))) / n for k, n in
             ((kernels[0], 50), (kernels[1], 70))]  # fmt: skip
    assert cmmd(gathered(y, clip))(x) == pytest.approx(
        biased - 1000 * float(sum(extra)), rel=1e-6
    )


@pytest.mark.parametrize("distance", [kid, cmmd])
def test_leaving_out_a_prompt_is_doing_without_its_images(
    clip: ClipFeatures, distance: Distance
) -> None:
    x, reference = sample(20, 24, 8, shift=0.2), gathered(sample(33, 24, 9), clip)
    groups = np.array([i % 7 for i in range(20)])
    value, without = distance(reference).leave_one_out(x, groups.tolist())
    assert value == pytest.approx(distance(reference)(x), rel=1e-9)
    expected = [distance(reference)(x[groups != group]) for group in range(7)]
    np.testing.assert_allclose(without, expected, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("distance", [kid, cmmd])
def test_a_prompt_leaves_a_paired_reference_too(
    clip: ClipFeatures, distance: Distance
) -> None:
    x, y = sample(20, 24, 10, shift=0.2), sample(15, 24, 11)
    groups, others = (
        np.array([f"prompt {i % 5}" for i in range(20)]),
        np.array([f"prompt {i % 5}" for i in range(15)]),
    )
    _, without = distance(gathered(y, clip), others.tolist()).leave_one_out(
        x, groups.tolist()
    )
    expected = []
    for label in sorted(set(groups.tolist())):
        mine, theirs = groups != label, others != label
        rest = distance(gathered(y[theirs], clip), others[theirs].tolist())
        expected.append(rest.leave_one_out(x[mine], groups[mine].tolist())[0])
    np.testing.assert_allclose(without, expected, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("distance", [kid, cmmd])
def test_images_of_the_same_prompts_are_no_nearer_than_they_are(
    clip: ClipFeatures, distance: Distance
) -> None:
    """Held against itself a set is at distance 0; with pairs of one prompt counted it would be far below."""
    x, groups = sample(24, 24, 14), [i // 2 for i in range(24)]
    reference = gathered(x, clip)
    assert distance(reference, groups).leave_one_out(x, groups)[0] == pytest.approx(
        0, abs=1e-9
    )
    assert distance(reference).leave_one_out(x, groups)[0] < -0.01
    # Two sets that share what is peculiar to each prompt, but not more: not biased either.
    found = []
    for seed in range(60):
        common = sample(12, 24, seed)
        mine, theirs = (common + 0.3 * sample(12, 24, 1000 * k + seed) for k in (1, 2))
        found.append(
            distance(gathered(theirs, clip), range(12)).leave_one_out(mine, range(12))[
                0
            ]
        )
    assert abs(np.mean(found)) < 3 * np.std(found) / math.sqrt(len(found))


def test_a_kernel_matrix_in_pieces(
    clip: ClipFeatures, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, reference, groups = (
        sample(20, 24, 12),
        gathered(sample(30, 24, 13), clip),
        [i // 4 for i in range(20)],
    )
    whole = kid(reference).leave_one_out(x, groups)
    monkeypatch.setattr("sdopt.quality.distances._ROWS", 7)
    pieces = kid(reference).leave_one_out(x, groups)
    assert pieces[0] == pytest.approx(whole[0], rel=1e-9)
    np.testing.assert_allclose(pieces[1], whole[1], rtol=1e-9)


def test_features_that_are_not_finite_give_no_figure(clip: ClipFeatures) -> None:
    x, reference = sample(10, 24, 14), gathered(sample(10, 24, 15), clip)
    x[3, 5] = math.nan
    assert math.isnan(fid(x, reference))
    assert math.isnan(kid(reference)(x))
    assert math.isnan(cmmd(reference)(x))
    assert math.isnan(fid(sample(10, 24, 14), gathered(x, clip)))


def test_too_few_images_give_no_figure(clip: ClipFeatures, tmp_path: Path) -> None:
    """Several images of one prompt are a set, which is nothing without that prompt."""
    x, one, reference = (
        sample(4, 24, 19),
        gathered(sample(1, 24, 16), clip),
        gathered(sample(10, 24, 17), clip),
    )
    assert all(
        math.isnan(value)
        for value in (
            fid(x, one),
            fid(one.values, reference),
            kid(reference)(one.values),
        )
    )
    value, [without] = kid(reference).leave_one_out(x, [0] * 4)
    assert math.isfinite(value)
    left = [without, kid(reference).leave_one_out(x, [0, 0, 0, 1])[1][0]]
    left += kid(gathered(x, clip), [0, 0, 1, 1]).leave_one_out(x, [0, 0, 1, 1])[1]
    assert not np.isfinite(left).any()
    one.save(tmp_path / "one.safetensors")
    with pytest.raises(UsageError, match=r"one\.safetensors: holds one image"):
        reference_set(str(tmp_path / "one.safetensors"), clip)


def test_a_folder_is_a_reference_set(
    clip: ClipFeatures, drawings: np.ndarray, tmp_path: Path
) -> None:
    folder = tmp_path / "drawings"
    folder.mkdir()
    for number, image in enumerate(drawings):
        Image.fromarray(image).save(folder / f"{number:02d}.png")
    found = reference_set(str(folder), clip)
    assert (found.name, len(found.values), found.features, found.weights) == (
        "drawings",
        16,
        clip.name,
        clip.digest,
    )
    torch.testing.assert_close(
        found.values, clip(channels_first(drawings)), rtol=1e-5, atol=1e-5
    )


def test_a_saved_set_is_the_same_set(
    clip: ClipFeatures, drawings: np.ndarray, tmp_path: Path
) -> None:
    made = ReferenceSet.of_images("drawings", drawings, clip)
    x = clip(channels_first(noisy(drawings, 0.1)))
    made.save(tmp_path / "features.safetensors")
    full = reference_set(str(tmp_path / "features.safetensors"), clip)
    assert (len(full.values), full.name) == (16, "drawings")
    assert (kid(full)(x), fid(x, full)) == (kid(made)(x), fid(x, made))


def test_saved_sets_that_do_not_fit(
    clip: ClipFeatures, drawings: np.ndarray, tmp_path: Path
) -> None:
    made = ReferenceSet.of_images("drawings", drawings, clip)
    made.save(tmp_path / "a.safetensors")
    tensors = load_file(tmp_path / "a.safetensors")
    facts = {"name": "a", "features": clip.name, "weights": clip.digest}
    cases = {
        "holds features effnet of the weights .*; this study needs clip": facts
        | {"features": "effnet"},
        r"of the weights 0…; this study needs": facts | {"weights": "0"},
        "is not a reference set": {"name": "a"},
    }
    for said, metadata in cases.items():
        save_file(tensors, tmp_path / "b.safetensors", metadata)
        with pytest.raises(UsageError, match=said):
            ReferenceSet.load(tmp_path / "b.safetensors", clip)
    save_file({"mean": made.values}, tmp_path / "b.safetensors", facts)
    with pytest.raises(UsageError, match="is not a reference set"):
        ReferenceSet.load(tmp_path / "b.safetensors", clip)
    (tmp_path / "b.safetensors").write_bytes(b"nothing")
    for file in ("b.safetensors", "absent.safetensors"):
        with pytest.raises(UsageError, match=r"cannot be read as a safetensors file"):
            reference_set(str(tmp_path / file), clip)


def test_pixels_by_hand() -> None:
    black, other = (
        np.zeros((1, 16, 16, 3), np.uint8),
        np.zeros((1, 16, 16, 3), np.uint8),
    )
    other[0, :8] = 51
    mse, _ = pixel_differences(other, black)
    assert mse == pytest.approx([0.02])
    assert psnr_db(mse[0]) == pytest.approx(16.9897, rel=1e-5)
    # Of two flat images it is the term of their means alone: C₁ / (0.2² + C₁) with C₁ = 0.01².
    other[0] = 51
    _, ssim = pixel_differences(other, black)
    assert ssim == pytest.approx([0.0001 / 0.0401], rel=1e-3)


@pytest.mark.parametrize("n", [1, 16])
def test_the_same_images_are_identical(
    drawings: np.ndarray, clip: ClipFeatures, n: int
) -> None:
    mse, ssim = pixel_differences(drawings[:n], drawings[:n].copy())
    assert mse == [0.0] * n
    assert ssim == [1.0] * n
    assert perceptual_distances(drawings[:n], drawings[:n], clip) == (0.0,) * n
    assert psnr_db(0) is None


def test_perceptual_distance_is_the_formula(
    drawings: np.ndarray, clip: ClipFeatures
) -> None:
    one, other = drawings[:1], drawings[1:2]
    layers = []
    for x, y in zip(
        clip.maps(channels_first(one)), clip.maps(channels_first(other)), strict=True
    ):
        cosines = torch.cosine_similarity(x[0], y[0], dim=1)
        layers.append(float((2 - 2 * cosines).mean()))
    assert perceptual_distances(one, other, clip) == pytest.approx(
        (np.mean(layers),), rel=1e-4
    )


def test_errors_of_latents_by_hand() -> None:
    reference = np.array(
        [[3.0, 4.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]], dtype=np.float16
    )
    latents = np.array(
        [[3.0, 4.5], [1.0, 0.0], [1.0, 0.0], [np.nan, 1.0]], dtype=np.float16
    )
    first, *others = latents_error(latents, reference)
    assert first == pytest.approx(0.1)
    assert others == [0.0, None, None]


def test_lpips_says_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        UsageError, match=r"torchvision is not installed; pip install 'sdopt\[lpips\]'"
    ):
        paired.Lpips()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    with pytest.raises(
        UsageError,
        match=r"alexnet-owt-7be5be79\.pth is missing; download it from https://",
    ):
        paired.Lpips()
