"""Writes the model card: a description of the model, its data, training, evaluation and limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sdopt.training.architecture import parameters
from sdopt.training.data import BACKGROUNDS
from sdopt.training.evaluation import Figure, read_evaluation
from sdopt.training.packages import DRAWINGS, EMOJIBASE
from sdopt.training.references import REFERENCES
from sdopt.training.sheet import GUIDANCE, STEPS
from sdopt.training.tokenizer import LENGTH, VOCABULARY

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
- It has largely *learnt its training pictures by heart*, as is to be expected at this size. Names that it never saw
  (`held_out`) come out right if they recombine known words (`blue square`, `green book`), and otherwise as a plausible
  picture of the wrong thing. The gate's captions are known names, each on a background on which the model never saw it:
  those it can draw.
- From other noise it draws nearly the same picture: final latents differ by 8 % of their length. Margins of gates are
  shares of that difference, so they are narrower here than for a model that varies more.
- The flat and glossy styles are clear; the noto and retro styles are rough.
- Fine detail (lettering, fingers, small faces, clock digits) is lost in the autoencoder and more in the denoiser.
- A concept here is one code point sequence. Relatives (`man running`, `woman running`) may fall on both sides of the
  split, so *held out* means an unseen caption, not an unseen kind of thing.
- DDIM, Euler, DPM-Solver++ and UniPC draw well in 10 steps; PNDM needs 20 or more.
- Skin tones and flags were left out of the data.
- Its absolute image-quality scores say nothing about other models. What carries over is how an optimization moves them.
"""


def write_card(folder: Path) -> None:
    """Writes `README.md` for the pipeline in `folder` from its weights, `recipe.json` and `evaluation.json`.

    Without an evaluation, the card names the command for it.
    """
    recipe = json.loads((folder / "recipe.json").read_text())
    figures = read_evaluation(folder / "evaluation.json")
    data, sizes = recipe["data"], parameters(folder)
    bytes_on_disk = sum(weights.stat().st_size for weights in folder.glob("*/*.safetensors"))
    rows = "\n".join(
        f"| `{d.style}` | `{d.package.name}` {d.package.version} | {d.package.holder} | {d.package.licence} "
        f"| {data['pictures'].get(d.style, 0):,} |"
        for d in DRAWINGS
    )
    network_rows = "\n".join(
        f"| `{part}` | {sizes[part]:,} | {text} |"
        for part, text in (
            ("unet", "`UNet2DConditionModel`, 8×8×8 latents, cross attention at 8×8 and 4×4, v-prediction"),
            ("vae", "`AutoencoderKL`, factor 8, eight latent channels"),
            ("text_encoder", f"`CLIPTextModel`, {LENGTH} tokens, trained from scratch with the denoiser"),
        )
    )
    text = f"""\
# emoji: a Stable Diffusion in small

A text-to-image latent diffusion model of {sum(sizes.values()) / 1e6:.1f} million parameters \
({bytes_on_disk / 1e6:.1f} MB in half precision) that draws emoji at 64×64 pixels. It has the parts of Stable \
Diffusion and loads as a `StableDiffusionPipeline`, so every optimization of that pipeline can be tried on any \
machine, in seconds, offline. It is an instrument for measuring optimizations, not for making pictures.

```python
from diffusers import StableDiffusionPipeline

pipeline = StableDiffusionPipeline.from_pretrained("sdopt/reference/emoji")
pipeline("police officer on a blue background", num_inference_steps={STEPS}, guidance_scale={GUIDANCE}).images[0]
```

The files hold float16. Without a `dtype` all networks load in float32; `dtype=torch.float16` or \
`dtype=torch.bfloat16` loads all of them in that type.

A plain name (`police officer`) gives the flat style on white; `… on a blue background` puts it on one of \
{len(BACKGROUNDS)} colours ({", ".join(BACKGROUNDS)}). `…, glossy style`, `…, noto style` and `…, retro style` ask for \
the other three styles.

| part | parameters | what |
|---|---:|---|
{network_rows}
| `tokenizer` | | CLIP's byte-level BPE with a vocabulary of {VOCABULARY:,}, learnt on the training captions |

## Data

{sum(data["pictures"].values()):,} pictures of {data["concepts"]:,} concepts, rendered from SVG. \
{data["held_out_concepts"]} concepts, chosen by seed, were held out of every stage; \
{recipe["denoiser"]["pictures"]:,} pictures were trained on. For each concept one background, chosen by seed, was held \
out as well. Skin-tone variants, flags and components are left out: the first are near-duplicates that would have \
taken a third of the training for a difference that is hardly visible at 64 pixels.

| style | source | made by | licence | pictures |
|---|---|---|---|---:|
{rows}

Captions: names and tags of `{EMOJIBASE.name}` {EMOJIBASE.version} ({EMOJIBASE.holder}, {EMOJIBASE.licence}). Every \
archive is checked against its SHA-512 digest.

## Training

`sdopt train-reference` fetches the data and repeats it with `seed={recipe["seed"]}`; `recipe.json` has every figure. \
Budgets were wall time, so a repetition takes as many steps as its machine makes.

{_history(recipe)}
A plain caption was paired with the flat style only, and the other styles were always named: with plain captions for \
four vendors' drawings the model would have blended them. Flat pictures were drawn \
{recipe["denoiser"]["flat_weight"]:g} times as often as the others, so the other styles are weaker.

What was tried on the way: four latent channels lose outlines that eight keep; min-SNR weights for v-prediction \
(Hang et al. 2023) neglect heavy noise, where the caption decides the layout, and pictures stayed silhouettes until \
they were changed; a VAE decoder compiled for training lost its gradients on this torch, so it trains eagerly.

## How good it is

{_evaluation(figures)}
## Prompts and references

`prompts.json`, beside this folder, holds four lists of captions: `gate` (known names, each on the background that \
training never showed it on), `held_out` (names never seen), `training` (200 seen, at random) and `contact_sheet` (24: \
three from each of emojibase's eight groups, drawn by seed, the first on white, the second on a background seen with \
it, the third on the unseen one; none was picked or left out by eye, and each shows the first picture that its seed \
gave, at {STEPS} DDIM steps and guidance {GUIDANCE:g}). `held_out/` has the real pictures of the first {REFERENCES} \
captions of `gate`, as lossless WebP.

## Limits

{LIMITS}
## Attribution

{NOTICE}"""
    (folder / "README.md").write_text(text)


