"""The denoiser's stage: the UNet and the text encoder, trained together on cached latents."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sdopt.training.architecture import build_denoiser, build_scheduler, build_text_encoder
from sdopt.training.autoencoder import encode_all
from sdopt.training.config import DiffusionConfig, TrainReferenceConfig
from sdopt.training.data import BACKGROUNDS, WHITE, Dataset, Record, caption, draw_background
from sdopt.training.loop import Progress, arithmetic, describe_hardware, generator, load_weights, pick_device, train

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from torch import Tensor, nn
    from transformers import CLIPTextModel, CLIPTokenizer


STREAM = 2
"""This stage's place in the seed's path."""


def join(denoiser: UNet2DConditionModel, text_encoder: CLIPTextModel) -> nn.ModuleDict:
    """Both networks as one module, under the names that checkpoints use."""
    from torch import nn

    return nn.ModuleDict({"denoiser": denoiser, "text_encoder": text_encoder})


def load_networks(folder: Path) -> nn.ModuleDict:
    """The averaged weights that `train_denoiser` left in `folder`, on the CPU.

    Raises:
        UsageError: the stage has not run.
    """
    networks = join(build_denoiser(), build_text_encoder())
    load_weights(folder / "checkpoint" / "average.safetensors", networks)
    return networks.eval().requires_grad_(False)


def start_networks(pipeline: str | None) -> tuple[UNet2DConditionModel, CLIPTextModel]:
    """The networks that training starts from: those of a pipeline folder, in single precision, or fresh ones."""
    import torch
    from diffusers import UNet2DConditionModel
    from transformers import CLIPTextModel

    if pipeline is None:
        return build_denoiser(), build_text_encoder()
    return (
        UNet2DConditionModel.from_pretrained(pipeline, subfolder="unet", dtype=torch.float32),
        CLIPTextModel.from_pretrained(pipeline, subfolder="text_encoder", dtype=torch.float32),
    )


def loss_weights(alphas_cumprod: Tensor, gamma: float) -> Tensor:
    """Weight of the v-prediction loss at every timestep, shape (timesteps,): (min(SNR, γ) + 1) / (SNR + 1).

    The plain v-loss weighs the error of the clean latents with SNR + 1 (Salimans and Ho 2022), which wastes a small
    model on the last traces of noise, so the SNR is cut at γ as in Hang et al. 2023. Their own weight for v-prediction,
    min(SNR, γ) / (SNR + 1), goes to zero under heavy noise. Tried here, it left untrained just that part in which the
    caption decides the layout: an 8×8 latent has no redundancy from which to see through heavy noise.
    """
    signal_to_noise = alphas_cumprod / (1 - alphas_cumprod)
    return (signal_to_noise.clamp(max=gamma) + 1) / (signal_to_noise + 1)


def spread_timesteps(count: int, timesteps: int, random: np.random.Generator) -> np.ndarray:
    """`count` timesteps, one from each of `count` equal intervals, in random order: uniform, with less variance."""
    places = (np.arange(count) + random.random(count)) / count
    return random.permutation((places * timesteps).astype(np.int64))


def diffusion_loss(
    config: TrainReferenceConfig,
    options: DiffusionConfig,
    dataset: Dataset,
    chosen: np.ndarray,
    tokenizer: CLIPTokenizer,
    autoencoder: AutoencoderKL,
    predict: Callable[[Tensor, Tensor, Tensor], Tensor],
    *,
    chances: np.ndarray,
    put: Callable[[Record, np.random.Generator], str | None],
    write: Callable[[Record, np.random.Generator, str | None], str],
    path: tuple[int, ...],
) -> Callable[[int], Tensor]:
    """The weighted v-prediction loss of one step, as `fit` calls it, over latents that are computed here once.

    Args:
        config: the whole configuration.
        options: of the stage.
        dataset: pictures and captions.
        chosen: positions of the pictures to train on, shape (n,).
        tokenizer: of the captions.
        autoencoder: encodes the pictures; its `scaling_factor` must be set.
        predict: noisy latents (b, 8, 8, 8), timesteps (b,) and token ids (b, 24) to predicted velocities (b, 8, 8, 8).
        chances: of each chosen picture to be drawn, shape (n,), with sum 1.
        put: chooses the background of a picture; None is white.
        write: one caption of a picture on that background.
        path: the stage's place in the seed's path.
    """
    import torch

    device = pick_device(config.device)
    alphas = build_scheduler().alphas_cumprod.to(device)
    weights = loss_weights(alphas, options.snr_gamma)
    records = [dataset.records[i] for i in chosen]
    # Of every picture the latents on white, and then on each background.
    backgrounds = {None: 0} | {name: place for place, name in enumerate(BACKGROUNDS, start=1)}
    encoded = [
        encode_all(autoencoder, dataset.on(chosen, np.array([colour] * len(chosen), np.uint8)))
        for colour in (WHITE, *BACKGROUNDS.values())
    ]
    means, deviations = (torch.stack(parts).to(device) for parts in zip(*encoded, strict=True))
    scale = autoencoder.config.scaling_factor

    def loss(step: int) -> Tensor:
        # Two streams for one step: numpy's has weighted choices, torch's fills the noise on its own device.
        random = np.random.default_rng([config.seed, *path, step])
        picked = random.choice(len(records), size=options.batch_size, p=chances)
        behind = [put(records[index], random) for index in picked]
        texts = [
            "" if random.random() < options.caption_dropout else write(records[index], random, background)
            for index, background in zip(picked, behind, strict=True)
        ]
        places = [backgrounds[background] for background in behind]
        tokens = tokenizer(
            texts, padding="max_length", truncation=True, max_length=tokenizer.model_max_length, return_tensors="pt"
        )
        timesteps = torch.from_numpy(spread_timesteps(options.batch_size, len(alphas), random)).to(device)
        torch_random = generator(config.seed, *path, step)
        shape = (2, options.batch_size, *means.shape[2:])
        sampling, noise = torch.randn(shape, generator=torch_random).to(device)
        clean = scale * (means[places, picked] + deviations[places, picked] * sampling)
        signal = alphas[timesteps, None, None, None].sqrt()
        sigma = (1 - alphas[timesteps, None, None, None]).sqrt()
        noisy = (signal * clean + sigma * noise).contiguous(memory_format=torch.channels_last)
        with arithmetic(config.arithmetic, device):
            predicted = predict(noisy, timesteps, tokens.input_ids.to(device))
        error = (predicted.float() - (signal * noise - sigma * clean)).square().mean(dim=(1, 2, 3))
        return (weights[timesteps] * error).mean()

    return loss


def train_denoiser(
    config: TrainReferenceConfig,
    dataset: Dataset,
    tokenizer: CLIPTokenizer,
    autoencoder: AutoencoderKL,
    folder: Path,
    export: Callable[[], None] | None = None,
) -> Progress:
    """Train both networks on the training pictures' latents; see `fit` for what lands in `folder`.

    Args:
        config: the whole configuration.
        dataset: pictures and captions.
        tokenizer: of the captions.
        autoencoder: encodes the pictures once; its `scaling_factor` must be set.
        folder: for checkpoints and the log.
        export: called every `export.every_minutes`, after a checkpoint.
    """
    import torch
    from diffusers.models.attention_processor import AttnProcessor

    options, device = config.denoiser, pick_device(config.device)
    chosen = dataset.indices(held_out=False)
    records = [dataset.records[i] for i in chosen]
    chances = np.array([options.flat_weight if record.style == "flat" else 1.0 for record in records])
    chances /= chances.sum()

    torch.manual_seed(config.seed)
    denoiser, text_encoder = start_networks(config.start_from)
    denoiser.to(device, memory_format=torch.channels_last)
    text_encoder.to(device)
    # As in the autoencoder: the fused kernels' backward passes are slow on CPUs.
    denoiser.set_attn_processor(AttnProcessor())
    text_encoder.set_attn_implementation("eager")
    networks = join(denoiser, text_encoder)
    average = copy.deepcopy(networks)

    def predict(noisy: Tensor, timesteps: Tensor, tokens: Tensor) -> Tensor:
        states = text_encoder(tokens).last_hidden_state
        return denoiser(noisy, timesteps, states).sample

    def put(record: Record, random: np.random.Generator) -> str | None:
        return draw_background(record, random, options.background_share)

    loss = diffusion_loss(
        config,
        options,
        dataset,
        chosen,
        tokenizer,
        autoencoder,
        predict,
        chances=chances,
        put=put,
        write=caption,
        path=(STREAM,),
    )
    figures = {
        "batch_size": options.batch_size,
        "caption_dropout": options.caption_dropout,
        "flat_weight": options.flat_weight,
        "background_share": options.background_share,
        "snr_gamma": options.snr_gamma,
        "start_from": config.start_from,
        "pictures": len(records),
        "hardware": describe_hardware(device, config.arithmetic),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "figures.json").write_text(json.dumps(figures, indent=1))
    return train(
        config,
        options,
        networks,
        loss,
        folder,
        title="denoiser",
        average=average,
        export=export,
    )
