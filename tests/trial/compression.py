"""Artefacts of compression: blocks, few levels, coarse colour."""

import io
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from tests.trial.base import Retouch, Sabotage

TITLE = "compression"


@dataclass(frozen=True)
class Jpeg(Retouch):
    """Compresses images as JPEG of `quality`, and decodes them again."""

    quality: int = 60

    @override
    def retouch(self, images: Tensor, numbers: range) -> Tensor:
        found = []
        for image in images.cpu():
            levels = ((image.float().clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 0).numpy()
            stream = io.BytesIO()
            Image.fromarray(levels).save(stream, "JPEG", quality=self.quality)
            found.append(torch.from_numpy(np.array(Image.open(stream))).permute(2, 0, 1) / 127.5 - 1)
        return torch.stack(found).to(images)


@dataclass(frozen=True)
class FewLevels(Retouch):
    """Reduces each channel to `levels` levels."""

    levels: int = 32

    @override
    def retouch(self, images: Tensor, numbers: range) -> Tensor:
        return ((images + 1) / 2 * (self.levels - 1)).round() / (self.levels - 1) * 2 - 1


@dataclass(frozen=True)
class CoarseColour(Retouch):
    """Reduces the resolution of colour to a quarter each way, and keeps that of luminance."""

    @override
    def retouch(self, images: Tensor, numbers: range) -> Tensor:
        weights = torch.tensor([0.2126, 0.7152, 0.0722], device=images.device, dtype=images.dtype).view(1, 3, 1, 1)
        grey = (images * weights).sum(1, keepdim=True)
        coarse = functional.interpolate(functional.avg_pool2d(images - grey, 4), scale_factor=4)
        return (grey + coarse).clamp(-1, 1)


SABOTAGES: dict[str, Sabotage] = {
    "JPEG of quality 50": Jpeg("lossy", caught_by="perceptual|fine_detail|detail_error", quality=50),
    "JPEG of quality 98": Jpeg("equivalent", caught_by="mse", quality=98),
    "32 levels a channel": FewLevels("lossy", caught_by="fine_detail|detail_error"),
    "colour at a quarter of the resolution": CoarseColour("lossy", caught_by="perceptual|fine_detail|colour_error"),
}
