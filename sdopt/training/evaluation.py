"""Evaluates the generator with features of an independent network, and defines `Figure` for all evaluations."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sdopt.quality.distances import fid, kid
from sdopt.quality.features import FeatureExtractor
from sdopt.quality.images import channels_first
from sdopt.quality.reference_sets import ReferenceSet, digest_of
from sdopt.training.autoencoder import reconstruction_psnr
from sdopt.training.data import BACKGROUNDS, WHITE, Dataset, Record
from sdopt.training.references import real_pictures, records_of
from sdopt.training.sheet import GUIDANCE, STEPS, generate

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline
    from torch import Tensor


NEAREST = (1, 10)
"""Values of k: the correct concept must be among the k nearest."""

CANDIDATES = 300
"""Number of concepts to rank for a coloured background; features of all concepts on each colour take too long."""

TARGETED = 10
"""The value in `NEAREST` that has a target."""

Note = Callable[[str], None]
"""Receives a short description of the current step."""


@dataclass(frozen=True)
class Figure:
    """One line of the evaluation.

    Attributes:
        part: the part of the family.
        figure: the name of the figure.
        value: the measured value, in `unit`.
        unit: `dB`, `%` or "".
        target: the target as text; "" if there is none.
        met: whether the target is met; None without one.
    """

    part: str
    figure: str
    value: float
    unit: str = ""
    target: str = ""
    met: bool | None = None

    @property
    def shown(self) -> str:
        """The rounded value with its unit."""
        digits = {"dB": ".1f", "%": ".0f"}.get(self.unit, ".3g")
        return f"{self.value:{digits}} {self.unit}".strip()


def at_least(part: str, figure: str, value: float, unit: str, target: float) -> Figure:
    """Returns a figure whose target is a minimum."""
    return Figure(part, figure, value, unit, f"at least {target:g} {unit}".strip(), value >= target)


@dataclass(frozen=True)
class Drawings:
    """Real drawings to compare generated pictures with: features (n, d), and the label of each drawing."""

    features: Tensor
    labels: tuple[str, ...]


def drawings_on(
    dataset: Dataset, chosen: np.ndarray, colour: tuple[int, int, int], extractor: FeatureExtractor, cache: Path
) -> Drawings:
    """Computes features of drawings on a background, which takes minutes, or reads them from the `cache` folder."""
    pictures = dataset.on(chosen, np.array([colour] * len(chosen), np.uint8))
    labels = tuple(dataset.records[i].label for i in chosen)
    file = cache / f"{extractor.name}-{'-'.join(map(str, colour))}-{len(chosen)}.safetensors"
    if file.is_file():
        known = ReferenceSet.load(file, extractor)
        if known.digest == digest_of(pictures) and known.values is not None:
            return Drawings(known.values, labels)
    made = ReferenceSet.of_images(f"drawings on {colour}", pictures, extractor)
    cache.mkdir(parents=True, exist_ok=True)
    made.save(file)
    assert made.values is not None
    return Drawings(made.values, labels)


def ranks(features: Tensor, labels: Sequence[str], drawings: Drawings) -> np.ndarray:
    """Returns, for each generated picture, the number of concepts that are nearer than its own, int64 (n,).

    The distance to a concept is the Euclidean distance of the features to those of its nearest drawing.
    """
    import torch

    names = list(dict.fromkeys(drawings.labels))
    place = {name: position for position, name in enumerate(names)}
    of_drawing = torch.tensor([place[label] for label in drawings.labels])
    apart = torch.cdist(features, drawings.features)
    nearest = torch.full((len(features), len(names)), torch.inf).scatter_reduce(
        1, of_drawing.expand(len(features), -1), apart, "amin"
    )
    own = nearest.gather(1, torch.tensor([[place[label]] for label in labels]))
    nearer: np.ndarray = (nearest < own).sum(dim=1).numpy()
    return nearer


def evaluate_generator(
    pipeline: StableDiffusionPipeline,
    dataset: Dataset,
    prompts: dict[str, list[str]],
    extractor: FeatureExtractor,
    cache: Path,
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
        cache: folder for features of drawings.
        seed: picture i of each list starts from the noise of seed + i.
        note: called before each step.
    """
    note("autoencoder")
    figures = _reconstruction(pipeline, dataset)
    note("features of the drawings on white")
    white = drawings_on(dataset, np.arange(len(dataset)), WHITE, extractor, cache)
    for purpose, what in (("training", "captions seen in training"), ("held_out", "names never seen")):
        note(f"drawing {what}")
        made = extractor(channels_first(generate(pipeline, prompts[purpose], seed=seed)))
        found = ranks(made, prompts[purpose], white)
        for nearest in NEAREST:
            name = f"{what}: own concept among the {nearest} nearest of {len(set(white.labels)):,}"
            value = 100 * float(np.mean(found < nearest))
            targeted = purpose == "training" and nearest == TARGETED
            figures.append(
                at_least("denoiser", name, value, "%", 60) if targeted else Figure("denoiser", name, value, "%")
            )
    note("drawing known names on unseen backgrounds")
    records = records_of(dataset, prompts["gate"])
    gate = extractor(channels_first(generate(pipeline, prompts["gate"], seed=seed)))
    found = _ranks_on_backgrounds(gate, records, dataset, extractor, cache, note)
    for nearest in NEAREST:
        name = f"known names on unseen backgrounds: own concept among the {nearest} nearest of {CANDIDATES}"
        figures.append(Figure("denoiser", name, 100 * float(np.mean(found < nearest)), "%"))
    note("distances")
    return figures + _distances(gate, records, dataset, extractor)


