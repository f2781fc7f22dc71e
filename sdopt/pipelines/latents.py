"""Lays latents out as each family's pipeline takes them, and back: (n, C, h, w) everywhere else in sdopt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sdopt.pipelines.family import Latents

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def laid_out(latents: Tensor, form: Latents) -> Tensor:
    """Returns latents (n, C, h, w), with even h and w unless `form` is spatial, as the call of a pipeline takes them.

    As `_pack_latents` of diffusers' FLUX.1 and `_patchify_latents` of its FLUX.2 do.
    """
    if form.layout == "spatial":
        return latents
    n, channels, height, width = latents.shape
    squares = latents.view(n, channels, height // 2, 2, width // 2, 2)
    if form.layout == "patchified":
        return squares.permute(0, 1, 3, 5, 2, 4).reshape(
            n, 4 * channels, height // 2, width // 2
        )
    return squares.permute(0, 2, 4, 1, 3, 5).reshape(
        n, height * width // 4, 4 * channels
    )


def drawn(
    generators: Sequence[torch.Generator], channels: int, side: int, form: Latents
) -> Tensor:
    """Draws the noise of square images, each from its generator, as a pipeline draws it from the same ones.

    In float32 and on the CPU, and laid out as the pipeline takes it. Latents that are patchified are drawn so.
    """
    import torch

    if form.layout == "patchified":
        shape = (1, 4 * channels, side // 2, side // 2)
        return torch.cat(
            [torch.randn(shape, generator=generator) for generator in generators]
        )
    shape = (1, channels, side, side)
    return laid_out(
        torch.cat(
            [torch.randn(shape, generator=generator) for generator in generators]
        ),
        form,
    )


def spatial(latents: Tensor, form: Latents) -> Tensor:
    """Returns the latents of a square image, as a callback of a pipeline gets them, in the form (n, C, h, w)."""
    if form.layout == "spatial":
        return latents
    n, tokens, channels = (
        latents.shape
    )  # those that are patchified are packed too before the first step
    side = round(tokens**0.5)
    squares = latents.view(n, side, side, channels // 4, 2, 2)
    return squares.permute(0, 3, 1, 4, 2, 5).reshape(
        n, channels // 4, 2 * side, 2 * side
    )


def size_of_latents(vae: Any) -> float | None:
    """Returns the standard deviation of an AutoencoderKL's latents, scaled as its configuration says.

    It is about 1 for pictures. None of an autoencoder that does not restore them, as one with random weights.
    """
    latents = _latents_of(vae)
    if not _restores(vae, latents):
        return None
    scaled = (latents - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor
    return float(scaled.std())


def have_other_latents(vae: Any, other: Any) -> bool:
    """Returns whether one AutoencoderKL does not restore pictures from the latents of another one, as from its own."""
    return _restores(other, _latents_of(other)) and not _restores(
        other, _latents_of(vae)
    )


def _latents_of(vae: Any) -> Tensor:
    """Returns the latents of pictures."""
    import torch

    with torch.no_grad():
        latents: Tensor = vae.encode(_pictures()).latent_dist.mode()
    return latents


def _restores(vae: Any, latents: Tensor) -> bool:
    """Returns whether an autoencoder makes the pictures from their latents."""
    import torch

    pictures = _pictures()
    with torch.no_grad():
        restored = vae.decode(latents).sample
    both = torch.stack([pictures.flatten(), restored.flatten()])
    return float(torch.corrcoef(both)[0, 1]) > _RESTORED


_RESTORED = 0.5
"""The correlation with pictures from which on they are restored."""


def _pictures() -> Tensor:
    """Draws pictures of 64×64 pixels with details of all sizes, as photographs have them."""
    import torch
    from torch.nn.functional import interpolate

    generator = torch.Generator().manual_seed(0)
    pictures = torch.zeros(4, 3, 64, 64)
    for level in range(1, 6):
        details = torch.randn(4, 3, 2**level, 2**level, generator=generator)
        pictures += interpolate(details, size=64, mode="bilinear") / 1.7**level
    return pictures.clamp(-1, 1)
