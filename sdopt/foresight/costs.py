"""Counts the operations and bytes of a pipeline's networks, from their configurations alone."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from sdopt.foresight.software import FUSED
from sdopt.foresight.trace import Costs, trace
from sdopt.pipelines.random_weights import empty_part


@dataclass(frozen=True)
class PassCosts:
    """What one pass of a network costs; operations in FLOP, `moved` and `between` in numbers read and written."""

    convolutions: float
    products: float
    attention: float
    moved: float
    between: float
    kernels: float

    def times(self, factor: float) -> "PassCosts":
        """Returns the costs of several passes, one after the other."""
        return PassCosts(*(factor * value for value in vars(self).values()))

    @property
    def flop(self) -> float:
        """All operations."""
        return self.convolutions + self.products + self.attention


@lru_cache(maxsize=64)
def network(folder: Path, name: str, dtype: torch.dtype = torch.float16) -> Any:
    """Builds a network of a pipeline's folder on the meta device, in one type."""
    return _typed(empty_part(folder, name), dtype)


def _typed(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Moves a network to the meta device in one type; diffusers' own `to` warns of parts that it keeps in float32."""
    return torch.nn.Module.to(module, "meta", dtype)


def denoiser_inputs(
    unet: Any, samples: int, width: int, height: int, dtype: torch.dtype
) -> tuple[list[Any], dict[str, Any]]:
    """Returns the inputs of a denoiser for some samples of a size in pixels."""
    config = unet.config
    with torch.device("meta"):
        sample = torch.empty(samples, config.in_channels, height // 8, width // 8, dtype=dtype)
        states = torch.empty(samples, 77, config.cross_attention_dim, dtype=dtype)
        more: dict[str, Any] = {}
        if config.get("addition_embed_type") == "text_time":
            wide = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
            added = {"text_embeds": torch.empty(samples, wide, dtype=dtype), "time_ids": torch.empty(samples, 6)}
            more = {"added_cond_kwargs": added}
    return [sample, torch.tensor(1.0, device="meta"), states], more


def set_attention(part: Any, kind: str) -> None:
    """Chooses attention that keeps its scores in the kernel, or that writes them to memory."""
    from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0

    if hasattr(part, "set_attn_processor"):
        part.set_attn_processor(AttnProcessor2_0() if kind == FUSED else AttnProcessor())


@lru_cache(maxsize=256)
def _traced(folder: Path, name: str, width: int, height: int, attention: str) -> tuple[Costs, int]:
    """Traces two samples of a network; returns the costs and the number of its parameters."""
    part = network(folder, name)
    set_attention(part, attention)
    if name == "vae":
        latents = torch.empty(
            2, part.config.latent_channels, height // 8, width // 8, dtype=torch.float16, device="meta"
        )
        return trace(part.decode, latents), sum(p.numel() for p in part.decoder.parameters())
    inputs, more = denoiser_inputs(part, 2, width, height, torch.float16)
    return trace(part, *inputs, **more), sum(p.numel() for p in part.parameters())


def pass_costs(folder: Path, name: str, samples: int, width: int, height: int, attention: str = FUSED) -> PassCosts:
    """Returns the costs of a pass of the denoiser (`unet`) or the decoder (`vae`).

    All grow with the number of samples, except for reading the weights.
    """
    two, weights = _traced(folder, name, width, height, attention)
    share = samples / 2
    return PassCosts(
        two.convolutions * share,
        two.products * share,
        two.attention * share,
        (two.moved - weights) * share + weights,
        two.between * share,
        float(two.kernels),
    )
