"""Weights that were rounded, pruned or damaged, behind a promise that they were not."""

from collections.abc import Iterator
from dataclasses import dataclass

from diffusers import DiffusionPipeline
from torch import Tensor
from typing_extensions import override

from sdopt.optimizations import Proof, denoiser_of
from tests.trial.base import Sabotage

TITLE = "weights"


def matrices(pipe: DiffusionPipeline) -> Iterator[tuple[str, Tensor]]:
    """Returns the weights of the denoiser's products and convolutions, by name."""
    return ((name, tensor.data) for name, tensor in denoiser_of(pipe).named_parameters() if tensor.dim() > 1)


@dataclass(frozen=True)
class ScaledAttention(Sabotage):
    """Multiplies the queries of every attention by `factor`, as with a wrong scale."""

    factor: float = 0.9

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        for name, module in denoiser_of(pipe).named_modules():
            if name.endswith("to_q"):
                module.weight.data *= self.factor
        return super().apply(pipe)


@dataclass(frozen=True)
class ScaledLatents(Sabotage):
    """Multiplies the autoencoder's scale by `factor`."""

    factor: float = 1.02

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        pipe.vae.register_to_config(scaling_factor=pipe.vae.config.scaling_factor * self.factor)
        return super().apply(pipe)


@dataclass(frozen=True)
class Rounded(Sabotage):
    """Rounds the denoiser's weights to `bits` bits, with one scale for each tensor."""

    bits: int = 5

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        for _, weight in matrices(pipe):
            scale = weight.abs().max() / (2 ** (self.bits - 1) - 1)
            weight.copy_((weight / scale).round() * scale)
        return super().apply(pipe)


@dataclass(frozen=True)
class Pruned(Sabotage):
    """Sets the smallest weights of each tensor to zero: the share `share` of all."""

    share: float = 0.3

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        for _, weight in matrices(pipe):
            weight[weight.abs() < weight.abs().flatten().quantile(self.share)] = 0
        return super().apply(pipe)


@dataclass(frozen=True)
class Damaged(Sabotage):
    """Flips the sign of every `every`-th weight, as damaged bits would."""

    every: int = 1000

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        for _, weight in matrices(pipe):
            weight.view(-1)[:: self.every] *= -1
        return super().apply(pipe)


SABOTAGES: dict[str, Sabotage] = {
    "attention scaled by 0.9": ScaledAttention("equivalent", caught_by="mse"),
    "VAE scale off by 2 %": ScaledLatents("equivalent", caught_by="mse"),
    "VAE scale off by 0.05 %": ScaledLatents("equivalent", caught_by="mse", factor=1.0005),
    "attention scaled by 0.999": ScaledAttention("equivalent", caught_by="latents_error", factor=0.999),
    "weights in 12 bits": Rounded("equivalent", caught_by="mse|latents_error", bits=12),
    "weights in 5 bits": Rounded("lossy", caught_by="perceptual"),
    "30 % of the weights zero": Pruned("lossy", caught_by="perceptual|colour_error|fine_detail|contrast_error"),
    "one sign of 1,000 flipped": Damaged("lossy", caught_by="perceptual|colour_error|fine_detail|contrast_error"),
}
