"""The autoencoder stage, which trains the network between pictures and 8×8×8 latents, and its distillation."""

import copy
import math
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor

from sdopt.apps.training.config import TrainReferenceConfig
from sdopt.apps.training.data import Dataset
from sdopt.apps.training.loop import (
    STREAMS,
    generator,
    in_precision,
    missing_stage,
    on_device,
    pick_device,
    train,
)
from sdopt.apps.training.networks import (
    LATENT_CHANNELS,
    build_autoencoder,
    build_tiny_autoencoder,
)

AT_ONCE = 64
"""Number of pictures that are encoded together."""

VIEWS = 2
"""Number of copies of each picture from which the tiny autoencoder learns, with different backgrounds and noise."""


def pixels(images: np.ndarray) -> Tensor:
    """Converts uint8 (n, 64, 64, 3) to float32 (n, 3, 64, 64) in [-1, 1]."""
    channels_first = torch.from_numpy(images).permute(0, 3, 1, 2)
    return channels_first.float().div_(127.5).sub_(1.0)


def picture_loss(output: Tensor, target: Tensor, edge_weight: float) -> Tensor:
    """Returns the mean absolute and squared error, plus the weighted absolute error of finite differences.

    The last one is of horizontal and vertical neighbours; without it, an L1 loss blurs edges.
    """
    error = output - target
    across = error.diff(dim=-1).abs().mean()
    down = error.diff(dim=-2).abs().mean()
    edges = across + down
    errors = error.abs().mean() + error.square().mean()
    return errors + edge_weight * edges


def peak_signal_to_noise(output: Tensor, target: Tensor) -> Tensor:
    """Returns the PSNR in dB of each picture, shape (n,), for pictures in [-1, 1]."""
    error = output.clamp(-1, 1) - target
    power = error.square().mean(dim=(1, 2, 3))
    return 10 * torch.log10(4.0 / power.clamp_min(1e-12))


def on_any_colour(
    dataset: Dataset,
    chosen: np.ndarray,
    share: float,
    random: torch.Generator,
) -> np.ndarray:
    """Returns the chosen pictures, a share of them on random colours and the others on white: uint8 (n, 64, 64, 3)."""
    colours = torch.randint(256, (len(chosen), 3), generator=random, dtype=torch.uint8)
    on_white = torch.rand(len(chosen), generator=random) >= share
    colours[on_white] = 255
    return dataset.on(chosen, colours.numpy())


def train_autoencoder(config: TrainReferenceConfig, dataset: Dataset) -> None:
    """Trains with L1, squared, edge and KL losses; writes the network to `model/` in the stage's folder."""
    options = config.autoencoder
    device = pick_device(config.device)
    torch.manual_seed(config.seed)
    network = on_device(start_autoencoder(config.start_from), device)
    chosen = dataset.indices(held_out=False)

    def loss(step: int) -> Tensor:
        random = generator(config.seed, STREAMS["autoencoder"], step)
        picked = torch.randint(len(chosen), (options.batch_size,), generator=random)
        pictures = on_any_colour(
            dataset,
            chosen[picked.numpy()],
            options.background_share,
            random,
        )
        target = _moved(pixels(pictures), device)
        with in_precision(config.arithmetic, device):
            encoded = network.encoder(target)
            moments = network.quant_conv(encoded).float()
            mean, log_variance = moments.chunk(2, dim=1)
            log_variance = log_variance.clamp(-30.0, 20.0)
            noise = torch.randn(mean.shape, generator=random).to(device)
            deviation = (0.5 * log_variance).exp()
            latents = mean + deviation * noise
            decoded = network.decoder(network.post_quant_conv(latents))
            output = decoded.float()
        divergences = mean.square() + log_variance.exp() - 1.0 - log_variance
        divergence = 0.5 * divergences.mean()
        of_pictures = picture_loss(output, target, options.edge_weight)
        total: Tensor = of_pictures + options.kl_weight * divergence
        return total

    average = train(
        config,
        "autoencoder",
        network,
        loss,
        start_from=config.start_from,
        pictures=len(chosen),
    )
    finished = build_autoencoder()
    finished.load_state_dict(average.state_dict())
    finished.eval().requires_grad_(False)
    pictures = dataset.images[chosen]
    mean, _ = encode_all(finished, pictures)
    normalise_latents(finished, mean)
    mean, deviation = encode_all(finished, pictures)
    finished.register_to_config(scaling_factor=scaling_factor(mean, deviation))
    finished.save_pretrained(Path(config.folder) / "autoencoder" / "model")


