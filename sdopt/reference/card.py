"""The model card: what the packaged model is, made of what, how, how well, and where it fails."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from sdopt.reference.architecture import parameters
from sdopt.reference.data import DRAWINGS, EMOJIBASE, Dataset
from sdopt.reference.evaluation import Recognition
from sdopt.reference.sheet import GUIDANCE, STEPS
from sdopt.reference.tokenizer import LENGTH, VOCABULARY

NOTICE = """\
The pictures that this model was trained on, and so in part the pictures that it makes, derive from:

- Noto Emoji (`@iconify-json/noto`, `@iconify-json/noto-v1`), Copyright Google LLC, Apache License 2.0,
  https://github.com/googlefonts/noto-emoji
- Fluent Emoji (`@iconify-json/fluent-emoji-flat`, `@iconify-json/fluent-emoji`), Copyright (c) Microsoft Corporation,
  MIT License, https://github.com/microsoft/fluentui-emoji
- their packaging as Iconify JSON, https://github.com/iconify/icon-sets

Its captions derive from:

- Emojibase (`emojibase-data`), Copyright (c) Miles Johnson, MIT License, https://github.com/milesj/emojibase, whose
  names come from the Unicode CLDR, Copyright Unicode, Inc., Unicode License v3.
"""

LIMITS = """\
- It knows emoji and nothing else: a prompt about anything else gives some emoji-like shape, or a blot.
- It has largely *learnt its training pictures by heart*; that is what a reference model of this size is for. Names that
  it never saw (`held_out`) come out right where they recombine known words (`blue square`, `green book`), and otherwise
  as a plausible picture of the wrong thing. They serve paired comparisons between variants of the pipeline, not a
  judgement of the model.
- The flat and glossy styles are clear; the noto and retro styles are rough.
- Fine detail (lettering, fingers, small faces, clock digits) is lost in the autoencoder and more in the denoiser.
- A concept here is one code point sequence. Relatives (`man running`, `woman running`) may fall on both sides of the
  split, so *held out* means an unseen caption, not an unseen kind of thing.
- DDIM, Euler, DPM-Solver++ and UniPC draw well in 10 steps; PNDM needs 20 or more.
- Skin tones and flags were left out of the data.
- Its absolute image-quality scores say nothing about other models. What carries over is how an optimization moves them.
"""


def write_card(
    file: Path, dataset: Dataset, figures: dict[str, dict[str, Any]], recognition: dict[str, Recognition]
) -> None:
    """Write the card of the pipeline in `file`'s folder.

    Args:
        file: the Markdown file to write; the weights must be beside it already.
        dataset: what was trained on.
        figures: by stage, what `read_figures` gives.
        recognition: of `training` and of `held_out` captions.
    """
    counts = Counter(record.style for record in dataset.records)
    concepts = {record.concept: record.held_out for record in dataset.records}
    sizes = parameters(file.parent)
    bytes_on_disk = sum(weights.stat().st_size for weights in file.parent.glob("*/*.safetensors"))
    autoencoder, denoiser = figures["autoencoder"], figures["denoiser"]
    seen, unseen = recognition["training"], recognition["held_out"]
    rows = "\n".join(
        f"| `{d.style}` | `{d.package.name}` {d.package.version} | {d.package.holder} | {d.package.licence} "
        f"| {counts[d.style]:,} |"
        for d in DRAWINGS
    )
    network_rows = "\n".join(
        f"| `{folder}` | {sizes[folder]:,} | {text} |"
        for folder, text in (
            ("unet", "`UNet2DConditionModel`, 8×8×8 latents, cross attention at 8×8 and 4×4, v-prediction"),
            ("vae", "`AutoencoderKL`, factor 8, eight latent channels"),
            ("text_encoder", f"`CLIPTextModel`, {LENGTH} tokens, trained from scratch with the denoiser"),
        )
    )
    text = f"""\
# emoji: a Stable Diffusion in small

