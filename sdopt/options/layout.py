"""layout: the order of a tensor's dimensions in memory."""

from dataclasses import dataclass
from itertools import chain
from typing import Literal

from typing_extensions import override

from sdopt.contract import LATENCY, NOTHING
from sdopt.options import (
    Context,
    Contract,
    Finding,
    Optimization,
    Proof,
    Stage,
    Trace,
)
from sdopt.options.assumptions import a_vae, plain_weights
from sdopt.pipelines.loading import part_config
from sdopt.pipelines.parts import Pipeline, denoiser_of


@dataclass(frozen=True)
class Layout(Optimization):
    """Sets the memory format of the convolution weights of the denoiser and the VAE."""

    stage = Stage.LAYOUT
    assumes = (plain_weights, a_vae)

    memory_format: Literal["contiguous", "channels_last"] = "contiguous"
    """`contiguous` is PyTorch's default, NCHW; `channels_last` is NHWC."""

    @property
    @override
    def contract(self) -> Contract:
        return (
            Contract.EXACT
            if self.memory_format == "contiguous"
            else Contract.EQUIVALENT
        )

    @property
    @override
    def claims(self) -> frozenset[str]:
        return NOTHING if self.memory_format == "contiguous" else LATENCY

    @property
    @override
    def diffusers_lines(self) -> tuple[str, ...]:
        order = f"torch.{'contiguous_format' if self.memory_format == 'contiguous' else 'channels_last'}"
        return (
            "import torch",
            f"pipe.unet.to(memory_format={order})",
            f"pipe.vae.to(memory_format={order})",
        )

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        vae = part_config(ctx.model, "vae") or {}
        if self.memory_format == "channels_last" and "temperal_downsample" in vae:
            made_for = "kernels of a VAE for video have three dimensions, for which there is no such layout"
            return [f"{made_for}: leave it out"]
        return []

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        import torch

        modules = [denoiser_of(pipe), pipe.vae]
        if self.memory_format == "channels_last":
            for module in modules:
                module.to(memory_format=torch.channels_last)

        def proof(trace: Trace) -> Finding:
            weights = []
            for layer in chain.from_iterable(module.modules() for module in modules):
                if not isinstance(layer, torch.nn.Conv2d):
                    continue
                # A 1×1 or single-channel kernel has the same layout in both formats, and packed weights have none.
                if layer.weight.ndim > 1 and min(layer.weight.shape[1:]) > 1:
                    weights.append(layer.weight)
            last = sum(
                weight.is_contiguous(memory_format=torch.channels_last)
                for weight in weights
            )
            expected = len(weights) if self.memory_format == "channels_last" else 0
            ran, ran_last = trace.denoiser.convolutions, trace.denoiser.channels_last
            facts = {
                "weights": len(weights),
                "weights_channels_last": last,
                "ran": ran,
                "ran_channels_last": ran_last,
            }
            summary = f"{last} of {len(weights)} kernels laid out channels-last"
            if ran:
                summary += f"; {ran_last} of {ran} convolutions gave channels-last"
            # Outputs of 1×1 kernels and with one channel are ambiguous, so a majority is enough.
            as_wanted = not ran or (ran_last > ran / 2) == (
                self.memory_format == "channels_last"
            )
            return Finding(last == expected and as_wanted, summary, facts)

        return proof
