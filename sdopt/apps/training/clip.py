"""The CLIP stage: trains an image encoder and a text encoder to match pictures and captions."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageFilter
from safetensors.torch import load_model
from torch import Tensor
from torch.nn import functional
from transformers import CLIPModel, CLIPTokenizer

from sdopt.apps.training.captions import caption
from sdopt.apps.training.config import ClipConfig, TrainReferenceConfig
from sdopt.apps.training.data import (
    BACKGROUNDS,
    Dataset,
    PictureRecord,
    colour_of,
)
from sdopt.apps.training.loop import (
    STREAMS,
    generator,
    in_precision,
    pick_device,
    train,
)
from sdopt.apps.training.networks import build_clip
from sdopt.errors import UsageError

WEIGHTS = "model.safetensors"
"""The weights file of transformers."""

HIGHEST_SCALE = math.log(100.0)
"""Upper limit of `logit_scale`, the learnt logarithm of the factor of the cosines (Radford et al. 2021)."""


SYMBOLS = 8
"""Emojibase's group of letters, arrows and signs."""

SIDED = re.compile(
    r"\b(left\w*|right\w*|clock\w*|counterclock\w*|o'clock|\w+-thirty|arrow)\b"
)
"""Words of labels whose drawings change their meaning when mirrored."""

STILL_SHARE = 0.25
"""Share of drawings that are neither shifted, rotated nor scaled."""

MIRRORED_SHARE = 0.5
"""Share of the mirrorable drawings that are mirrored."""


def noisy(picture: np.ndarray, sigma: float, random: np.random.Generator) -> np.ndarray:
    """Adds Gaussian noise with a standard deviation of `sigma`, as a share of the value range."""
    noise = 255 * sigma * random.standard_normal(picture.shape, dtype=np.float32)
    pixels: np.ndarray = (picture + noise).clip(0, 255).round().astype(np.uint8)
    return pixels


def blurred(
    picture: np.ndarray, sigma: float, random: np.random.Generator
) -> np.ndarray:
    """Applies a Gaussian blur of `sigma` pixels."""
    return np.asarray(Image.fromarray(picture).filter(ImageFilter.GaussianBlur(sigma)))


def resampled(
    picture: np.ndarray, size: float, random: np.random.Generator
) -> np.ndarray:
    """Scales a picture down to `size` pixels and up again."""
    cubic, small, image = (
        Image.Resampling.BICUBIC,
        round(size),
        Image.fromarray(picture),
    )
    return np.asarray(image.resize((small, small), cubic).resize(image.size, cubic))


def turned(
    picture: np.ndarray, degrees: float, random: np.random.Generator
) -> np.ndarray:
    """Rotates all hues by `degrees`."""
    hue, saturation, value = Image.fromarray(picture).convert("HSV").split()
    hue = hue.point(
        [(level + round(degrees / 360 * 256)) % 256 for level in range(256)]
    )
    return np.asarray(Image.merge("HSV", (hue, saturation, value)).convert("RGB"))


@dataclass(frozen=True)
class Degradation:
    """A way to degrade a picture by a given amount.

    Attributes:
        name: the name in tables.
        unit: a format string for an amount.
        spoil: returns a degraded picture from a picture, uint8 (height, width, 3), an amount and a random generator.
        tried: amounts that the card tests, in increasing order of degradation.
        word: the word for such a picture in captions; empty if training does not use the degradation.
        range: the range of amounts in training, sampled uniformly on a logarithmic scale.
    """

    name: str
    unit: str
    spoil: Callable[[np.ndarray, float, np.random.Generator], np.ndarray]
    tried: tuple[float, ...]
    word: str = ""
    range: tuple[float, float] = (1.0, 1.0)

    def draw(self, random: np.random.Generator) -> float:
        """Draws an amount for training."""
        low, high = self.range
        return float(low * (high / low) ** random.random())


