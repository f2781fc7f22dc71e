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

    With Σ₁ = XᵀX and Σ₂ = YᵀY, the trace of (Σ₁Σ₂)^½ is the sum of the singular values of XYᵀ; the triangular factors
    of X and Y have the same, and no more rows than there are dimensions. Biased: two samples of 32 from one Gaussian in
    256 dimensions are 388 apart.

    Args:
        features: (n, d).
        reference: the set to compare with.

    Returns:
        NaN if a feature is not finite, or a set has no covariance.
    """
    x = features.double()
    y = reference.values.double()
    for values in (x, y):
        if len(values) < 2 or not values.isfinite().all():
            return math.nan
    apart = x.mean(dim=0) - y.mean(dim=0)
    root_x = _root_of_covariance(x)
    root_y = _root_of_covariance(y)
    shared = torch.linalg.svdvals(root_x @ root_y.T)
    distance = apart.square().sum()
    distance += root_x.square().sum()
    distance += root_y.square().sum()
    distance -= 2 * shared.sum()
    return float(distance)


def _root_of_covariance(values: Tensor) -> Tensor:
    """Returns a triangular factor R of a covariance RᵀR, (min(n, d), d) for values (n, d)."""
    centred = values - values.mean(dim=0)
    scaled = centred / math.sqrt(len(values) - 1)
    triangle: Tensor = torch.linalg.qr(scaled, mode="r").R
    return triangle


Groups = Sequence[Hashable]
"""The group of each image: in sdopt, its prompt."""

Kernel = Callable[[Tensor, Tensor], Tensor]
"""A kernel function: maps features (n, d) and (m, d) to (n, m), float64."""


def polynomial(x: Tensor, y: Tensor) -> Tensor:
    """Returns (x·y / d + 1)³, the kernel of the KID."""
    dimensions = x.shape[1]
    products = x @ y.T / dimensions
    return (products + 1) ** 3


_SIGMA = 10.0


def gaussian(x: Tensor, y: Tensor) -> Tensor:
    """Returns exp(−|x − y|² / 2σ²) of features scaled to unit norm, with σ = 10: the kernel of CMMD."""
    x = nn.functional.normalize(x, dim=1)
    y = nn.functional.normalize(y, dim=1)
    # |x − y|² = 2 − 2 x·y loses no precision here: with σ = 10 the kernel is nearly linear.
    exponents = (x @ y.T - 1) / _SIGMA**2
    return exponents.exp()


_ROWS = 2048
"""Rows of a kernel matrix that are in memory at a time."""


class SquaredMMD:
    """Unbiased estimates of the squared maximum mean discrepancy to a reference (Gretton et al. 2012, eq. 3).

    It uses the whole sets once, not the mean over random subsets, so the result does not depend on chance. Sums of the
    kernel by group, and numbers of pairs, give the estimate without any one group at no further cost.

    Args:
        kernel: function of two sets of features.
        scale: factor on the result.
        reference: features (m, d), m ≥ 2.
        groups: the group of each reference image, if the reference is another variant's images of the same prompts.
            Leaving out a group then leaves it out of the reference too, and no two images of one group are compared:
            they are more alike than independent ones, and would make the distance negative.
    """

    def __init__(
        self,
        kernel: Kernel,
        scale: float,
        reference: Tensor,
        groups: Groups | None = None,
    ) -> None:
        self._kernel = kernel
        self._scale = scale
        self._reference = reference.double()
        self._paired = groups is not None
        if groups is None:
            groups = [0] * len(reference)
        self._index = _indexed(groups)
        self._within_reference = self._within(self._reference, self._index)
        if self._paired:
            self._within_reference = _off_diagonal(self._within_reference)

    def __call__(self, features: Tensor) -> float:
        """Returns the distance of features (n, d), n ≥ 2, to a reference without groups; NaN if one is not finite."""
        distance, _ = self.leave_one_out(features, [0] * len(features))
        return distance

    def leave_one_out(
        self,
        features: Tensor,
        groups: Groups,
    ) -> tuple[float, list[float]]:
        """Returns the distance with all groups, and without each in sorted order.

        It is not finite where no two images are left to compare.

        Args:
            features: (n, d)
            groups: the group of each image; if the reference has groups, the same ones.
        """
        features = features.double()
        index = _indexed(groups)
        reference = self._within_reference
        within = self._within(features, index)
        across = self._sums(features, index, self._reference, self._index)
        if self._paired:
            within = _off_diagonal(within)
            across = _off_diagonal(across)
        all_within = within.sum((1, 2))
        all_across = across.sum((1, 2))
        all_reference = reference.sum((1, 2))
        whole = self._estimate(all_within, all_across, all_reference)
        if self._paired:
            rest_across = _without(across)
            rest_reference = _without(reference)
        else:
            rest_across = all_across[:, None] - across.sum(2)
            rest_reference = all_reference[:, None]
        rest = self._estimate(_without(within), rest_across, rest_reference)
        return float(whole), rest.tolist()

    def _estimate(self, within: Tensor, across: Tensor, reference: Tensor) -> Tensor:
        """Combines sums and numbers of pairs, (2, …) each."""
        x = within[0] / within[1]
        xy = across[0] / across[1]
        y = reference[0] / reference[1]
        return self._scale * (x + y - 2 * xy)

    def _within(self, x: Tensor, index: Tensor) -> Tensor:
        """Returns `_sums` of one set with itself, but for each image with itself."""
        itself = [self._kernel(image, image)[0] for image in x[:, None]]
        sums = torch.bincount(index, torch.cat(itself))
        counts = torch.bincount(index)
        of_itself = torch.diag_embed(torch.stack([sums, counts]))
        return self._sums(x, index, x, index) - of_itself

    def _sums(
        self,
        x: Tensor,
        of_x: Tensor,
        y: Tensor,
        of_y: Tensor,
    ) -> Tensor:
        """Sums k(xᵢ, yⱼ) over i of each group of x and j of each group of y, and counts the pairs.

        Returns:
            float64 (2, groups of x, groups of y): the sums, and the numbers of pairs.
        """
        columns = nn.functional.one_hot(of_y).double()
        sizes_x = torch.bincount(of_x)
        sizes_y = torch.bincount(of_y)
        counts = torch.outer(sizes_x, sizes_y).double()
        sums = torch.zeros_like(counts)
        for start in range(0, len(x), _ROWS):
            rows = slice(start, start + _ROWS)
            by_column = self._kernel(x[rows], y) @ columns
            sums.index_add_(0, of_x[rows], by_column)
        return torch.stack([sums, counts])


def kid(
    reference: ReferenceSet,
    groups: Groups | None = None,
) -> SquaredMMD:
    """Returns the Kernel Inception Distance (Bińkowski et al. 2018) to a reference set, over its features.

    With equal numbers of images it equals torchmetrics' `KernelInceptionDistance` with one subset of all images.
    """
    return SquaredMMD(polynomial, 1.0, reference.values, groups)


def cmmd(
    reference: ReferenceSet,
    groups: Groups | None = None,
) -> SquaredMMD:
    """Returns CMMD (Jayasumana et al. 2024): 1000 × squared MMD, Gaussian kernel with σ = 10, features of unit norm.

    It is the unbiased estimate. The authors' program computes the biased one, which counts each image's similarity to
    itself and is larger by about 1000 (1 − mean kernel) (1/n + 1/m), and it always uses CLIP ViT-L/14 at 336 pixels.
    """
    return SquaredMMD(gaussian, 1000.0, reference.values, groups)


def _off_diagonal(pairs: Tensor) -> Tensor:
    """Returns square matrices without what is on their diagonals."""
    return pairs - torch.diag_embed(pairs.diagonal(dim1=1, dim2=2))


def _without(pairs: Tensor) -> Tensor:
    """Returns the sums of square matrices without the row and the column of each index."""
    rest = pairs.sum((1, 2))[:, None]
    rest = rest - pairs.sum(1)
    rest = rest - pairs.sum(2)
    return rest + pairs.diagonal(dim1=1, dim2=2)


def _indexed(groups: Groups) -> Tensor:
    """Returns each image's group by its place among the sorted groups."""
    _, places = np.unique(np.asarray(groups), return_inverse=True)
    return torch.from_numpy(places)
