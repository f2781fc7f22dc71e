"""Measures differences between an image and the reference variant's image of the same prompt and the same noise.

Images and latents come in pairs of one shape. All values are floats that JSON can hold; None stands for a figure that
does not exist.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sdopt.quality.available import require_lpips
from sdopt.quality.features import FeatureExtractor, without_pickles
from sdopt.quality.images import channels_first

_BATCH = 16


def pixel_differences(
    images: np.ndarray, reference: np.ndarray
) -> tuple[list[float], list[float]]:
    """Compares uint8 images (n, height, width, 3) pair by pair.

    Returns:
        the mean squared error of each pair, of values between 0 and 1; and its structural similarity (Wang et al. 2004,
        through torchmetrics), which is 1 for the same image.
    """
    from torchmetrics.functional.image import structural_similarity_index_measure

    mse: list[float] = []
    ssim: list[float] = []
    for one, other in _pairs(images, reference):
        mse += (
            ((one.double() - other.double()) / 255)
            .square()
            .mean(dim=(1, 2, 3))
            .tolist()
        )
        values: Any = structural_similarity_index_measure(
            one / 255, other / 255, data_range=1.0, reduction="none"
        )
        # Of the same image its terms cancel but for rounding.
        same = (one == other).flatten(1).all(1)
        ssim += values.double().masked_fill(same, 1.0).tolist()
    return mse, ssim


def psnr_db(mse: float) -> float | None:
    """Returns the peak signal-to-noise ratio in dB of values between 0 and 1; None if it is infinite."""
    return None if mse == 0 else -10 * math.log10(mse)


def latents_error(
    latents: np.ndarray, reference: np.ndarray
) -> tuple[float | None, ...]:
    """Returns ‖z − z_ref‖₂ / ‖z_ref‖₂ of final latents (n, …); None if a value is not finite or z_ref is zero."""
    errors: list[float | None] = []
    for one, other in zip(
        latents.astype(np.float64), reference.astype(np.float64), strict=True
    ):
        length = float(np.linalg.norm(other))
        error = float(np.linalg.norm(one - other)) / length if length else math.nan
        errors.append(error if math.isfinite(error) else None)
    return tuple(errors)


def perceptual_distances(
    images: np.ndarray, reference: np.ndarray, extractor: FeatureExtractor
) -> tuple[float, ...]:
    """Returns the distance in the layers of a network, pair by pair: 0 for the same image, at most 4.

    It is LPIPS (Zhang et al. 2018, eq. 1) with equal weights: activations are scaled to unit length over the channels
    at each position, their squared differences are summed over channels and averaged over positions, then over layers.
    Unlike a distance between pooled embeddings it depends on where in the image something changed.
    """
    distances: list[float] = []
    for one, other in _pairs(images, reference):
        layers = []
        for x, y in zip(extractor.maps(one), extractor.maps(other), strict=True):
            apart = nn.functional.normalize(x, dim=2) - nn.functional.normalize(
                y, dim=2
            )
            layers.append(apart.square().sum(dim=2).mean(dim=1))
        distances += torch.stack(layers).mean(dim=0).double().tolist()
    return tuple(distances)


class Lpips:
    """LPIPS over AlexNet (Zhang et al. 2018) through torchmetrics. Raises UsageError as `require_lpips` does."""

    def __init__(self, device: str = "cpu") -> None:
        require_lpips()
        from torchmetrics.image.lpip import LearnedPerceptualImagePatchSimilarity

        with without_pickles():
            metric: Any = LearnedPerceptualImagePatchSimilarity(
                net_type="alex", reduction="none", normalize=True
            )
        self._metric = metric.to(device)

    @torch.inference_mode()
    def __call__(self, images: np.ndarray, reference: np.ndarray) -> tuple[float, ...]:
        """Returns distances of uint8 images (n, height, width, 3), pair by pair."""
        self._metric.reset()
        for one, other in _pairs(images, reference):
            self._metric.update(
                one.to(self._metric.device) / 255, other.to(self._metric.device) / 255
            )
        return tuple(self._metric.compute().double().flatten().tolist())


def _pairs(
    images: np.ndarray, reference: np.ndarray
) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, len(images), _BATCH):
        yield (
            channels_first(images[start : start + _BATCH]),
            channels_first(reference[start : start + _BATCH]),
        )
