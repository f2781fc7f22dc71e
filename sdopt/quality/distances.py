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
    both = features.double(), reference.values.double()
    if not all(len(each) > 1 and each.isfinite().all() for each in both):
        return math.nan

    def root(values: Tensor) -> Tensor:
        """Returns a root of the covariance."""
        centred = (values - values.mean(dim=0)) / math.sqrt(len(values) - 1)
        triangle: Tensor = torch.linalg.qr(centred, mode="r").R
        return triangle

    x, y = map(root, both)
    apart = (both[0].mean(dim=0) - both[1].mean(dim=0)).square().sum()
    return float(
        apart
        + x.square().sum()
        + y.square().sum()
        - 2 * torch.linalg.svdvals(x @ y.T).sum()
    )


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
        groups: Sequence[Hashable] | None = None,
    ) -> None:
        self._kernel, self._scale = kernel, scale
        self._reference = reference.double()
        self._paired = groups is not None
        self._index = _indexed([0] * len(reference) if groups is None else groups)
        self._own_of_reference = self._own(self._reference, self._index)

    def __call__(self, features: Tensor) -> float:
        """Returns the distance of features (n, d), n ≥ 2, to a reference without groups; NaN if one is not finite."""
        return self.leave_one_out(features, [0] * len(features))[0]

    def leave_one_out(
        self, features: Tensor, groups: Sequence[Hashable]
    ) -> tuple[float, list[float]]:
        """Returns the distance with all groups, and without each in sorted order (in sdopt, a group is a prompt).

        It is not finite where no two images are left to compare.

        Args:
            features: (n, d)
            groups: the group of each image; if the reference has groups, the same ones.
        """
        features, index = features.double(), _indexed(groups)
        within, across = (
            self._own(features, index),
            self._sums(features, index, self._reference, self._index),
        )
        reference = self._own_of_reference
        if self._paired:
            within, across, reference = (
                _off_diagonal(pairs) for pairs in (within, across, reference)
            )
        total = within.sum((1, 2)), across.sum((1, 2)), reference.sum((1, 2))
        if self._paired:
            rest = _without(within), _without(across), _without(reference)
        else:
            rest = (
                _without(within),
                total[1][:, None] - across.sum(2),
                total[2][:, None],
            )
        return float(self._estimate(*total)), self._estimate(*rest).tolist()

    def _estimate(self, within: Tensor, across: Tensor, reference: Tensor) -> Tensor:
        """Combines sums and numbers of pairs, (2, …) each."""
        x, xy, y = (sums[0] / sums[1] for sums in (within, across, reference))
        return self._scale * (x + y - 2 * xy)

    def _own(self, x: Tensor, index: Tensor) -> Tensor:
        """Returns `_sums` of one set with itself, but for each image with itself."""
        itself = torch.cat([self._kernel(image, image)[0] for image in x[:, None]])
        of_itself = torch.stack([torch.bincount(index, itself), torch.bincount(index)])
        return self._sums(x, index, x, index) - torch.diag_embed(of_itself)

    def _sums(self, x: Tensor, of_x: Tensor, y: Tensor, of_y: Tensor) -> Tensor:
        """Sums k(xᵢ, yⱼ) over i of each group of x and j of each group of y, and counts the pairs.

        Returns:
            float64 (2, groups of x, groups of y): the sums, and the numbers of pairs.
        """
        columns = nn.functional.one_hot(of_y).double()
        sums = torch.zeros(int(of_x.max()) + 1, columns.shape[1], dtype=torch.double)
        for start in range(0, len(x), _ROWS):
            rows = slice(start, start + _ROWS)
            sums.index_add_(0, of_x[rows], self._kernel(x[rows], y) @ columns)
        return torch.stack(
            [sums, torch.outer(torch.bincount(of_x), torch.bincount(of_y)).double()]
        )


def kid(
    reference: ReferenceSet, groups: Sequence[Hashable] | None = None
) -> SquaredMMD:
    """Returns the Kernel Inception Distance (Bińkowski et al. 2018) to a reference set, over its features.

    With equal numbers of images it equals torchmetrics' `KernelInceptionDistance` with one subset of all images.
    """
    return SquaredMMD(polynomial, 1.0, reference.values, groups)


def cmmd(
    reference: ReferenceSet, groups: Sequence[Hashable] | None = None
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
    return (
        pairs.sum((1, 2))[:, None]
        - pairs.sum(1)
        - pairs.sum(2)
        + pairs.diagonal(dim1=1, dim2=2)
    )


def _indexed(groups: Sequence[Hashable]) -> Tensor:
    """Returns each image's group by its place among the sorted groups."""
    return torch.from_numpy(np.unique(np.asarray(groups), return_inverse=True)[1])
