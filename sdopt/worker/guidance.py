"""Gives each image of a call a guidance scale of its own, where the denoiser embeds the scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


@contextmanager
def scales_embedded(denoiser: nn.Module, scales: Sequence[float]) -> Iterator[None]:
    """Replaces the scale that a pipeline gives its denoiser, one for all images, by one for each image.

    Pipelines of diffusers take a single number, but their transformers read `guidance` as a tensor (n,).

    Raises:
        RuntimeError: no call of the denoiser had a scale, or one had another number of images.
    """
    calls = 0

    def replace(
        _: nn.Module, args: Any, others: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        nonlocal calls
        guidance = others.get("guidance")
        if guidance is None or len(guidance) != len(scales):
            raise RuntimeError(
                "the denoiser does not take a guidance scale for each image"
            )
        calls += 1
        return args, others | {"guidance": guidance.new_tensor(scales)}

    handle = denoiser.register_forward_pre_hook(replace, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
    if calls == 0:
        raise RuntimeError(
            "the denoiser was not called, so images do not have their guidance scales"
        )
