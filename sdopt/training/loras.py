"""The LoRAs' stage: two drawing styles that the denoiser never saw, as low-rank updates of its attention."""

from __future__ import annotations

import copy
import json
import os
import re
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from sdopt.errors import UsageError
from sdopt.training.autoencoder import encode_all
from sdopt.training.config import TrainReferenceConfig
from sdopt.training.data import (
    Dataset,
    Package,
    Record,
    choose_held_out,
    code_points,
    draw_background,
    fetch,
    plain_caption,
    read_json,
    render,
    svg,
)
from sdopt.training.denoiser import diffusion_loss
from sdopt.training.evaluation import Figure
from sdopt.training.loop import describe_hardware, pick_device, read_figures, train
from sdopt.training.sheet import GUIDANCE, STEPS, draw_sheet, generate

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline, UNet2DConditionModel
    from torch import Tensor, nn


STREAM = 5
"""This stage's place in the seed's path."""

TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out")
"""The layers of the denoiser's transformers that are updated, the same ones for every style."""

COMPARED = 32
"""Concepts of each kind that the card's figures rest on."""

SHOWN = 12
"""Of them, those on the LoRA's contact sheet."""


@dataclass(frozen=True)
class Style:
    """Drawings that a LoRA learns from.

    Attributes:
        name: of the weights file.
        title: what the drawings are called.
        package: where they come from.
        address: of the project that made them.
        names: what the icons are called after, `label` (today's English name) or `unicode` (the character's).
        look: what to expect, for the card.
        black: the drawings are black, so nothing of them would be seen on a black background.
    """

    name: str
    title: str
    package: Package
    address: str
    names: Literal["label", "unicode"]
    look: str
    black: bool = False


STYLES = (
    Style(
        "fxemoji",
        "Firefox OS Emoji",
        Package(
            "@iconify-json/fxemoji",
            "1.2.2",
            "sha512-UAasRaxzFUKfIGSmLwnoarsssA4LX0VLLuEmplIqM6ZNQqIQRtav8tZ4H1neTlBreXuMQyAifr5jP4kn78DpiQ==",
            "Apache-2.0",
            "Mozilla Foundation",
        ),
        "https://github.com/mozilla/fxemoji",
        "unicode",
        "large plain shapes in muted colours",
    ),
    Style(
        "high_contrast",
        "Fluent Emoji High Contrast",
        Package(
            "@iconify-json/fluent-emoji-high-contrast",
            "1.2.6",
            "sha512-esqhZPpkrF7sNX3NsLoh8KW64okEr/bzko7WNnFP+qTJGAqDPDYjp0925yxuivXy3HtVQB8xhIKu3+Nq1byX5w==",
            "MIT",
            "Microsoft Corporation",
        ),
        "https://github.com/microsoft/fluentui-emoji",
        "label",
        "black line drawings",
        black=True,
    ),
)


def letters(name: str) -> str:
    """A name without what vendors spell differently: case, spaces, hyphens."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def icon_key(record: Record, style: Style) -> str:
    """What the style's icon of a concept is called, in `letters`; empty where it cannot have one."""
    if style.names == "label":
        return letters(record.label)
    code = code_points(record.concept).split("-")
    return letters(unicodedata.name(chr(int(code[0], 16)), "")) if len(code) == 1 else ""


