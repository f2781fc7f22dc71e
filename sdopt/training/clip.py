"""The CLIP's stage: an image and a text encoder that agree on which caption belongs to which picture."""

from __future__ import annotations

import copy
import json
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sdopt.errors import UsageError
from sdopt.training.architecture import build_clip
from sdopt.training.config import TrainReferenceConfig
from sdopt.training.data import BACKGROUNDS, WHITE, Dataset, Record, caption
from sdopt.training.degradations import LEARNT, Degradation
from sdopt.training.loop import (
    Progress,
    arithmetic,
    describe_hardware,
    generator,
    load_weights,
    pick_device,
    read_figures,
    train,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import CLIPModel, CLIPTokenizer


STREAM = 3
"""This stage's place in the seed's path."""

WEIGHTS = "model.safetensors"
"""File of a folder that transformers wrote."""

HIGHEST_SCALE = math.log(100.0)
"""Of the learnt logarithm that multiplies cosines (Radford et al. 2021)."""

SYMBOLS = 8
"""Emojibase's group of letters, arrows and signs."""

SIDED = re.compile(r"\b(left\w*|right\w*|clock\w*|counterclock\w*|o'clock|\w+-thirty|arrow)\b")
"""Words of labels whose drawings mean something else in the mirror."""


def hold_out_pictures(dataset: Dataset, share: float, seed: int) -> np.ndarray:
    """Positions of the pictures kept from training, int64: of a share of the concepts with several, one each.

    Every concept stays known by its other pictures, so that a held-out picture asks whether the encoder recognises a
    known thing in a drawing that it never saw.
    """
    random = np.random.default_rng([seed, STREAM])
    pictures: dict[str, list[int]] = defaultdict(list)
    for index, record in enumerate(dataset.records):
        pictures[record.concept].append(index)
    chosen = [random.choice(indices) for indices in pictures.values() if len(indices) > 1 and random.random() < share]
    return np.array(chosen, dtype=np.int64)


def may_be_mirrored(record: Record) -> bool:
    """Whether the mirrored drawing is still what its label says."""
    return record.group != SYMBOLS and not SIDED.search(record.label)


def draw_any_background(random: np.random.Generator, share: float) -> str | None:
    """One of all backgrounds, or None, which is white: the CLIP must judge the pairs that the denoiser never sees."""
    return str(random.choice(list(BACKGROUNDS))) if random.random() < share else None


def loose_caption(record: Record, random: np.random.Generator, background: str | None, style_share: float) -> str:
    """A caption as the denoiser's training draws it, but mostly without the style: a plain one fits all drawings."""
    text = caption(record, random, background)
    return text if random.random() < style_share else text.removesuffix(f", {record.style} style")


def draw_degradation(random: np.random.Generator, share: float) -> Degradation | None:
    """One of those that have a word, or None, which leaves a picture as it is."""
    return LEARNT[random.integers(len(LEARNT))] if random.random() < share else None


def spoil(pictures: Tensor, ways: Sequence[Degradation | None], random: np.random.Generator) -> Tensor:
    """Spoil each picture, float32 (n, 3, 64, 64) in [-1, 1], in its own way, by an amount that is drawn."""
    import torch

    spoilt = pictures.clone()
    for place, way in enumerate(ways):
        if way is not None:
            picture = pictures[place].add(1).mul(127.5).round().byte().permute(1, 2, 0).numpy()
            changed = torch.from_numpy(way.spoil(picture, way.draw(random), random).copy())
            spoilt[place] = changed.permute(2, 0, 1) / 127.5 - 1
    return spoilt


def place_drawings(
    images: Tensor, alphas: Tensor, colours: Tensor, mirrored: Tensor, random: torch.Generator
) -> Tensor:
    """Turn, scale, shift and tint drawings a little and lay them on their backgrounds.

    A fourth of them stays where it is, as sharp as it was drawn.

    Args:
        images: float32 (n, 3, 64, 64) in [0, 1], on white.
        alphas: float32 (n, 1, 64, 64) in [0, 1].
        colours: of the backgrounds, float32 (n, 3) in [0, 1].
        mirrored: bool (n,), which may be flipped; a coin decides.
        random: where all of it comes from.

    Returns:
        float32 (n, 3, 64, 64) in [-1, 1].
    """
    import torch
    from torch.nn import functional

    count = len(images)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=random)

    still = uniform(0, 1) < 0.25
    angle = uniform(-0.2, 0.2).masked_fill(still, 0)
    scale = uniform(-0.22, 0.22).masked_fill(still, 0).exp()
    shift = uniform(-0.16, 0.16, 2).masked_fill(still[:, None], 0)
    flip = torch.where(mirrored & (uniform(0, 1) < 0.5), -1.0, 1.0)
    cosine, sine = scale * angle.cos(), scale * angle.sin()
    matrix = torch.stack(
        [torch.stack([flip * cosine, -sine, shift[:, 0]], 1), torch.stack([flip * sine, cosine, shift[:, 1]], 1)], 1
    )
    # Colour times alpha, which can be moved over transparent surroundings.
    layers = torch.cat([images - (1 - alphas), alphas], dim=1)
    grid = functional.affine_grid(matrix, list(layers.shape), align_corners=False)
    layers = functional.grid_sample(layers, grid, align_corners=False)
    tint = uniform(0.9, 1.1, 1, 1, 1) * uniform(0.95, 1.05, 3, 1, 1)
    white = (colours == 1).all(dim=1, keepdim=True)
    behind = (colours + uniform(-0.04, 0.04, 3).masked_fill(white, 0))[:, :, None, None]
    return (tint * layers[:, :3] + (1 - layers[:, 3:]) * behind).clamp(0, 1).mul(2).sub(1)


