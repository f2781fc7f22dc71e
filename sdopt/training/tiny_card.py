"""Writes the card of the tiny autoencoder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdopt.training.sheet import GUIDANCE, STEPS
from sdopt.training.tiny_evaluation import compare_on_latents, compare_speed, count_operations, generated_latents

if TYPE_CHECKING:
    from diffusers import AutoencoderTiny, StableDiffusionPipeline


def write_tiny_card(
    file: Path,
    network: AutoencoderTiny,
    pipeline: StableDiffusionPipeline,
    captions: Sequence[str],
    figures: dict[str, Any],
    seed: int,
) -> None:
    """Compares the distilled networks with the pipeline's autoencoder, and writes their card.

    Args:
        file: the Markdown file to write, in the folder with the weights.
        network: the released weights, in single precision.
        pipeline: the pipeline, in single precision.
        captions: captions for generated latents.
        figures: the stage's figures from `read_figures`.
        seed: picture i starts from the noise of seed + i.
    """
    import torch

    latents = generated_latents(pipeline, captions, seed)
    generated = compare_on_latents(network, pipeline.vae, latents)
    speed = "\n".join(
        f"| wall time, batch {n}, {torch.get_num_threads()} threads, fp32 | {found.mean:.1f}× faster "
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

| measure | tiny against full decoder | 90 % of the rounds |
|---|---:|---:|
| operations, one picture | {teachers / mine:.1f}× fewer ({mine:.0f} against {teachers:.0f} MFLOP) | counted |
{speed}

Wall times are of both decoders in turn in one process, on a machine shared with other work.

Data and licences are those of `../emoji`; see its card.
"""
    )
