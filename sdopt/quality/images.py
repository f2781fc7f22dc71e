"""Reads images as arrays: uint8 (n, height, width, 3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sdopt.errors import UsageError
from sdopt.record.images import open_picture

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = (
    ".png",
    ".webp",
    ".jpg",
    ".jpeg",
    ".jfif",
    ".bmp",
    ".tif",
    ".tiff",
    ".gif",
    ".avif",
    ".heic",
    ".heif",
    ".jxl",
    ".jp2",
)
"""Suffixes of images, also of those that cannot be read: a set must not leave some out without a word."""


def image_files(folder: Path) -> list[Path]:
    """Lists the images in a folder, sorted by name. Raises UsageError if there are none, or it cannot be read."""
    try:
        # macOS leaves a hidden file beside each that it copies, with the same suffix.
        visible = [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError as error:
        raise UsageError(f"{folder}: cannot be read ({error.strerror})") from error
    files = sorted(path for path in visible if path.suffix.lower() in SUFFIXES)
    if not files:
        raise UsageError(f"{folder}: holds no image ({', '.join(SUFFIXES)})")
    return files


def read_image(file: Path) -> np.ndarray:
    """Reads an image, uint8 (height, width, 3). Raises UsageError if it cannot be read."""
    return np.asarray(open_picture(file))


def read_images(files: Sequence[Path]) -> np.ndarray:
    """Reads images of one size, uint8 (n, height, width, 3). Raises UsageError if sizes differ."""
    images = [read_image(file) for file in files]
    for file, image in zip(files, images, strict=True):
        if image.shape != images[0].shape:
            sizes = [
                f"{shape[1]}×{shape[0]}" for shape in (image.shape, images[0].shape)
            ]
            raise UsageError(
                f"{file}: is {sizes[0]}, but {files[0].name} is {sizes[1]}"
            )
    return np.stack(images)


def batches(files: Sequence[Path], size: int) -> Iterator[np.ndarray]:
    """Reads files of any sizes, in order, in batches of equal images of at most `size`."""
    batch: list[np.ndarray] = []
    for file in files:
        image = read_image(file)
        if batch and (len(batch) == size or image.shape != batch[0].shape):
            yield np.stack(batch)
            batch = []
        batch.append(image)
    if batch:
        yield np.stack(batch)


def channels_first(images: np.ndarray) -> Tensor:
    """Converts uint8 (n, height, width, 3) to (n, 3, height, width)."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
