"""The pictures and captions of the CLIP's training."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sdopt.training.captions import caption
from sdopt.training.compute import generator
from sdopt.training.config import ClipConfig
from sdopt.training.data import BACKGROUNDS, WHITE, Dataset, Record
from sdopt.training.degradations import LEARNT, Degradation

if TYPE_CHECKING:
    import torch
    from torch import Tensor


STREAM = 3
"""The CLIP stage's place in the path of the seed."""

SYMBOLS = 8
"""Emojibase's group of letters, arrows and signs."""

SIDED = re.compile(r"\b(left\w*|right\w*|clock\w*|counterclock\w*|o'clock|\w+-thirty|arrow)\b")
"""Words of labels whose drawings mean something else in the mirror."""

STILL_SHARE = 0.25
"""Of drawings that are neither moved, turned nor scaled."""

MIRRORED_SHARE = 0.5
"""Of the drawings that may be mirrored."""


@dataclass(frozen=True)
class Batch:
    """One step's pictures and captions.

    Attributes:
        pictures: float32 (n, 3, 64, 64) in [-1, 1].
        texts: m ≥ n captions; the first n are those of the pictures.
        same: bool (n, m), true where another picture's text fits too.
        random: the step's stream, for what else the step draws.
    """

    pictures: Tensor
    texts: list[str]
    same: Tensor
    random: torch.Generator


class Batches:
    """Draws the batches of a training.

    Attributes:
        held_out: number of pictures kept from training.
    """

    def __init__(self, options: ClipConfig, dataset: Dataset, seed: int) -> None:
        import torch

        self._options, self._dataset, self._seed = options, dataset, seed
        held_out = set(hold_out_pictures(dataset, options.held_out_share, seed).tolist())
        self.held_out = len(held_out)
        pictures: dict[str, list[int]] = defaultdict(list)
        for index, record in enumerate(dataset.records):
            if index not in held_out:
                pictures[record.concept].append(index)
        self._pictures = list(pictures.values())
        self._mirrored = torch.tensor([may_be_mirrored(record) for record in dataset.records])

    def draw(self, step: int) -> Batch:
        """Draws the batch of a step; it depends on the seed and on the step only."""
        import torch

        options, records = self._options, self._dataset.records
        random = np.random.default_rng([self._seed, STREAM, step])
        own = random.permutation(len(self._pictures))[: options.batch_size]
        extra = random.integers(len(self._pictures), size=options.extra_captions)
        # Half of the further captions put a thing of this step on another background, or degrade it in another way.
        extra[::2] = own[np.arange(len(extra[::2])) % len(own)]
        concepts, count = np.concatenate([own, extra]), len(own)
        behind = [draw_any_background(random, options.background_share) for _ in concepts]
        indices = [int(random.choice(self._pictures[concept])) for concept in concepts]
        texts = [
            loose_caption(records[index], random, background, options.style_share)
            for index, background in zip(indices, behind, strict=True)
        ]
        ways = [draw_degradation(random, options.spoilt_share) for _ in concepts]
        texts = [f"{text}, {way.word}" if way else text for text, way in zip(texts, ways, strict=True)]
        names, kinds = (None, *BACKGROUNDS), (None, *LEARNT)
        said = [(names.index(name), kinds.index(way)) for name, way in zip(behind, ways, strict=True)]
        told = np.column_stack([concepts, said])
        same = torch.from_numpy((told[:count, None] == told).all(axis=2)).fill_diagonal_(False)
        stream = generator(self._seed, STREAM, step)
        placed = self._placed(np.array(indices[:count]), behind[:count], stream)
        return Batch(spoil(placed, ways[:count], random), texts, same, stream)

    def _placed(self, chosen: np.ndarray, behind: Sequence[str | None], stream: torch.Generator) -> Tensor:
        import torch

        return place_drawings(
            torch.from_numpy(self._dataset.images[chosen]).permute(0, 3, 1, 2) / 255,
            torch.from_numpy(self._dataset.alphas[chosen])[:, None] / 255,
            torch.tensor([BACKGROUNDS[name] if name else WHITE for name in behind]) / 255,
            self._mirrored[chosen],
            stream,
        )


def hold_out_pictures(dataset: Dataset, share: float, seed: int) -> np.ndarray:
    """Picks pictures to keep from training, int64: one each of a share of the concepts that have several.

    Training sees the other pictures of each concept, so a held-out one tests whether the encoder recognises a known
    thing in a drawing that it never saw.
    """
    random = np.random.default_rng([seed, STREAM])
    pictures: dict[str, list[int]] = defaultdict(list)
    for index, record in enumerate(dataset.records):
        pictures[record.concept].append(index)
    chosen = [random.choice(indices) for indices in pictures.values() if len(indices) > 1 and random.random() < share]
    return np.array(chosen, dtype=np.int64)


def may_be_mirrored(record: Record) -> bool:
    """Returns whether the mirrored drawing is still what its label says."""
    return record.group != SYMBOLS and not SIDED.search(record.label)


def draw_any_background(random: np.random.Generator, share: float) -> str | None:
    """Draws any background, or None for white: the CLIP must also judge the pairs that the denoiser never sees."""
    return str(random.choice(list(BACKGROUNDS))) if random.random() < share else None


def loose_caption(record: Record, random: np.random.Generator, background: str | None, style_share: float) -> str:
    """Draws a caption as the denoiser's training does, but mostly without the style: a plain one fits all drawings."""
    text = caption(record, random, background)
    return text if random.random() < style_share else text.removesuffix(f", {record.style} style")


def draw_degradation(random: np.random.Generator, share: float) -> Degradation | None:
    """Draws a degradation that has a word, or None, which leaves a picture as it is."""
    return LEARNT[random.integers(len(LEARNT))] if random.random() < share else None


def spoil(pictures: Tensor, ways: Sequence[Degradation | None], random: np.random.Generator) -> Tensor:
    """Degrades each picture, float32 (n, 3, 64, 64) in [-1, 1], in its own way, by a random amount."""
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
    """Turns, scales, shifts and tints drawings a little and places them on their backgrounds.

    `STILL_SHARE` of them stay where they are, as sharp as they were drawn.

    Args:
        images: float32 (n, 3, 64, 64) in [0, 1], on white.
        alphas: float32 (n, 1, 64, 64) in [0, 1].
        colours: of the backgrounds, float32 (n, 3) in [0, 1].
        mirrored: bool (n,), which ones may be mirrored; half of those are.
        random: source of all random numbers.

    Returns:
        float32 (n, 3, 64, 64) in [-1, 1].
    """
    import torch
    from torch.nn import functional

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
