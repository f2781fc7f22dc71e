"""Distances between two sets of images, over named features: FID, KID and CMMD.

All of them compare sets: which image belongs to which prompt does not matter. KID and CMMD are unbiased, so they can be
read at any number of images. FID is biased upwards; below some thousand images the bias is far larger than the
differences between optimizations.
"""

import math
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from sdopt.quality.reference_sets import ReferenceSet


def fid(features: Tensor, reference: ReferenceSet) -> float:
    """Returns the Fréchet distance of two Gaussians with the features' means and covariances (Heusel et al. 2017).

    The trace of (Σ₁Σ₂)^½ is the sum of the roots of its eigenvalues. With fewer images than dimensions the product is
    singular; the few eigenvalues that are not zero are those of an n × n matrix (Σ₁ = XᵀX, and XΣ₂Xᵀ). Biased: two
    samples of 32 from one Gaussian in 256 dimensions are 388 apart.

    Args:
        features: (n, d), n ≥ 2.
        reference: the set to compare with, n ≥ 2.

    Returns:
        NaN if a feature is not finite.

    Raises:
        ValueError: fewer than two images on a side, or d differs.
    """
    if features.ndim != 2 or features.shape[1] != reference.values.shape[1]:
        raise ValueError(f"features {tuple(features.shape)} against {tuple(reference.values.shape)}")
    if min(len(features), reference.n) < 2:
        raise ValueError(f"{len(features)} images against {reference.n}; at least 2 are needed on each side")
    features, others = features.double(), reference.values.double()
    if not (features.isfinite().all() and others.isfinite().all()):
        return math.nan
    n, dimension = features.shape
    mean, covariance = features.mean(dim=0), others.T.cov()
    x = (features - mean) / math.sqrt(n - 1)
    if n <= dimension:
        overlap = torch.linalg.eigvalsh(x @ covariance @ x.T).clamp(min=0).sqrt().sum()
    else:
        overlap = torch.linalg.eigvals(x.T @ x @ covariance).sqrt().real.sum()
    apart = (mean - others.mean(dim=0)).square().sum()
    return float(apart + x.square().sum() + covariance.trace() - 2 * overlap)


Kernel = Callable[[Tensor, Tensor], Tensor]
"""A kernel function: maps features (n, d) and (m, d) to (n, m), float64."""


def polynomial(x: Tensor, y: Tensor) -> Tensor:
    """Returns (x·y / d + 1)³, the kernel of the KID."""
    return (x @ y.T / x.shape[1] + 1) ** 3


def gaussian(x: Tensor, y: Tensor) -> Tensor:
    """Returns exp(−|x − y|² / 2σ²) of features scaled to unit norm, with σ = 10: the kernel of CMMD."""
    x, y = nn.functional.normalize(x, dim=1), nn.functional.normalize(y, dim=1)
    # |x − y|² = 2 − 2 x·y loses no precision here: with σ = 10 the kernel is nearly linear.
    return ((x @ y.T - 1) / _SIGMA**2).exp()


_SIGMA = 10.0


_CMMD_SCALE = 1000.0


_ROWS = 2048
"""Rows of a kernel matrix that are in memory at a time."""