def embed_visible(model: CLIPModel, pictures: Tensor, hidden: float, random: torch.Generator) -> Tensor:
    """Projected embeddings of pictures (n, 3, 64, 64), of which a share of patches is left out, others for each.

    It makes a step cheaper and the drawings harder to learn by heart (Li et al. 2023, FLIP).
    """
    import torch

    vision = model.vision_model
    states = vision.embeddings(pictures)
    if hidden > 0:
        count, patches = len(states), states.shape[1] - 1
        kept = torch.rand(count, patches, generator=random).argsort(dim=1)[:, : round(patches * (1 - hidden))] + 1
        # The class token, at place 0, always stays.
        kept = torch.cat([torch.zeros(count, 1, dtype=kept.dtype), kept], dim=1).to(states.device)
        states = states.gather(1, kept[..., None].expand(-1, -1, states.shape[2]))
    states = vision.encoder(inputs_embeds=vision.pre_layrnorm(states)).last_hidden_state
    return model.visual_projection(vision.post_layernorm(states[:, 0]))


def contrastive_loss(images: Tensor, texts: Tensor, scale: Tensor, same: Tensor) -> Tensor:
    """Symmetric InfoNCE (Radford et al. 2021), with more texts than images.

    Args:
        images: embeddings (n, d).
        texts: embeddings (m, d), m ≥ n; the first n belong to the images, in order.
        scale: logarithm of what cosines are multiplied by.
        same: bool (n, m), where another image's text fits too, and is no mistake.
    """
    import torch
    from torch.nn import functional

    images, texts = functional.normalize(images, dim=1), functional.normalize(texts, dim=1)
    cosines = scale.clamp(max=HIGHEST_SCALE).exp() * images @ texts.T
    logits = cosines.masked_fill(same, -math.inf)
    own = torch.arange(len(images), device=images.device)
    towards_texts = functional.cross_entropy(logits, own)
    towards_images = functional.cross_entropy(logits[:, : len(images)].T, own)
    return (towards_texts + towards_images) / 2


