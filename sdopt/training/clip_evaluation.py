"""Can the CLIP judge? It must find the caption of a picture, and each figure over it must show worse pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sdopt.quality.distances import ReferenceSet, cmmd, fid, kid
from sdopt.quality.features import ClipFeatures
from sdopt.quality.images import channels_first
from sdopt.training.clip import hold_out_pictures
from sdopt.training.data import BACKGROUNDS, WHITE, Dataset, on_background
from sdopt.training.degradations import DEGRADATIONS
from sdopt.training.evaluation import Figure, at_least
from sdopt.training.prompts import choose_prompts
from sdopt.training.sheet import GUIDANCE, generate

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline
    from torch import Tensor


REFERENCE_PICTURES = 1000
"""How many training pictures the distances are measured to."""

JUDGED_CAPTIONS = 80
"""How many captions of each kind are drawn in fewer and fewer steps."""

WRONG = (0.1, 0.25, 0.5, 1.0)

STEPS = (25, 10, 5, 3, 2)

METRICS = {"clip_score": -1, "fid": 1, "kid": 1, "cmmd": 1}
"""The figures over the CLIP, and which way each moves when pictures get worse."""


@dataclass(frozen=True)
class Retrieval:
    """How often the right caption is among the first for a picture.

    Attributes:
        pictures: how many were tried.
        captions: how many were ranked for each, one of them right.
        top1: share of pictures whose caption is first.
        top10: share of pictures whose caption is among the first ten.
    """

    pictures: int
    captions: int
    top1: float
    top10: float


@dataclass(frozen=True)
class Degraded:
    """The figures of one set of pictures, degraded in one way to one extent.

    Attributes:
        way: what was done to the pictures.
        extent: how much, in words; the first row of each way is that of the untouched pictures.
        clip_score: mean of 100 · max(cosine, 0) over pictures and their captions (Hessel et al. 2021, scaled by 100).
        fid: Fréchet distance to the reference, over this CLIP's features; None where pictures stay as they are.
        kid: kernel distance, unbiased; None likewise.
        cmmd: maximum mean discrepancy of CMMD, unbiased; None likewise.
    """

    way: str
    extent: str
    clip_score: float
    fid: float | None
    kid: float | None
    cmmd: float | None


@dataclass(frozen=True)
class ClipEvaluation:
    """Everything that the card says of how well the CLIP judges.

    Attributes:
        held_out: retrieval for pictures kept from training, on white, among the plain names of all concepts.
        seen: the same for as many training pictures.
        background: retrieval of the right background for held-out pictures on white and on each colour, among the
            eleven captions of their concept.
        rows: the figures under each degradation, from the untouched pictures to the worst.
    """

    held_out: Retrieval
    seen: Retrieval
    background: Retrieval
    rows: tuple[Degraded, ...]


def ranks(scores: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Of each row's own column, how many others score higher; one that ties counts half. float64 (n,).

    Args:
        scores: (n, m), the higher the better.
        own: the right column of each row, (n,).
    """
    right = scores[np.arange(len(scores)), own][:, None]
    return (scores > right).sum(axis=1) + ((scores == right).sum(axis=1) - 1) / 2


def retrieve(scores: np.ndarray, own: np.ndarray) -> Retrieval:
    """How often the right column comes first, or among the first ten, of each row; see `ranks`."""
    found = ranks(scores, own)
    return Retrieval(len(scores), scores.shape[1], float(np.mean(found < 1)), float(np.mean(found < 10)))


def recognise_captions(extractor: ClipFeatures, dataset: Dataset, indices: np.ndarray) -> Retrieval:
    """Rank the plain names of all concepts for each picture, on white. Names that are equal count as one."""
    names = list(dict.fromkeys(record.label for record in dataset.records))
    place = {name: position for position, name in enumerate(names)}
    scores = _cosines(extractor(channels_first(dataset.images[indices])), extractor.embed_texts(names))
    return retrieve(scores, np.array([place[dataset.records[index].label] for index in indices]))


