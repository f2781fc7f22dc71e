"""Traces the networks of a pipeline with a transformer on the meta device: the inputs that its call would give them.

A step's cost goes by tokens: those of the image are (side / (factor · patch))², and those of the text come on top.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from sdopt.apps.foresight.latency import Costs
from sdopt.apps.foresight.trace import network, trace
from sdopt.errors import UsageError
from sdopt.pipelines.catalog import parts_in
from sdopt.pipelines.families import factor_of, family_of_folder, latent_channels_of
from sdopt.pipelines.family import Family

Inputs = dict[str, Any]


@dataclass(frozen=True)
class NetworkCall:
    """What a call of a denoiser with one sample is given.

    Attributes:
        config: of the denoiser.
        height, width: of the latents, as the autoencoder has them.
        words: tokens of text.
        dtype: of the numbers.
    """

    config: Any
    height: int
    width: int
    words: int
    dtype: torch.dtype

    @property
    def tokens(self) -> int:
        """Tokens of an image, each a square of 2×2 latents."""
        return self.height * self.width // 4

    def empty(self, *shape: int) -> torch.Tensor:
        """Returns a tensor of no values."""
        return torch.empty(shape, dtype=self.dtype, device="meta")

    def spatial(self) -> torch.Tensor:
        """Returns latents (1, C, h, w)."""
        return self.empty(1, self.config.in_channels, self.height, self.width)

    def packed(self) -> torch.Tensor:
        """Returns latents (1, h·w/4, C)."""
        return self.empty(1, self.tokens, self.config.in_channels)

    def text(self, width: int) -> torch.Tensor:
        """Returns the states of the text (1, words, width)."""
        return self.empty(1, self.words, width)

    def time(self) -> torch.Tensor:
        """Returns the timestep."""
        return self.empty(1)

    def guidance(self) -> Inputs:
        """Returns the scale of guidance of a network that is told it."""
        guided = self.config.guidance_embeds
        return {"guidance": torch.ones(1, device="meta")} if guided else {}

    def mask(self) -> torch.Tensor:
        """Returns which tokens of the text count."""
        return torch.ones(1, self.words, dtype=torch.bool, device="meta")


def _flux(call: NetworkCall) -> Inputs:
    return {
        "hidden_states": call.packed(),
        "encoder_hidden_states": call.text(call.config.joint_attention_dim),
        "pooled_projections": call.empty(1, call.config.pooled_projection_dim),
        "timestep": call.time(),
        "img_ids": call.empty(call.tokens, 3),
        "txt_ids": call.empty(call.words, 3),
        **call.guidance(),
    }


def _flux2(call: NetworkCall) -> Inputs:
    return {
        "hidden_states": call.packed(),
        "encoder_hidden_states": call.text(call.config.joint_attention_dim),
        "timestep": call.time(),
        "img_ids": call.empty(1, call.tokens, 4),
        "txt_ids": call.empty(1, call.words, 4),
        **call.guidance(),
    }


def _chroma(call: NetworkCall) -> Inputs:
    return {
        "hidden_states": call.packed(),
        "encoder_hidden_states": call.text(call.config.joint_attention_dim),
        "timestep": call.time(),
        "img_ids": call.empty(call.tokens, 3),
        "txt_ids": call.empty(call.words, 3),
        "attention_mask": torch.ones(
            1, call.words + call.tokens, dtype=torch.bool, device="meta"
        ),
    }


def _sd3(call: NetworkCall) -> Inputs:
    return {
        "hidden_states": call.spatial(),
        "encoder_hidden_states": call.text(call.config.joint_attention_dim),
        "pooled_projections": call.empty(1, call.config.pooled_projection_dim),
        "timestep": call.time(),
    }


def _qwen(call: NetworkCall) -> Inputs:
    return {
        "hidden_states": call.packed(),
        "encoder_hidden_states": call.text(call.config.joint_attention_dim),
        "timestep": call.time(),
        "img_shapes": [[(1, call.height // 2, call.width // 2)]],
    }


def _z_image(call: NetworkCall) -> Inputs:
    shape = call.config.in_channels, 1, call.height, call.width
    return {
        "x": [call.empty(*shape)],
        "t": call.time(),
        "cap_feats": [call.empty(call.words, call.config.cap_feat_dim)],
    }


def _pixart(call: NetworkCall) -> Inputs:
    return {
        "hidden_states": call.spatial(),
        "encoder_hidden_states": call.text(call.config.caption_channels),
        "timestep": call.time(),
        "encoder_attention_mask": call.mask(),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def _sana(call: NetworkCall) -> Inputs:
    return {
        "hidden_states": call.spatial(),
        "encoder_hidden_states": call.text(call.config.caption_channels),
        "timestep": call.time(),
        "encoder_attention_mask": call.mask(),
    }


def _lumina2(call: NetworkCall) -> Inputs:
    # The lengths of texts are read from the mask, which needs its values.
    mask = torch.ones(1, call.words, dtype=torch.bool, device="cpu")
    return {
        "hidden_states": call.spatial(),
        "encoder_hidden_states": call.text(call.config.cap_feat_dim),
        "timestep": call.time(),
        "encoder_attention_mask": mask,
    }


def _aura(call: NetworkCall) -> Inputs:
    return {
        "hidden_states": call.spatial(),
        "encoder_hidden_states": call.text(call.config.joint_attention_dim),
        "timestep": call.time(),
    }


INPUTS: dict[str, Callable[[NetworkCall], Inputs]] = {
    "FluxTransformer2DModel": _flux,
    "Flux2Transformer2DModel": _flux2,
    "ChromaTransformer2DModel": _chroma,
    "SD3Transformer2DModel": _sd3,
    "QwenImageTransformer2DModel": _qwen,
    "ZImageTransformer2DModel": _z_image,
    "PixArtTransformer2DModel": _pixart,
    "SanaTransformer2DModel": _sana,
    "Lumina2Transformer2DModel": _lumina2,
    "AuraFlowTransformer2DModel": _aura,
}
"""How each class of transformer is called."""


def step_inputs(
    denoiser: Any,
    family: Family,
    size: tuple[int, int],
    factor: int,
    words: int,
) -> Inputs:
    """Returns the inputs of one call of a transformer on one sample; all tensors have the type of its weights.

    Args:
        denoiser: the transformer.
        family: of its pipeline.
        size: width and height of the images in pixels.
        factor: pixels a side of a latent.
        words: tokens of text.

    Raises:
        UsageError: sdopt does not know how its class is called.
    """
    kind = type(denoiser).__name__
    if kind not in INPUTS:
        raise UsageError(
            f"{family.title}: sdopt does not know how to trace a {kind}: measure it"
        )
    width, height = (side // factor for side in size)
    return INPUTS[kind](
        NetworkCall(
            denoiser.config,
            height,
            width,
            words,
            next(denoiser.parameters()).dtype,
        )
    )


def words_of(family: Family, most: int | None) -> int:
    """Returns how many tokens of text the denoiser reads of each sample.

    Where texts of one length get no mask, only the tokens of the prompt are there; elsewhere it is padded.

    Args:
        family: of the pipeline.
        most: of the call, where it sets a limit.
    """
    if family.encoding.masks == "batches":
        return _PROMPT
    *others, last = (tokens or _PROMPT for tokens in family.encoding.tokens)
    last = most or last
    # SD 3 reads those of CLIP beside those of T5; FLUX.1 reads T5's alone.
    return last + others[0] if len(others) > 1 else last


_PROMPT = 64
"""Tokens of a usual prompt with the words of a chat around it."""


@lru_cache(maxsize=64)
def denoiser_costs(
    folder: Path, size: tuple[int, int], words: int, scores: bool
) -> Costs:
    """Traces one call of a folder's transformer on one sample, in bfloat16.

    Args:
        folder: of the pipeline's configurations.
        size: width and height of the images in pixels.
        words: tokens of text.
        scores: whether attention writes its scores to memory.
    """
    family = family_of_folder(folder)
    denoiser, vae = (network(folder, name) for name in (family.denoiser, "vae"))
    factor = factor_of(vae.config)
    costs = trace(denoiser, **step_inputs(denoiser, family, size, factor, words))
    stored = float(sum(weight.numel() for weight in denoiser.parameters()))
    costs = replace(costs, stored=stored)
    return (
        _with_scores(costs, denoiser.config, size, factor, words) if scores else costs
    )


def _with_scores(
    costs: Costs, config: Any, size: tuple[int, int], factor: int, words: int
) -> Costs:
    """Returns the costs of a pass whose attention writes and reads its scores, which are float32 in the softmax."""
    tokens = size[0] * size[1] // (2 * factor) ** 2 + words
    heads = config.get("num_attention_heads") or config.get("n_heads") or 1
    width = config.get("attention_head_dim") or config.get("dim", 64 * heads) // heads
    written = costs.attention / (4 * width)
    return replace(
        costs,
        products=costs.products + costs.attention,
        attention=0.0,
        filling=0.0,
        moved=costs.moved + 4 * written,
        between=costs.between + 2 * written,
        peak=costs.peak + 2 * 2 * heads * tokens**2,
    )


@lru_cache(maxsize=64)
def decoder_costs(folder: Path, size: tuple[int, int]) -> Costs:
    """Traces the decoding of one image by a folder's autoencoder, in bfloat16."""
    vae = network(folder, "vae")
    latents = latents_of(vae, size, 1, torch.bfloat16)
    return trace(vae.decode, latents, kept=[latents])


