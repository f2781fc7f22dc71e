"""The CLIP stage: trains an image encoder and a text encoder to match pictures and captions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from sdopt.errors import UsageError
from sdopt.training.clip_data import Batches
from sdopt.training.compute import in_precision, pick_device
from sdopt.training.config import TrainReferenceConfig
from sdopt.training.data import Dataset
from sdopt.training.loop import load_weights, train
from sdopt.training.networks import build_clip

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import CLIPModel, CLIPTokenizer


WEIGHTS = "model.safetensors"
"""The weights file of transformers."""

HIGHEST_SCALE = math.log(100.0)
"""Upper limit of `logit_scale`, the learnt logarithm of the factor of the cosines (Radford et al. 2021)."""


def embed_visible(model: CLIPModel, pictures: Tensor, hidden: float, random: torch.Generator) -> Tensor:
    """Returns projected embeddings of pictures (n, 3, 64, 64), after dropping a random share of each one's patches.

    Dropping patches makes steps cheaper, and drawings harder to memorize (Li et al. 2023, FLIP).
    """
    import torch

    vision = model.vision_model
    states = vision.embeddings(pictures)
    if hidden > 0:
        count, patches = len(states), states.shape[1] - 1
        kept = torch.rand(count, patches, generator=random).argsort(dim=1)[:, : round(patches * (1 - hidden))] + 1
        # The class token, at index 0, is always kept.
        kept = torch.cat([torch.zeros(count, 1, dtype=kept.dtype), kept], dim=1).to(states.device)
        states = states.gather(1, kept[..., None].expand(-1, -1, states.shape[2]))
    states = vision.encoder(inputs_embeds=vision.pre_layrnorm(states)).last_hidden_state
    embeddings: Tensor = model.visual_projection(vision.post_layernorm(states[:, 0]))
    return embeddings


def contrastive_loss(images: Tensor, texts: Tensor, scale: Tensor, same: Tensor) -> Tensor:
    """Returns the symmetric InfoNCE loss (Radford et al. 2021), with more texts than images.

    Args:
        images: embeddings (n, d).
        texts: embeddings (m, d), m ≥ n; the first n belong to the images, in order.
        scale: logarithm of the factor of the cosines.
        same: bool (n, m), true for pairs to ignore, because another image's text fits too.
    """
    import torch
    from torch.nn import functional

    images, texts = functional.normalize(images, dim=1), functional.normalize(texts, dim=1)
    cosines = scale.clamp(max=HIGHEST_SCALE).exp() * images @ texts.T
    logits = cosines.masked_fill(same, -math.inf)
    own = torch.arange(len(images), device=images.device)
    towards_texts = functional.cross_entropy(logits, own)
    towards_images = functional.cross_entropy(logits[:, : len(images)].T, own)
    return (towards_texts + towards_images) / 2


def train_clip(config: TrainReferenceConfig, dataset: Dataset, tokenizer: CLIPTokenizer) -> None:
    """Trains on all concepts, including the denoiser's held-out concepts."""
    import torch

    options, device = config.clip, pick_device(config.device)
    torch.manual_seed(config.seed)
    network = start_clip(options.start_from).to(device)
    # The fused kernels' backward passes are slow on CPUs.
    network.set_attn_implementation("eager")
    batches = Batches(options, dataset, config.seed)

    def loss(step: int) -> Tensor:
        batch = batches.draw(step)
        # Padded to the longest text: with causal attention, the end token does not see the padding.
        tokens = tokenizer(
            batch.texts, padding=True, truncation=True, max_length=tokenizer.model_max_length, return_tensors="pt"
        )
        with in_precision(config.arithmetic, device):
            seen = embed_visible(network, batch.pictures.to(device), options.hidden_patches, batch.random)
            read = network.get_text_features(input_ids=tokens.input_ids.to(device)).pooler_output
        return contrastive_loss(seen.float(), read.float(), network.logit_scale, batch.same.to(device))

    train(
        config, "clip", network, loss,
        pictures=len(dataset) - batches.held_out, held_out_pictures=batches.held_out,
    )  # fmt: skip


def start_clip(folder: str | None) -> CLIPModel:
    """Returns the network to train: one from a folder of this stage, in single precision, or an untrained network.

    Raises:
        UsageError: the folder has no CLIP of this architecture.
    """
    network = build_clip()
    if folder is not None:
        if not (Path(folder) / WEIGHTS).is_file():
            raise UsageError(
                f"clip.start_from={folder}: the folder has no {WEIGHTS}; choose a folder written by stage=clip"
            )
        load_weights(Path(folder) / WEIGHTS, network)
    return network
