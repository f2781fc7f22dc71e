"""grad_mode: whether autograd records a call."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from typing_extensions import override

from sdopt.measure.trace import Trace
from sdopt.optimizations.base import Finding, Optimization, Proof, Stage
from sdopt.schema import bounded

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


@dataclass(frozen=True)
class GradMode(Optimization):
    """Sets whether and how autograd records a call."""

    stage: ClassVar[Stage] = Stage.CALL

    mode: str = bounded("no_grad", choices=("enabled", "no_grad", "inference_mode"))
    """`no_grad` is what diffusers' pipelines do; `enabled` takes that away; `inference_mode` adds to it."""

    @property
    @override
    def claims(self) -> frozenset[str]:
        return frozenset({"latency"}) if self.mode == "inference_mode" else frozenset()

    @property
    @override
    def diffusers_lines(self) -> tuple[str, ...]:
        # diffusers' pipelines turn recording off within each call, which nothing around it can undo.
        return () if self.mode == "enabled" else ("import torch", f"with torch.{self.mode}():")

    @override
    @contextmanager
    def context(self, pipe: "DiffusionPipeline") -> Iterator[None]:
        modes = {"enabled": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
        with modes[self.mode]():
            yield

    @override
    def apply(self, pipe: "DiffusionPipeline") -> Proof:
        if self.mode == "enabled":
            _undecorate(pipe)

        def proof(trace: Trace) -> Finding:
            seen = trace.denoiser
            state = "inference_mode" if seen.inference_mode else "enabled" if seen.grad_enabled else "no_grad"
            engaged = state == self.mode and (state == "enabled") == bool(seen.output_requires_grad)
            return Finding(
                engaged, f"the denoiser ran with {state}", {"output_requires_grad": seen.output_requires_grad}
            )

        return proof


def _undecorate(pipe: "DiffusionPipeline") -> None:
    # A pipeline's __call__ is decorated with torch.no_grad(), which would win over any mode around it.
    cls: Any = type(pipe)
    pipe.__class__ = type(cls.__name__, (cls,), {"__call__": cls.__call__.__wrapped__})
    decode = pipe.vae.decode

    # The pipeline turns the image into an array, which a tensor with a graph refuses.
    def detached(*args: Any, **kwargs: Any) -> Any:
        output = decode(*args, **kwargs)
        return tuple(part.detach() for part in output) if isinstance(output, tuple) else _detach_fields(output)

    pipe.vae.__dict__["decode"] = detached


def _detach_fields(output: Any) -> Any:
    output.sample = output.sample.detach()
    return output