class SquaredMMD:
    """Unbiased estimates of the squared maximum mean discrepancy to a reference (Gretton et al. 2012, eq. 3).

    It uses the whole sets once, not the mean over random subsets, so the result does not depend on chance. Sums of the
    kernel by group give the estimate without any one group at no further cost.

    Args:
        kernel: function of two sets of features.
        scale: factor on the result.
        reference: features (m, d), m ≥ 2.
        groups: the group of each reference image, if the reference is another variant's images of the same prompts.
            Leaving out a group then leaves it out of the reference too, and no two images of one group are compared:
            they are more alike than independent ones, and would make the distance negative.
    """

    def __init__(
        self, kernel: Kernel, scale: float, reference: Tensor, groups: Sequence[Hashable] | None = None
    ) -> None:
        if len(reference) < 2:
            raise ValueError(f"a reference of {len(reference)} images; at least 2 are needed")
        self._kernel, self._scale = kernel, scale
        self._reference = reference.double()
        self._labels, self._index = _indexed(groups, len(reference))
        self._own_of_reference = self._own(self._reference, self._index)

    def __call__(self, features: Tensor) -> float:
        """Returns the distance of features (n, d), n ≥ 2; NaN if a feature is not finite."""
        return self._estimate(features, None)[0]

    def leave_one_out(self, features: Tensor, groups: Sequence[Hashable]) -> tuple[float, list[float]]:
        """Returns the distance with all groups, and without each in sorted order (in sdopt, a group is a prompt).

        Args:
            features: (n, d)
            groups: the group of each image.

        Raises:
            ValueError: fewer than two images would be left on a side, or the reference has other groups.
        """
        return self._estimate(features, groups)

    def _estimate(self, features: Tensor, groups: Sequence[Hashable] | None) -> tuple[float, list[float]]:
        features = features.double()
        if features.ndim != 2 or features.shape[1] != self._reference.shape[1]:
            raise ValueError(f"features {tuple(features.shape)} against {tuple(self._reference.shape)}")
        if len(features) < 2:
            raise ValueError(f"{len(features)} images; at least 2 are needed")
        labels, index = _indexed(groups, len(features))
        paired = False
        if labels is not None and self._labels is not None:
            if not np.array_equal(labels, self._labels):
                raise ValueError("the reference has other groups than the features")
            paired = True
        xx, yy = self._own(features, index), self._own_of_reference
        xy = self._sums(features, index, self._reference, self._index)
        x, y = torch.bincount(index), torch.bincount(self._index)
        n, m, skipped = x.sum(), y.sum(), (x, y, torch.zeros(1))
        if paired:
            xx, yy, xy = (sums - sums.diagonal().diag() for sums in (xx, yy, xy))
            skipped = (x * x, y * y, x * y)
        value = float(self._combine((xx.sum(), yy.sum(), xy.sum()), n, m, *(pairs.sum() for pairs in skipped)))
        if labels is None:
            return value, []
        if paired:
            rest = _without(xx), _without(yy), _without(xy)
            without = self._combine(rest, n - x, m - y, *(pairs.sum() - pairs for pairs in skipped))
        else:
            rest = _without(xx), yy.sum(), xy.sum() - xy.sum(dim=1)
            without = self._combine(rest, n - x, m, n - x, m, torch.zeros(1))
        return value, without.tolist()

    def _combine(
        self, sums: tuple[Tensor, Tensor, Tensor], n: Tensor, m: Tensor, in_x: Tensor, in_y: Tensor, across: Tensor
    ) -> Tensor:
        """Combines sums of the kernel within x, within y and across; some of the n², m² and nm pairs were left out."""
        pairs = n * n - in_x, m * m - in_y, n * m - across
        if min(int(count.min()) for count in pairs) < 1:
            raise ValueError("without one of the groups fewer than two images are left")
        means = [total / count for total, count in zip(sums, pairs, strict=True)]
        return self._scale * (means[0] + means[1] - 2 * means[2])

    def _own(self, x: Tensor, index: Tensor) -> Tensor:
        """Sums the kernel between groups of one set, leaving out each image with itself."""
        sums = self._sums(x, index, x, index)
        itself = torch.cat([self._kernel(image, image)[0] for image in x[:, None]])
        return sums - torch.bincount(index, itself).diag()

    def _sums(self, x: Tensor, of_x: Tensor, y: Tensor, of_y: Tensor) -> Tensor:
        """Sums k(xᵢ, yⱼ) over i of each group of x and j of each group of y: float64 (groups of x, groups of y)."""
        columns = nn.functional.one_hot(of_y).double()
        sums = torch.zeros(int(of_x.max()) + 1, columns.shape[1], dtype=torch.double)
        for start in range(0, len(x), _ROWS):
            rows = slice(start, start + _ROWS)
            sums.index_add_(0, of_x[rows], self._kernel(x[rows], y) @ columns)
        return sums


def kid(reference: ReferenceSet, groups: Sequence[Hashable] | None = None) -> SquaredMMD:
    """Returns the Kernel Inception Distance (Bińkowski et al. 2018) to a reference set, over its features.

    With equal numbers of images it equals torchmetrics' `KernelInceptionDistance` with one subset of all images.
    """
    return SquaredMMD(polynomial, 1.0, reference.values, groups)


def cmmd(reference: ReferenceSet, groups: Sequence[Hashable] | None = None) -> SquaredMMD:
    """Returns CMMD (Jayasumana et al. 2024): 1000 × squared MMD, Gaussian kernel with σ = 10, features of unit norm.

    It is the unbiased estimate. The authors' program computes the biased one, which counts each image's similarity to
    itself and is larger by about 1000 (1 − mean kernel) (1/n + 1/m), and it always uses CLIP ViT-L/14 at 336 pixels.
    """
    return SquaredMMD(gaussian, _CMMD_SCALE, reference.values, groups)


def _without(sums: Tensor) -> Tensor:
    """Returns the sums of a square matrix without the row and the column of each index."""
    return sums.sum() - sums.sum(dim=0) - sums.sum(dim=1) + sums.diagonal()


def _indexed(groups: Sequence[Hashable] | None, n: int) -> tuple[np.ndarray | None, Tensor]:
    """Returns the sorted labels and each image's index among them; without groups all images are one group."""
    if groups is None:
        return None, torch.zeros(n, dtype=torch.long)
    if len(groups) != n:
        raise ValueError(f"{len(groups)} groups for {n} images")
    labels, index = np.unique(np.asarray(groups), return_inverse=True)
    return labels, torch.from_numpy(index)