def draw_style(
    style: Style, base: Dataset, packages: Path, *, held_out_concepts: int, seed: int, threads: int | None = None
) -> Dataset:
    """The style's drawings of the concepts that the denoiser knows in the flat style; some of them held out.

    Args:
        style: what to draw.
        base: the denoiser's data; what it held out is left out here.
        packages: keeps the archives.
        held_out_concepts: how many concepts to keep from the LoRA's training.
        seed: which ones.
        threads: that render at the same time; the machine's cores by default.

    Raises:
        DataError: the archive cannot be fetched, verified or read.
        UsageError: no more than `held_out_concepts` concepts match.
    """
    icons = read_json(fetch(style.package, packages), "icons.json")
    names = {letters(name): name for name in (*icons.get("aliases", {}), *icons["icons"])}
    found: list[tuple[Record, str]] = []
    for record in base.records:
        if record.style == "flat" and not record.held_out:
            name = names.get(icon_key(record, style))
            markup = name and svg(icons, name)
            if markup:
                found.append((record, markup))
    if len(found) <= held_out_concepts:
        raise UsageError(
            f"loras.held_out_concepts={held_out_concepts}: {style.package.name} has drawings of only {len(found)} "
            "concepts that the denoiser is trained on"
        )
    hidden = choose_held_out([record.concept for record, _ in found], held_out_concepts, seed)
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        layers = np.stack(list(pool.map(render, (markup for _, markup in found))))
    records = tuple(replace(r, style=style.name, held_out=r.concept in hidden) for r, _ in found)
    return Dataset(layers[..., :3].copy(), layers[..., 3].copy(), records)


def add_lora(denoiser: UNet2DConditionModel, rank: int) -> nn.ParameterList:
    """Freeze the denoiser, put untrained low-rank updates into it, and return their parameters.

    Their scale is 1 (alpha equals the rank), which is what a loader assumes of a file that does not say.
    """
    from peft import LoraConfig
    from torch import nn

    denoiser.requires_grad_(False)
    denoiser.add_adapter(
        LoraConfig(r=rank, lora_alpha=rank, init_lora_weights="gaussian", target_modules=list(TARGETS))
    )
    return nn.ParameterList(parameter for parameter in denoiser.parameters() if parameter.requires_grad)


def train_loras(config: TrainReferenceConfig, base: Dataset, pipeline: StableDiffusionPipeline, folder: Path) -> None:
    """Train a LoRA for each of `STYLES` and measure it; weights and card land in `folder/model`.

    Args:
        config: the whole configuration.
        base: the denoiser's data.
        pipeline: the finished model, in single precision.
        folder: for the styles' checkpoints, logs, figures and contact sheets, and for `model/`.

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
    write_card(model / "README.md", known)


def _train(
    config: TrainReferenceConfig,
    style: Style,
    place: int,
    dataset: Dataset,
    pipeline: StableDiffusionPipeline,
    work: Path,
    model: Path,
) -> None:
    """Train one LoRA on a copy of the pipeline's denoiser and save it in half precision."""
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
        return denoiser(noisy, timesteps, states).sample

    def put(record: Record, random: np.random.Generator) -> str | None:
        background = draw_background(record, random, options.background_share)
        return None if style.black and background == "black" else background

    loss = diffusion_loss(
        config,
        options,
        dataset,
        chosen,
        pipeline.tokenizer,
        pipeline.vae,
        predict,
        chances=np.full(len(chosen), 1 / len(chosen)),
        put=put,
        write=plain_caption,
        path=(STREAM, place),
    )
    train(
        config,
        options,
        updates,
        loss,
        work,
        title=f"LoRA {style.name}",
        average=average,
        parts=len(STYLES),
    )
    with torch.no_grad():
        for live, kept in zip(updates, average, strict=True):
            live.copy_(kept)
    # Under PEFT's own names: diffusers' converter renames the attention's layers alone, and its loader skips them then.
    weights = get_peft_model_state_dict(denoiser.cpu())
    StableDiffusionPipeline.save_lora_weights(
        model,
        unet_lora_layers={name: tensor.half().contiguous() for name, tensor in weights.items()},
        weight_name=f"{style.name}.safetensors",
    )


