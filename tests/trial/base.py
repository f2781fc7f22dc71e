"""Base classes of all sabotages: each declares a promise that it breaks, and the rules that should catch it.

Each shows evidence like an honest option, because it does take effect.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from diffusers import DiffusionPipeline
from torch import Tensor
from typing_extensions import override

from sdopt.optimizations import Contract, Finding, Optimization, Proof, Stage
from sdopt.schema import bounded


@dataclass(frozen=True)
class Sabotage(Optimization):
    """Base class of all sabotages: a declared promise, and the claim that goes with it."""

    stage: ClassVar[Stage] = Stage.COMPONENTS
    promise: str = bounded("lossy", choices=tuple(Contract))
    claim: str = ""
    caught_by: str = ""
    """Rules of which at least one should not pass it, by metric or name, separated by bars."""

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
class Retouch(Sabotage):
    """Base class of sabotages that change decoded images, so that their images can be made from the baseline's."""

    def retouch(self, images: Tensor, numbers: range) -> Tensor:
        """Returns the changed images, (n, 3, height, width) in −1…1.

        Args:
            images: the decoded images, of the same shape and range.
            numbers: the images' numbers among all that the process has drawn.
        """
        raise NotImplementedError

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        drawn = 0

        def change(images: Tensor) -> Tensor:
            nonlocal drawn
            numbers, drawn = range(drawn, drawn + len(images)), drawn + len(images)
            return self.retouch(images.clamp(-1, 1), numbers)

        decoded(pipe, change)
        return super().apply(pipe)


def chosen(images: Tensor, numbers: range, every: int) -> Tensor:
    """Returns a mask of every `every`-th image, from the first on: bool (n, 1, 1, 1)."""
    return torch.tensor([number % every == 0 for number in numbers], device=images.device).view(-1, 1, 1, 1)


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
