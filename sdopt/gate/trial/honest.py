"""Honest options beside the sabotages: a rule that is inconclusive for both catches nothing."""

from dataclasses import dataclass

import torch
from diffusers import DiffusionPipeline
from typing_extensions import override

from sdopt.gate.trial.base import Sabotage
from sdopt.optimizations import Contract, Proof, denoiser_of
from sdopt.schema import bounded

TITLE = "honest"


@dataclass(frozen=True)
class Nothing(Sabotage):
    """Changes nothing, and claims nothing."""

    promise: str = bounded("exact", choices=tuple(Contract))


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
