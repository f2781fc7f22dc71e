"""grad_mode: whether autograd records a call."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import override

from sdopt.contract import LATENCY, NOTHING
from sdopt.options import Contract, Finding, Optimization, Proof, Stage, Trace
from sdopt.options.assumptions import call_without_gradients
from sdopt.pipelines.parts import Pipeline


@dataclass(frozen=True)
class GradMode(Optimization):
    """Sets the gradient mode of a call."""

    stage = Stage.CALL

    mode: Literal["enabled", "no_grad", "inference_mode"] = "no_grad"
    """`no_grad` is the default of diffusers' pipelines; `enabled` removes it; `inference_mode` is stricter."""

    @property
    @override
    def contract(self) -> Contract:
        # PyTorch's fused attention takes no mask that autograd records, as the positions that T5 adds to its scores.
        return Contract.EQUIVALENT if self.mode == "enabled" else Contract.EXACT

    @property
    @override
    def claims(self) -> frozenset[str]:
        return LATENCY if self.mode == "inference_mode" else NOTHING

    @property
    @override
    def diffusers_lines(self) -> tuple[str, ...]:
        # diffusers' pipelines disable recording inside each call, which a surrounding context cannot undo.
        return (
            ()
            if self.mode == "enabled"
            else ("import torch", f"with torch.{self.mode}():")
        )

    @override
    def broken(self, pipe: Pipeline) -> list[str]:
        return call_without_gradients(pipe) if self.mode == "enabled" else []

    @override
    def context(self, pipe: Pipeline) -> AbstractContextManager[Any]:
        import torch

        modes = {
            "enabled": torch.enable_grad,
            "no_grad": torch.no_grad,
            "inference_mode": torch.inference_mode,
        }
        entered: AbstractContextManager[Any] = modes[self.mode]()
        return entered

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        if self.mode == "enabled":
            _undecorate(pipe)

        def proof(trace: Trace) -> Finding:
            seen = trace.denoiser
            state = (
                "inference_mode"
                if seen.inference_mode
                else "enabled"
                if seen.grad_enabled
                else "no_grad"
            )
            engaged = state == self.mode and (state == "enabled") == bool(
                seen.output_requires_grad
            )
            return Finding(
                engaged,
                f"the denoiser ran with {state}",
                {"output_requires_grad": seen.output_requires_grad},
            )

        return proof


def _undecorate(pipe: Pipeline) -> None:
    # A pipeline's __call__ is decorated with torch.no_grad(), which would override any surrounding mode.
    cls: Any = type(pipe)
    pipe.__class__ = type(cls.__name__, (cls,), {"__call__": cls.__call__.__wrapped__})
    decode = pipe.vae.decode

    # The pipeline converts the image to an array, which fails for a tensor that requires gradients.
    def detached(*args: Any, **kwargs: Any) -> Any:
        output = decode(*args, **kwargs)
        if isinstance(output, tuple):
            return tuple(part.detach() for part in output)
        output.sample = output.sample.detach()
        return output

    pipe.vae.__dict__["decode"] = detached
