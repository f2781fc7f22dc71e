"""The tiny autoencoder's stage: a quicker stand-in for the autoencoder, distilled from it."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sdopt.analysis.timing import ratio
from sdopt.measure.operations import tflop
from sdopt.training.architecture import LATENT_CHANNELS, LATENT_SIZE, build_autoencoder, build_tiny_autoencoder
from sdopt.training.autoencoder import edge_loss, peak_signal_to_noise, pixels
from sdopt.training.config import TrainReferenceConfig
from sdopt.training.evaluation import Figure, at_least
from sdopt.training.loop import Progress, arithmetic, describe_hardware, generator, missing_stage, pick_device, train
from sdopt.training.sheet import GUIDANCE, STEPS

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, AutoencoderTiny, StableDiffusionPipeline
    from torch import Tensor

    from sdopt.results.records import Interval
    from sdopt.training.data import Dataset


STREAM = 4
"""This stage's place in the seed's path."""

VIEWS = 2
"""How many times each training picture is shown, with other backgrounds and other noise."""


def train_tiny_autoencoder(
    config: TrainReferenceConfig, dataset: Dataset, teacher: AutoencoderKL, folder: Path
) -> Progress:
    """Distil `teacher` on the training pictures; see `fit` for what lands in `folder`, beside `model/`.

    The encoder learns the teacher's mean latents, times its scaling factor: diffusers gives an `AutoencoderTiny` the
    factor 1, so it sees the latents as the denoiser does. The decoder learns the teacher's pictures, not the real ones:
    in a comparison of the two, what differs is then the distillation's fault alone.

    Args:
        config: the whole configuration.
        dataset: pictures.
        teacher: the finished autoencoder; its `scaling_factor` must be set.
        folder: for checkpoints, the log, `figures.json` and `model/`.
    """
    import torch

    options, device = config.tiny_autoencoder, pick_device(config.device)
    torch.manual_seed(config.seed)
    network = build_tiny_autoencoder().to(device, memory_format=torch.channels_last)
    average = copy.deepcopy(network)
    pictures, latents, disturbed, targets = prepare_lessons(config, dataset, teacher)

    def loss(step: int) -> Tensor:
        random = generator(config.seed, STREAM, step)
        picked = torch.randint(len(pictures), (options.batch_size,), generator=random).numpy()
        shown, target = (
            pixels(images[picked]).to(device, memory_format=torch.channels_last) for images in (pictures, targets)
        )
        with arithmetic(config.arithmetic, device):
            encoded = network.encode(shown).latents.float()
            output = network.decode(disturbed[picked].to(device, memory_format=torch.channels_last)).sample.float()
        pixel = (output - target).abs().mean() + (output - target).square().mean()
        latent = (encoded - latents[picked].to(device)).square().mean()
        return pixel + options.edge_weight * edge_loss(output, target) + latent

    done = train(
        config,
        options,
        network,
        loss,
        folder,
        title="tiny autoencoder",
        average=average,
    )
    finished = build_tiny_autoencoder()
    finished.load_state_dict(average.state_dict())
    # What ships is rounded, so what is measured is too.
    finished.eval().requires_grad_(False).half()
    finished.save_pretrained(folder / "model")
    figures = {
        "batch_size": options.batch_size,
        "latent_noise": options.latent_noise,
        "hardware": describe_hardware(device, config.arithmetic),
    }
    figures |= compare_on_pictures(finished.float(), teacher, dataset)
    (folder / "figures.json").write_text(json.dumps(figures, indent=1))
    return done


def prepare_lessons(
    config: TrainReferenceConfig, dataset: Dataset, teacher: AutoencoderKL
) -> tuple[np.ndarray, Tensor, Tensor, np.ndarray]:
    """What the teacher makes of every training picture, once and for all: to run it costs more than to train.

    Returns:
        Each picture `VIEWS` times, on white or on a random colour, uint8 (n, 64, 64, 3); its scaled latents, float32
        (n, 8, 8, 8); the same with noise on them; and the picture that the teacher decodes from those, like the first.
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
            with arithmetic(config.arithmetic, device):
                latents = scale * guide.encode(shown).latent_dist.mode().float()
                reach = options.latent_noise * torch.rand(len(batch), 1, 1, 1, generator=random)
                disturbed = latents + (reach * torch.randn(latents.shape, generator=random)).to(device)
                output = guide.decode(disturbed / scale).sample.float()
            found.append(latents.cpu())
            moved.append(disturbed.cpu())
            decoded.append(output.clamp(-1, 1).add(1).mul(127.5).round().byte().permute(0, 2, 3, 1).cpu().numpy())
    return pictures, torch.cat(found).clone(), torch.cat(moved).clone(), np.concatenate(decoded)


