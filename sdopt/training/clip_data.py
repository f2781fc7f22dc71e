"""Draws the pictures and captions of the CLIP's training."""

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
"""Number of the CLIP stage in the path of a random seed."""

SYMBOLS = 8
"""Emojibase's group of letters, arrows and signs."""

SIDED = re.compile(r"\b(left\w*|right\w*|clock\w*|counterclock\w*|o'clock|\w+-thirty|arrow)\b")
"""Words of labels whose drawings change their meaning when mirrored."""

STILL_SHARE = 0.25
"""Share of drawings that are neither shifted, rotated nor scaled."""

MIRRORED_SHARE = 0.5
"""Share of the mirrorable drawings that are mirrored."""


@dataclass(frozen=True)
class Batch:
    """The pictures and captions of one step.

    Attributes:
        pictures: float32 (n, 3, 64, 64) in [-1, 1].
        texts: m ≥ n captions; the first n are those of the pictures.
        same: bool (n, m), true if another picture's text fits too.
        random: the step's random stream, for further draws.
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
        """Returns the batch of a step, which depends only on the seed and the step."""
        import torch

        options, records = self._options, self._dataset.records
        random = np.random.default_rng([self._seed, STREAM, step])
        own = random.permutation(len(self._pictures))[: options.batch_size]
        extra = random.integers(len(self._pictures), size=options.extra_captions)
        # Half of the extra captions combine a concept of this step with another background or degradation.
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
    """Returns indices of pictures to hold out, int64: one picture each, for a share of the concepts with several.

    Training sees the other pictures of each concept, so a held-out picture tests whether the encoder recognizes a known
    concept in an unseen drawing.
    """
    random = np.random.default_rng([seed, STREAM])
    pictures: dict[str, list[int]] = defaultdict(list)
    for index, record in enumerate(dataset.records):
        pictures[record.concept].append(index)
    chosen = [random.choice(indices) for indices in pictures.values() if len(indices) > 1 and random.random() < share]
    return np.array(chosen, dtype=np.int64)


def may_be_mirrored(record: Record) -> bool:
    """Returns whether the label still describes the mirrored drawing."""
    return record.group != SYMBOLS and not SIDED.search(record.label)


def draw_any_background(random: np.random.Generator, share: float) -> str | None:
    """Draws any background, or None for white, including pairs with a concept that the denoiser never sees."""
    return str(random.choice(list(BACKGROUNDS))) if random.random() < share else None


def loose_caption(record: Record, random: np.random.Generator, background: str | None, style_share: float) -> str:
    """Draws a caption like the denoiser's training, but mostly without the style, so that it fits all drawings."""
    text = caption(record, random, background)
    return text if random.random() < style_share else text.removesuffix(f", {record.style} style")


def draw_degradation(random: np.random.Generator, share: float) -> Degradation | None:
    """Draws a degradation that captions can name, or None for no degradation."""
    return LEARNT[random.integers(len(LEARNT))] if random.random() < share else None


def spoil(pictures: Tensor, ways: Sequence[Degradation | None], random: np.random.Generator) -> Tensor:
    """Applies one degradation per picture, by a random amount, to pictures of float32 (n, 3, 64, 64) in [-1, 1]."""
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
    # Premultiplied alpha, so that resampling is correct at transparent borders.
    layers = torch.cat([images - (1 - alphas), alphas], dim=1)
    grid = functional.affine_grid(matrix, list(layers.shape), align_corners=False)
    layers = functional.grid_sample(layers, grid, align_corners=False)
    tint = uniform(0.9, 1.1, 1, 1, 1) * uniform(0.95, 1.05, 3, 1, 1)
    white = (colours == 1).all(dim=1, keepdim=True)
    behind = (colours + uniform(-0.04, 0.04, 3).masked_fill(white, 0))[:, :, None, None]
    return (tint * layers[:, :3] + (1 - layers[:, 3:]) * behind).clamp(0, 1).mul(2).sub(1)
