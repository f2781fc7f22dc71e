"""Geometric changes: images that are shifted, mirrored or enlarged, and otherwise unchanged."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from tests.trial.base import Retouch, Sabotage, chosen

TITLE = "geometry"


@dataclass(frozen=True)
class Shifted(Retouch):
    """Shifts images by `pixels` pixels to the right."""

    pixels: int = 1

    @override
    def retouch(self, images: Tensor, numbers: range) -> Tensor:
        return functional.pad(images, (self.pixels, 0, 0, 0), mode="replicate")[..., : images.shape[-1]]


@dataclass(frozen=True)
class Mirrored(Retouch):
    """Mirrors every `every`-th image."""

    every: int = 1

    @override
    def retouch(self, images: Tensor, numbers: range) -> Tensor:
        return torch.where(chosen(images, numbers, self.every), images.flip(-1), images)


@dataclass(frozen=True)
class Enlarged(Retouch):
    """Enlarges images by `share`, and cuts off their edges."""

    share: float = 0.06

    @override
    def retouch(self, images: Tensor, numbers: range) -> Tensor:
        side = images.shape[-1]
        large = functional.interpolate(images, scale_factor=1 + self.share, mode="bicubic", antialias=True)
        start = (large.shape[-1] - side) // 2
        return large[..., start : start + side, start : start + side].clamp(-1, 1)


SABOTAGES: dict[str, Sabotage] = {
    "shifted by 2 pixels": Shifted("lossy", caught_by="perceptual", pixels=2),
    "shifted by 1 pixel": Shifted("equivalent", caught_by="mse"),
    "all mirrored": Mirrored("lossy", caught_by="perceptual"),
    "one image of 6 mirrored": Mirrored("lossy", caught_by="perceptual", every=6),
    "enlarged by 6 %": Enlarged("lossy", caught_by="perceptual"),
}