def load_tiny_autoencoder(folder: Path) -> AutoencoderTiny:
    """The finished network that `train_tiny_autoencoder` left in `folder`, on the CPU, in single precision.

    Raises:
        UsageError: the stage has not run.
    """
    import torch
    from diffusers import AutoencoderTiny

    if not (folder / "model").exists():
        raise missing_stage("tiny_autoencoder", folder / "model")
    return AutoencoderTiny.from_pretrained(folder / "model", dtype=torch.float32).eval().requires_grad_(False)


def compare_on_pictures(
    network: AutoencoderTiny, teacher: AutoencoderKL, dataset: Dataset, batch_size: int = 64
) -> dict[str, float]:
    """How near the distilled networks come to their teacher's on the held-out pictures.

    Returns:
        `held_out_psnr_db`: PSNR of the decoder's pictures against the teacher's, both from the teacher's latents.
        `encoder_psnr_db`: PSNR against the real pictures of what the *teacher* decodes from the distilled encoder's
        latents, and `teacher_psnr_db` from its own. `latent_error`: root mean squared error of the latents, which have
        about unit deviation.
    """
    import torch

    scale = teacher.config.scaling_factor
    images = dataset.images[dataset.indices(held_out=True)]
    decoded, encoded, ceiling, errors = [], [], [], []
    with torch.inference_mode():
        for start in range(0, len(images), batch_size):
            pictures = pixels(images[start : start + batch_size])
            latents = scale * teacher.encode(pictures).latent_dist.mode()
            target = teacher.decode(latents / scale).sample
            mine = network.encode(pictures).latents
            decoded.append(peak_signal_to_noise(network.decode(latents).sample, target.clamp(-1, 1)))
            encoded.append(peak_signal_to_noise(teacher.decode(mine / scale).sample, pictures))
            ceiling.append(peak_signal_to_noise(target, pictures))
            errors.append((mine - latents).square().mean(dim=(1, 2, 3)))
    return {
        "held_out_psnr_db": float(torch.cat(decoded).mean()),
        "encoder_psnr_db": float(torch.cat(encoded).mean()),
        "teacher_psnr_db": float(torch.cat(ceiling).mean()),
        "latent_error": float(torch.cat(errors).mean().sqrt()),
    }


def generated_latents(pipeline: StableDiffusionPipeline, captions: Sequence[str], seed: int) -> Tensor:
    """What the denoiser makes of some captions, scaled as it makes it, (n, 8, 8, 8) float32."""
    import torch

    pipeline.set_progress_bar_config(disable=True)
    noise = [torch.Generator().manual_seed(seed + i) for i in range(len(captions))]
    return pipeline(
        list(captions), num_inference_steps=STEPS, guidance_scale=GUIDANCE, generator=noise, output_type="latent"
    ).images


def compare_on_latents(network: AutoencoderTiny, teacher: AutoencoderKL, latents: Tensor) -> float:
    """Mean PSNR in dB of the decoder's pictures against the teacher's, for scaled latents (n, 8, 8, 8)."""
    import torch

    with torch.inference_mode():
        target = teacher.decode(latents / teacher.config.scaling_factor).sample.clamp(-1, 1)
        return float(peak_signal_to_noise(network.decode(latents).sample, target).mean())


def compare_speed(network: AutoencoderTiny, teacher: AutoencoderKL, latents: Tensor, rounds: int = 40) -> Interval:
    """How many times faster the decoder is than its teacher's: both in turn, in this process, on this machine.

    Args:
        network: the distilled networks.
        teacher: the autoencoder.
        latents: one batch, scaled, (n, 8, 8, 8).
        rounds: of one decoding each, after three to warm up.

    Returns:
        The geometric mean of the rounds' ratios of wall time, with its 95 % interval.
    """
    import torch

    seconds: list[list[float]] = []
    with torch.inference_mode():
        for _ in range(rounds + 3):
            marks = [time.perf_counter()]
            for decode in (teacher.decode, network.decode):
                decode(latents)
                marks.append(time.perf_counter())
            seconds.append([after - before for before, after in pairwise(marks)])
    slow, fast = np.log(seconds[3:]).T
    return ratio(slow - fast, 0.95, "round")


