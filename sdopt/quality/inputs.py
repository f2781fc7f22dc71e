"""Provides the inputs of quality metrics: images, features and reference sets, each computed once, when needed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

import numpy as np
from safetensors.torch import load_file
from torch import Tensor

from sdopt.quality.by_prompt import by_prompt
from sdopt.quality.features import FeatureExtractor, feature_extractor
from sdopt.quality.images import channels_first, read_images
from sdopt.quality.paired import Lpips, pixel_differences
from sdopt.quality.reference_sets import ReferenceSet, reference_set
from sdopt.record.files import inside
from sdopt.record.images import scored_file
from sdopt.record.scores import ImageRecord, Score
from sdopt.worker.draws import LATENTS


@dataclass(frozen=True)
class Pictures:
    """The images of one variant, read when needed."""

    folder: Path
    records: Sequence[ImageRecord]

    @cached_property
    def images(self) -> np.ndarray:
        """All images, uint8 (n, height, width, 3). Raises UsageError if one was replaced since it was recorded."""
        return read_images(
            [scored_file(self.folder, record) for record in self.records]
        )

    @cached_property
    def latents(self) -> np.ndarray | None:
        """Final latents, float32 (n, channels, height, width); None if they were not kept for every image.

        The file has the latents of a whole pass; these images may be only a part of that pass.
        """
        file = inside(
            self.folder, str(PurePosixPath(self.records[0].path).with_name(LATENTS))
        )
        if not file.is_file():
            return None
        latents: np.ndarray = load_file(file)["latents"].float().numpy()
        if len(latents) == len(self.records):
            return latents
        per_prompt = 1 + max(record.image_index for record in self.records)
        rows = [
            record.prompt_index * per_prompt + record.image_index
            for record in self.records
        ]
        if max(rows) >= len(latents) or len(latents) % per_prompt:
            return None
        selected: np.ndarray = latents[rows]
        return selected

    @property
    def draws(self) -> list[tuple[str, int]]:
        """The prompt and the seed of each image."""
        return [(record.prompt, record.seed) for record in self.records]

    @property
    def prompts(self) -> list[int]:
        """The prompt's number for each image."""
        return [record.prompt_index for record in self.records]


class Networks:
    """Loads feature extractors, LPIPS and reference sets, each once for all variants.

    Args:
        device: where they run.
        reference: the reference set; None or `baseline` stands for the baseline's images.
    """

    def __init__(self, device: str, reference: str | None) -> None:
        self._device, self._reference = device, reference
        self._extractors: dict[str, FeatureExtractor] = {}
        self._references: dict[tuple[str, tuple[str, ...]], ReferenceSet] = {}

    def extractor(self, features: str) -> FeatureExtractor:
        """Returns the extractor of the named features. Raises UsageError if it cannot be loaded."""
        if features not in self._extractors:
            self._extractors[features] = feature_extractor(features, self._device)
        return self._extractors[features]

    @cached_property
    def lpips(self) -> Lpips:
        """LPIPS over AlexNet. Raises UsageError if it cannot be loaded."""
        return Lpips(self._device)

    @property
    def against_baseline(self) -> bool:
        """Whether sets of images are compared with those of the study's own baseline."""
        return self._reference in (None, "baseline")

    def reference(self, features: str, baseline: Pictures) -> ReferenceSet:
        """Returns the reference set for sets of images. Raises UsageError if it cannot be read."""
        paths = [record.path for record in baseline.records]
        key = (features, tuple(paths) if self.against_baseline else ())
        if key in self._references:
            return self._references[key]
        extractor = self.extractor(features)
        if self.against_baseline:
            name = "the baseline's images"
            references = ReferenceSet.of_images(name, baseline.images, extractor)
        else:
            references = reference_set(str(self._reference), extractor)
        self._references[key] = references
        return references

    @property
    def digests(self) -> dict[str, str]:
        """Digest of the weights of every extractor that was used."""
        return {name: extractor.digest for name, extractor in self._extractors.items()}


@dataclass(frozen=True)
class Inputs:
    """Inputs of the metrics of one variant, or of a pair of variants.

    Attributes:
        pictures: the variant's images.
        other: the images to compare with: in a pair, the reference variant's of the same prompts and noise; else the
            baseline's.
        networks: the networks, which all variants share.
    """

    pictures: Pictures
    other: Pictures
    networks: Networks
    _features: dict[str, Tensor] = field(default_factory=dict)

    @cached_property
    def pixels(self) -> tuple[list[float], list[float]]:
        """Mean squared error and structural similarity, pair by pair."""
        return pixel_differences(self.pictures.images, self.other.images)

    def features(self, name: str) -> Tensor:
        """Returns the features of the variant's images, (n, d)."""
        if name not in self._features:
            self._features[name] = self.networks.extractor(name)(
                channels_first(self.pictures.images)
            )
        return self._features[name]

    def reference(self, features: str) -> ReferenceSet:
        """Returns the reference set that the variant's images are compared with."""
        return self.networks.reference(features, self.other)

    @property
    def groups(self) -> list[int] | None:
        """The reference's prompts if they are the variant's own: images of one prompt are then not compared."""
        is_baseline_set = self.networks.against_baseline and {
            *self.pictures.prompts
        } == {*self.other.prompts}
        return self.other.prompts if is_baseline_set else None

    def by_prompt(self, values: Sequence[float | None] | np.ndarray) -> Score:
        """Returns the score of a value for each image; see `by_prompt`."""
        return by_prompt(self.pictures.prompts, values)
