"""Optimizations that do harm and say they do not: what `sdopt gate-trial` tries the gate on.

Each declares the contract of its yaml, and shows evidence as an honest option would: it does take effect.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from diffusers import DiffusionPipeline
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from sdopt.optimizations import Contract, Finding, Optimization, Proof, Stage, denoiser_of
from sdopt.reference import PROMPTS


@dataclass(frozen=True)
class Sabotage(Optimization):
    """What all have in common: a declared promise, and the claim that goes with it."""

    stage: ClassVar[Stage] = Stage.COMPONENTS
    promise: str = "lossy"
    claim: str = ""
    caught_by: str = ""
    """Rules of which one should not let it pass, by metric or name, with bars between."""

    @property
    @override
    def contract(self) -> Contract:
        return Contract(self.promise)

    @property
    @override
    def claims(self) -> frozenset[str]:
        return frozenset({self.claim} if self.claim else ())

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        return lambda trace: Finding(True, "applied")


@dataclass(frozen=True)
class FewerSteps(Sabotage):
    """A share of the steps, under the same name."""

    steps: int = 5

    @override
    def call_kwargs(self) -> dict[str, Any]:
        return {"num_inference_steps": self.steps}


@dataclass(frozen=True)
class OtherGuidance(Sabotage):
    """Another weight of the prompt, under the same name."""

    guidance_scale: float = 1.5

    @override
    def call_kwargs(self) -> dict[str, Any]:
        return {"guidance_scale": self.guidance_scale}


@dataclass(frozen=True)
class ScaledAttention(Sabotage):
    """Queries of every attention are a little too small, as with a wrong scale."""

    factor: float = 0.9

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        for name, module in denoiser_of(pipe).named_modules():
            if name.endswith("to_q"):
                module.weight.data *= self.factor
        return super().apply(pipe)


def decoded(pipe: DiffusionPipeline, change: Callable[[Tensor], Tensor]) -> None:
    """Changes what the VAE decodes, (n, 3, height, width) in -1…1."""
    decode = pipe.vae.decode

    def changed(*arguments: Any, **options: Any) -> Any:
        output = decode(*arguments, **options)
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        output.sample = change(output.sample)
        return output

    pipe.vae.__dict__["decode"] = changed


@dataclass(frozen=True)
class BlackImage(Sabotage):
    """One image of so many comes out black."""

    every: int = 32

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        drawn = 0

        def change(images: Tensor) -> Tensor:
            nonlocal drawn
            drawn += 1
            return torch.full_like(images, -1.0) if drawn % self.every == 0 else images

        decoded(pipe, change)
        return super().apply(pipe)


@dataclass(frozen=True)
class NotANumber(Sabotage):
    """One value of the latents of one image of so many is NaN."""

    every: int = 32

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        decode, drawn = pipe.vae.decode, 0

        def changed(latents: Tensor, *arguments: Any, **options: Any) -> Any:
            nonlocal drawn
            drawn += 1
            if drawn % self.every == 0:
                latents = latents.clone()
                latents[0, 0, 0, 0] = torch.nan
            return decode(latents, *arguments, **options)

        pipe.vae.__dict__["decode"] = changed
        return super().apply(pipe)


@dataclass(frozen=True)
class PixelNoise(Sabotage):
    """Noise of a deviation `sigma` of the whole range 0…1."""

    sigma: float = 0.02

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        random = torch.Generator().manual_seed(0)
        decoded(pipe, lambda images: images + 2 * self.sigma * torch.randn(images.shape, generator=random).to(images))
        return super().apply(pipe)


@dataclass(frozen=True)
class Blur(Sabotage):
    """A Gaussian of `sigma` pixels."""

    sigma: float = 0.7

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        places = torch.arange(-3, 4).float()
        line = torch.exp(-places.square() / (2 * self.sigma**2))
        kernel = torch.outer(line, line) / line.sum() ** 2

        def change(images: Tensor) -> Tensor:
            padded = functional.pad(images, (3, 3, 3, 3), mode="replicate")
            return functional.conv2d(padded, kernel.to(images).expand(3, 1, 7, 7), groups=3)

        decoded(pipe, change)
        return super().apply(pipe)


@dataclass(frozen=True)
class OtherPrompts(Sabotage):
    """Each prompt, or one of so many, is replaced by the next one of the packaged list."""

    every: int = 1

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        captions = json.loads(PROMPTS.read_text())["gate"]
        following = dict(list(zip(captions, captions[1:] + captions[:1], strict=True))[:: self.every])
        encode = pipe.encode_prompt

        def changed(prompt: Any, *arguments: Any, **options: Any) -> Any:
            prompts = [prompt] if isinstance(prompt, str) else prompt
            return encode([following.get(text, text) for text in prompts], *arguments, **options)

        pipe.encode_prompt = changed
        return super().apply(pipe)


@dataclass(frozen=True)
class ScaledLatents(Sabotage):
    """The autoencoder's scale is off by a share."""

    factor: float = 1.02

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        pipe.vae.register_to_config(scaling_factor=pipe.vae.config.scaling_factor * self.factor)
        return super().apply(pipe)


@dataclass(frozen=True)
class Slower(Sabotage):
    """Waits for a share of a call's time before it returns."""

    seconds: float = 0.05

    @override
    @contextmanager
    def context(self, pipe: DiffusionPipeline) -> Iterator[None]:
        yield
        time.sleep(self.seconds)


@dataclass(frozen=True)
class MemoryHog(Sabotage):
    """Holds so many MiB during each call."""

    mib: int = 256

    @override
    @contextmanager
    def context(self, pipe: DiffusionPipeline) -> Iterator[None]:
        held = torch.ones(self.mib * 2**20 // 4)
        yield
        del held
