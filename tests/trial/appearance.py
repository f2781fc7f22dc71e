"""Harm to colours, contrast or sharpness, also where images change in opposite ways and a mean hides it."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from tests.trial.base import Retouch, Sabotage, chosen

TITLE = "colours, contrast, sharpness"


@dataclass(frozen=True)
class PixelNoise(Retouch):
    """Adds noise with a standard deviation of `sigma`, in the range 0…1."""

    sigma: float = 0.02

    @override
    def retouch(self, images: Tensor, numbers: range) -> Tensor:
        random = torch.Generator().manual_seed(numbers.start)
        return images + 2 * self.sigma * torch.randn(images.shape, generator=random).to(images)


@dataclass(frozen=True)
class Blur(Retouch):
    """Blurs images with a Gaussian of `sigma` pixels."""

    sigma: float = 0.7

    @override
    def retouch(self, images: Tensor, numbers: range) -> Tensor:
        return blurred(images, self.sigma)


def blurred(images: Tensor, sigma: float) -> Tensor:
    """Returns images convolved with a Gaussian of `sigma` pixels."""
    offsets = torch.arange(-3, 4).float()
    line = torch.exp(-offsets.square() / (2 * sigma**2))
    kernel = torch.outer(line, line) / line.sum() ** 2
    padded = functional.pad(images, (3, 3, 3, 3), mode="replicate")
    return functional.conv2d(padded, kernel.to(images).expand(3, 1, 7, 7), groups=3)


@dataclass(frozen=True)
class UnevenSharpness(Retouch):
    """Blurs every other image, and sharpens the others by as much, so that the mean of fine detail stays."""

    sigma: float = 0.6

    @override
    def retouch(self, images: Tensor, numbers: range) -> Tensor:
        soft = blurred(images, self.sigma)
        return torch.where(chosen(images, numbers, 2), soft, (2 * images - soft).clamp(-1, 1))


@dataclass(frozen=True)
class Cast(Retouch):
    """Adds `share` of the range to red; if `in_turn`, subtracts it in every other image: the mean colour stays."""

    share: float = 0.02
    in_turn: bool = True

    @override
    def retouch(self, images: Tensor, numbers: range) -> Tensor:
        red = torch.tensor([2 * self.share, 0, 0], device=images.device, dtype=images.dtype).view(1, 3, 1, 1)
        down = images - red if self.in_turn else images + red
        return torch.where(chosen(images, numbers, 2), images + red, down).clamp(-1, 1)


@dataclass(frozen=True)
class Faded(Retouch):
    """Reduces the distance of colours to grey of the same luminance to the share `kept`."""

    kept: float = 0.8

    @override
    def retouch(self, images: Tensor, numbers: range) -> Tensor:
        weights = torch.tensor([0.2126, 0.7152, 0.0722], device=images.device, dtype=images.dtype).view(1, 3, 1, 1)
        grey = (images * weights).sum(1, keepdim=True)
        return grey + self.kept * (images - grey)


@dataclass(frozen=True)
class UnevenContrast(Retouch):
    """Raises the contrast by `share` in every other image, and lowers it in the others."""

    share: float = 0.08

    @override
    def retouch(self, images: Tensor, numbers: range) -> Tensor:
        middle = images.mean(dim=(1, 2, 3), keepdim=True)
        more, less = (middle + factor * (images - middle) for factor in (1 + self.share, 1 - self.share))
        return torch.where(chosen(images, numbers, 2), more, less).clamp(-1, 1)


SABOTAGES: dict[str, Sabotage] = {
    "pixel noise, σ 0.02": PixelNoise("lossy", caught_by="fine_detail"),
    "pixel noise, σ 0.05": PixelNoise("lossy", caught_by="fine_detail", sigma=0.05),
    "blur, σ 0.7 pixels": Blur("lossy", caught_by="fine_detail"),
    "blurred and sharpened in turn": UnevenSharpness("lossy", caught_by="detail_error"),
    "red +5 % and −5 % in turn": Cast("lossy", caught_by="colour_error", share=0.05),
    "red +0.5 %": Cast("equivalent", caught_by="mse", share=0.005, in_turn=False),
    "a fifth of the colour lost": Faded("lossy", caught_by="colour_error"),
    "contrast +8 % and −8 % in turn": UnevenContrast("lossy", caught_by="contrast_error"),
}
