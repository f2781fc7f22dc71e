"""Provides reference sets: the images that FID, KID and CMMD compare others with."""

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sdopt.errors import UsageError
from sdopt.pipelines.catalog import PACKAGED
from sdopt.quality.features import FeatureExtractor
from sdopt.quality.images import batches, channels_first, image_files

HELD_OUT = PACKAGED / "held_out"
"""Folder of the packaged held-out images."""

PRECOMPUTED = PACKAGED / "clip" / "held_out.safetensors"
"""File with the features of these images, computed by the packaged CLIP."""

PACKAGED_NAME = "packaged held-out images"


@dataclass(frozen=True, eq=False)
class ReferenceSet:
    """Images that others are compared with, as features.

    Attributes:
        name: its name in reports.
        features: name of the extractor.
        weights: digest of the extractor's weights.
        values: features, float32 (n, d).
    """

    name: str
    features: str
    weights: str
    values: Tensor = field(repr=False)

    @classmethod
    def of_features(
        cls, name: str, values: Tensor, extractor: FeatureExtractor
    ) -> "ReferenceSet":
        """Makes a set from features (n, d) that are already computed, such as another variant's."""
        return cls(name, extractor.name, extractor.digest, values)

    @classmethod
    def of_images(
        cls, name: str, images: np.ndarray, extractor: FeatureExtractor
    ) -> "ReferenceSet":
        """Makes a set from uint8 images (n, height, width, 3)."""
        return cls.of_features(name, extractor(channels_first(images)), extractor)

    @classmethod
    def of_folder(
        cls, folder: Path, extractor: FeatureExtractor, name: str = ""
    ) -> "ReferenceSet":
        """Makes a set from a folder's images, of any sizes. Raises UsageError if none is there or one is unreadable."""
        parts = [
            extractor(channels_first(batch))
            for batch in batches(image_files(folder), extractor.batch_size)
        ]
        return cls.of_features(
            name or folder.resolve().name, torch.cat(parts), extractor
        )

    def save(self, file: Path) -> None:
        """Writes a safetensors file."""
        facts = {"name": self.name, "features": self.features, "weights": self.weights}
        save_file({"features": self.values.contiguous()}, file, facts)

    @classmethod
    def load(cls, file: Path, extractor: FeatureExtractor) -> "ReferenceSet":
        """Reads a file that `save` wrote.

        Raises:
            UsageError: the file cannot be read, or holds features of another extractor or of other weights.
        """
        try:
            with safe_open(file, framework="pt") as stream:
                facts = stream.metadata() or {}
                tensors = {key: stream.get_tensor(key) for key in stream.keys()}  # noqa: SIM118 (not a dict)
        except (OSError, SafetensorError) as error:
            raise UsageError(
                f"{file}: cannot be read as a safetensors file ({error})"
            ) from error
        lacking = [key for key in ("name", "features", "weights") if key not in facts]
        if lacking or "features" not in tensors:
            raise UsageError(
                f"{file}: is not a reference set; make one with ReferenceSet.of_folder(…).save(…)"
            )
        if facts["features"] != extractor.name or facts["weights"] != extractor.digest:
            raise UsageError(
                f"{file}: holds features {facts['features']} of the weights {facts['weights'][:8]}…; "
                f"this study needs {extractor.name} of the weights {extractor.digest[:8]}…"
            )
        return cls.of_features(facts["name"], tensors["features"], extractor)


def reference_set(source: str, extractor: FeatureExtractor) -> ReferenceSet:
    """Loads the reference set that a configuration names: `packaged`, a folder of images, or a saved file.

    Raises:
        UsageError: the folder or file does not exist or cannot be read, or holds one image alone.
    """
    if source == "packaged":
        with suppress(
            UsageError
        ):  # the extractor has other weights than the packaged one
            return ReferenceSet.load(PRECOMPUTED, extractor)
        return ReferenceSet.of_folder(HELD_OUT, extractor, PACKAGED_NAME)
    path = Path(source).expanduser()
    references = (
        ReferenceSet.of_folder(path, extractor)
        if path.is_dir()
        else ReferenceSet.load(path, extractor)
    )
    if len(references.values) < 2:
        raise UsageError(
            f"{source}: holds one image; a distance between sets needs two or more"
        )
    return references