DEGRADATIONS = (
    Degradation(
        "noise", "σ = {:g}", noisy, (0.02, 0.05, 0.1, 0.2), "noisy", (0.015, 0.3)
    ),
    Degradation(
        "blur", "σ = {:g} px", blurred, (0.5, 1.0, 1.5, 2.0), "blurred", (0.4, 3.0)
    ),
    # Not used in training: tests whether training on noise and blur generalizes.
    Degradation("down-up sampling", "{:g} px", resampled, (48, 32, 24, 16)),
    Degradation(
        "colours turned", "{:g}°", turned, (20, 45, 90, 180), "false colours", (15, 345)
    ),
)

LEARNT = tuple(way for way in DEGRADATIONS if way.word)
"""Those that training uses, and captions name."""


class Batches:
    """Draws the batches of a training, from which `held_out` pictures are kept."""

    def __init__(self, options: ClipConfig, dataset: Dataset, seed: int) -> None:
        self._options, self._dataset, self._seed = options, dataset, seed
        held_out = set(
            hold_out_pictures(dataset, options.held_out_share, seed).tolist()
        )
        self.held_out = len(held_out)
        self._pictures: list[list[int]] = []
        for pictures in pictures_by_concept(dataset):
            if shown := [index for index in pictures if index not in held_out]:
                self._pictures.append(shown)
        self._mirrored = torch.tensor(
            [may_be_mirrored(record) for record in dataset.records]
        )

    def draw(self, step: int) -> tuple[Tensor, list[str], Tensor, torch.Generator]:
        """Draws the batch of a step, which depends only on the seed and the step.

        Returns:
            pictures, float32 (n, 3, 64, 64) in [-1, 1]; m ≥ n captions, of which the first n are those of the pictures;
            whether another picture's text fits too, bool (n, m); and the step's random stream, for further draws.
        """
        options, dataset = self._options, self._dataset
        random = np.random.default_rng([self._seed, STREAMS["clip"], step])
        own = random.permutation(len(self._pictures))[: options.batch_size]
        extra = random.integers(len(self._pictures), size=options.extra_captions)
        # Half of the extra captions combine a concept of this step with another background or degradation.
        extra[::2] = own[np.arange(len(extra[::2])) % len(own)]
        concepts, count = np.concatenate([own, extra]), len(own)
        names = list(BACKGROUNDS)
        # Any background, including pairs with a concept that the denoiser never sees.
        behind: list[str | None] = [None] * len(concepts)
        for number in range(len(concepts)):
            if random.random() < options.background_share:
                behind[number] = str(random.choice(names))
        indices = [int(random.choice(self._pictures[concept])) for concept in concepts]
        texts = [
            loose_caption(
                dataset.records[index], random, background, options.style_share
            )
            for index, background in zip(indices, behind, strict=True)
        ]
        ways: list[Degradation | None] = [None] * len(concepts)
        for number in range(len(concepts)):
            if random.random() < options.spoilt_share:
                way = LEARNT[random.integers(len(LEARNT))]
                ways[number] = way
                texts[number] += f", {way.word}"
        on = [[None, *names].index(name) for name in behind]
        by = [[None, *LEARNT].index(way) for way in ways]
        told = np.column_stack([concepts, on, by])
        same = torch.from_numpy(
            (told[:count, None] == told).all(axis=2)
        ).fill_diagonal_(False)
        stream, chosen = (
            generator(self._seed, STREAMS["clip"], step),
            np.array(indices[:count]),
        )
        placed = place_drawings(
            torch.from_numpy(dataset.images[chosen]).permute(0, 3, 1, 2) / 255,
            torch.from_numpy(dataset.alphas[chosen])[:, None] / 255,
            torch.tensor([colour_of(name) for name in behind[:count]]) / 255,
            self._mirrored[chosen],
            stream,
        )
        return spoil(placed, ways[:count], random), texts, same, stream


def pictures_by_concept(dataset: Dataset) -> list[list[int]]:
    """Returns the indices of the pictures of each concept."""
    pictures: dict[str, list[int]] = defaultdict(list)
    for index, record in enumerate(dataset.records):
        pictures[record.concept].append(index)
    return list(pictures.values())


