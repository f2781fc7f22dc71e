"""Evaluates the generator with features of an independent network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from sdopt.quality.distances import fid, kid
from sdopt.quality.features import FeatureExtractor
from sdopt.quality.images import channels_first
from sdopt.quality.reference_sets import ReferenceSet
from sdopt.training.autoencoder import reconstruction_psnr
from sdopt.training.data import BACKGROUNDS, Dataset, Record
from sdopt.training.evaluation import Figure, Note, ranks, share
from sdopt.training.prompts import real_pictures, records_of
from sdopt.training.sheet import generate

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline
    from torch import Tensor


NEAREST = (1, 10)
"""Values of k: the correct concept must be among the k nearest."""

CANDIDATES = 300
"""Number of concepts to rank for a coloured background; features of all concepts on each colour take too long."""


def concept_ranks(features: Tensor, labels: Sequence[str], drawings: Tensor, of_drawings: Sequence[str]) -> np.ndarray:
    """Returns, for each generated picture, the number of concepts that are nearer than its own (n,); ties count half.

    The distance to a concept is the Euclidean distance of the features to those of its nearest drawing.

    Args:
        features: of the generated pictures, (n, d).
        labels: the concept's name of each picture.
        drawings: features of real drawings, (m, d).
        of_drawings: the concept's name of each drawing.
    """
    import torch

    place = {name: position for position, name in enumerate(dict.fromkeys(of_drawings))}
    of_drawing = torch.tensor([place[label] for label in of_drawings])
    nearest = torch.full((len(features), len(place)), torch.inf).scatter_reduce(
        1, of_drawing.expand(len(features), -1), torch.cdist(features, drawings), "amin"
    )
    return ranks(-nearest.numpy(), np.array([place[label] for label in labels]))


def evaluate_generator(
    pipeline: StableDiffusionPipeline,
    dataset: Dataset,
    prompts: dict[str, list[str]],
    extractor: FeatureExtractor,
    *,
    seed: int = 0,
    note: Note = lambda _: None,
) -> list[Figure]:
    """Returns all figures of the autoencoder and the denoiser.

    Args:
        pipeline: in single precision.
        dataset: the drawings.
        prompts: `training`, `held_out` and `gate`, as in `prompts.json`.
        extractor: the feature extractor.
        seed: picture i of each list starts from the noise of seed + i.
        note: called before each step.
    """
    note("autoencoder")
    held_out = dataset.indices(held_out=True)
    names = list(BACKGROUNDS)
    coloured = dataset.on_named(held_out, [names[place % len(names)] for place in range(len(held_out))])
    psnr = "autoencoder: PSNR of held-out pictures"
    figures = [
        Figure(psnr, (reconstruction_psnr(pipeline.vae, dataset.images[held_out]),), "dB", 24),
        Figure(f"{psnr} on coloured backgrounds", (reconstruction_psnr(pipeline.vae, coloured),), "dB"),
    ]

    def found(what: str, ranked: np.ndarray, concepts: int, target: float | None = None) -> None:
        for nearest in NEAREST:
            name = f"{what}: own concept among the {nearest} nearest of {concepts:,}"
            figures.append(Figure(name, (share(ranked < nearest),), "%", target if nearest == max(NEAREST) else None))

    note("features of the drawings on white")
    white, labels = extractor(channels_first(dataset.images)), [record.label for record in dataset.records]
    for purpose, what, target in (
        ("training", "captions seen in training", 60),
        ("held_out", "names never seen", None),
    ):
        note(f"generating {what}")
        made = extractor(channels_first(generate(pipeline, prompts[purpose], seed=seed)))
        found(what, concept_ranks(made, prompts[purpose], white, labels), len(set(labels)), target)
    note("generating known names on unseen backgrounds")
    records = records_of(dataset, prompts["gate"])
    gate = extractor(channels_first(generate(pipeline, prompts["gate"], seed=seed)))
    found("known names on unseen backgrounds", _on_backgrounds(gate, records, dataset, extractor, note), CANDIDATES)
    note("distances")
    return figures + _distances(gate, records, dataset, extractor)


def _on_backgrounds(
    features: Tensor, records: Sequence[Record], dataset: Dataset, extractor: FeatureExtractor, note: Note
) -> np.ndarray:
    """Returns the rank of each picture's concept among flat drawings on the background of its caption, (n,)."""
    flat = np.array([i for i, record in enumerate(dataset.records) if record.style == "flat"])
    others = np.random.default_rng(0).permutation(flat)[:CANDIDATES]
    found = np.zeros(len(records))
    for name in BACKGROUNDS:
        of_colour = [i for i, record in enumerate(records) if record.unseen_background == name]
        if of_colour:
            note(f"features of the drawings on {name}")
            concepts = {records[i].concept for i in of_colour}
            shown = np.union1d(others, [i for i in flat if dataset.records[i].concept in concepts])
            drawings = extractor(channels_first(dataset.on_named(shown, [name] * len(shown))))
            labels = [dataset.records[i].label for i in shown]
            found[of_colour] = concept_ranks(
                features[of_colour], [records[i].label for i in of_colour], drawings, labels
            )
    return found


def _distances(
    generated: Tensor, records: Sequence[Record], dataset: Dataset, extractor: FeatureExtractor
) -> list[Figure]:
    """Returns Fréchet and kernel distances to real pictures, of generated and of other real pictures."""
    concepts = {record.concept for record in records}
    others = {r.concept: r for r in dataset.records if r.style == "flat" and r.concept not in concepts}
    real = ReferenceSet.of_images("real", real_pictures(dataset, records), extractor)
    other = extractor(channels_first(real_pictures(dataset, list(others.values())[: len(records)])))
    return [
        Figure(f"{name} distance to real pictures{what}, {len(features)} images", (distance(features),))
        for name, distance in (("Fréchet", lambda features: fid(features, real)), ("kernel", kid(real)))
        for what, features in (("", generated), (" of other real pictures", other))
    ]
