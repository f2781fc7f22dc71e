"""Harm to a few images of many, which a mean and a share let through."""

from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor
from typing_extensions import override

from sdopt.optimizations import Proof
from tests.trial.base import Retouch, Sabotage, chosen

TITLE = "a few images of many"


@dataclass(frozen=True)
class BlackImage(Retouch):
    """Makes every `every`-th image black."""

    every: int = 32

    @override
    def retouch(self, images: Tensor, numbers: range) -> Tensor:
        return torch.where(chosen(images, numbers, self.every), -torch.ones_like(images), images)


@dataclass(frozen=True)
class OtherImage(Retouch):
    """Replaces every `every`-th image by that of the prompt before it."""

    every: int = 60

    @override
    def retouch(self, images: Tensor, numbers: range) -> Tensor:
        return torch.where(chosen(images, numbers, self.every), images.roll(1, 0), images)


@dataclass(frozen=True)
class Blot(Retouch):
    """Puts a grey square, a quarter of the side wide, in the middle of every `every`-th image."""

    every: int = 8

    @override
    def retouch(self, images: Tensor, numbers: range) -> Tensor:
        side = images.shape[-1]
        start, stop = 3 * side // 8, 5 * side // 8
        blotted = images.clone()
        blotted[..., start:stop, start:stop] = 0
        return torch.where(chosen(images, numbers, self.every), blotted, images)


@dataclass(frozen=True)
class Dimmed(Retouch):
    """Darkens every `every`-th image by `share`."""

    every: int = 8
    share: float = 0.1

    @override
    def retouch(self, images: Tensor, numbers: range) -> Tensor:
        return torch.where(chosen(images, numbers, self.every), (images + 1) * (1 - self.share) - 1, images)


@dataclass(frozen=True)
class NotANumber(Sabotage):
    """Sets one value in the latents of every `every`-th image to NaN."""

    every: int = 32

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        decode, drawn = pipe.vae.decode, 0

        def changed(latents: Tensor, *arguments: Any, **options: Any) -> Any:
            nonlocal drawn
            latents = latents.clone()
            latents[chosen(latents, range(drawn, drawn + len(latents)), self.every).flatten(), 0, 0, 0] = torch.nan
            drawn += len(latents)
            return decode(latents, *arguments, **options)

        pipe.vae.__dict__["decode"] = changed
        return super().apply(pipe)


SABOTAGES: dict[str, Sabotage] = {
    "one black image of 32": BlackImage("lossy", caught_by="tripwires"),
    "NaN in one latent of 32": NotANumber("lossy", caught_by="tripwires"),
    "one image of 60 is another's": OtherImage("equivalent", caught_by="mse"),
    "one image of 15 is another's": OtherImage("lossy", caught_by="perceptual", every=15),
    "grey square in one image of 8": Blot("lossy", caught_by="perceptual"),
    "one image of 8 darker by 10 %": Dimmed("lossy", caught_by="brightness_error|colour_error"),
    "one image of 30 darker by 1 %": Dimmed("equivalent", caught_by="mse", every=30, share=0.01),
}
