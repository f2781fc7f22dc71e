"""Distances between two sets of images, over named features: FID, KID and CMMD.

All of them see a set of images only: which image belongs to which prompt plays no part. KID and CMMD are unbiased, so
they can be read at any number of images; FID is biased upwards by far more than optimizations differ by until there
are thousands.
"""

import hashlib
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from sdopt.errors import UsageError
from sdopt.pipelines.catalog import PACKAGED
from sdopt.quality.features import FeatureExtractor
from sdopt.quality.images import batches, channels_first, image_files

HELD_OUT = PACKAGED / "held_out"
"""Folder of the packaged held-out images."""

PRECOMPUTED = PACKAGED / "clip" / "held_out.safetensors"
"""Their features by the packaged CLIP."""

PACKAGED_NAME = "packaged held-out images"


@dataclass(frozen=True, eq=False)
class ReferenceSet:
    """The images that others are compared with, as features or as their mean and covariance.

    Attributes:
        name: what it is called in reports.
        features: name of the extractor.
        weights: digest of the extractor's weights.
        n: number of images.
        digest: SHA-256 of the images where it was made of images, else of the numbers.
        values: features, float32 (n, d); None where only statistics are known, which is enough for the FID.
        mean: float64 (d,)
        covariance: float64 (d, d), with n − 1 in the denominator.
    """

    name: str
    features: str
    weights: str
    n: int
    digest: str
    values: Tensor | None = field(repr=False)
    mean: Tensor = field(repr=False)
    covariance: Tensor = field(repr=False)

    @classmethod
    def of_features(cls, name: str, values: Tensor, extractor: FeatureExtractor, digest: str = "") -> "ReferenceSet":
        """From features (n, d) that are known already, such as another variant's."""
        doubles = values.double()
        return cls(
            name,
            extractor.name,
            extractor.digest,
            len(values),
            digest or _digest([values.numpy()]),
            values,
            doubles.mean(dim=0),
            doubles.T.cov() if len(values) > 1 else torch.full((values.shape[1],) * 2, math.nan, dtype=torch.double),
        )

    @classmethod
    def of_images(cls, name: str, images: np.ndarray, extractor: FeatureExtractor) -> "ReferenceSet":
        """From uint8 images (n, height, width, 3)."""
        return cls.of_features(name, extractor(channels_first(images)), extractor, _digest(images))

    @classmethod
    def of_folder(cls, folder: Path, extractor: FeatureExtractor, name: str = "") -> "ReferenceSet":
        """From all images of a folder, of any sizes. Raises UsageError where there are none or one cannot be read."""
        digest = hashlib.sha256()
        parts = []
        for batch in batches(image_files(folder), extractor.batch_size):
            parts.append(extractor(channels_first(batch)))
            _add_to(digest, batch)
        return cls.of_features(name or folder.resolve().name, torch.cat(parts), extractor, digest.hexdigest())

    def save(self, file: Path, statistics_only: bool = False) -> None:
        """Writes a safetensors file; with `statistics_only` mean and covariance alone, which serve only the FID."""
        if self.values is None or statistics_only:
            tensors = {"mean": self.mean, "covariance": self.covariance}
        else:
            tensors = {"features": self.values}
        facts = {"name": self.name, "features": self.features, "weights": self.weights, "digest": self.digest}
        save_file({k: v.contiguous() for k, v in tensors.items()}, file, facts | {"n": str(self.n)})

    @classmethod
    def load(cls, file: Path, extractor: FeatureExtractor) -> "ReferenceSet":
        """Reads what `save` wrote.

        Raises:
            UsageError: it cannot be read, or holds features of another extractor or of other weights.
        """
        try:
            with safe_open(file, framework="pt") as stream:
                facts = stream.metadata() or {}
                tensors = {key: stream.get_tensor(key) for key in stream.keys()}  # noqa: SIM118 (not a dict)
        except (OSError, SafetensorError) as error:
            raise UsageError(f"{file}: cannot be read as a safetensors file ({error})") from error
        lacking = [key for key in ("name", "features", "weights", "digest", "n") if key not in facts]
        if lacking or not ("features" in tensors or {"mean", "covariance"} <= set(tensors)):
            raise UsageError(f"{file}: is no reference set; make one with ReferenceSet.of_folder(…).save(…)")
        if facts["features"] != extractor.name or facts["weights"] != extractor.digest:
            same = "of the same name but other weights" if facts["features"] == extractor.name else "what is asked for"
            raise UsageError(f"{file}: holds features {facts['features']}; {extractor.name} is {same}")
        if "features" in tensors:
            return cls.of_features(facts["name"], tensors["features"], extractor, facts["digest"])
        known = tensors["mean"].double(), tensors["covariance"].double()
        return cls(facts["name"], facts["features"], facts["weights"], int(facts["n"]), facts["digest"], None, *known)