def hold_out_pictures(dataset: Dataset, share: float, seed: int) -> np.ndarray:
    """Returns indices of pictures to hold out, int64: one picture each, for a share of the concepts with several.

    Training sees the other pictures of each concept, so a held-out picture tests whether the encoder recognizes a known
    concept in an unseen drawing.
    """
    random = np.random.default_rng([seed, STREAMS["clip"]])
    several = (indices for indices in pictures_by_concept(dataset) if len(indices) > 1)
    return np.array(
        [random.choice(indices) for indices in several if random.random() < share],
        dtype=np.int64,
    )


def may_be_mirrored(record: PictureRecord) -> bool:
    """Returns whether the label still describes the mirrored drawing."""
    return record.group != SYMBOLS and not SIDED.search(record.label)


def loose_caption(
    record: PictureRecord,
    random: np.random.Generator,
    background: str | None,
    style_share: float,
) -> str:
    """Draws a caption like the denoiser's training, but mostly without the style, so that it fits all drawings."""
    text = caption(record, random, background)
    return (
        text
        if random.random() < style_share
        else text.removesuffix(f", {record.style} style")
    )


def spoil(
    pictures: Tensor, ways: Sequence[Degradation | None], random: np.random.Generator
) -> Tensor:
    """Applies one degradation per picture, by a random amount, to pictures of float32 (n, 3, 64, 64) in [-1, 1]."""
    spoilt = pictures.clone()
    for place, way in enumerate(ways):
        if way is not None:
            picture = (
                pictures[place]
                .add(1)
                .mul(127.5)
                .round()
                .byte()
                .permute(1, 2, 0)
                .numpy()
            )
            changed = torch.from_numpy(
                way.spoil(picture, way.draw(random), random).copy()
            )
            spoilt[place] = changed.permute(2, 0, 1) / 127.5 - 1
    return spoilt


def place_drawings(
    images: Tensor,
    alphas: Tensor,
    colours: Tensor,
    mirrored: Tensor,
    random: torch.Generator,
) -> Tensor:
    """Slightly rotates, scales, shifts and tints drawings, and places them on their backgrounds.

    A share of `STILL_SHARE` is not transformed, and so stays sharp.

    Args:
        images: float32 (n, 3, 64, 64) in [0, 1], on white.
        alphas: float32 (n, 1, 64, 64) in [0, 1].
        colours: of the backgrounds, float32 (n, 3) in [0, 1].
        mirrored: bool (n,), whether a drawing may be mirrored; half of these drawings are.
        random: source of all random numbers.

    Returns:
        float32 (n, 3, 64, 64) in [-1, 1].
    """
    count = len(images)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=random)

    still = uniform(0, 1) < STILL_SHARE
    angle = uniform(-0.2, 0.2).masked_fill(still, 0)
    scale = uniform(-0.22, 0.22).masked_fill(still, 0).exp()
    shift = uniform(-0.16, 0.16, 2).masked_fill(still[:, None], 0)
    flip = torch.where(mirrored & (uniform(0, 1) < MIRRORED_SHARE), -1.0, 1.0)
    cosine, sine = scale * angle.cos(), scale * angle.sin()
    matrix = torch.stack(
        [
            torch.stack([flip * cosine, -sine, shift[:, 0]], 1),
            torch.stack([flip * sine, cosine, shift[:, 1]], 1),
        ],
        1,
    )
    # Premultiplied alpha, so that resampling is correct at transparent borders.
    layers = torch.cat([images - (1 - alphas), alphas], dim=1)
    grid = functional.affine_grid(matrix, list(layers.shape), align_corners=False)
    layers = functional.grid_sample(layers, grid, align_corners=False)
    tint = uniform(0.9, 1.1, 1, 1, 1) * uniform(0.95, 1.05, 3, 1, 1)
    white = (colours == 1).all(dim=1, keepdim=True)
    behind = (colours + uniform(-0.04, 0.04, 3).masked_fill(white, 0))[:, :, None, None]
    return (
        (tint * layers[:, :3] + (1 - layers[:, 3:]) * behind).clamp(0, 1).mul(2).sub(1)
    )