def recognise_backgrounds(extractor: ClipFeatures, dataset: Dataset, indices: np.ndarray) -> Retrieval:
    """Put each picture on white and on every colour, and rank the eleven captions of its concept."""
    backgrounds = [None, *BACKGROUNDS]
    texts = [on_background(dataset.records[index].label, colour) for index in indices for colour in backgrounds]
    captions = extractor.embed_texts(texts).view(len(indices), len(backgrounds), -1)
    scores = []
    for colour in backgrounds:
        seen = extractor(channels_first(_on(dataset, indices, [colour] * len(indices))))
        scores += [_cosines(picture[None], names)[0] for picture, names in zip(seen, captions, strict=True)]
    return retrieve(np.stack(scores), np.repeat(np.arange(len(backgrounds)), len(indices)))


def degradations(
    extractor: ClipFeatures,
    dataset: Dataset,
    held_out: np.ndarray,
    made: Mapping[int, np.ndarray],
    captions: Sequence[str],
    seed: int,
) -> tuple[Degraded, ...]:
    """The figures over `extractor` as pictures get worse, in six ways.

    Five ways spoil the held-out drawings, whose distances are to drawings of the CLIP's training. The sixth takes
    pictures that were made in fewer and fewer steps; those distances are to the flat drawings of the same captions.

    Args:
        extractor: the CLIP.
        dataset: where the drawings are.
        held_out: the drawings that the CLIP's training never saw, on white.
        made: what `draw_in_fewer_steps` gives.
        captions: of which those pictures were made; see `drawable`.
        seed: of noise, and of the choice of references and wrong captions.
    """
    random = np.random.default_rng([seed, 7])
    others = np.setdiff1d(np.arange(len(dataset)), held_out)
    chosen = random.permutation(others)[:REFERENCE_PICTURES]
    reference = ReferenceSet.of_images("training drawings", dataset.images[chosen], extractor)
    pictures = dataset.images[held_out]
    texts = extractor.embed_texts([dataset.records[index].label for index in held_out])

    def judged(way: str, extent: str, spoilt: np.ndarray) -> Degraded:
        return measure(way, extent, extractor(channels_first(spoilt)), texts, reference)

    rows = []
    for way in DEGRADATIONS:
        rows.append(judged(way.name, "none", pictures))
        for amount in way.tried:
            # The same noise at every amount.
            source = np.random.default_rng([seed, 8])
            spoilt = np.stack([way.spoil(picture, amount, source) for picture in pictures])
            rows.append(judged(way.name, way.unit.format(amount), spoilt))

    seen, order, given = extractor(channels_first(pictures)), random.permutation(len(texts)), np.arange(len(texts))
    rows.append(Degraded("wrong captions", "none", clip_score(seen, texts), None, None, None))
    for share in WRONG:
        # In random order, the first ones each take the caption of the one before: none of them keeps its own.
        given[order] = np.where(np.arange(len(order)) < share * len(order), np.roll(order, 1), order)
        rows.append(Degraded("wrong captions", f"{share:.0%}", clip_score(seen, texts[given]), None, None, None))

    drawings = drawable(dataset)
    indices, colours = zip(*(drawings[text] for text in captions), strict=True)
    real = ReferenceSet.of_images("drawings of the captions", _on(dataset, np.array(indices), colours), extractor)
    asked = extractor.embed_texts(captions)
    for steps, images in made.items():
        rows.append(measure("fewer steps", f"{steps}", extractor(channels_first(images)), asked, real))
    return tuple(rows)


def drawable(dataset: Dataset) -> dict[str, tuple[int, str | None]]:
    """By plain caption, on white or on a named background: the place of its flat drawing, and the background."""
    return {
        on_background(record.label, colour): (index, colour)
        for index, record in enumerate(dataset.records)
        if record.style == "flat"
        for colour in (None, *BACKGROUNDS)
    }


def judged_captions(dataset: Dataset, seed: int) -> list[str]:
    """Plain captions on white, and pairs of known words that the generator never met, all with a flat drawing."""
    prompts, drawings = choose_prompts(dataset, seed), drawable(dataset)
    return [text for purpose in ("training", "gate") for text in prompts[purpose][:JUDGED_CAPTIONS] if text in drawings]


def draw_in_fewer_steps(pipeline: StableDiffusionPipeline, captions: Sequence[str], seed: int) -> dict[int, np.ndarray]:
    """By number of DDIM steps, the most first: uint8 pictures (captions, 64, 64, 3) from the same noise.

    Args:
        pipeline: the generator, in single precision.
        captions: plain.
        seed: picture i starts from the noise of seed + i.
    """
    return {steps: generate(pipeline, captions, seed=seed, steps=steps, guidance=GUIDANCE) for steps in STEPS}


