"""The denoiser stage: trains the UNet and the text encoder together on cached latents."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTokenizer

from sdopt.apps.training.autoencoder import encode_all
from sdopt.apps.training.captions import caption, draw_background
from sdopt.apps.training.config import (
    CaptionedConfig,
    DiffusionConfig,
    TrainReferenceConfig,
)
from sdopt.apps.training.data import BACKGROUNDS, Dataset, PictureRecord
from sdopt.apps.training.loop import (
    STREAMS,
    generator,
    in_precision,
    on_device,
    pick_device,
    train,
)
from sdopt.apps.training.networks import (
    build_denoiser,
    build_scheduler,
    build_text_encoder,
)


def join(denoiser: UNet2DConditionModel, text_encoder: CLIPTextModel) -> nn.ModuleDict:
    """Returns both networks in one module, with the names that checkpoints use."""
    return nn.ModuleDict({"denoiser": denoiser, "text_encoder": text_encoder})


def start_networks(pipeline: str | None) -> tuple[UNet2DConditionModel, CLIPTextModel]:
    """Returns the networks to train: those of a pipeline folder, in single precision, or untrained networks."""
    if pipeline is None:
        return build_denoiser(), build_text_encoder()
    return (
        UNet2DConditionModel.from_pretrained(
            pipeline, subfolder="unet", dtype=torch.float32
        ),
        CLIPTextModel.from_pretrained(
            pipeline, subfolder="text_encoder", dtype=torch.float32
        ),
    )


def loss_weights(alphas_cumprod: Tensor, gamma: float) -> Tensor:
    """Returns the weight of the v-prediction loss at each timestep, (timesteps,): (min(SNR, γ) + 1) / (SNR + 1).

    The plain v-loss weights the error of the clean latents by SNR + 1 (Salimans and Ho 2022), which wastes a small
    model's capacity on the last traces of noise, so the SNR is clipped at γ as in Hang et al. 2023. Their weight for
    v-prediction, min(SNR, γ) / (SNR + 1), goes to zero for heavy noise. In experiments, this left those steps untrained
    in which the caption determines the layout: an 8×8 latent has no redundancy that is visible through heavy noise.
    """
    signal_to_noise = alphas_cumprod / (1 - alphas_cumprod)
    return (signal_to_noise.clamp(max=gamma) + 1) / (signal_to_noise + 1)


def spread_timesteps(
    count: int, timesteps: int, random: np.random.Generator
) -> np.ndarray:
    """Draws one timestep from each of `count` equal intervals, in random order: uniform, with lower variance."""
    places = (np.arange(count) + random.random(count)) / count
    return random.permutation((places * timesteps).astype(np.int64))


def picture_chances(
    dataset: Dataset, flat_weight: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the indices of the training pictures, int64 (n,), and the probability of each, (n,), with sum 1."""
    chosen = dataset.indices(held_out=False)
    is_flat = np.array([dataset.records[index].style == "flat" for index in chosen])
    chances = np.where(is_flat, flat_weight, 1.0)
    return chosen, chances / chances.sum()


CaptionedLatents = tuple[list[str], Tensor, Tensor, np.random.Generator]
"""The pictures of one step: the caption of each, "" where it was dropped; scaled latents, float32 (n, 8, 8, 8); noise,
standard normal, likewise; and the step's random stream, for what else is drawn."""


