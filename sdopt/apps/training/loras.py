"""The stages of LoRAs: two for drawing styles that the denoiser never saw, and one for few steps without guidance."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sdopt.apps.training.captions import (
    GUIDANCE,
    STEPS,
    caption,
    draw_background,
    plain_caption,
)
from sdopt.apps.training.config import TrainReferenceConfig
from sdopt.apps.training.data import Dataset, draw_style
from sdopt.apps.training.denoiser import (
    captioned_latents,
    diffusion_loss,
    loss_weights,
    picture_chances,
    spread_timesteps,
)
from sdopt.apps.training.loop import (
    STREAMS,
    generator,
    in_precision,
    on_device,
    pick_device,
    train,
)
from sdopt.apps.training.networks import LATENT_CHANNELS, LATENT_SIZE
from sdopt.apps.training.packages import STYLES

TARGETS = (
    "to_q",
    "to_k",
    "to_v",
    "to_out.0",
    "ff.net.0.proj",
    "ff.net.2",
    "proj_in",
    "proj_out",
)
"""The layers of the denoiser's transformers that the LoRAs update, the same for all styles."""

TAUGHT = 23
"""The first states of a trajectory, from which the LoRA for few steps learns: runs of one to eight steps call the
denoiser at none of the later timesteps."""

LAYERS = (*TARGETS, "time_emb_proj")
"""The layers that the LoRA for few steps updates: those of a style, and those that tell the time."""

WALKED_AT_ONCE = 64

FILE = "pytorch_lora_weights.safetensors"
"""The file of the LoRA for few steps: the name that diffusers seeks by itself."""


def add_lora(
    denoiser: UNet2DConditionModel, rank: int, targets: Sequence[str] = TARGETS
) -> nn.ParameterList:
    """Freezes the denoiser, adds untrained LoRA layers, and returns their parameters.

    The scale is 1 (alpha equals the rank), the default of loaders for files without alpha.
    """
    denoiser.requires_grad_(False)
    denoiser.add_adapter(
        LoraConfig(
            r=rank,
            lora_alpha=rank,
            init_lora_weights="gaussian",
            target_modules=list(targets),
        )
    )
    return nn.ParameterList(
        parameter for parameter in denoiser.parameters() if parameter.requires_grad
    )


def save_lora(
    denoiser: UNet2DConditionModel,
    updates: nn.ParameterList,
    average: nn.Module,
    file: Path,
) -> None:
    """Writes a trained LoRA to a safetensors file in half precision."""
    with torch.no_grad():
        for live, kept in zip(updates.parameters(), average.parameters(), strict=True):
            live.copy_(kept)
    # Keeps PEFT's names: diffusers' converter would rename only attention layers, which its loader then skips.
    weights = get_peft_model_state_dict(denoiser.cpu())
    StableDiffusionPipeline.save_lora_weights(
        file.parent,
        unet_lora_layers={
            name: tensor.half().contiguous() for name, tensor in weights.items()
        },
        weight_name=file.name,
    )


def train_loras(
    config: TrainReferenceConfig, base: Dataset, pipeline: StableDiffusionPipeline
) -> None:
    """Trains a LoRA for each of `STYLES`; writes the weights to `model/` in the stage's folder.

    `base` is the denoiser's data, and `pipeline` the finished model in single precision.
    """
    options, device, folder = (
        config.loras,
        pick_device(config.device),
        Path(config.folder),
    )
    held_out = options.held_out_concepts
    # All before the first training, so that an impossible setting is reported at once.
    drawings = [
        draw_style(
            style,
            base,
            folder / "packages",
            held_out_concepts=held_out,
            seed=config.seed,
        )
        for style in STYLES
    ]
    for place, (style, dataset) in enumerate(zip(STYLES, drawings, strict=True)):
        torch.manual_seed(config.seed)
        denoiser = on_device(copy.deepcopy(pipeline.unet), device)
        text_encoder = (
            copy.deepcopy(pipeline.text_encoder).to(device).requires_grad_(False)
        )
        updates = add_lora(denoiser, options.rank)
        pictures = len(dataset.indices(held_out=False))
        draw = captioned_latents(
            config, "loras", dataset, pipeline.vae, np.full(pictures, 1 / pictures),
            part=(place,), caption=plain_caption, avoided="black" if style.black else None,
        )  # fmt: skip
        networks = {"denoiser": denoiser, "text_encoder": text_encoder}
        loss = diffusion_loss(config, options, draw, networks, pipeline.tokenizer)
        average = train(
            config, "loras", updates, loss, part=style.name, parts=len(STYLES),
            pictures=pictures, held_out_pictures=len(dataset) - pictures,
        )  # fmt: skip
        save_lora(
            denoiser,
            updates,
            average,
            folder / "loras" / "model" / f"{style.name}.safetensors",
        )


