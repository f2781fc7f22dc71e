"""Evaluates the CLIP: the retrieval of captions, and whether its metrics get monotonically worse with degradation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sdopt.quality.distances import cmmd, fid, kid
from sdopt.quality.features import ClipFeatures
from sdopt.quality.images import channels_first
from sdopt.quality.reference_sets import ReferenceSet
from sdopt.training.clip_data import hold_out_pictures
from sdopt.training.data import Dataset
from sdopt.training.degradations import DEGRADATIONS
from sdopt.training.evaluation import Figure, ranks, share

if TYPE_CHECKING:
    from torch import Tensor


REFERENCE_PICTURES = 1000
"""Number of training pictures in the reference of the distances."""

WRONG = (0.0, 0.1, 0.25, 0.5, 1.0)
"""Shares of pictures with a wrong caption."""


def evaluate_clip(folder: Path, dataset: Dataset) -> list[Figure]:
    """Returns all figures of the CLIP in `folder`, whose `recipe.json` determines the held-out pictures.

    Args:
        folder: the folder exported by `sdopt train-reference stage=clip`.
        dataset: the drawings.
    """
    recipe = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))
    extractor, seed = ClipFeatures("emojiclip", str(folder)), recipe["seed"]
    held_out = hold_out_pictures(dataset, recipe["clip"]["held_out_share"], seed)
    others = np.setdiff1d(np.arange(len(dataset)), held_out)
    seen = np.random.default_rng([seed, 8]).permutation(others)[: len(held_out)]
    names = list(dict.fromkeys(record.label for record in dataset.records))
    found, of_training = (caption_ranks(extractor, dataset, names, indices) for indices in (held_out, seen))
    series = degradation_series(extractor, dataset, held_out, seed)
    fine = [worsens(figure) for figure in series]
    return [
        Figure(
            f"right caption of {len(names):,} first, {len(held_out)} held-out pictures", (share(found < 1),), "%", 30
        ),
        Figure("right caption among the first ten, held-out pictures", (share(found < 10),), "%", 70),
        Figure("right caption first, training pictures", (share(of_training < 1),), "%"),
        Figure(f"degradations, of {len(fine)}, that move a metric monotonically", (share(np.array(fine)),), "%", 100),
        *series,
    ]


def caption_ranks(extractor: ClipFeatures, dataset: Dataset, names: Sequence[str], indices: np.ndarray) -> np.ndarray:
    """Ranks all concepts' distinct plain `names` for each picture on white; see `ranks`."""
    place = {name: position for position, name in enumerate(names)}
    scores = _cosines(extractor(channels_first(dataset.images[indices])), extractor.embed_texts(names))
    return ranks(scores, np.array([place[dataset.records[index].label] for index in indices]))


def _cosines(pictures: Tensor, texts: Tensor) -> np.ndarray:
    from torch.nn import functional

    cosines: np.ndarray = (functional.normalize(pictures, dim=1) @ functional.normalize(texts, dim=1).T).numpy()
    return cosines


def degradation_series(extractor: ClipFeatures, dataset: Dataset, held_out: np.ndarray, seed: int) -> list[Figure]:
    """Returns each metric for the held-out drawings, degraded in four ways to an increasing extent, or mislabelled.

    Distances are to drawings of the CLIP's training.

    Args:
        extractor: the CLIP.
        dataset: the drawings.
        held_out: indices of the drawings that were held out of the CLIP's training.
        seed: seed of noise, references and wrong captions.
    """
    random = np.random.default_rng([seed, 7])
    others = np.setdiff1d(np.arange(len(dataset)), held_out)
    chosen = random.permutation(others)[:REFERENCE_PICTURES]
    reference = ReferenceSet.of_images("training drawings", dataset.images[chosen], extractor)
    pictures = dataset.images[held_out]
    texts = extractor.embed_texts([dataset.records[index].label for index in held_out])
    intact = extractor(channels_first(pictures))
    figures: list[Figure] = []
    for way in DEGRADATIONS:
        features = [intact]
        for amount in way.tried:
            # All amounts use the same noise.
            source = np.random.default_rng([seed, 8])
            spoilt = np.stack([way.spoil(picture, amount, source) for picture in pictures])
            features.append(extractor(channels_first(spoilt)))
        extents = ", ".join(["none", *(way.unit.format(amount) for amount in way.tried)])
        figures += metrics(f"{way.name} ({extents})", features, texts, reference)
    order, given, scores = random.permutation(len(texts)), np.arange(len(texts)), []
    for wrong in WRONG:
        # Each of the first pictures in `order` takes the caption of its predecessor, so none keeps its own.
        given[order] = np.where(np.arange(len(order)) < wrong * len(order), np.roll(order, 1), order)
        scores.append(clip_score(intact, texts[given]))
    shares = ", ".join(f"{wrong:.0%}" for wrong in WRONG)
    return [*figures, Figure(f"CLIP score, wrong captions ({shares})", tuple(scores))]


def metrics(what: str, series: Sequence[Tensor], texts: Tensor, reference: ReferenceSet) -> Iterator[Figure]:
    """Yields each metric for a series of sets of pictures, given as features (n, d), with their captions (n, d)."""
    distances: dict[str, Callable[[Tensor], float]] = {
        "CLIP score": lambda features: clip_score(features, texts),
        "FID": lambda features: fid(features, reference),
        "KID": kid(reference),
        "CMMD": cmmd(reference),
    }
    for name, distance in distances.items():
        yield Figure(f"{name}, {what}", tuple(float(distance(features)) for features in series))


def clip_score(features: Tensor, texts: Tensor) -> float:
    """Returns the mean of 100 · max(cosine, 0) over pairs of embeddings, both (n, d).

    Source: Hessel et al. 2021, scaled by 100.
    """
    from torch.nn import functional

    return float(100 * functional.cosine_similarity(features, texts).clamp(min=0).mean())


def worsens(figure: Figure) -> bool:
    """Returns whether each value of a metric is worse than the one before: a lower CLIP score, a larger distance."""
    sign = -1 if figure.figure.startswith("CLIP score") else 1
    return all(sign * (after - before) > 0 for before, after in pairwise(figure.values))
