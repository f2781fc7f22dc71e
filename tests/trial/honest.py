"""Honest options beside the sabotages: a rule that is inconclusive for both catches nothing."""

from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DiffusionPipeline
from typing_extensions import override

from sdopt.optimizations import Contract, Proof, denoiser_of
from sdopt.schema import bounded
from tests.trial.base import Sabotage

TITLE = "honest"


@dataclass(frozen=True)
class Nothing(Sabotage):
    """Changes nothing, and claims nothing unless it is told to."""

    promise: str = bounded("exact", choices=tuple(Contract))


@dataclass(frozen=True)
class Detour(Sabotage):
    """Computes products that nobody needs in each step: an option beside it that does not is honestly faster."""

    promise: str = bounded("exact", choices=tuple(Contract))
    products: int = 2

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        ones = torch.ones(512, 512)

        def detour(_module: Any, _args: Any, _output: Any) -> None:
            for _ in range(self.products):
                torch.mm(ones, ones)

        denoiser_of(pipe).register_forward_hook(detour)
        return super().apply(pipe)


@dataclass(frozen=True)
class Reordered(Sabotage):
    """Sums the products of attention in another order: queries and keys are permuted alike, within each head.

    The mathematics is the same, and so is the time.
    """

    promise: str = bounded("equivalent", choices=tuple(Contract))

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        random = torch.Generator().manual_seed(0)
        for module in denoiser_of(pipe).modules():
            if hasattr(module, "to_q") and hasattr(module, "heads"):
                width = module.to_q.out_features // module.heads
                order = torch.cat(
                    [head * width + torch.randperm(width, generator=random) for head in range(module.heads)]
                )
                for layer in (module.to_q, module.to_k):
                    layer.weight.data = layer.weight.data[order.to(layer.weight.device)]
                    if layer.bias is not None:
                        layer.bias.data = layer.bias.data[order.to(layer.weight.device)]
        return super().apply(pipe)