def captioned_latents(
    config: TrainReferenceConfig,
    stage: str,
    dataset: Dataset,
    autoencoder: AutoencoderKL,
    chances: np.ndarray,
    part: tuple[int, ...] = (),
    caption: Callable[[PictureRecord, np.random.Generator, str | None], str] = caption,
    avoided: str | None = None,
) -> Callable[[int], CaptionedLatents]:
    """Computes all latents once, and returns what draws the pictures of a step.

    Args:
        config: the whole configuration.
        stage: the stage, whose section of the configuration holds.
        dataset: the pictures, of which the held-out ones are left out.
        autoencoder: its `scaling_factor` must be set.
        chances: probability of each training picture, (n,), with sum 1.
        part: number of this training among several of the stage.
        caption: draws a caption of a picture on a background; None is white.
        avoided: a background that becomes white.
    """
    device, path = pick_device(config.device), (STREAMS[stage], *part)
    options: CaptionedConfig = getattr(config, stage)
    chosen = dataset.indices(held_out=False)
    records = [dataset.records[i] for i in chosen]
    # Encodes each picture on white, and then on each background.
    backgrounds = {name: place for place, name in enumerate((None, *BACKGROUNDS))}
    encoded = [
        encode_all(autoencoder, dataset.on_named(chosen, [name] * len(records)))
        for name in backgrounds
    ]
    means, deviations = (
        torch.stack(parts).to(device) for parts in zip(*encoded, strict=True)
    )
    scale = autoencoder.config.scaling_factor

    def draw(step: int) -> CaptionedLatents:
        # Two random streams per step: NumPy's supports weighted choices, and PyTorch's draws the noise.
        random = np.random.default_rng([config.seed, *path, step])
        picked = random.choice(len(records), size=options.batch_size, p=chances)
        behind = [
            draw_background(records[index], random, options.background_share)
            for index in picked
        ]
        texts = [""] * len(behind)
        for number, index in enumerate(picked):
            if behind[number] == avoided:
                behind[number] = None
            if random.random() >= options.caption_dropout:
                texts[number] = caption(records[index], random, behind[number])
        places = [backgrounds[background] for background in behind]
        shape = (2, options.batch_size, *means.shape[2:])
        spread, noise = torch.randn(
            shape, generator=generator(config.seed, *path, step)
        ).to(device)
        clean = scale * (means[places, picked] + deviations[places, picked] * spread)
        return texts, clean, noise, random

    return draw


def token_ids(tokenizer: CLIPTokenizer, captions: list[str]) -> Tensor:
    """Returns the token ids of captions, (n, 24)."""
    tokens = tokenizer(
        captions,
        padding="max_length",
        truncation=True,
        max_length=tokenizer.model_max_length,
        return_tensors="pt",
    )
    ids: Tensor = tokens.input_ids
    return ids


def diffusion_loss(
    config: TrainReferenceConfig,
    options: DiffusionConfig,
    draw: Callable[[int], CaptionedLatents],
    networks: Mapping[str, Any],
    tokenizer: CLIPTokenizer,
) -> Callable[[int], Tensor]:
    """Returns the weighted v-prediction loss as a function of the step, for `train`.

    Args:
        config: the whole configuration.
        options: the section of the stage.
        draw: draws the pictures of a step, as `captioned_latents` returns it.
        networks: `denoiser` and `text_encoder`, of which what requires gradients is trained.
        tokenizer: the tokenizer for captions.
    """
    device = pick_device(config.device)
    alphas = build_scheduler().alphas_cumprod.to(device)
    weights = loss_weights(alphas, options.snr_gamma)

    def loss(step: int) -> Tensor:
        captions, clean, noise, random = draw(step)
        timesteps = torch.from_numpy(
            spread_timesteps(len(captions), len(alphas), random)
        ).to(device)
        signal = alphas[timesteps, None, None, None].sqrt()
        sigma = (1 - alphas[timesteps, None, None, None]).sqrt()
        noisy = (signal * clean + sigma * noise).contiguous(
            memory_format=torch.channels_last
        )
        with in_precision(config.arithmetic, device):
            states = networks["text_encoder"](
                token_ids(tokenizer, captions).to(device)
            ).last_hidden_state
            predicted = networks["denoiser"](noisy, timesteps, states).sample
        error = (
            (predicted.float() - (signal * noise - sigma * clean))
            .square()
            .mean(dim=(1, 2, 3))
        )
        weighted: Tensor = (weights[timesteps] * error).mean()
        return weighted

    return loss


def train_denoiser(
    config: TrainReferenceConfig,
    dataset: Dataset,
    tokenizer: CLIPTokenizer,
    autoencoder: AutoencoderKL,
) -> None:
    """Trains both networks on the latents of the training pictures; the autoencoder's `scaling_factor` must be set."""
    options, device = config.denoiser, pick_device(config.device)
    chosen, chances = picture_chances(dataset, options.flat_weight)

    torch.manual_seed(config.seed)
    denoiser, text_encoder = start_networks(config.start_from)
    on_device(denoiser, device)
    text_encoder.to(device).set_attn_implementation("eager")

    networks = join(denoiser, text_encoder)
    draw = captioned_latents(config, "denoiser", dataset, autoencoder, chances)
    loss = diffusion_loss(config, options, draw, {**networks}, tokenizer)
    train(
        config, "denoiser", networks, loss,
        start_from=config.start_from, pictures=len(chosen),
    )  # fmt: skip