def compare(
    pipeline: StableDiffusionPipeline, weights: Path, dataset: Dataset, base: Dataset, seed: int, folder: Path
) -> dict[str, dict[str, float]]:
    """What a LoRA changes: generated pictures set against the style's and the flat drawings of the same concepts.

    All figures are of mean latents of the pipeline's own autoencoder, after encoding the pictures. A linear probe,
    fitted to the drawings of the LoRA's training concepts in both styles, tells the styles apart whatever is drawn. A
    contact sheet lands in `folder`: without the LoRA, with it, and the style's own drawing, concept by concept.

    Args:
        pipeline: in single precision; the LoRA is loaded as a user would, and unloaded again.
        weights: the LoRA's file.
        dataset: the style's drawings.
        base: the denoiser's data, with the flat drawings.
        seed: picture i starts from the noise of seed + i, with and without the LoRA.
        folder: for the contact sheet.

    Returns:
        For `training` and `held_out` concepts: how many `concepts`; the mean Euclidean distance to the style's drawing,
        `before` and `after`; the share of pictures nearer to it than to the flat drawing, `nearer_before` and
        `nearer_after`; and the share that the probe takes for the style's, `probe_before` and `probe_after`, beside
        that of the `probe_drawings` and of the `probe_flat_drawings`.
    """
    flat = {record.concept: index for index, record in enumerate(base.records) if record.style == "flat"}
    random = np.random.default_rng([seed, STREAM])
    chosen = {
        "training": random.permutation(dataset.indices(held_out=False))[:COMPARED],
        "held_out": random.permutation(dataset.indices(held_out=True))[:COMPARED],
    }
    captions = {split: [dataset.records[i].label for i in places] for split, places in chosen.items()}
    before = {split: generate(pipeline, texts, seed=seed) for split, texts in captions.items()}
    pipeline.load_lora_weights(weights.parent, weight_name=weights.name)
    after = {split: generate(pipeline, texts, seed=seed) for split, texts in captions.items()}
    pipeline.unload_lora_weights()

    def latents(pictures: np.ndarray) -> Tensor:
        return encode_all(pipeline.vae, pictures)[0].flatten(1)

    def both(places: np.ndarray) -> tuple[Tensor, Tensor]:
        """Of the style's drawings and of the flat ones."""
        concepts = [dataset.records[i].concept for i in places]
        return latents(dataset.images[places]), latents(base.images[[flat[concept] for concept in concepts]])

    is_styled = fit_probe(*both(dataset.indices(held_out=False)))
    figures: dict[str, dict[str, float]] = {}
    for split, places in chosen.items():
        own, other = both(places)
        figures[split] = {
            "concepts": len(places),
            "probe_drawings": is_styled(own),
            "probe_flat_drawings": is_styled(other),
        }
        for time, pictures in (("before", before[split]), ("after", after[split])):
            made = latents(pictures)
            near, far = (made - own).norm(dim=1), (made - other).norm(dim=1)
            figures[split] |= {
                time: float(near.mean()),
                f"nearer_{time}": float((near < far).float().mean()),
                f"probe_{time}": is_styled(made),
            }
    shown, titles = [], []
    for split, places in chosen.items():
        for i, place in enumerate(places[:SHOWN]):
            shown += [before[split][i], after[split][i], dataset.images[place]]
            titles += [captions[split][i], f"with the LoRA ({split.replace('_', ' ')})", "the style's own"]
    draw_sheet(np.stack(shown), titles, folder / "contact_sheet.png")
    return figures


def lora_figures(figures: dict[str, dict[str, Any]]) -> list[Figure]:
    """What the table of the reference family says of each LoRA, as it was measured after training."""
    return [
        Figure(
            f"LoRA {name}",
            f"pictures that a probe takes for the style's (without it {100 * unseen['probe_before']:.0f} %)",
            100 * unseen["probe_after"],
            "%",
        )
        for name, unseen in ((name, of_style["comparison"]["held_out"]) for name, of_style in figures.items())
    ]


def fit_probe(styled: Tensor, flat: Tensor) -> Callable[[Tensor], float]:
    """Ridge regression that tells two equally large sets of features (n, d) apart.

    Returns:
        A function from features (m, d) to the share of them that are taken for `styled`.
    """
    import torch

    features = torch.cat([styled, flat])
    target = torch.cat([torch.ones(len(styled)), -torch.ones(len(flat))])
    centre = features.mean(dim=0)
    spread = features - centre
    # As strong as the data itself: there are about as many numbers to fit as drawings.
    ridge = spread.square().mean() * len(features) * torch.eye(features.shape[1])
    weights = torch.linalg.solve(spread.T @ spread + ridge, spread.T @ target)
    return lambda other: float(((other - centre) @ weights > 0).float().mean())


