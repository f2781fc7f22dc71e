"""Defines every quality metric, one row each: its name, its better direction, its needs, and its computation.

A metric over features carries their name in its own, everywhere: `fid_emojiclip` and `fid_inception` are two metrics.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from sdopt.errors import UsageError
from sdopt.pipelines.catalog import PACKAGED
from sdopt.quality.available import (
    PUBLISHED,
    is_in_cache,
    is_installed,
    require_features,
    require_lpips,
)
from sdopt.quality.by_prompt import finite
from sdopt.record.scores import Score
from sdopt.schema import Gate, Model, Quality

if TYPE_CHECKING:
    from sdopt.quality.inputs import Inputs


@dataclass(frozen=True)
class MetricFamily:
    """The common properties of all metrics of one kind.

    Attributes:
        name: the first part of a metric's name, or all of it.
        meaning: one line for tables.
        higher_is_better: the direction; None if neither way is better.
        compute: computes the score of some inputs, over the named features ("" for none); None if there is no score for
            them. It is sent to another process, so it can be pickled.
        unit: unit of its values; "" if they have none.
        over: the kinds of features that it can be computed over (`clip`, `dinov2`, `effnet`, …); the name of such a
            metric ends with the name of the features.
        first_features: whether it is computed over only the first of the run's features that suit.
        needs_pair: whether it compares with the reference variant's images of the same prompts and seeds.
        on_request: the key of the quality section that must be true for it to be computed.
        least: the least number of images for a figure.
        decides_from: the least number of images for a gate to decide by it; with fewer, it is only reported.
        on_random_weights: whether it means anything for a model with random weights.
        headline: whether the terminal and the page show it.
        tabulated: whether tables show it at all; `result.json` and MLflow have all metrics.
        equal_text: what a table shows where it has no figure because the images are identical; "" if it has one.
    """

    name: str
    meaning: str
    higher_is_better: bool | None
    compute: Callable[[Inputs, str], Score | None]
    unit: str = ""
    over: tuple[str, ...] = ()
    first_features: bool = False
    needs_pair: bool = False
    on_request: str = ""
    least: int = 1
    decides_from: int = 1
    on_random_weights: bool = False
    headline: bool = False
    tabulated: bool = True
    equal_text: str = ""


@dataclass(frozen=True)
class QualityMetric:
    """A metric as it is computed, reported and judged."""

    family: MetricFamily
    features: str = ""
    """The features, as `sdopt.quality.features` names them; "" if the family uses none."""

    @property
    def name(self) -> str:
        """The name in results, tables, trackers and rules."""
        return (
            f"{self.family.name}_{slug(self.features)}"
            if self.features
            else self.family.name
        )


def _mse(given: Inputs, _features: str) -> Score:
    return given.by_prompt(given.pixels[0])


def _psnr_db(given: Inputs, _features: str) -> Score | None:
    """Returns the PSNR of the mean squared error over all images, because identical images have no PSNR."""
    from sdopt.quality.paired import psnr_db

    mse = given.by_prompt(given.pixels[0]).estimate
    if mse is None:
        return None
    return Score(
        psnr_db(mse),
        note="of the mean squared error" if mse else "the images are identical",
    )


def _ssim(given: Inputs, _features: str) -> Score:
    return given.by_prompt(given.pixels[1])


# Features that are trained to recognise objects hardly change if all images become a little noisier, softer or paler.
# Appearance is measured per image and compared pair by pair, so that even a small shift shows if all images share it.

_LUMINANCE = np.array([0.2126, 0.7152, 0.0722])
"""Weights of linear red, green and blue in the luminance (ITU-R BT.709)."""

_FINE = np.array([[1.0, -2.0, 1.0], [-2.0, 4.0, -2.0], [1.0, -2.0, 1.0]])
"""Difference of two Laplacians, which is 0 on planes and straight edges (Immerkær 1996)."""


def brightness(images: np.ndarray) -> np.ndarray:
    """Returns the mean luminance of uint8 images (n, height, width, 3), gamma-coded: float64 (n,) from 0 to 1."""
    means: np.ndarray = _luminance(images).mean(axis=(1, 2))
    return means


def contrast(images: np.ndarray) -> np.ndarray:
    """Returns the root mean square contrast: the standard deviation of the luminance, float64 (n,) from 0 to 0.5."""
    deviations: np.ndarray = _luminance(images).std(axis=(1, 2))
    return deviations


def fine_detail(images: np.ndarray) -> np.ndarray:
    """Returns the amount of fine structure, float64 (n,): Immerkær's estimate of the noise deviation, from 0 to 1.

    It is √(π/2) / 6 times the mean absolute response to Immerkær's mask. Noise and ringing raise it, blur lowers it.
    """
    from scipy.ndimage import convolve

    responses = np.stack(
        [convolve(image, _FINE, mode="nearest") for image in _luminance(images)]
    )
    means: np.ndarray = np.abs(responses).mean(axis=(1, 2))
    return means * (math.sqrt(math.pi / 2) / 6)


def palette(images: np.ndarray) -> np.ndarray:
    """Returns the colours of uint8 images (n, height, width, 3) in five figures each: float64 (n, 5).

    They are the means of red, green and blue, gamma-coded from 0 to 1, and the standard deviations of the two opponent
    colours, red − green and yellow − blue (Hasler and Süsstrunk 2003). A cast moves the means, a loss of colour the
    deviations, also of an image whose colours balance.
    """
    colours = images.astype(np.float64) / 255
    red, green, blue = np.moveaxis(colours, -1, 0)
    opponents = np.stack([red - green, (red + green) / 2 - blue])
    return np.column_stack([colours.mean(axis=(1, 2)), opponents.std(axis=(2, 3)).T])


def _luminance(images: np.ndarray) -> np.ndarray:
    luminance: np.ndarray = images.astype(np.float64) @ _LUMINANCE / 255
    return luminance


def _of_images(
    appearance: Callable[[np.ndarray], np.ndarray], given: Inputs, _features: str
) -> Score:
    return given.by_prompt(appearance(given.pictures.images))


def _colour_error(given: Inputs, _features: str) -> Score:
    mine, other = (
        palette(pictures.images) for pictures in (given.pictures, given.other)
    )
    return given.by_prompt(np.linalg.norm(mine - other, axis=1))


def _change(
    appearance: Callable[[np.ndarray], np.ndarray], given: Inputs, _features: str
) -> Score:
    """Returns the mean absolute change, image by image, so that changes of both signs do not cancel."""
    return given.by_prompt(
        np.abs(appearance(given.pictures.images) - appearance(given.other.images))
    )


def _latents_error(given: Inputs, _features: str) -> Score | None:
    from sdopt.quality.paired import latents_error

    mine, other = given.pictures.latents, given.other.latents
    if mine is None or other is None or mine.shape != other.shape:
        return None
    return given.by_prompt(latents_error(mine, other))


def _perceptual(given: Inputs, features: str) -> Score:
    from sdopt.quality.paired import perceptual_distances

    extractor = given.networks.extractor(features)
    return given.by_prompt(
        perceptual_distances(given.pictures.images, given.other.images, extractor)
    )


def _lpips_alex(given: Inputs, _features: str) -> Score:
    return given.by_prompt(
        given.networks.lpips(given.pictures.images, given.other.images)
    )


def _clip_score(given: Inputs, features: str) -> Score | None:
    """Returns 100 · max(cos(image, prompt), 0) (Hessel et al. 2021); None where nobody knows the prompts."""
    from torch.nn import functional

    from sdopt.quality.features import ClipFeatures

    prompts = [record.prompt for record in given.pictures.records]
    if not all(prompts):
        return None
    clip = given.networks.extractor(features)
    assert isinstance(clip, ClipFeatures)
    cosines = functional.cosine_similarity(
        given.features(features), clip.embed_texts(prompts)
    )
    return given.by_prompt((100 * cosines.clamp(min=0)).tolist())


def _fid(given: Inputs, features: str) -> Score:
    from sdopt.quality.distances import fid

    reference = given.reference(features)
    return Score(
        finite(fid(given.features(features), reference)),
        note=f"against {reference.name}",
    )


def _kernel_distance(kernel: str, given: Inputs, features: str) -> Score:
    """Returns the squared MMD with the kernel of a function of `sdopt.quality.distances`: `kid` or `cmmd`."""
    from sdopt.quality import distances

    distance = getattr(distances, kernel)
    reference = given.reference(features)
    value, without = distance(reference, given.groups).leave_one_out(
        given.features(features), given.pictures.prompts
    )
    # Without one of two prompts, no two images may be left to compare: that is too few prompts, and no broken value.
    estimates = without if all(map(math.isfinite, without)) else []
    return Score(
        finite(value),
        leave_one_out=list(map(finite, estimates)),
        note=f"against {reference.name}",
    )


def _imported(given: Inputs, features: str) -> None:
    """Another program computes it, and an application takes it in."""


_LAYERED = ("clip", "effnet", "dinov2")

_ALL = ("clip", "effnet", "inception", "dinov2")

_ELSEWHERE = ("elsewhere",)

FAMILIES = (
    # The PSNR, which is computed from it, stands for it in tables.
    MetricFamily(
        "mse", "mean squared error of pixel values in 0…1", False, _mse,
        needs_pair=True, on_random_weights=True, tabulated=False,
    ),
    MetricFamily(
        "psnr_db", "peak signal-to-noise ratio", True, _psnr_db,
        unit="dB", needs_pair=True, on_random_weights=True, headline=True, equal_text="equal",
    ),
    MetricFamily("ssim", "structural similarity", True, _ssim, needs_pair=True, on_random_weights=True),
    MetricFamily("brightness", "mean luminance", None, partial(_of_images, brightness), tabulated=False),
    MetricFamily(
        "contrast", "standard deviation of the luminance", None, partial(_of_images, contrast), tabulated=False,
    ),
    MetricFamily("fine_detail", "mean response to Immerkær's mask", True, partial(_of_images, fine_detail)),
    MetricFamily("colour_error", "distance of mean colours and their spread", False, _colour_error, needs_pair=True),
    MetricFamily(
        "brightness_error", "change of mean luminance, either way", False, partial(_change, brightness),
        needs_pair=True,
    ),
    MetricFamily(
        "contrast_error", "change of contrast, either way", False, partial(_change, contrast), needs_pair=True,
    ),
    MetricFamily(
        "detail_error", "change of fine detail, either way", False, partial(_change, fine_detail), needs_pair=True,
    ),
    MetricFamily(
        "latents_error", "relative L2 error of final latents", False, _latents_error,
        needs_pair=True, on_random_weights=True,
    ),
    MetricFamily(
        "perceptual", "distance in a network's layers", False, _perceptual,
        over=_LAYERED, first_features=True, needs_pair=True, headline=True,
    ),
    MetricFamily(
        "lpips_alex", "LPIPS, AlexNet", False, _lpips_alex, needs_pair=True, on_request="lpips", headline=True,
    ),
    # It also needs features of the prompts, which only a CLIP has.
    MetricFamily("clip_score", "100 · cosine of image and prompt", True, _clip_score, over=("clip",), headline=True),
    # Two for a covariance. Its bias at few images dwarfs what an optimization does: see `sdopt.quality.distances.fid`.
    MetricFamily("fid", "Fréchet distance", False, _fid, over=_ALL, least=2, decides_from=2000),
    # Three, because a jackknife leaves prompts out and the unbiased estimate needs two.
    MetricFamily(
        "kid", "kernel distance to the reference images, about 0 for images like them", False,
        partial(_kernel_distance, "kid"), over=_ALL, least=3,
    ),
    MetricFamily(
        "cmmd", "1000 · kernel distance to the reference images, about 0 for images like them", False,
        partial(_kernel_distance, "cmmd"), over=_ALL, least=3, headline=True,
    ),
    # Their names end with that of the metric: `score_imagereward`.
    MetricFamily("score", "score by another program", True, _imported, over=_ELSEWHERE, headline=True),
    MetricFamily("penalty", "score by another program", False, _imported, over=_ELSEWHERE, headline=True),
)  # fmt: skip


READ_FIRST = ("psnr_db", "perceptual", "lpips_alex", "ssim", "clip_score", "cmmd")
"""Families in the order in which every report shows their metrics; the others follow in the order of `FAMILIES`."""


def known_family(name: str) -> MetricFamily | None:
    """Returns the family of a metric, named with or without its features; None if this version does not know it."""
    for family in FAMILIES:
        if name == family.name or (family.over and name.startswith(f"{family.name}_")):
            return family
    return None


def is_imported(name: str) -> bool:
    """Returns whether a metric is one that another program computes."""
    family = known_family(name)
    return family is not None and family.over == _ELSEWHERE


def family_of(name: str) -> MetricFamily:
    """Returns the family of a metric, as `known_family` does. Raises UsageError if there is none."""
    family = known_family(name)
    if family is None:
        raise UsageError(
            f"{name}: unknown metric; choose from {', '.join(family.name for family in FAMILIES)}"
        )
    return family


def in_reading_order(names: Iterable[str]) -> list[str]:
    """Returns names of metrics, each once, in the order of `READ_FIRST`; metrics that are not known come last."""
    order = [*READ_FIRST, *(family.name for family in FAMILIES)]

    def place(name: str) -> int:
        family = known_family(name)
        return order.index(family.name) if family else len(order)

    return sorted(dict.fromkeys(names), key=place)


def features_of(quality: Quality, model: Model) -> tuple[str, ...]:
    """Returns the names of feature extractors: those configured, else the model's own, else EfficientNet's.

    The packaged model has its own, and a model on the hub a published CLIP, if that is in the local cache.
    """
    if quality.features is not None:
        return tuple(quality.features)
    if (PACKAGED / model.name).is_dir():
        return ("emojiclip",)
    if model.weights == "hub" and is_in_cache(PUBLISHED):
        return (PUBLISHED,)
    return ("effnet",) if is_installed("effnet") else ()


def measured_metrics(quality: Quality, model: Model) -> tuple[QualityMetric, ...]:
    """Returns the metrics that a run with these settings measures: the evaluation and the check of a gate read it.

    Raises:
        UsageError: two features have one name.
    """
    if not quality.metrics:
        return ()
    features = features_of(quality, model)
    if len({slug(one) for one in features}) < len(set(features)):
        raise UsageError(
            f"{', '.join(features)}: two of these features have the same name in the metrics; leave one out"
        )
    metrics: list[QualityMetric] = []
    for family in FAMILIES:
        if model.weights == "random" and not family.on_random_weights:
            continue
        if family.on_request and not is_wanted(quality.lpips):
            continue
        suiting = [
            one for one in dict.fromkeys(features) if kind_of(one) in family.over
        ]
        over = (
            (suiting[:1] if family.first_features else suiting) if family.over else [""]
        )
        metrics += [QualityMetric(family, one) for one in over]
    return tuple(metrics)


def is_wanted(lpips: bool | None) -> bool:
    """Returns whether LPIPS is measured: if asked for, or, where nobody says, if its weights are at hand."""
    if lpips is None:
        try:
            require_lpips()
        except UsageError:
            return False
    return lpips is not False


def slug(features: str) -> str:
    """Returns a metric's suffix for features: `clip:openai/clip-vit-large-patch14` is `clip_vit_large_patch14`."""
    last = re.sub(r"^(clip|dinov2):", "", features).rstrip("/").rpartition("/")[2]
    return re.sub(r"[^a-z0-9]+", "_", last.lower()).strip("_")


