"""precision: the type of the weights, of the arithmetic under autocast, and TensorFloat-32."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from typing_extensions import override

from sdopt.hardware.arithmetic import convolutions_are_rounded, products_are_rounded, tf32
from sdopt.hardware.cards import BFLOAT16, TF32, arithmetic, missing
from sdopt.measure.trace import Trace
from sdopt.optimizations.base import Context, Contract, Finding, Optimization, Proof, Stage
from sdopt.pipelines.parts import denoiser_of
from sdopt.schema import bounded

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

_FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Precision(Optimization):
    """Weights in one type, arithmetic in it or, with autocast, in another.

    `tf32`: `default` leaves PyTorch's settings (TF32 in cuDNN's convolutions only), `on` allows it in matrix products
    too, `off` forbids it everywhere.
    """

    stage: ClassVar[Stage] = Stage.LOAD

    weights: str = bounded("float32", choices=_FLOATS)
    """The type of all parameters."""
    autocast: str | None = bounded(None, choices=_FLOATS[1:])
    """The type that `torch.autocast` computes in; null leaves it off."""
    tf32: str = bounded("default", choices=("default", "on", "off"))
    """TensorFloat-32: PyTorch's settings, in matrix products as well, or nowhere."""

    @property
    @override
    def contract(self) -> Contract:
        if self.weights != "float32" or self.autocast or self.tf32 == "on":
            return Contract.LOSSY
        return Contract.EXACT if self.tf32 == "default" else Contract.EQUIVALENT

    @property
    @override
    def claims(self) -> frozenset[str]:
        reduced = {"latency"} if self.contract is Contract.LOSSY else set()
        return frozenset(reduced | ({"memory"} if self.weights != "float32" else set()))

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        found = []
        if self.tf32 == "off" and not ctx.device.is_cuda:
            found.append(f"turning TensorFloat-32 off needs a CUDA device; this runs on {ctx.device.name}")
        elif self.tf32 != "default":
            found += missing(ctx.device, TF32)
        if "bfloat16" in (self.weights, self.autocast) and ctx.device.is_cuda:
            found += missing(ctx.device, BFLOAT16)
        return found

    @override
    def load_kwargs(self) -> dict[str, Any]:
        return {"dtype": getattr(torch, self.weights)}

    @contextmanager
    @override
    def context(self, pipe: "DiffusionPipeline") -> Iterator[None]:
        with ExitStack() as stack:
            if self.tf32 != "default":
                stack.enter_context(tf32(self.tf32 == "on"))
            if self.autocast:
                stack.enter_context(torch.autocast(pipe.device.type, dtype=getattr(torch, self.autocast)))
            yield

    @override
    def apply(self, pipe: "DiffusionPipeline") -> Proof:
        def proof(trace: Trace) -> Finding:
            weights = sorted({str(p.dtype).removeprefix("torch.") for p in denoiser_of(pipe).parameters()})
            products = dict(trace.denoiser.product_dtypes)
            wanted = self.autocast or self.weights
            engaged = weights == [self.weights] and trace.denoiser.autocast_dtype == self.autocast
            # Compiled products may be kernels without an operator: then types of weights and autocast decide.
            engaged = engaged and (not products or max(products, key=lambda name: products[name]) == wanted)
            summary = f"weights {', '.join(weights)}; products in {', '.join(sorted(products)) or 'compiled kernels'}"
            rounded = convolved = None
            if self.tf32 != "default":
                with self.context(pipe):
                    rounded, convolved = products_are_rounded(pipe.device), convolutions_are_rounded(pipe.device)
                # Convolutions are rounded without any choice, so that only forbidding it shows in them.
                engaged = engaged and (rounded if self.tf32 == "on" else not (rounded or convolved))
                summary += f"; float32 products {_in_words(rounded)}, convolutions {_in_words(convolved)}"
            # Without a choice cuDNN's convolutions are rounded, on a device that can.
            reduced = _rounds_convolutions(pipe.device) if rounded is None else bool(rounded or convolved)
            facts = {
                "weights": weights,
                "products": products,
                "rounded_to_tf32": rounded,
                "convolutions_rounded_to_tf32": convolved,
                "arithmetic": arithmetic(products, wanted, reduced),
            }
            return Finding(engaged, summary, facts)

        return proof


def _in_words(rounded: bool) -> str:
    return "rounded to TF32" if rounded else "in full"


def _rounds_convolutions(device: torch.device) -> bool:
    if device.type != "cuda" or not torch.backends.cudnn.allow_tf32:
        return False
    return torch.cuda.get_device_capability(device) >= TF32.capability