def reference_set(source: str, extractor: FeatureExtractor) -> ReferenceSet:
    """The reference set that a configuration names: `packaged`, a folder of images, or a saved file.

    Raises:
        UsageError: there is no such thing, or it cannot be read.
    """
    if source == "packaged":
        return _precomputed(extractor) or ReferenceSet.of_folder(HELD_OUT, extractor, PACKAGED_NAME)
    path = Path(source).expanduser()
    return ReferenceSet.of_folder(path, extractor) if path.is_dir() else ReferenceSet.load(path, extractor)


def _precomputed(extractor: FeatureExtractor) -> ReferenceSet | None:
    """The packaged features of the held-out images, where they are by this extractor's weights."""
    if not PRECOMPUTED.is_file():
        return None
    with safe_open(PRECOMPUTED, framework="pt") as stream:
        of = stream.metadata()
    fits = (of["features"], of["weights"]) == (extractor.name, extractor.digest)
    return ReferenceSet.load(PRECOMPUTED, extractor) if fits else None


def digest_of(images: np.ndarray) -> str:
    """SHA-256 of images in their order, as in `ReferenceSet.digest`."""
    return _digest(images)


class _Given(nn.Module):
    """What torchmetrics takes for a feature extractor where the features are there already."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.num_features = dimension

    def forward(self, features: Tensor) -> Tensor:
        return features


def fid(features: Tensor, reference: ReferenceSet) -> float:
    """Fréchet distance between two Gaussians that have the means and covariances of the features (Heusel et al. 2017).

    Through torchmetrics where there are more images than dimensions. With fewer the product of the covariances is
    singular, and its d eigenvalues take minutes; its few that are not zero are those of an n × n matrix, to the same
    result. Biased: two samples of 32 from one Gaussian in 256 dimensions are 388 apart.

    Args:
        features: (n, d), n ≥ 2.

    Returns:
        NaN where a feature is not finite.

    Raises:
        ValueError: fewer than two images on a side, or another d.
    """
    if features.ndim != 2 or features.shape[1] != len(reference.mean):
        raise ValueError(f"features {tuple(features.shape)}, but the reference has d = {len(reference.mean)}")
    if min(len(features), reference.n) < 2:
        raise ValueError(f"{len(features)} images against {reference.n}; at least 2 are needed on each side")
    features = features.double()
    if not (features.isfinite().all() and reference.covariance.isfinite().all()):
        return math.nan
    n, dimension = features.shape
    if n <= dimension:
        return _fid_of_few(features, reference)
    from torchmetrics.image.fid import FrechetInceptionDistance

    metric = FrechetInceptionDistance(feature=_Given(dimension))
    metric.update(features, real=False)
    m, mean, covariance = reference.n, reference.mean, reference.covariance
    metric.real_features_num_samples += m
    metric.real_features_sum += m * mean
    metric.real_features_cov_sum += (m - 1) * covariance + m * mean.outer(mean)
    return float(metric.compute())


def _fid_of_few(features: Tensor, reference: ReferenceSet) -> float:
    """With Σ₁ = XᵀX, the trace of (Σ₁Σ₂)^½ is that of (XΣ₂Xᵀ)^½: n × n, symmetric and not negative."""
    mean = features.mean(dim=0)
    x = (features - mean) / math.sqrt(len(features) - 1)
    overlap = torch.linalg.eigvalsh(x @ reference.covariance @ x.T).clamp(min=0).sqrt().sum()
    apart = (mean - reference.mean).square().sum()
    return float(apart + x.square().sum() + reference.covariance.trace() - 2 * overlap)


Kernel = Callable[[Tensor, Tensor], Tensor]
"""(n, d), (m, d) to (n, m), float64."""


def polynomial(x: Tensor, y: Tensor) -> Tensor:
    """(x·y / d + 1)³, the kernel of the KID, as torchmetrics has it."""
    from torchmetrics.image.kid import poly_kernel

    return poly_kernel(x, y)


def gaussian(x: Tensor, y: Tensor) -> Tensor:
    """exp(−|x − y|² / 2σ²) of features scaled to unit norm, with σ = 10: the kernel of CMMD."""
    x, y = nn.functional.normalize(x, dim=1), nn.functional.normalize(y, dim=1)
    # |x − y|² = 2 − 2 x·y, by which nothing is lost: with σ = 10 the kernel is nearly linear.
    return ((x @ y.T - 1) / _SIGMA**2).exp()


_SIGMA = 10.0
_CMMD_SCALE = 1000.0
_ROWS = 2048
"""Rows of a kernel matrix that are held at a time."""


@dataclass(frozen=True, eq=False)
class LeaveOneOut:
    """A figure, and what it is without each group: all that a block jackknife needs.

    Attributes:
        value: with all groups.
        groups: their labels, sorted, (G,).
        without: the figure without each of them, float64 (G,).
    """

    value: float
    groups: np.ndarray
    without: np.ndarray

    def __sub__(self, other: "LeaveOneOut") -> "LeaveOneOut":
        """The difference of two figures over the same groups, recomputed without each. Raises ValueError."""
        if not np.array_equal(self.groups, other.groups):
            raise ValueError("the two figures are not of the same prompts")
        return LeaveOneOut(self.value - other.value, self.groups, self.without - other.without)


class SquaredMMD:
    """Unbiased estimates of the squared maximum mean discrepancy to a reference (Gretton et al. 2012, eq. 3).

    The whole sets enter once, instead of the mean over random subsets: the result does not depend on chance, and
    sums of the kernel by group give the estimate without any one group at no further cost.

    Args:
        kernel: of two sets of features.
        scale: factor on the result.
        reference: features (m, d), m ≥ 2.
        groups: the group of each reference image, where the reference is another variant's images of the same prompts.
            Leaving out a group then leaves it out of the reference too, and no two images of one group are compared:
            they are more alike than two that were drawn apart, by which the distance would come out below 0.
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
        """The distance of features (n, d), n ≥ 2; NaN where a feature is not finite."""
        return self._estimate(features, None).value

    def leave_one_out(self, features: Tensor, groups: Sequence[Hashable]) -> LeaveOneOut:
        """The distance, and that without each group (in sdopt: without each prompt).

        Args:
            features: (n, d)
            groups: the group of each image.

        Raises:
            ValueError: fewer than two images would be left on a side, or the reference has other groups.
        """
        return self._estimate(features, groups)

    def _estimate(self, features: Tensor, groups: Sequence[Hashable] | None) -> LeaveOneOut:
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
            return LeaveOneOut(value, np.empty(0), np.empty(0))
        if paired:
            rest = _without(xx), _without(yy), _without(xy)
            without = self._combine(rest, n - x, m - y, *(pairs.sum() - pairs for pairs in skipped))
        else:
            rest = _without(xx), yy.sum(), xy.sum() - xy.sum(dim=1)
            without = self._combine(rest, n - x, m, n - x, m, torch.zeros(1))
        return LeaveOneOut(value, labels, without.numpy())

    def _combine(
        self, sums: tuple[Tensor, Tensor, Tensor], n: Tensor, m: Tensor, in_x: Tensor, in_y: Tensor, across: Tensor
    ) -> Tensor:
        """From sums of the kernel within x, within y and across; of the n², m² and nm pairs some were left out."""
        pairs = n * n - in_x, m * m - in_y, n * m - across
        if min(int(count.min()) for count in pairs) < 1:
            raise ValueError("without one of the groups fewer than two images are left")
        means = [total / count for total, count in zip(sums, pairs, strict=True)]
        return self._scale * (means[0] + means[1] - 2 * means[2])

    def _own(self, x: Tensor, index: Tensor) -> Tensor:
        """Sums of the kernel between groups of one set, no image with itself."""
        sums = self._sums(x, index, x, index)
        itself = torch.cat([self._kernel(image, image)[0] for image in x.split(1)])
        return sums - torch.bincount(index, itself).diag()

    def _sums(self, x: Tensor, of_x: Tensor, y: Tensor, of_y: Tensor) -> Tensor:
        """Σ k(xᵢ, yⱼ) over i of each group of x and j of each group of y: float64 (groups of x, groups of y)."""
        columns = nn.functional.one_hot(of_y).double()
        sums = torch.zeros(int(of_x.max()) + 1, columns.shape[1], dtype=torch.double)
        for rows in torch.arange(len(x)).split(_ROWS):
            sums.index_add_(0, of_x[rows], self._kernel(x[rows], y) @ columns)
        return sums