def latents_of(
    vae: Any, size: tuple[int, int], images: int, dtype: torch.dtype
) -> torch.Tensor:
    """Returns what an autoencoder decodes: (n, C, h, w), and (n, C, 1, h, w) if it is one for videos."""
    width, height = (side // factor_of(vae.config) for side in size)
    frames = (1,) if "temperal_downsample" in vae.config else ()
    channels = int(latent_channels_of(vae.config) or 4)
    return torch.empty(
        images, channels, *frames, height, width, dtype=dtype, device="meta"
    )


def for_samples(one: Costs, samples: int) -> Costs:
    """Returns the costs of a pass of several samples; weights are read once, and launches are as many."""
    moved = (one.moved - one.stored) * samples + one.stored
    return replace(
        one.times(samples),
        moved=moved,
        kernels=one.kernels,
        stored=one.stored,
        peak=one.peak * samples,
    )


def encoding_costs(folder: Path, prompts: int) -> Costs:
    """Returns the products of encoding some prompts, by the weights that each of their tokens meets."""
    family = family_of_folder(folder)
    total = 0.0
    for name, tokens in zip(family.encoders, family.encoding.tokens, strict=False):
        if name in parts_in(folder):
            read = _PROMPT if family.encoding.masks == "batches" else tokens or _PROMPT
            total += (
                2.0
                * read
                * prompts
                * sum(weight.numel() for weight in network(folder, name).parameters())
            )
    return Costs(products=total)
