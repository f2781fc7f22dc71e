"""Every quality metric: what it is called, which way is better, what it needs. The one place that knows.

A metric over features carries their name in its own, everywhere: `fid_emojiclip` and `fid_inception` are two metrics.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sdopt.errors import UsageError

PACKAGED_FEATURES = ("emojiclip", "effnet", "inception")


@dataclass(frozen=True)
class Family:
    """What all metrics of one kind have in common.

    Attributes:
        name: the first part of a metric's name, or all of it.
        meaning: in a line, for tables and help.
        higher_is_better: the direction.
        unit: of its values; empty where they have none.
        over_features: whether its name ends with that of features.
        per_image: whether there is a value for each image; otherwise for a whole set, by leaving out prompts.
        needs_prompts: whether it reads the prompts.
        needs_pair: whether it compares with the reference variant's images of the same prompts and seeds.
        needs_reference_set: whether it compares with a set of images.
        least: images below which there is no figure.
        decides_from: images below which it is reported, but decides nothing by itself.
        on_random_weights: whether it says anything of a model whose weights are random.
    """

    name: str
    meaning: str
    higher_is_better: bool
    unit: str = ""
    over_features: bool = False
    per_image: bool = True
    needs_prompts: bool = False
    needs_pair: bool = False
    needs_reference_set: bool = False
    least: int = 1
    decides_from: int = 1
    on_random_weights: bool = False


FAMILIES = (
    Family("mse", "mean squared error of pixel values in 0…1", False, needs_pair=True, on_random_weights=True),
    Family("psnr_db", "peak signal-to-noise ratio", True, "dB", needs_pair=True, on_random_weights=True),
    Family("ssim", "structural similarity", True, needs_pair=True, on_random_weights=True),
    Family("brightness", "mean luminance", True),
    Family("contrast", "standard deviation of the luminance", True),
    Family("fine_detail", "mean response to Immerkær's mask", True),
    Family("latents_error", "relative L2 error of final latents", False, needs_pair=True, on_random_weights=True),
    Family("perceptual", "distance in a network's layers", False, over_features=True, needs_pair=True),
    Family("lpips_alex", "LPIPS, AlexNet", False, needs_pair=True),
    Family("lpips_vgg", "LPIPS, VGG-16", False, needs_pair=True),
    Family("lpips_squeeze", "LPIPS, SqueezeNet", False, needs_pair=True),
    Family("clip_score", "100 · cosine of image and prompt", True, over_features=True, needs_prompts=True),
    # Two for a covariance. Its bias at few images dwarfs what an optimization does: see `sdopt.quality.distances.fid`.
    Family(
        "fid", "Fréchet distance", False,
        over_features=True, per_image=False, needs_reference_set=True, least=2, decides_from=2000,
    ),
    # Three, because a jackknife leaves prompts out and the unbiased estimate needs two.
    Family(
        "kid", "kernel distance, cubic kernel", False,
        over_features=True, per_image=False, needs_reference_set=True, least=3, decides_from=3,
    ),
    Family(
        "cmmd", "kernel distance, Gaussian kernel", False,
        over_features=True, per_image=False, needs_reference_set=True, least=3, decides_from=3,
    ),
)  # fmt: skip


def family_of(name: str) -> Family:
    """The kind of a metric, with or without the name of its features. Raises UsageError where there is none."""
    for family in FAMILIES:
        if name == family.name or (family.over_features and name.startswith(f"{family.name}_")):
            return family
    raise UsageError(f"{name}: no such metric; there are {', '.join(family.name for family in FAMILIES)}")


@dataclass(frozen=True)
class QualityMetric:
    """A metric as it is configured, reported and judged."""

    family: Family
    features: str | None = None
    """As `sdopt.quality.features` names them; None where the family has none."""

    @property
    def name(self) -> str:
        return self.family.name if self.features is None else f"{self.family.name}_{slug(self.features)}"


def metric_named(name: str, features: Sequence[str] = PACKAGED_FEATURES) -> QualityMetric:
    """The metric of a name such as `psnr_db` or `fid_emojiclip`.

    Args:
        name: the metric.
        features: those that may be meant; of `clip:/models/my-clip` the CLIP score is `clip_score_my_clip`.

    Raises:
        UsageError: there is no such metric, or two features have one name.
    """
    slugs = {slug(one): one for one in features}
    if len(slugs) < len(set(features)):
        raise UsageError(f"{', '.join(features)}: two of these features are called alike in the names of metrics")
    for family in FAMILIES:
        if not family.over_features and name == family.name:
            return QualityMetric(family)
        ending = name.removeprefix(f"{family.name}_")
        # CLIP score reads prompts too, which only a CLIP does.
        if family.over_features and ending != name and ending in slugs and _suits(family, slugs[ending]):
            return QualityMetric(family, slugs[ending])
    known = [f"{f.name}_<features>" if f.over_features else f.name for f in FAMILIES]
    raise UsageError(f"{name}: no such metric; there are {', '.join(known)} (features: {', '.join(slugs)})")


def slug(features: str) -> str:
    """Features as part of a metric's name: `clip:openai/clip-vit-large-patch14` is `clip_vit_large_patch14`."""
    last = features.removeprefix("clip:").rstrip("/").rpartition("/")[2]
    return re.sub(r"[^a-z0-9]+", "_", last.lower()).strip("_")


def _suits(family: Family, features: str) -> bool:
    if family.needs_prompts:
        return features == "emojiclip" or features.startswith("clip:")
    return not (family.name == "perceptual" and features == "inception")