def kind_of(features: str) -> str:
    """Returns the kind of features, as in `Family.over`: `clip` for each CLIP, else the name of the features."""
    return "clip" if features == "emojiclip" else features.partition(":")[0]


def reference_of(quality: Quality, model: Model) -> str:
    """Returns the reference set of FID, KID and CMMD."""
    if quality.reference is not None:
        return quality.reference
    return "packaged" if (PACKAGED / model.name).is_dir() else "baseline"


def require_quality(quality: Quality, gate: Gate, model: Model) -> None:
    """Raises UsageError if features or networks are missing, or if a gate judges images and none is scored."""
    problems = []
    if gate.judges and not quality.metrics:
        problems.append(
            f"gate={gate.name}: judges images, but quality.metrics=false computes no metrics; leave one of them out"
        )
    features = features_of(quality, model) if quality.metrics else ()
    checks: list[tuple[str, Callable[[], object]]] = [
        ("features", partial(require_features, name)) for name in features
    ]
    checks += [("features", partial(measured_metrics, quality, model))]
    checks += [("lpips", require_lpips)] if quality.lpips else []
    for key, check in checks:
        try:
            check()
        except UsageError as error:
            problems += [f"quality.{key}: {problem}" for problem in error.problems]
    if problems:
        raise UsageError(problems)