A text-to-image latent diffusion model of {sum(sizes.values()) / 1e6:.1f} million parameters \
({bytes_on_disk / 1e6:.1f} MB in half precision) that draws emoji at 64×64 pixels. It has the parts of Stable \
Diffusion and loads as a `StableDiffusionPipeline`, so that everything which can be done to that pipeline can be \
tried on any machine, in seconds, offline. It is an instrument for measuring optimizations, not for making pictures.

```python
import torch
from diffusers import StableDiffusionPipeline

pipeline = StableDiffusionPipeline.from_pretrained("sdopt/reference/emoji", dtype=torch.float32)
pipeline("police officer", num_inference_steps={STEPS}, guidance_scale={GUIDANCE}).images[0]
```

A plain name (`police officer`) gives the flat style. `police officer, glossy style`, `…, noto style` and `…, retro
style` ask for the other three.

| part | parameters | what |
|---|---:|---|
{network_rows}
| `tokenizer` | | CLIP's byte-level BPE with a vocabulary of {VOCABULARY:,}, learnt on the training captions |

## Data

{len(dataset):,} pictures of {len(concepts):,} concepts, rendered from SVG on white. \
{sum(concepts.values())} concepts, chosen by seed, were held out of every stage; {denoiser["pictures"]:,} pictures \
were trained on. Skin-tone variants, flags and components are left out.

| style | source | made by | licence | pictures |
|---|---|---|---|---:|
{rows}

Captions: names and tags of `{EMOJIBASE.name}` {EMOJIBASE.version} ({EMOJIBASE.holder}, {EMOJIBASE.licence}). Every \
archive is checked against its SHA-512 digest.

## Training

`sdopt train-reference` fetches the data and repeats all of it. The figures are of {denoiser["hardware"]}, \
shared with other work; the budgets were wall time.

- **Autoencoder**: {autoencoder["steps"]:,} steps of {autoencoder["batch_size"]} pictures in \
{autoencoder["seconds"] / 60:.0f} minutes; L1, squared and edge losses with a light KL term; AdamW, cosine schedule, \
averaged weights. PSNR of held-out pictures: **{autoencoder["held_out_psnr_db"]:.1f} dB**. Last training loss \
{autoencoder["loss"]:.4f}. Scaling factor {autoencoder["scaling_factor"]:.4f}, measured.
- **Denoiser and text encoder**: {denoiser["steps"]:,} steps of {denoiser["batch_size"]} latents in \
{denoiser["seconds"] / 60:.0f} minutes; v-prediction with \
weights (min(SNR, 5) + 1) / (SNR + 1), one timestep from each of as many equal intervals as the batch is large, \
{denoiser["caption_dropout"]:.0%} empty captions for guidance; AdamW, cosine schedule, averaged weights. \
Last training loss (weighted) {denoiser["loss"]:.4f}.

A plain caption was paired with the flat style only, and the other styles always named: spread over four vendors' \
drawings, plain captions would have come out as a blend. Flat pictures were drawn {denoiser["flat_weight"]:g} times as \
often as the others, so the other styles are weaker.

## Does it draw what the caption says?

Each generated picture was compared with all {seen.candidates:,} flat drawings (Euclidean distance between latents of \
its own autoencoder; {STEPS} DDIM steps, guidance {GUIDANCE:g}, first seed):

| captions | tried | own drawing is the nearest | … is among the five nearest |
|---|---:|---:|---:|
| seen in training | {seen.captions} | {seen.top1:.0%} | {seen.top5:.0%} |
| held out | {unseen.captions} | {unseen.top1:.0%} | {unseen.top5:.0%} |
| chance | | {1 / seen.candidates:.2%} | {5 / seen.candidates:.2%} |

## Prompts

`prompts.json`, beside this folder, holds three lists of plain names: `held_out` (never seen in training, for gates), \
`training` (200 seen, at random) and `contact_sheet` (24 seen: three from each of emojibase's eight groups, drawn by \
seed; none was picked or left out by eye, and each shows the first picture that its seed gave, at {STEPS} DDIM steps \
and guidance {GUIDANCE:g}).

## Limits

{LIMITS}
## Attribution

{NOTICE}"""
    file.write_text(text)
