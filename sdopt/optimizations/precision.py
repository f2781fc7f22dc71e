"""precision: the type of the weights, of the arithmetic under autocast, and TensorFloat-32."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from sdopt.measure.stages import denoiser_of
from sdopt.measure.trace import Trace
from sdopt.optimizations.base import Context, Contract, Finding, Optimization, Proof, Stage
from sdopt.schema import bounded

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

_FLOATS = ("float32", "float16", "bfloat16")
# How NVIDIA's libraries name the kernels that round their inputs to TensorFloat-32.
_TF32_KERNELS = ("tf32", "s1688", "tensorop_s")


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
        if self.tf32 != "default":
            found += ctx.device.needs_cuda("TensorFloat-32", (8, 0))
        if "bfloat16" in (self.weights, self.autocast) and ctx.device.is_cuda:
            found += ctx.device.needs_cuda("bfloat16 arithmetic", (8, 0))
        return found

    def load_kwargs(self) -> dict[str, Any]:
        return {"dtype": getattr(torch, self.weights)}

    @contextmanager
    def context(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.tf32 != "default":
                stack.enter_context(_tf32(self.tf32 == "on"))
            if self.autocast:
                kind = "cuda" if torch.cuda.is_available() else "cpu"
                stack.enter_context(torch.autocast(kind, dtype=getattr(torch, self.autocast)))
            yield

    def apply(self, pipe: "DiffusionPipeline") -> Proof:
        def proof(trace: Trace) -> Finding:
            weights = sorted({str(p.dtype).removeprefix("torch.") for p in denoiser_of(pipe).parameters()})
            products = dict(trace.denoiser.product_dtypes)
            wanted = self.autocast or self.weights
            engaged = weights == [self.weights] and trace.denoiser.autocast_dtype == self.autocast
            # Compiled products may be kernels without an operator: then types of weights and autocast decide.
            engaged = engaged and (not products or max(products, key=lambda name: products[name]) == wanted)
            rounded = sum(n for name, n in trace.kernels.items() if any(word in name.lower() for word in _TF32_KERNELS))
            if self.tf32 == "on":
                engaged = engaged and rounded > 0
            if self.tf32 == "off":
                engaged = engaged and rounded == 0
            summary = f"weights {', '.join(weights)}; products in {', '.join(sorted(products)) or 'compiled kernels'}"
            return Finding(engaged, summary, {"weights": weights, "products": products, "tf32_kernels": rounded})

        return proof


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "tf32" if allowed else "ieee"
        yield
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.fp32_precision = value
