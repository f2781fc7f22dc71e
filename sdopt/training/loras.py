"""The LoRA stage: trains LoRAs for two drawing styles that the denoiser never saw."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sdopt.training.captions import draw_background, plain_caption
from sdopt.training.compute import pick_device
from sdopt.training.config import TrainReferenceConfig
from sdopt.training.data import Dataset, Record, draw_style
from sdopt.training.denoiser import Sampling, diffusion_loss
from sdopt.training.loop import train
from sdopt.training.packages import STYLES, Style

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline, UNet2DConditionModel
    from torch import Tensor, nn


STREAM = 5
"""Number of this stage in the path of a random seed."""

TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out")
"""The layers of the denoiser's transformers that the LoRAs update, the same for all styles."""


def add_lora(denoiser: UNet2DConditionModel, rank: int, targets: Sequence[str] = TARGETS) -> nn.ParameterList:
    """Freezes the denoiser, adds untrained LoRA layers, and returns their parameters.

    The scale is 1 (alpha equals the rank), the default of loaders for files without alpha.
    """
    from peft import LoraConfig
    from torch import nn

    denoiser.requires_grad_(False)
    denoiser.add_adapter(
        LoraConfig(r=rank, lora_alpha=rank, init_lora_weights="gaussian", target_modules=list(targets))
    )
    return nn.ParameterList(parameter for parameter in denoiser.parameters() if parameter.requires_grad)


def save_lora(denoiser: UNet2DConditionModel, updates: nn.ParameterList, average: nn.Module, file: Path) -> None:
    """Writes a trained LoRA to a safetensors file in half precision.

    Args:
        denoiser: with the LoRA's layers.
        updates: their parameters, as `add_lora` returned them.
        average: the weights to save, in the same order.
        file: the file to write.
    """
    import torch
    from diffusers import StableDiffusionPipeline
    from peft import get_peft_model_state_dict

    with torch.no_grad():
        for live, kept in zip(updates.parameters(), average.parameters(), strict=True):
            live.copy_(kept)
    # Keeps PEFT's names: diffusers' converter would rename only attention layers, which its loader then skips.
    weights = get_peft_model_state_dict(denoiser.cpu())
    StableDiffusionPipeline.save_lora_weights(
        file.parent,
        unet_lora_layers={name: tensor.half().contiguous() for name, tensor in weights.items()},
        weight_name=file.name,
    )


def train_loras(config: TrainReferenceConfig, base: Dataset, pipeline: StableDiffusionPipeline) -> None:
    """Trains a LoRA for each of `STYLES`; writes the weights to `model/` in the stage's folder.

    Args:
        config: the whole configuration.
        base: the denoiser's data.
        pipeline: the finished model, in single precision.

    Raises:
        DataError: an archive cannot be fetched, verified or read.
        UsageError: too many concepts are held out.
    """
    packages, held_out = Path(config.folder) / "packages", config.loras.held_out_concepts
    # All before the first training, so that an impossible setting is reported at once.
    drawings = [
        draw_style(style, base, packages, held_out_concepts=held_out, seed=config.seed, threads=config.threads)
        for style in STYLES
    ]
    for place, (style, dataset) in enumerate(zip(STYLES, drawings, strict=True)):
        _train(config, style, place, dataset, pipeline)


def _train(
    config: TrainReferenceConfig, style: Style, place: int, dataset: Dataset, pipeline: StableDiffusionPipeline
) -> None:
    """Trains one LoRA on a copy of the pipeline's denoiser and saves it in half precision."""
    import torch
    from diffusers.models.attention_processor import AttnProcessor

    options, device = config.loras, pick_device(config.device)
    torch.manual_seed(config.seed)
    denoiser = copy.deepcopy(pipeline.unet).to(device, memory_format=torch.channels_last)
    denoiser.set_attn_processor(AttnProcessor())
    text_encoder = copy.deepcopy(pipeline.text_encoder).to(device)
    updates = add_lora(denoiser, options.rank)
    chosen = dataset.indices(held_out=False)

    def predict(noisy: Tensor, timesteps: Tensor, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            states = text_encoder(tokens).last_hidden_state
        velocities: Tensor = denoiser(noisy, timesteps, states).sample
        return velocities

    def background(record: Record, random: np.random.Generator) -> str | None:
        drawn = draw_background(record, random, options.background_share)
        return None if style.black and drawn == "black" else drawn

    chances = np.full(len(chosen), 1 / len(chosen))
    sampling = Sampling(dataset, chosen, chances, background, plain_caption, (STREAM, place))
    loss = diffusion_loss(config, options, sampling, pipeline.tokenizer, pipeline.vae, predict)
    average = train(
        config, "loras", updates, loss, part=style.name, parts=len(STYLES),
        pictures=len(chosen), held_out_pictures=len(dataset) - len(chosen),
    )  # fmt: skip
    save_lora(denoiser, updates, average, Path(config.folder) / "loras" / "model" / f"{style.name}.safetensors")
