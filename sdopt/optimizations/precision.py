"""precision: the type of the weights, of the arithmetic under autocast, and TensorFloat-32."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

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
    autocast: str | None = bounded(None, choices=_FLOATS[1:])
    tf32: str = bounded("default", choices=("default", "on", "off"))

    @property
    def contract(self) -> Contract:
        if self.weights != "float32" or self.autocast or self.tf32 == "on":
            return Contract.LOSSY
        return Contract.EXACT if self.tf32 == "default" else Contract.EQUIVALENT

    @property
    def claims(self) -> frozenset[str]:
        reduced = {"latency"} if self.contract is Contract.LOSSY else set()
        return frozenset(reduced | ({"memory"} if self.weights != "float32" else set()))

    def conflicts(self, ctx: Context) -> list[str]:
        found = []
        if self.tf32 == "off" and not ctx.device.is_cuda:
            found.append(f"turning TensorFloat-32 off needs a CUDA device; this runs on {ctx.device.name}")
        elif self.tf32 != "default":
            found += missing(ctx.device, TF32)
        if "bfloat16" in (self.weights, self.autocast) and ctx.device.is_cuda:
            found += missing(ctx.device, BFLOAT16)
        return found

    def load_kwargs(self) -> dict[str, Any]:
        return {"dtype": getattr(torch, self.weights)}

    @contextmanager
    def context(self, pipe: "DiffusionPipeline") -> Iterator[None]:
        with ExitStack() as stack:
            if self.tf32 != "default":
                stack.enter_context(_tf32(self.tf32 == "on"))
            if self.autocast:
                stack.enter_context(torch.autocast(pipe.device.type, dtype=getattr(torch, self.autocast)))
            yield

    def apply(self, pipe: "DiffusionPipeline") -> Proof:
        def proof(trace: Trace) -> Finding:
            weights = sorted({str(p.dtype).removeprefix("torch.") for p in denoiser_of(pipe).parameters()})
            products = dict(trace.denoiser.product_dtypes)
            wanted = self.autocast or self.weights
            engaged = weights == [self.weights] and trace.denoiser.autocast_dtype == self.autocast
            # Compiled products may be kernels without an operator: then types of weights and autocast decide.
            engaged = engaged and (not products or max(products, key=lambda name: products[name]) == wanted)
            rounded = None
            if self.tf32 != "default":
                with self.context(pipe):
                    rounded = _products_are_rounded(pipe.device)
                engaged = engaged and rounded == (self.tf32 == "on")
            summary = f"weights {', '.join(weights)}; products in {', '.join(sorted(products)) or 'compiled kernels'}"
            if rounded is not None:
                summary += f"; float32 products {'rounded to TF32' if rounded else 'in full'}"
            # Without a choice cuDNN's convolutions are rounded, on a device that can.
            tf32 = _rounds_convolutions(pipe.device) if rounded is None else rounded
            facts = {
                "weights": weights,
                "products": products,
                "rounded_to_tf32": rounded,
                "arithmetic": arithmetic(products, wanted, tf32),
            }
            return Finding(engaged, summary, facts)

        return proof


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    # The older switches: after the newer `fp32_precision` was set, Inductor's reading of these raises an error.
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def _rounds_convolutions(device: torch.device) -> bool:
    if device.type != "cuda" or not torch.backends.cudnn.allow_tf32:
        return False
    return torch.cuda.get_device_capability(device) >= TF32.capability


def _products_are_rounded(device: torch.device) -> bool:
    """Whether a float32 matrix product on this device, with the settings of now, rounds its inputs to TF32.

    Names of kernels do not tell: libraries name them differently on each generation. A factor of 1 + 2⁻¹² does: it
    needs 12 bits of mantissa, of which TF32 keeps 10, so that the product comes out as if it had been 1.
    """
    matrix = torch.full((256, 256), 1 + 2**-12, device=device)
    return bool((matrix @ torch.ones_like(matrix))[0, 0].item() == 256.0)