def measure(way: str, extent: str, features: Tensor, texts: Tensor, reference: ReferenceSet) -> Degraded:
    """All four figures of pictures with `features` (n, d), whose captions' embeddings are `texts` (n, d)."""
    return Degraded(
        way,
        extent,
        clip_score(features, texts),
        fid(features, reference),
        kid(reference)(features),
        cmmd(reference)(features),
    )


def clip_score(features: Tensor, texts: Tensor) -> float:
    """Mean of 100 · max(cosine, 0) of embeddings (n, d) in pairs."""
    from torch.nn import functional

    return float(100 * functional.cosine_similarity(features, texts).clamp(min=0).mean())


def monotonicity(rows: Sequence[Degraded]) -> dict[str, dict[str, bool | None]]:
    """By way of degradation and metric, whether every row is worse than the one before; None where it has no figure."""
    ways: dict[str, list[Degraded]] = {}
    for row in rows:
        ways.setdefault(row.way, []).append(row)
    return {
        way: {metric: _worsens([getattr(row, metric) for row in series], sign) for metric, sign in METRICS.items()}
        for way, series in ways.items()
    }


def _worsens(values: Sequence[float | None], sign: int) -> bool | None:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return all(sign * (after - before) > 0 for before, after in pairwise(known))


def evaluate_clip(
    folder: Path, dataset: Dataset, captions: Sequence[str], made: Mapping[int, np.ndarray]
) -> ClipEvaluation:
    """All figures of the card of the CLIP in `folder`, whose `recipe.json` says which pictures it never saw.

    Args:
        folder: what `sdopt train-reference stage=clip` exported.
        dataset: where the drawings are.
        captions: what `judged_captions` gives.
        made: what `draw_in_fewer_steps` gives of them.
    """
    recipe = json.loads((folder / "recipe.json").read_text())
    extractor, seed = ClipFeatures("emojiclip", str(folder)), recipe["seed"]
    held_out = hold_out_pictures(dataset, recipe["clip"]["held_out_share"], seed)
    others = np.setdiff1d(np.arange(len(dataset)), held_out)
    seen = np.random.default_rng([seed, 8]).permutation(others)[: len(held_out)]
    return ClipEvaluation(
        recognise_captions(extractor, dataset, held_out),
        recognise_captions(extractor, dataset, seen),
        recognise_backgrounds(extractor, dataset, held_out),
        degradations(extractor, dataset, held_out, made, captions, seed),
    )


def clip_figures(evaluation: ClipEvaluation) -> list[Figure]:
    """What the table of the reference family says of the CLIP."""
    held_out, verdicts = evaluation.held_out, monotonicity(evaluation.rows)
    known = [verdict for of_way in verdicts.values() for verdict in of_way.values() if verdict is not None]
    return [
        at_least("clip", "right caption first, held-out pictures", 100 * held_out.top1, "%", 30),
        at_least("clip", "right caption among the first ten", 100 * held_out.top10, "%", 70),
        Figure("clip", "right caption first, training pictures", 100 * evaluation.seen.top1, "%"),
        Figure("clip", "right background first, of eleven", 100 * evaluation.background.top1, "%"),
        at_least("clip", "degradations that move a figure monotonically", 100 * sum(known) / len(known), "%", 100),
    ]


def write_clip_evaluation(evaluation: ClipEvaluation, file: Path) -> None:
    """Keeps all figures as JSON, and whether they are monotonic."""
    kept = {**asdict(evaluation), "monotonic": monotonicity(evaluation.rows)}
    file.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_clip_evaluation(file: Path) -> ClipEvaluation:
    """Reads what `write_clip_evaluation` wrote."""
    kept = json.loads(file.read_text(encoding="utf-8"))
    held_out, seen, background = (Retrieval(**kept[name]) for name in ("held_out", "seen", "background"))
    return ClipEvaluation(held_out, seen, background, tuple(Degraded(**row) for row in kept["rows"]))


def _cosines(pictures: Tensor, texts: Tensor) -> np.ndarray:
    from torch.nn import functional

    return (functional.normalize(pictures, dim=1) @ functional.normalize(texts, dim=1).T).numpy()


def _on(dataset: Dataset, indices: np.ndarray, colours: Sequence[str | None]) -> np.ndarray:
    return dataset.on(indices, np.array([BACKGROUNDS[c] if c else WHITE for c in colours], np.uint8))