def _reconstruction(pipeline: StableDiffusionPipeline, dataset: Dataset) -> list[Figure]:
    """Returns figures of the autoencoder's reconstruction of held-out pictures, on white and on colours."""
    held_out = dataset.indices(held_out=True)
    names = list(BACKGROUNDS)
    coloured = dataset.on_named(held_out, [names[place % len(names)] for place in range(len(held_out))])
    white, colours = (reconstruction_psnr(pipeline.vae, pictures) for pictures in (dataset.images[held_out], coloured))
    return [
        at_least("autoencoder", "PSNR of held-out pictures", white, "dB", 24),
        Figure("autoencoder", "the same on coloured backgrounds", colours, "dB"),
    ]


def _ranks_on_backgrounds(
    features: Tensor,
    records: Sequence[Record],
    dataset: Dataset,
    extractor: FeatureExtractor,
    cache: Path,
    note: Note,
) -> np.ndarray:
    """Returns the rank of each picture's concept among flat drawings on the background of its caption, int64 (n,)."""
    flat = np.array([i for i, record in enumerate(dataset.records) if record.style == "flat"])
    others = np.random.default_rng(0).permutation(flat)[:CANDIDATES]
    found = np.zeros(len(records), np.int64)
    for name, colour in BACKGROUNDS.items():
        of_colour = [i for i, record in enumerate(records) if record.unseen_background == name]
        if of_colour:
            note(f"features of the drawings on {name}")
            concepts = {records[i].concept for i in of_colour}
            own = [i for i in flat if dataset.records[i].concept in concepts]
            drawings = drawings_on(dataset, np.union1d(others, own), colour, extractor, cache)
            found[of_colour] = ranks(features[of_colour], [records[i].label for i in of_colour], drawings)
    return found


def _distances(
    generated: Tensor, records: Sequence[Record], dataset: Dataset, extractor: FeatureExtractor
) -> list[Figure]:
    """Returns Fréchet and kernel distances to real pictures, of generated and of other real pictures."""
    concepts = {record.concept for record in records}
    others = {r.concept: r for r in dataset.records if r.style == "flat" and r.concept not in concepts}
    real = ReferenceSet.of_images("real", real_pictures(dataset, records), extractor)
    other = extractor(channels_first(real_pictures(dataset, list(others.values())[: len(records)])))
    n = len(records)
    return [
        Figure("denoiser", f"Fréchet distance to real pictures, {n} images", fid(generated, real)),
        Figure("denoiser", f"Fréchet distance of other real pictures, {len(other)} images", fid(other, real)),
        Figure("denoiser", f"kernel distance to real pictures, {n} images", kid(real)(generated)),
        Figure("denoiser", f"kernel distance of other real pictures, {len(other)} images", kid(real)(other)),
    ]


def write_evaluation(figures: Sequence[Figure], judge: str, file: Path) -> None:
    """Writes the figures as JSON, one per line."""
    lines = ",\n".join(f"  {json.dumps(vars(figure), ensure_ascii=False)}" for figure in figures)
    settings = json.dumps({"judge": judge, "steps": STEPS, "guidance": GUIDANCE})
    file.write_text(f'{{\n "settings": {settings},\n "figures": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def read_evaluation(file: Path) -> list[Figure]:
    """Reads a file written by `write_evaluation`; returns [] if the file does not exist."""
    return [Figure(**entry) for entry in json.loads(file.read_text())["figures"]] if file.is_file() else []