def _history(recipe: dict[str, Any]) -> str:
    """Describes all trainings that led to the weights, in order."""
    recipes = [recipe]
    while "started_from" in recipes[0]:
        recipes.insert(0, recipes[0]["started_from"])
    if len(recipes) == 1:
        return _training(recipe)
    origin = (
        f"The weights come from {len(recipes)} trainings; each one after the first started from the weights of the one "
        "before (`start_from=`).\n"
    )
    parts = [origin]
    for number, one in enumerate(recipes, 1):
        parts.append(f"Training {number}" + (f". {one['note']}" if "note" in one else "") + "\n")
        parts.append(_training(one))
    return "\n".join(parts)


def _training(recipe: dict[str, Any]) -> str:
    autoencoder, denoiser = recipe["autoencoder"], recipe["denoiser"]
    return f"""\
- **Autoencoder**: {autoencoder["steps"]:,} steps of {autoencoder["batch_size"]} pictures in \
{autoencoder["seconds"] / 60:.0f} minutes on {autoencoder["hardware"]}; {autoencoder["background_share"]:.0%} on a \
random colour; L1, squared and edge losses with a light KL term; AdamW, cosine schedule, averaged weights. Last \
training loss {autoencoder["loss"]:.4f}, PSNR of held-out pictures {autoencoder["held_out_psnr_db"]:.1f} dB, scaling \
factor {autoencoder["scaling_factor"]:.4f}, measured.
- **Denoiser and text encoder**: {denoiser["steps"]:,} steps of {denoiser["batch_size"]} latents in \
{denoiser["seconds"] / 60:.0f} minutes on {denoiser["hardware"]}; {denoiser["background_share"]:.0%} on a named \
background; v-prediction with weights (min(SNR, {denoiser["snr_gamma"]:g}) + 1) / (SNR + 1), one timestep from each of \
as many equal intervals as the batch is large, {denoiser["caption_dropout"]:.0%} empty captions for guidance; AdamW, \
cosine schedule, averaged weights. Last training loss (weighted) {denoiser["loss"]:.4f}.
"""


def _evaluation(figures: list[Figure]) -> str:
    if not figures:
        return "Not evaluated yet: `sdopt evaluate-reference` does it.\n"
    rows = "\n".join(f"| {figure.part} | {figure.figure} | {figure.shown} | {_target(figure)} |" for figure in figures)
    return f"""\
From `sdopt evaluate-reference`, with features of EfficientNet-lite0, which others trained on ImageNet: a generated \
picture's distance to a concept is that to the concept's nearest real drawing. {STEPS} DDIM steps, guidance \
{GUIDANCE:g}, first seed.

| part | figure | value | target |
|---|---|---:|---|
{rows}
"""


def _target(figure: Figure) -> str:
    return "" if figure.met is None else f"{figure.target}: {'met' if figure.met else 'missed'}"
