"""The stage of the LoRA for few steps: distils the guided denoiser, so that a few steps without guidance suffice.

As in latent consistency (Luo et al. 2023), the denoiser learns to name the end of the trajectory on which noisy latents
lie. Here the end is known: the teacher walks each trajectory once, where consistency training approaches it by way of
the denoiser's own estimates. A small model needs few trajectories, and the target is exact.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sdopt.training.captions import caption, draw_background
from sdopt.training.compute import generator, in_precision, pick_device
from sdopt.training.config import TrainReferenceConfig
from sdopt.training.data import Dataset
from sdopt.training.denoiser import loss_weights, picture_chances, spread_timesteps
from sdopt.training.loop import train
from sdopt.training.loras import TARGETS, add_lora, save_lora
from sdopt.training.networks import LATENT_CHANNELS, LATENT_SIZE
from sdopt.training.sheet import GUIDANCE, STEPS

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline
    from torch import Tensor


STREAM = 6
"""Number of this stage in the path of a random seed."""

TAUGHT = 23
"""The first states of a trajectory, from which the LoRA learns: runs of one to eight steps call the denoiser at none of
the later timesteps."""

LAYERS = (*TARGETS, "time_emb_proj")
"""The layers that are updated: those of a style, and those that tell the time."""

WALKED_AT_ONCE = 64

FILE = "pytorch_lora_weights.safetensors"
"""The name that diffusers seeks by itself."""


def train_few_steps(config: TrainReferenceConfig, dataset: Dataset, pipeline: StableDiffusionPipeline) -> None:
    """Trains the LoRA; writes the weights to `model/` in the stage's folder.

    Args:
        config: the whole configuration.
        dataset: the denoiser's data, of which only captions are used.
        pipeline: the finished model, in single precision.
    """
    import torch
    from diffusers.models.attention_processor import AttnProcessor

    options, device = config.few_steps, pick_device(config.device)
    folder = Path(config.folder) / "few_steps"
    states, texts = trajectories(config, dataset, pipeline, folder / "trajectories.safetensors")
    timesteps = pipeline.scheduler.timesteps[:TAUGHT].tolist()
    torch.manual_seed(config.seed)
    denoiser = copy.deepcopy(pipeline.unet).to(device, memory_format=torch.channels_last)
    denoiser.set_attn_processor(AttnProcessor())
    updates = add_lora(denoiser, options.rank, LAYERS)
    alphas = pipeline.scheduler.alphas_cumprod[timesteps].to(device)
    weights, times = loss_weights(alphas, options.snr_gamma), torch.tensor(timesteps, device=device)

    def loss(step: int) -> Tensor:
        random = np.random.default_rng([config.seed, STREAM, 1, step])
        picked = torch.from_numpy(random.integers(len(states), size=options.batch_size))
        places = torch.from_numpy(spread_timesteps(options.batch_size, len(timesteps), random))
        noisy, end = (states[picked, place].to(device, torch.float32) for place in (places, -1))
        signal, sigma = (part[places, None, None, None].sqrt() for part in (alphas, 1 - alphas))
        with in_precision(config.arithmetic, device):
            predicted = denoiser(
                noisy.contiguous(memory_format=torch.channels_last), times[places], texts[picked].to(device).float()
            ).sample
        # The velocity with which this state would come from the trajectory's end alone.
        velocity = (signal * noisy - end) / sigma
        error = (predicted.float() - velocity).square().mean(dim=(1, 2, 3))
        weighted: Tensor = (weights[places] * error).mean()
        return weighted

    average = train(config, "few_steps", updates, loss, solver_steps=STEPS, guidance=GUIDANCE)
    save_lora(denoiser, updates, average, folder / "model" / FILE)


def trajectories(
    config: TrainReferenceConfig, dataset: Dataset, pipeline: StableDiffusionPipeline, file: Path
) -> tuple[Tensor, Tensor]:
    """Returns the states of the teacher's runs, and their text states; a file keeps them for a training that goes on.

    Returns:
        states, float16 (trajectories, STEPS + 1, 8, 8, 8), from noise to the end; and text states, float16
        (trajectories, 24, 144).
    """
    import torch
    from safetensors.torch import load_file, save_file

    options, device = config.few_steps, pick_device(config.device)
    pipeline.to(device).set_progress_bar_config(disable=True)
    pipeline.scheduler.set_timesteps(STEPS)
    if config.resume and file.exists():
        kept = load_file(file)
        return kept["states"], kept["texts"]
    random = np.random.default_rng([config.seed, STREAM, 0])
    chosen, chances = picture_chances(dataset, config.denoiser.flat_weight)
    records = [dataset.records[i] for i in random.choice(chosen, size=options.trajectories, p=chances)]
    captions = [caption(r, random, draw_background(r, random, options.background_share)) for r in records]
    shape = (len(captions), LATENT_CHANNELS, LATENT_SIZE, LATENT_SIZE)
    noise = torch.randn(shape, generator=generator(config.seed, STREAM, 0))
    states, texts = [], []
    for start in range(0, len(captions), WALKED_AT_ONCE):
        part = slice(start, start + WALKED_AT_ONCE)
        walked = [noise[part]]
        with in_precision(config.arithmetic, device):
            text, _ = pipeline.encode_prompt(captions[part], device, 1, do_classifier_free_guidance=False)
            pipeline(
                captions[part], num_inference_steps=STEPS, guidance_scale=GUIDANCE, latents=noise[part],
                output_type="latent", callback_on_step_end=_keeper(walked),
            )  # fmt: skip
        states.append(torch.stack([each.cpu().half() for each in walked], dim=1))
        texts.append(text.cpu().half())
        print(f"few_steps: {start + len(walked[0])} of {len(captions)} trajectories", flush=True)
    kept = {"states": torch.cat(states), "texts": torch.cat(texts)}
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(kept, file)
    return kept["states"], kept["texts"]


def _keeper(walked: list[Tensor]) -> Callable[..., dict[str, Any]]:
    def keep(_pipeline: Any, _step: int, _timestep: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        walked.append(kwargs["latents"])
        return kwargs

    return keep