def tiny_figures(
    network: AutoencoderTiny, pipeline: StableDiffusionPipeline, dataset: Dataset, captions: Sequence[str], seed: int
) -> list[Figure]:
    """What the table of the reference family says of the distilled networks, beside the pipeline's autoencoder."""
    latents = generated_latents(pipeline, captions, seed)
    fast, slow = count_operations()
    speed = compare_speed(network, pipeline.vae, latents)
    held_out = compare_on_pictures(network, pipeline.vae, dataset)
    return [
        at_least("tiny autoencoder", f"times faster to decode {len(captions)} pictures", speed.estimate, "", 3),
        Figure("tiny autoencoder", "times fewer operations to decode", slow / fast),
        Figure(
            "tiny autoencoder",
            "PSNR against the full decoder, generated latents",
            compare_on_latents(network, pipeline.vae, latents),
            "dB",
        ),
        Figure("tiny autoencoder", "… held-out pictures' latents", held_out["held_out_psnr_db"], "dB"),
    ]


def count_operations() -> tuple[float, float]:
    """MFLOP to decode one picture: the distilled decoder's and its teacher's."""
    import torch

    with torch.device("meta"):
        latents = torch.zeros(1, LATENT_CHANNELS, LATENT_SIZE, LATENT_SIZE)
        return 1e6 * tflop(build_tiny_autoencoder().decode, latents), 1e6 * tflop(build_autoencoder().decode, latents)


def write_tiny_card(
    file: Path,
    network: AutoencoderTiny,
    pipeline: StableDiffusionPipeline,
    captions: Sequence[str],
    figures: dict[str, Any],
    seed: int,
) -> None:
    """Measure the distilled networks beside the pipeline's autoencoder and write their card.

    Args:
        file: the Markdown file to write; the weights must be beside it already.
        network: in single precision, with the weights as they ship.
        pipeline: in single precision.
        captions: to generate latents from.
        figures: what `read_figures` gives for the stage.
        seed: picture i starts from the noise of seed + i.
    """
    import torch

    latents = generated_latents(pipeline, captions, seed)
    generated = compare_on_latents(network, pipeline.vae, latents)
    speed = "\n".join(
        f"| wall time, batch {n}, {torch.get_num_threads()} threads, fp32 | {found.estimate:.1f}× faster "
        f"| {found.low:.1f} to {found.high:.1f} |"
        for n in (1, 8)
        for found in [compare_speed(network, pipeline.vae, latents[:n])]
    )
    mine, teachers = count_operations()
    counts = {
        name: sum(parameter.numel() for parameter in part.parameters())
        for name, part in (("encoder", network.encoder), ("decoder", network.decoder))
    }
    weights = file.with_name("diffusion_pytorch_model.safetensors")
    file.write_text(
        f"""\
# A tiny autoencoder for emoji

An `AutoencoderTiny` that stands in for the autoencoder of `../emoji` and decodes faster, as TAESD does for Stable \
Diffusion. {counts["encoder"]:,} parameters encode and {counts["decoder"]:,} decode; \
{weights.stat().st_size / 1e3:.0f} kB in half precision.

```python
from diffusers import AutoencoderTiny

pipeline.vae = AutoencoderTiny.from_pretrained("sdopt/reference/tiny_autoencoder", dtype=pipeline.dtype)
```

It was distilled on the pictures that the autoencoder was trained on, and never saw the held-out ones: the encoder \
learnt the autoencoder's mean latents as the denoiser sees them (scaled), the decoder its pictures, from latents with \
up to {figures["latent_noise"]:g} deviations of noise on them. {figures["steps"]:,} steps of {figures["batch_size"]} \
pictures in {figures["seconds"] / 60:.0f} minutes on {figures["hardware"]}; `sdopt train-reference \
stage=tiny_autoencoder` repeats it.

## How near does it come?

| what | against | PSNR |
|---|---|---:|
| decoded latents of held-out pictures | the full decoder's pictures | {figures["held_out_psnr_db"]:.1f} dB |
| decoded latents from {len(captions)} training captions ({STEPS} DDIM steps, guidance {GUIDANCE:g}) \
| the full decoder's pictures | {generated:.1f} dB |
| held-out pictures through the tiny encoder and the full decoder | the pictures \
| {figures["encoder_psnr_db"]:.1f} dB |
| held-out pictures through the full autoencoder | the pictures | {figures["teacher_psnr_db"]:.1f} dB |

The encoder's latents are off by {figures["latent_error"]:.2f} (root mean square; latents have about unit deviation).

## How much faster does it decode?

| measure | tiny against full decoder | 95 % interval |
|---|---:|---:|
| operations, one picture | {teachers / mine:.1f}× fewer ({mine:.0f} against {teachers:.0f} MFLOP) | counted |
{speed}

Wall times are of both decoders in turn in one process, on a machine shared with other work.

Data and licences are those of `../emoji`; see its card.
"""
    )