def start_autoencoder(pipeline: str | None) -> AutoencoderKL:
    """Returns the network to train: that of a pipeline folder, or an untrained network."""
    if pipeline is not None:
        return AutoencoderKL.from_pretrained(
            pipeline, subfolder="vae", dtype=torch.float32
        )
    network = build_autoencoder()
    # The decoder would learn to ignore latents with as much noise as signal, so they start with almost no noise.
    with torch.no_grad():
        network.quant_conv.bias[LATENT_CHANNELS:] = -6.0
    return network


def load_autoencoder(folder: Path) -> AutoencoderKL:
    """Loads the network that `train_autoencoder` saved in `folder`, on the CPU, with its `scaling_factor`."""
    if not (folder / "model").exists():
        raise missing_stage("autoencoder", folder / "model")
    return AutoencoderKL.from_pretrained(folder / "model").eval().requires_grad_(False)


def batches(images: np.ndarray) -> list[np.ndarray]:
    """Splits pictures (n, …) into batches of at most `AT_ONCE`."""
    return np.split(images, range(AT_ONCE, len(images), AT_ONCE))


def encode_all(network: AutoencoderKL, images: np.ndarray) -> tuple[Tensor, Tensor]:
    """Returns mean and standard deviation of each picture's unscaled latents, each float32 (n, 8, 8, 8)."""
    with torch.inference_mode():
        means = []
        deviations = []
        for batch in batches(images):
            latents = network.encode(pixels(batch)).latent_dist
            means.append(latents.mean)
            deviations.append(latents.std)
        mean = torch.cat(means)
        deviation = torch.cat(deviations)
    return mean.clone(), deviation.clone()


def normalise_latents(network: AutoencoderKL, mean: Tensor) -> None:
    """Normalizes each latent channel to mean 0 and standard deviation 1, in place, without changing the output.

    `StableDiffusionPipeline` scales all latents by one number and cannot shift them, but the denoiser learns fastest if
    all channels have equal distributions. The 1×1 convolutions on both sides of the latents absorb the change exactly.
    """
    centre = mean.mean(dim=(0, 2, 3))
    spread = mean.std(dim=(0, 2, 3))
    before = network.quant_conv
    after = network.post_quant_conv
    with torch.no_grad():
        after.bias += after.weight[..., 0, 0] @ centre
        after.weight *= spread[None, :, None, None]
        before.bias[:LATENT_CHANNELS] -= centre
        before.bias[:LATENT_CHANNELS] /= spread
        before.weight[:LATENT_CHANNELS] /= spread[:, None, None, None]
        # The other half of the channels are logarithms of variances.
        before.bias[LATENT_CHANNELS:] -= 2 * spread.log()


def scaling_factor(mean: Tensor, deviation: Tensor) -> float:
    """Returns the factor that gives sampled latents unit variance (Rombach et al. 2022, appendix G)."""
    variance = mean.var() + deviation.square().mean()
    return 1.0 / math.sqrt(float(variance))


@torch.inference_mode()
def reconstruction_psnr(network: AutoencoderKL, images: np.ndarray) -> float:
    """Returns the mean PSNR in dB of pictures, uint8 (n, 64, 64, 3), after reconstruction from their mean latents."""
    values = []
    for target in map(pixels, batches(images)):
        latents = network.encode(target).latent_dist.mode()
        output = network.decode(latents).sample
        values.append(peak_signal_to_noise(output, target))
    return float(torch.cat(values).mean())


