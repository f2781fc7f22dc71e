"""Evaluates whether the CLIP retrieves the caption of a picture, and the background in the caption."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sdopt.quality.features import ClipFeatures
from sdopt.quality.images import channels_first
from sdopt.training.captions import on_background
from sdopt.training.data import BACKGROUNDS, Dataset

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Retrieval:
    """The accuracy of ranking captions for pictures.

    Attributes:
        pictures: number of pictures.
        captions: number of ranked captions per picture, one of which is correct.
        top1: share of pictures whose correct caption is first.
        top10: share of pictures whose correct caption is among the first ten.
    """

    pictures: int
    captions: int
    top1: float
    top10: float


def ranks(scores: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Returns the number of columns with a higher score than each row's own column; ties count half. float64 (n,).

    Args:
        scores: scores (n, m); higher is better.
        own: the correct column of each row, (n,).
    """
    right = scores[np.arange(len(scores)), own][:, None]
    higher: np.ndarray = (scores > right).sum(axis=1) + ((scores == right).sum(axis=1) - 1) / 2
    return higher


def retrieve(scores: np.ndarray, own: np.ndarray) -> Retrieval:
    """Returns how often the correct column of a row is first, or among the first ten; see `ranks`."""
    found = ranks(scores, own)
    top1, top10 = (float(np.mean(found < first)) for first in (1, 10))
    return Retrieval(len(scores), scores.shape[1], top1, top10)


def recognise_captions(extractor: ClipFeatures, dataset: Dataset, indices: np.ndarray) -> Retrieval:
    """Ranks the distinct plain names of all concepts for each picture on white."""
    names = list(dict.fromkeys(record.label for record in dataset.records))
    place = {name: position for position, name in enumerate(names)}
    scores = _cosines(extractor(channels_first(dataset.images[indices])), extractor.embed_texts(names))
    return retrieve(scores, np.array([place[dataset.records[index].label] for index in indices]))


def recognise_backgrounds(extractor: ClipFeatures, dataset: Dataset, indices: np.ndarray) -> Retrieval:
    """Ranks the eleven captions of a concept for each picture on white and on each colour."""
    backgrounds = [None, *BACKGROUNDS]
    texts = [on_background(dataset.records[index].label, colour) for index in indices for colour in backgrounds]
    captions = extractor.embed_texts(texts).view(len(indices), len(backgrounds), -1)
    scores = []
    for colour in backgrounds:
        seen = extractor(channels_first(dataset.on_named(indices, [colour] * len(indices))))
        scores += [_cosines(picture[None], names)[0] for picture, names in zip(seen, captions, strict=True)]
    return retrieve(np.stack(scores), np.repeat(np.arange(len(backgrounds)), len(indices)))


def _cosines(pictures: Tensor, texts: Tensor) -> np.ndarray:
    from torch.nn import functional

    cosines: np.ndarray = (functional.normalize(pictures, dim=1) @ functional.normalize(texts, dim=1).T).numpy()
    return cosines
