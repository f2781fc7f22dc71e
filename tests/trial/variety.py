"""Loss of variety: images from different noise that are more alike than they should be."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor
from typing_extensions import override

from sdopt.optimizations import Proof
from tests.trial.base import Sabotage

TITLE = "variety between seeds"


@dataclass(frozen=True)
class AlikeNoise(Sabotage):
    """Mixes the noise of every image with noise that all images share, at the same variance.

    `shared` is the share of the common noise in the variance: 1 ignores the seed.
    """

    shared: float = 1.0

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        prepare = pipe.prepare_latents

        def changed(*arguments: Any, **options: Any) -> Tensor:
            own: Tensor = prepare(*arguments, **options)
            sigma = pipe.scheduler.init_noise_sigma
            common = torch.randn(own[:1].shape, generator=torch.Generator().manual_seed(0)).to(own)
            mixed: Tensor = math.sqrt(1 - self.shared) * own + math.sqrt(self.shared) * sigma * common
            return mixed

        pipe.prepare_latents = changed
        return super().apply(pipe)


@dataclass(frozen=True)
class SmallNoise(Sabotage):
    """Weakens the noise that images start from by `share`."""

    share: float = 0.2

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        prepare = pipe.prepare_latents
        pipe.prepare_latents = lambda *arguments, **options: (1 - self.share) * prepare(*arguments, **options)
        return super().apply(pipe)


SABOTAGES: dict[str, Sabotage] = {
    "the seed ignored": AlikeNoise("lossy", caught_by="perceptual"),
    "half of the noise shared": AlikeNoise("lossy", caught_by="perceptual", shared=0.5),
    "noise weaker by two fifths": SmallNoise("lossy", caught_by="perceptual|contrast_error|colour_error", share=0.4),
}
