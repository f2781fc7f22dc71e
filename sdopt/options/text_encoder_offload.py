"""memory: keeps the text encoders alone in host memory, and brings each to the device while it encodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from sdopt.contract import MEMORY
from sdopt.measure.stages import TEXT_ENCODER
from sdopt.options import Context, Contract, Finding, Optimization, Proof, Stage, Trace
from sdopt.options.memory import PrecomputedEmbeddings
from sdopt.options.offload import Offload
from sdopt.pipelines.parts import (
    Pipeline,
    bytes_of,
    device_of,
    networks_of,
    text_encoders_of,
)

if TYPE_CHECKING:
    import torch

_HOOKS = "_sdopt_text_encoder_hooks"
"""Attribute of a pipeline with what moves its text encoders, one for each."""


class TextEncoderOffload(Optimization):
    """Keeps the text encoders in host memory, and brings one at a time to the device while it encodes prompts.

    Denoiser and VAE stay on the device, and may be compiled: while steps run, the device holds no text encoder. A call
    pays for moving them; `memory=precomputed_embeddings` pays once.
    """

    stage = Stage.OFFLOAD
    loads_on_host = True
    claims = MEMORY
    contract = Contract.EXACT

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        reasons = []
        for axis, option in ctx.chosen.items():
            if isinstance(option, Offload):
                reasons.append(
                    f"{axis} moves the text encoders too: choose one of them"
                )
            if isinstance(option, PrecomputedEmbeddings):
                reasons.append(f"{axis} frees the text encoders: choose one of them")
        if "text_encoder" in getattr(ctx.chosen.get("compiler"), "targets", ()):
            reasons.append(
                "its hooks would move weights inside compiled code: choose compiler.targets=[denoiser,decoder]"
            )
        for reason in ctx.device.needs_cuda("offloading to host memory"):
            reasons.append(f"{reason}, where weights already are in host memory")
        return reasons

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        import torch
        from accelerate import cpu_offload_with_hook

        device, encoders = device_of(pipe), text_encoders_of(pipe)
        for network in networks_of(pipe).values():
            if not any(network is encoder for encoder in encoders):
                network.to(device)
        moves = []
        for encoder in encoders:
            _, move = cpu_offload_with_hook(encoder, device)
            moves.append(move)
        for encoder, own in zip(encoders, moves, strict=True):
            others = [move for move in moves if move is not own]
            encoder.register_forward_pre_hook(_leaving(others))
        setattr(pipe, _HOOKS, moves)
        held = sum(bytes_of(encoder) for encoder in encoders) / 2**30
        del encoders, encoder  # else the proof would keep alive what a program replaces

        def proof(trace: Trace) -> Finding:
            encoders = text_encoders_of(pipe)
            calls = trace.stages[TEXT_ENCODER].calls
            resting = sum(bytes_of(encoder, device.type) for encoder in encoders)
            hooked = sum(hasattr(encoder, "_hf_hook") for encoder in encoders)
            ran = device.type != "cuda" or bool(trace.kernels)
            summary = (
                f"{hooked} of {len(encoders)} text encoders ({held:.2f} GiB) wait in host memory, and ran {calls} "
                f"times; {resting / 2**30:.2f} GiB of them on {device.type} after encoding"
            )
            facts: dict[str, Any] = {
                "encoders": len(encoders),
                "hooked": hooked,
                "calls": calls,
                "encoders_gib": held,
                "resting_on_device_gib": resting / 2**30,
            }
            if device.type == "cuda":
                facts["allocated_gib"] = torch.cuda.memory_allocated(device) / 2**30
            engaged = 0 < hooked == len(encoders) and calls > 0 and ran and not resting
            return Finding(engaged, summary, facts)

        return proof

    @override
    def context(self, pipe: Pipeline) -> AbstractContextManager[None]:
        return _leaving_after_encoding(pipe)


def _leaving(moves: list[Any]) -> Any:
    """Returns a hook that sends text encoders to the host before another one runs."""

    def leave(module: torch.nn.Module, inputs: Any) -> None:
        for move in moves:
            move.offload()

    return leave


@contextmanager
def _leaving_after_encoding(pipe: Pipeline) -> Iterator[None]:
    """Sends the text encoders to the host at the end of each `encode_prompt` in the block."""
    before = vars(pipe).get("encode_prompt")
    encode = pipe.encode_prompt

    @wraps(encode)
    def encode_and_leave(*args: Any, **given: Any) -> Any:
        try:
            return encode(*args, **given)
        finally:
            for move in getattr(pipe, _HOOKS, ()):
                move.offload()

    pipe.encode_prompt = encode_and_leave
    try:
        yield
    finally:
        del pipe.encode_prompt
        if before is not None:
            pipe.encode_prompt = before
