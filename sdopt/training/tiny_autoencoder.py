"""The tiny autoencoder stage: distils the autoencoder to a faster one."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import numpy as np

from sdopt.training.autoencoder import edge_loss, pixels
from sdopt.training.compute import generator, in_precision, pick_device
from sdopt.training.config import TrainReferenceConfig
from sdopt.training.loop import train
from sdopt.training.networks import build_tiny_autoencoder

if TYPE_CHECKING:
    from diffusers import AutoencoderKL
    from torch import Tensor

    from sdopt.training.data import Dataset


STREAM = 4
"""Number of this stage in the path of a random seed."""

VIEWS = 2
"""Number of copies of each training picture, with different backgrounds and noise."""


def train_tiny_autoencoder(config: TrainReferenceConfig, dataset: Dataset, teacher: AutoencoderKL) -> None:
    """Distils `teacher` on the training pictures.

    The encoder learns the teacher's mean latents times its scaling factor, because diffusers gives an `AutoencoderTiny`
    the factor 1. The decoder learns the teacher's pictures instead of the real ones, so that all differences between
    teacher and student are due to the distillation.

    Args:
        config: the whole configuration.
        dataset: pictures.
        teacher: the finished autoencoder; its `scaling_factor` must be set.
    """
    import torch

    options, device = config.tiny_autoencoder, pick_device(config.device)
    torch.manual_seed(config.seed)
    network = build_tiny_autoencoder().to(device, memory_format=torch.channels_last)
    pictures, latents, disturbed, targets = prepare_lessons(config, dataset, teacher)

    def loss(step: int) -> Tensor:
        random = generator(config.seed, STREAM, step)
        picked = torch.randint(len(pictures), (options.batch_size,), generator=random).numpy()
        shown, target = (
            pixels(images[picked]).to(device, memory_format=torch.channels_last) for images in (pictures, targets)
        )
        with in_precision(config.arithmetic, device):
            encoded = network.encode(shown).latents.float()
            output = network.decode(disturbed[picked].to(device, memory_format=torch.channels_last)).sample.float()
        pixel = (output - target).abs().mean() + (output - target).square().mean()
        latent = (encoded - latents[picked].to(device)).square().mean()
        total: Tensor = pixel + options.edge_weight * edge_loss(output, target) + latent
        return total

    train(config, "tiny_autoencoder", network, loss, pictures=len(pictures) // VIEWS)


def prepare_lessons(
    config: TrainReferenceConfig, dataset: Dataset, teacher: AutoencoderKL
) -> tuple[np.ndarray, Tensor, Tensor, np.ndarray]:
    """Computes the teacher's outputs for all training pictures once, because the teacher costs more than a step.

    Returns:
        Each picture `VIEWS` times, on white or on a random colour, uint8 (n, 64, 64, 3); its scaled latents, float32
        (n, 8, 8, 8); these latents with noise; and the teacher's picture of the noisy latents, uint8 (n, 64, 64, 3).
    """
    import torch
    from diffusers.models.attention_processor import AttnProcessor

    options, device = config.tiny_autoencoder, pick_device(config.device)
    guide = copy.deepcopy(teacher).to(device, memory_format=torch.channels_last)
    guide.set_attn_processor(AttnProcessor())
    scale = guide.config.scaling_factor
    chosen = np.tile(dataset.indices(held_out=False), VIEWS)
    random = generator(config.seed, STREAM)
    colours = torch.randint(256, (len(chosen), 3), generator=random, dtype=torch.uint8)
    colours[torch.rand(len(chosen), generator=random) >= options.background_share] = 255
    pictures = dataset.on(chosen, colours.numpy())
    found, moved, decoded = [], [], []
    with torch.inference_mode():
        for batch in np.array_split(pictures, -(-len(pictures) // 64)):
            shown = pixels(batch).to(device, memory_format=torch.channels_last)
            with in_precision(config.arithmetic, device):
                latents = scale * guide.encode(shown).latent_dist.mode().float()
                reach = options.latent_noise * torch.rand(len(batch), 1, 1, 1, generator=random)
                disturbed = latents + (reach * torch.randn(latents.shape, generator=random)).to(device)
                output = guide.decode(disturbed / scale).sample.float()
            found.append(latents.cpu())
            moved.append(disturbed.cpu())
            decoded.append(output.clamp(-1, 1).add(1).mul(127.5).round().byte().permute(0, 2, 3, 1).cpu().numpy())
    return pictures, torch.cat(found).clone(), torch.cat(moved).clone(), np.concatenate(decoded)