def train_clip(config: TrainReferenceConfig, dataset: Dataset, tokenizer: CLIPTokenizer, folder: Path) -> Progress:
    """Train on all concepts, those that the denoiser never sees included; see `fit` for what lands in `folder`."""
    import torch

    options, device = config.clip, pick_device(config.device)
    torch.manual_seed(config.seed)
    network = start_clip(options.start_from).to(device)
    # The fused kernels' backward passes are slow on CPUs.
    network.set_attn_implementation("eager")
    average = copy.deepcopy(network)

    held_out = set(hold_out_pictures(dataset, options.held_out_share, config.seed).tolist())
    pictures: dict[str, list[int]] = defaultdict(list)
    for index, record in enumerate(dataset.records):
        if index not in held_out:
            pictures[record.concept].append(index)
    drawn = list(pictures.values())
    places = {background: place for place, background in enumerate((None, *BACKGROUNDS))}
    mirrored = torch.tensor([may_be_mirrored(record) for record in dataset.records])

    def loss(step: int) -> Tensor:
        random = np.random.default_rng([config.seed, STREAM, step])
        own = random.permutation(len(drawn))[: options.batch_size]
        extra = random.integers(len(drawn), size=options.extra_captions)
        # Half of the further captions put a thing of this step on another background, or spoil it in another way.
        extra[::2] = own[np.arange(len(extra[::2])) % len(own)]
        concepts = np.concatenate([own, extra])
        behind = [draw_any_background(random, options.background_share) for _ in concepts]
        indices = [int(random.choice(drawn[concept])) for concept in concepts]
        texts = [
            loose_caption(dataset.records[index], random, background, options.style_share)
            for index, background in zip(indices, behind, strict=True)
        ]
        ways = [draw_degradation(random, options.spoilt_share) for _ in concepts]
        texts = [f"{text}, {way.word}" if way else text for text, way in zip(texts, ways, strict=True)]
        kinds = [LEARNT.index(way) + 1 if way else 0 for way in ways]
        told = np.array(list(zip(concepts, (places[background] for background in behind), kinds, strict=True)))
        count = len(own)
        same = torch.from_numpy((told[:count, None] == told).all(axis=2)).fill_diagonal_(False)
        chosen = np.array(indices[:count])
        colours = torch.tensor([BACKGROUNDS[b] if b else WHITE for b in behind[:count]]) / 255
        torch_random = generator(config.seed, STREAM, step)
        shown = place_drawings(
            torch.from_numpy(dataset.images[chosen]).permute(0, 3, 1, 2) / 255,
            torch.from_numpy(dataset.alphas[chosen])[:, None] / 255,
            colours,
            mirrored[chosen],
            torch_random,
        )
        shown = spoil(shown, ways[:count], random).to(device)
        with arithmetic(config.arithmetic, device):
            seen = embed_visible(network, shown, options.hidden_patches, torch_random)
            read = network.get_text_features(input_ids=_tokens(tokenizer, texts).to(device)).pooler_output
        return contrastive_loss(seen.float(), read.float(), network.logit_scale, same.to(device))

    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {
        "batch_size": options.batch_size,
        "extra_captions": options.extra_captions,
        "background_share": options.background_share,
        "spoilt_share": options.spoilt_share,
        "hidden_patches": options.hidden_patches,
        "held_out_share": options.held_out_share,
        "start_from": options.start_from,
        "pictures": len(dataset) - len(held_out),
        "held_out_pictures": len(held_out),
        "hardware": describe_hardware(device, config.arithmetic),
    }
    figures["earlier"] = earlier_settings(folder, figures) if config.resume else []
    (folder / "figures.json").write_text(json.dumps(figures, indent=1))
    return train(
        config,
        options,
        network,
        loss,
        folder,
        title="clip",
        average=average,
    )


def start_clip(folder: str | None) -> CLIPModel:
    """The network that training starts from: one that this stage wrote, in single precision, or a fresh one.

    Raises:
        UsageError: the folder has no CLIP of this architecture.
    """
    network = build_clip()
    if folder is not None:
        if not (Path(folder) / WEIGHTS).is_file():
            raise UsageError(f"clip.start_from={folder}: there is no {WEIGHTS} in it; name a folder of this stage's")
        load_weights(Path(folder) / WEIGHTS, network)
    return network


def earlier_settings(folder: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """What a run that goes on was trained with before, where that was something else: the settings and `until_step`."""
    if not ((folder / "figures.json").exists() and (folder / "checkpoint" / "state.json").exists()):
        return []
    before = read_figures(folder)
    earlier: list[dict[str, Any]] = before.get("earlier", [])
    changed = {key: before.get(key) for key, value in settings.items() if before.get(key) != value}
    return [*earlier, {"until_step": before["steps"], **changed}] if changed else earlier


def _tokens(tokenizer: CLIPTokenizer, texts: list[str]) -> Tensor:
    """Token ids, as long as the longest text: attention is causal and the end token is read, so padding is no use."""
    return tokenizer(
        texts, padding=True, truncation=True, max_length=tokenizer.model_max_length, return_tensors="pt"
    ).input_ids


def load_clip(folder: Path) -> CLIPModel:
    """The averaged weights that `train_clip` left in `folder`, on the CPU.

    Raises:
        UsageError: the stage has not run.
    """
    model = build_clip()
    load_weights(folder / "checkpoint" / "average.safetensors", model)
    return model.eval().requires_grad_(False)