def train_tiny_autoencoder(
    config: TrainReferenceConfig,
    dataset: Dataset,
    teacher: AutoencoderKL,
) -> None:
    """Distils `teacher`, whose `scaling_factor` must be set, on the training pictures.

    The encoder learns the teacher's mean latents times its scaling factor, because diffusers gives an `AutoencoderTiny`
    the factor 1. The decoder learns the teacher's pictures instead of the real ones, so that all differences between
    teacher and student are due to the distillation.
    """
    options = config.tiny_autoencoder
    device = pick_device(config.device)
    torch.manual_seed(config.seed)
    network = build_tiny_autoencoder().to(device, memory_format=torch.channels_last)
    pictures, latents, disturbed, targets = prepare_lessons(config, dataset, teacher)

    def loss(step: int) -> Tensor:
        random = generator(config.seed, STREAMS["tiny_autoencoder"], step)
        drawn = torch.randint(len(pictures), (options.batch_size,), generator=random)
        picked = drawn.numpy()
        shown = _moved(pixels(pictures[picked]), device)
        target = _moved(pixels(targets[picked]), device)
        with in_precision(config.arithmetic, device):
            encoded = network.encode(shown).latents.float()
            decoded = network.decode(_moved(disturbed[picked], device))
            output = decoded.sample.float()
        error = encoded - latents[picked].to(device)
        latent = error.square().mean()
        total: Tensor = picture_loss(output, target, options.edge_weight) + latent
        return total

    train(config, "tiny_autoencoder", network, loss, pictures=len(pictures) // VIEWS)


def _moved(pictures: Tensor, device: torch.device) -> Tensor:
    """Moves pictures or latents, float32 (n, channels, height, width), to a device."""
    return pictures.to(device, memory_format=torch.channels_last)


def prepare_lessons(
    config: TrainReferenceConfig,
    dataset: Dataset,
    teacher: AutoencoderKL,
) -> tuple[np.ndarray, Tensor, Tensor, np.ndarray]:
    """Computes the teacher's outputs for all training pictures once, because the teacher costs more than a step.

    Returns:
        Each picture `VIEWS` times, on white or on a random colour, uint8 (n, 64, 64, 3); its scaled latents, float32
        (n, 8, 8, 8); these latents with noise; and the teacher's picture of the noisy latents, uint8 (n, 64, 64, 3).
    """
    options = config.tiny_autoencoder
    device = pick_device(config.device)
    guide = on_device(copy.deepcopy(teacher), device)
    scale = guide.config.scaling_factor
    chosen = np.tile(dataset.indices(held_out=False), VIEWS)
    random = generator(config.seed, STREAMS["tiny_autoencoder"])
    pictures = on_any_colour(dataset, chosen, options.background_share, random)
    encoded = []
    noisy = []
    decoded = []
    with torch.inference_mode():
        count = math.ceil(len(pictures) / AT_ONCE)
        for batch in np.array_split(pictures, count):
            shown = _moved(pixels(batch), device)
            with in_precision(config.arithmetic, device):
                latents = guide.encode(shown).latent_dist.mode()
                latents = scale * latents.float()
                shares = torch.rand(len(batch), 1, 1, 1, generator=random)
                noise = torch.randn(latents.shape, generator=random)
                noise = options.latent_noise * shares * noise
                disturbed = latents + noise.to(device)
                output = guide.decode(disturbed / scale).sample.float()
            encoded.append(latents.cpu())
            noisy.append(disturbed.cpu())
            levels = output.clamp(-1, 1).add(1).mul(127.5)
            images = levels.round().byte().permute(0, 2, 3, 1)
            decoded.append(images.cpu().numpy())
    return (
        pictures,
        torch.cat(encoded).clone(),
        torch.cat(noisy).clone(),
        np.concatenate(decoded),
    )