def embed_visible(
    model: CLIPModel, pictures: Tensor, hidden: float, random: torch.Generator
) -> Tensor:
    """Returns projected embeddings of pictures (n, 3, 64, 64), after dropping a random share of each one's patches.

    Dropping patches makes steps cheaper, and drawings harder to memorize (Li et al. 2023, FLIP).
    """
    vision = model.vision_model
    states = vision.embeddings(pictures)
    if hidden > 0:
        count, patches = len(states), states.shape[1] - 1
        kept = (
            torch.rand(count, patches, generator=random).argsort(dim=1)[
                :, : round(patches * (1 - hidden))
            ]
            + 1
        )
        # The class token, at index 0, is always kept.
        kept = torch.cat([torch.zeros(count, 1, dtype=kept.dtype), kept], dim=1).to(
            states.device
        )
        states = states.gather(1, kept[..., None].expand(-1, -1, states.shape[2]))
    states = vision.encoder(inputs_embeds=vision.pre_layrnorm(states)).last_hidden_state
    embeddings: Tensor = model.visual_projection(vision.post_layernorm(states[:, 0]))
    return embeddings


def contrastive_loss(
    images: Tensor, texts: Tensor, scale: Tensor, same: Tensor
) -> Tensor:
    """Returns the symmetric InfoNCE loss (Radford et al. 2021), with more texts than images.

    Args:
        images: embeddings (n, d).
        texts: embeddings (m, d), m ≥ n; the first n belong to the images, in order.
        scale: logarithm of the factor of the cosines.
        same: bool (n, m), true for pairs to ignore, because another image's text fits too.
    """
    images, texts = (
        functional.normalize(images, dim=1),
        functional.normalize(texts, dim=1),
    )
    cosines = scale.clamp(max=HIGHEST_SCALE).exp() * images @ texts.T
    logits = cosines.masked_fill(same, -math.inf)
    own = torch.arange(len(images), device=images.device)
    towards_texts = functional.cross_entropy(logits, own)
    towards_images = functional.cross_entropy(logits[:, : len(images)].T, own)
    return (towards_texts + towards_images) / 2


def train_clip(
    config: TrainReferenceConfig, dataset: Dataset, tokenizer: CLIPTokenizer
) -> None:
    """Trains on all concepts, including the denoiser's held-out concepts."""
    options, device = config.clip, pick_device(config.device)
    torch.manual_seed(config.seed)
    network = start_clip(options.start_from).to(device)
    # The fused kernels' backward passes are slow on CPUs.
    network.set_attn_implementation("eager")
    batches = Batches(options, dataset, config.seed)

    def loss(step: int) -> Tensor:
        pictures, texts, same, random = batches.draw(step)
        # Padded to the longest text: with causal attention, the end token does not see the padding.
        tokens = tokenizer(
            texts,
            padding=True,
            truncation=True,
            max_length=tokenizer.model_max_length,
            return_tensors="pt",
        )
        with in_precision(config.arithmetic, device):
            seen = embed_visible(
                network, pictures.to(device), options.hidden_patches, random
            )
            read = network.get_text_features(
                input_ids=tokens.input_ids.to(device)
            ).pooler_output
        return contrastive_loss(
            seen.float(), read.float(), network.logit_scale, same.to(device)
        )

    train(
        config, "clip", network, loss,
        pictures=len(dataset) - batches.held_out, held_out_pictures=batches.held_out,
    )  # fmt: skip


def start_clip(folder: str | None) -> CLIPModel:
    """Returns the network to train: one from a folder of this stage, in single precision, or an untrained network."""
    network = build_clip()
    if folder is not None:
        if not (Path(folder) / WEIGHTS).is_file():
            raise UsageError(
                f"clip.start_from={folder}: the folder has no {WEIGHTS}; choose a folder written by stage=clip"
            )
        load_model(network, Path(folder) / WEIGHTS)
    return network