def write_card(file: Path, figures: dict[str, dict[str, Any]]) -> None:
    """Write the card of the LoRAs in `file`'s folder from what `read_figures` gives for each style."""
    rows, training, comparison, sources = [], [], [], []
    for style in STYLES:
        seen = figures[style.name]
        size = file.with_name(f"{style.name}.safetensors").stat().st_size
        rows.append(
            f"| `{style.name}.safetensors` | {size / 1e3:.0f} kB | {style.title}: {style.look} "
            f"| `{style.package.name}` {style.package.version} | {style.package.holder} | {style.package.licence} |"
        )
        training.append(
            f"- `{style.name}`: {seen['pictures']:,} drawings, {seen['held_out']} more held out; {seen['steps']:,} "
            f"steps of {seen['batch_size']} latents in {seen['seconds'] / 60:.0f} minutes on {seen['hardware']}."
        )
        sources.append(
            f"- {style.title} (`{style.package.name}`), Copyright {style.package.holder}, {style.package.licence}, "
            f"{style.address}"
        )
        for split, title in (("training", "trained on"), ("held_out", "held out")):
            part = seen["comparison"][split]
            comparison.append(
                f"| `{style.name}` | {title} | {part['concepts']} | {part['before']:.1f} → {part['after']:.1f} "
                f"| {part['nearer_before']:.0%} → {part['nearer_after']:.0%} "
                f"| {part['probe_before']:.0%} → {part['probe_after']:.0%} "
                f"| {part['probe_drawings']:.0%} against {part['probe_flat_drawings']:.0%} |"
            )
    rank = figures[STYLES[0].name]["rank"]
    newline = "\n"
    file.write_text(
        f"""\
# Two style LoRAs for emoji

Low-rank updates (rank {rank}, alpha {rank}, half precision) of the transformer blocks in the denoiser of `../emoji`. \
Each turns its plain captions into another style, one that the model's training never showed. The caption has no word \
for it: the LoRA is the style.

```python
pipeline.load_lora_weights("sdopt/reference/loras", weight_name="{STYLES[0].name}.safetensors", adapter_name="style")
pipeline("police officer").images[0]
# Same rank, same layers: the other one can take its place without new modules.
pipeline.load_lora_weights(
    "sdopt/reference/loras", weight_name="{STYLES[1].name}.safetensors", adapter_name="style", hotswap=True
)
```

| file | size | style | drawings from | made by | licence |
|---|---:|---|---|---|---|
{newline.join(rows)}

## Training

`sdopt train-reference stage=loras` repeats it. The archive is checked against its SHA-512 digest, and the drawings are
matched to the concepts that the denoiser was trained on. Some of those concepts were held out from the LoRA. Only the
updates train; the denoiser and the text encoder stay as they are.

{newline.join(training)}

## Does it change the style?

Pictures ({STEPS} DDIM steps, guidance {GUIDANCE:g}) without the LoRA → with it, from the same noise, in latents of \
the model's own autoencoder:

- *distance*: mean Euclidean distance to the style's own drawing of the concept;
- *nearer*: share of pictures nearer to that drawing than to the flat one;
- *probe*: share that a linear probe takes for the style's, whatever they show. It was fitted to drawings of the \
concepts trained on, in this style and in the flat one; beside it, what it says of the drawings themselves, the \
style's against the flat ones.

| LoRA | concepts | tried | distance | nearer | probe | probe of drawings |
|---|---|---:|---:|---:|---:|---:|
{newline.join(comparison)}

What holds on held-out concepts is the style; what holds only on those trained on is drawings learnt by heart.

## Attribution

The drawings that these weights were trained on, and so in part the pictures that they make, derive from:

{newline.join(sources)}
- their packaging as Iconify JSON, https://github.com/iconify/icon-sets
"""
    )