def train_few_steps(
    config: TrainReferenceConfig, dataset: Dataset, pipeline: StableDiffusionPipeline
) -> None:
    """Trains the LoRA for few steps; writes the weights to `model/` in the stage's folder.

    As in latent consistency (Luo et al. 2023), the denoiser learns to name the end of the trajectory on which noisy
    latents lie. Here the end is known: the teacher walks each trajectory once, where consistency training approaches it
    by way of the denoiser's own estimates. A small model needs few trajectories, and the target is exact. Of the
    dataset only captions are used; the pipeline is the finished model in single precision.
    """
    options, device = config.few_steps, pick_device(config.device)
    folder = Path(config.folder) / "few_steps"
    states, texts = trajectories(
        config, dataset, pipeline, folder / "trajectories.safetensors"
    )
    timesteps = pipeline.scheduler.timesteps[:TAUGHT].tolist()
    torch.manual_seed(config.seed)
    denoiser = on_device(copy.deepcopy(pipeline.unet), device)
    updates = add_lora(denoiser, options.rank, LAYERS)
    alphas = pipeline.scheduler.alphas_cumprod[timesteps].to(device)
    weights, times = (
        loss_weights(alphas, options.snr_gamma),
        torch.tensor(timesteps, device=device),
    )

    def loss(step: int) -> Tensor:
        random = np.random.default_rng([config.seed, STREAMS["few_steps"], 1, step])
        picked = torch.from_numpy(random.integers(len(states), size=options.batch_size))
        places = torch.from_numpy(
            spread_timesteps(options.batch_size, len(timesteps), random)
        )
        noisy, end = (
            states[picked, place].to(device, torch.float32) for place in (places, -1)
        )
        signal, sigma = (
            part[places, None, None, None].sqrt() for part in (alphas, 1 - alphas)
        )
        with in_precision(config.arithmetic, device):
            predicted = denoiser(
                noisy.contiguous(memory_format=torch.channels_last),
                times[places],
                texts[picked].to(device).float(),
            ).sample
        # The velocity with which this state would come from the trajectory's end alone.
        velocity = (signal * noisy - end) / sigma
        error = (predicted.float() - velocity).square().mean(dim=(1, 2, 3))
        weighted: Tensor = (weights[places] * error).mean()
        return weighted

    average = train(
        config, "few_steps", updates, loss, solver_steps=STEPS, guidance=GUIDANCE
    )
    save_lora(denoiser, updates, average, folder / "model" / FILE)


def trajectories(
    config: TrainReferenceConfig,
    dataset: Dataset,
    pipeline: StableDiffusionPipeline,
    file: Path,
) -> tuple[Tensor, Tensor]:
    """Returns the states of the teacher's runs, and their text states; a file keeps them for a training that goes on.

    Returns:
        states, float16 (trajectories, STEPS + 1, 8, 8, 8), from noise to the end; and text states, float16
        (trajectories, 24, 144).
    """
    options, device = config.few_steps, pick_device(config.device)
    pipeline.to(device).set_progress_bar_config(disable=True)
    pipeline.scheduler.set_timesteps(STEPS)
    if config.resume and file.exists():
        kept = load_file(file)
        return kept["states"], kept["texts"]
    random = np.random.default_rng([config.seed, STREAMS["few_steps"], 0])
    chosen, chances = picture_chances(dataset, config.denoiser.flat_weight)
    records = [
        dataset.records[i]
        for i in random.choice(chosen, size=options.trajectories, p=chances)
    ]
    captions = [
        caption(r, random, draw_background(r, random, options.background_share))
        for r in records
    ]
    shape = (len(captions), LATENT_CHANNELS, LATENT_SIZE, LATENT_SIZE)
    noise = torch.randn(
        shape, generator=generator(config.seed, STREAMS["few_steps"], 0)
    )
    states, texts = [], []
    for start in range(0, len(captions), WALKED_AT_ONCE):
        part = slice(start, start + WALKED_AT_ONCE)
        walked = [noise[part]]
        with in_precision(config.arithmetic, device):
            text, _ = pipeline.encode_prompt(
                captions[part], device, 1, do_classifier_free_guidance=False
            )
            pipeline(
                captions[part], num_inference_steps=STEPS, guidance_scale=GUIDANCE, latents=noise[part],
                output_type="latent", callback_on_step_end=_keeper(walked),
            )  # fmt: skip
        states.append(torch.stack([each.cpu().half() for each in walked], dim=1))
        texts.append(text.cpu().half())
        print(
            f"few_steps: {start + len(walked[0])} of {len(captions)} trajectories",
            flush=True,
        )
    kept = {"states": torch.cat(states), "texts": torch.cat(texts)}
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(kept, file)
    return kept["states"], kept["texts"]


def _keeper(walked: list[Tensor]) -> Callable[..., dict[str, Any]]:
    def keep(
        _pipeline: Any, _step: int, _timestep: int, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        walked.append(kwargs["latents"])
        return kwargs

    return keep