def kid(reference: ReferenceSet, groups: Sequence[Hashable] | None = None) -> SquaredMMD:
    """Kernel Inception Distance (Bińkowski et al. 2018) to a reference set, over its features.

    With equal numbers of images it is torchmetrics' `KernelInceptionDistance` with one subset of all images.

    Raises:
        UsageError: the reference set holds no features.
    """
    return SquaredMMD(polynomial, 1.0, _features_of(reference, "KID"), groups)


def cmmd(reference: ReferenceSet, groups: Sequence[Hashable] | None = None) -> SquaredMMD:
    """CMMD (Jayasumana et al. 2024): 1000 × squared MMD, Gaussian kernel with σ = 10, features of unit norm.

    The unbiased estimate. The authors' program computes the biased one, which counts each image's likeness to itself,
    and is larger by about 1000 (1 − mean kernel) (1/n + 1/m). Theirs is also over CLIP ViT-L/14 at 336 pixels alone.

    Raises:
        UsageError: the reference set holds no features.
    """
    return SquaredMMD(gaussian, _CMMD_SCALE, _features_of(reference, "CMMD"), groups)


def _features_of(reference: ReferenceSet, metric: str) -> Tensor:
    if reference.values is None:
        raise UsageError(f"{metric}: '{reference.name}' holds a mean and a covariance only; it needs the features")
    return reference.values


def _without(sums: Tensor) -> Tensor:
    """The sum of a square matrix without each row and column of one index."""
    return sums.sum() - sums.sum(dim=0) - sums.sum(dim=1) + sums.diagonal()


def _indexed(groups: Sequence[Hashable] | None, n: int) -> tuple[np.ndarray | None, Tensor]:
    """Sorted labels, and the place of each image's label among them; without groups all images are one."""
    if groups is None:
        return None, torch.zeros(n, dtype=torch.long)
    if len(groups) != n:
        raise ValueError(f"{len(groups)} groups for {n} images")
    labels, index = np.unique(np.asarray(groups), return_inverse=True)
    return labels, torch.from_numpy(index)


def _digest(images: np.ndarray | Sequence[np.ndarray]) -> str:
    digest = hashlib.sha256()
    _add_to(digest, images)
    return digest.hexdigest()


def _add_to(digest: "hashlib._Hash", images: np.ndarray | Sequence[np.ndarray]) -> None:
    for image in images:
        digest.update(f"{image.dtype} {image.shape}".encode())
        digest.update(np.ascontiguousarray(image).data)
