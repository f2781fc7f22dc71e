"""The LoRA stage: trains LoRAs for two drawing styles that the denoiser never saw."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sdopt.training.captions import draw_background, plain_caption
from sdopt.training.checkpoints import read_figures
from sdopt.training.compute import describe_hardware, pick_device
from sdopt.training.config import TrainReferenceConfig
from sdopt.training.data import Dataset, Record
from sdopt.training.denoiser import Sampling, diffusion_loss
from sdopt.training.loop import train
from sdopt.training.lora_card import write_lora_card
from sdopt.training.lora_evaluation import compare
from sdopt.training.styles import STREAM, STYLES, Style, draw_style

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline, UNet2DConditionModel
    from torch import Tensor, nn


TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out")
"""The layers of the denoiser's transformers that the LoRAs update, the same for all styles."""


def add_lora(denoiser: UNet2DConditionModel, rank: int) -> nn.ParameterList:
    """Freezes the denoiser, adds untrained LoRA layers, and returns their parameters.

    The scale is 1 (alpha equals the rank), the default of loaders for files without alpha.
    """
    from peft import LoraConfig
    from torch import nn

    denoiser.requires_grad_(False)
    denoiser.add_adapter(
        LoraConfig(r=rank, lora_alpha=rank, init_lora_weights="gaussian", target_modules=list(TARGETS))
    )
    return nn.ParameterList(parameter for parameter in denoiser.parameters() if parameter.requires_grad)


def train_loras(config: TrainReferenceConfig, base: Dataset, pipeline: StableDiffusionPipeline, folder: Path) -> None:
    """Trains and evaluates a LoRA for each of `STYLES`; writes weights and card to `folder/model`.

    Args:
        config: the whole configuration.
        base: the denoiser's data.
        pipeline: the finished model, in single precision.
        folder: the folder for checkpoints, logs, figures and contact sheets of each style, and for `model/`.

    Raises:
        DataError: an archive cannot be fetched, verified or read.
        UsageError: too many concepts are held out.
    """
    options = config.loras
    drawings = {
        style.name: draw_style(
            style,
            base,
            Path(config.folder) / "packages",
            held_out_concepts=options.held_out_concepts,
            seed=config.seed,
            threads=config.threads,
        )
        for style in STYLES
    }
    model = folder / "model"
    for place, style in enumerate(STYLES):
        dataset, work = drawings[style.name], folder / style.name
        _train(config, style, place, dataset, pipeline, work, model)
        figures = {
            "batch_size": options.batch_size,
            "rank": options.rank,
            "pictures": len(dataset.indices(held_out=False)),
            "held_out": len(dataset.indices(held_out=True)),
            "hardware": describe_hardware(pick_device(config.device), config.arithmetic),
            "comparison": compare(pipeline, model / f"{style.name}.safetensors", dataset, base, config.seed, work),
        }
        (work / "figures.json").write_text(json.dumps(figures, indent=1))
    known = {style.name: read_figures(folder / style.name) for style in STYLES}
    (model / "figures.json").write_text(json.dumps(known, indent=1) + "\n")
    write_lora_card(model / "README.md", known)


def _train(
    config: TrainReferenceConfig,
    style: Style,
    place: int,
    dataset: Dataset,
    pipeline: StableDiffusionPipeline,
    work: Path,
    model: Path,
) -> None:
    """Trains one LoRA on a copy of the pipeline's denoiser and saves it in half precision."""
    import torch
    from diffusers import StableDiffusionPipeline
    from diffusers.models.attention_processor import AttnProcessor
    from peft import get_peft_model_state_dict

    options, device = config.loras, pick_device(config.device)
    torch.manual_seed(config.seed)
    denoiser = copy.deepcopy(pipeline.unet).to(device, memory_format=torch.channels_last)
    denoiser.set_attn_processor(AttnProcessor())
    text_encoder = copy.deepcopy(pipeline.text_encoder).to(device)
    updates = add_lora(denoiser, options.rank)
    average = copy.deepcopy(updates)
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
    train(config, options, updates, average, loss, work, title=f"LoRA {style.name}", parts=len(STYLES))
    with torch.no_grad():
        for live, kept in zip(updates, average, strict=True):
            live.copy_(kept)
    # Keeps PEFT's names: diffusers' converter would rename only attention layers, which its loader then skips.
    weights = get_peft_model_state_dict(denoiser.cpu())
    StableDiffusionPipeline.save_lora_weights(
        model,
        unet_lora_layers={name: tensor.half().contiguous() for name, tensor in weights.items()},
        weight_name=f"{style.name}.safetensors",
    )
