"""precision: stores weights of the denoiser's linear layers in 4 bits of unequal steps, with bitsandbytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from sdopt.options import Context
from sdopt.options.declarations import Excludes, Extra
from sdopt.options.lora import Loaded
from sdopt.options.quantization import Quantized

if TYPE_CHECKING:
    import torch

_INPUTS, _OUTPUTS = 64, 32
"""Weights that share a scale, and rows that kernels for a CPU take at once: bitsandbytes 0.50 raises for other widths
there."""

_MOVED = "moves the weights without the scales that bitsandbytes keeps beside them: choose memory=model_offload"


@dataclass(frozen=True)
class BitsAndBytes(Quantized):
    """Quantizes linear layers to NF4 (Dettmers et al. 2023, QLoRA) with bitsandbytes, and dequantizes for each use.

    Layers whose numbers of inputs and outputs are no multiples of 64 and 32 keep their type, and so do convolutions.
    """

    needs = (Extra("bitsandbytes", ("bitsandbytes",)),)
    excludes = (
        Excludes(
            "lora",
            "bitsandbytes replaces the layers that a LoRA wraps: choose lora=fused",
            (Loaded,),
        ),
        Excludes("memory.group_offload", _MOVED),
        Excludes("memory.sequential_offload", _MOVED),
    )

    weights: Literal["nf4", "fp4"] = "nf4"
    """The type of the quantized weights: quantiles of a normal distribution, or floats of 4 bits."""
    activations: bool = False
    double: bool = True
    """Whether to quantize the scales too, which saves 0.4 bits of each weight."""

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        problems = super().conflicts(ctx)
        if self.activations:
            problems.append(
                "4-bit weights are dequantized for each use: set precision.activations=false"
            )
        return problems

    @override
    def _quantize(self, denoiser: Any) -> None:
        import torch

        chosen = []
        for module in denoiser.modules():
            for name, layer in module.named_children():
                if type(layer) is torch.nn.Linear and _fits(layer):
                    chosen.append((module, name, layer))
        for module, name, layer in chosen:
            setattr(module, name, self._in_4_bits(layer))

    def _in_4_bits(self, layer: torch.nn.Linear) -> torch.nn.Module:
        from bitsandbytes.nn import Linear4bit, Params4bit

        weight = layer.weight
        replaced: torch.nn.Module = Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            compute_dtype=weight.dtype,
            compress_statistics=self.double,
            quant_type=self.weights,
            device="meta",
        )
        replaced.bias = layer.bias
        parameter = Params4bit(
            weight.data,
            requires_grad=False,
            compress_statistics=self.double,
            quant_type=self.weights,
            module=replaced,
        )
        replaced.weight = parameter.to(weight.device)  # which quantizes it
        return replaced.train(layer.training)

    @override
    def _is_quantized(self, layer: torch.nn.Module) -> bool:
        from bitsandbytes.nn import Linear4bit

        return isinstance(layer, Linear4bit) and layer.weight.quant_state is not None


def _fits(layer: torch.nn.Linear) -> bool:
    return layer.in_features % _INPUTS == 0 and layer.out_features % _OUTPUTS == 0
