"""Evaluates the CLIP: the retrieval of captions, and whether its metrics get monotonically worse with degradation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sdopt.quality.distances import cmmd, fid, kid
from sdopt.quality.features import ClipFeatures
from sdopt.quality.images import channels_first
from sdopt.quality.reference_sets import ReferenceSet
from sdopt.training.captions import on_background
from sdopt.training.clip_data import hold_out_pictures
from sdopt.training.data import BACKGROUNDS, Dataset
from sdopt.training.degradations import DEGRADATIONS
from sdopt.training.evaluation import Figure, at_least
from sdopt.training.prompts import choose_prompts
from sdopt.training.retrieval import Retrieval, recognise_backgrounds, recognise_captions
from sdopt.training.sheet import GUIDANCE, generate

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline
    from torch import Tensor


REFERENCE_PICTURES = 1000
"""Number of training pictures in the reference of the distances."""

JUDGED_CAPTIONS = 80
"""Number of captions of each purpose to generate with fewer and fewer steps."""

WRONG = (0.1, 0.25, 0.5, 1.0)

STEPS = (25, 10, 5, 3, 2)

METRICS = {"clip_score": -1, "fid": 1, "kid": 1, "cmmd": 1}
"""The metrics that use the CLIP, and the sign of their change when pictures get worse."""


@dataclass(frozen=True)
class Degraded:
    """The metrics of a set of pictures, degraded in one way to one extent.

    Attributes:
        way: the name of the degradation.
        extent: the amount as text; the first row of each way is for unmodified pictures.
        clip_score: mean of 100 · max(cosine, 0) over pictures and their captions (Hessel et al. 2021, scaled by 100).
        fid: Fréchet distance to the reference, with this CLIP's features; None if the pictures did not change.
        kid: unbiased kernel distance; None if the pictures did not change.
        cmmd: unbiased maximum mean discrepancy of CMMD; None if the pictures did not change.
    """

    way: str
    extent: str
    clip_score: float
    fid: float | None
    kid: float | None
    cmmd: float | None


@dataclass(frozen=True)
class ClipEvaluation:
    """All figures of the CLIP's card.

    Attributes:
        held_out: retrieval for held-out pictures, on white, among the plain names of all concepts.
        seen: the same for an equal number of training pictures.
        background: retrieval of the background of held-out pictures on white and on each colour, among the eleven
            captions of their concept.
        rows: the metrics for each degradation, in increasing order of degradation.
    """

    held_out: Retrieval
    seen: Retrieval
    background: Retrieval
    rows: tuple[Degraded, ...]


def degradations(
    extractor: ClipFeatures,
    dataset: Dataset,
    held_out: np.ndarray,
    made: Mapping[int, np.ndarray],
    captions: Sequence[str],
    seed: int,
) -> tuple[Degraded, ...]:
    """Returns the metrics with `extractor` for six ways of degrading pictures.

    Four ways degrade the held-out drawings, with distances to the CLIP's training drawings; the fifth way swaps their
    captions. The sixth way generates pictures with fewer and fewer steps, with distances to the flat drawings of the
    same captions.

    Args:
        extractor: the CLIP.
        dataset: the drawings.
        held_out: indices of the drawings that were held out of the CLIP's training.
        made: the pictures from `draw_in_fewer_steps`.
        captions: the captions of those pictures; see `drawable`.
        seed: seed of noise, references and wrong captions.
    """
    random = np.random.default_rng([seed, 7])
    others = np.setdiff1d(np.arange(len(dataset)), held_out)
    chosen = random.permutation(others)[:REFERENCE_PICTURES]
    reference = ReferenceSet.of_images("training drawings", dataset.images[chosen], extractor)
    pictures = dataset.images[held_out]
    texts = extractor.embed_texts([dataset.records[index].label for index in held_out])
    features = extractor(channels_first(pictures))
    return (
        *_degraded_pictures(extractor, pictures, texts, reference, seed),
        *_wrong_captions(features, texts, random.permutation(len(texts))),
        *_fewer_steps(extractor, dataset, made, captions),
    )


def _degraded_pictures(
    extractor: ClipFeatures, pictures: np.ndarray, texts: Tensor, reference: ReferenceSet, seed: int
) -> Iterator[Degraded]:
    for way in DEGRADATIONS:
        yield measure(way.name, "none", extractor(channels_first(pictures)), texts, reference)
        for amount in way.tried:
            # All amounts use the same noise.
            source = np.random.default_rng([seed, 8])
            degraded = np.stack([way.spoil(picture, amount, source) for picture in pictures])
            features = extractor(channels_first(degraded))
            yield measure(way.name, way.unit.format(amount), features, texts, reference)


def _wrong_captions(features: Tensor, texts: Tensor, order: np.ndarray) -> Iterator[Degraded]:
    """Gives an increasing share of pictures a wrong caption; distances are None, because no picture changes."""
    yield Degraded("wrong captions", "none", clip_score(features, texts), None, None, None)
    given = np.arange(len(texts))
    for share in WRONG:
        # Each of the first pictures in `order` takes the caption of its predecessor, so none keeps its own.
        given[order] = np.where(np.arange(len(order)) < share * len(order), np.roll(order, 1), order)
        yield Degraded("wrong captions", f"{share:.0%}", clip_score(features, texts[given]), None, None, None)


def _fewer_steps(
    extractor: ClipFeatures, dataset: Dataset, made: Mapping[int, np.ndarray], captions: Sequence[str]
) -> Iterator[Degraded]:
    drawings = drawable(dataset)
    indices, colours = zip(*(drawings[text] for text in captions), strict=True)
    drawn = dataset.on_named(np.array(indices), colours)
    real = ReferenceSet.of_images("drawings of the captions", drawn, extractor)
    texts = extractor.embed_texts(captions)
    for steps, images in made.items():
        yield measure("fewer steps", f"{steps}", extractor(channels_first(images)), texts, real)


def drawable(dataset: Dataset) -> dict[str, tuple[int, str | None]]:
    """Returns the index of the flat drawing and the name of the background (None: white), by plain caption."""
    return {
        on_background(record.label, colour): (index, colour)
        for index, record in enumerate(dataset.records)
        if record.style == "flat"
        for colour in (None, *BACKGROUNDS)
    }


def judged_captions(dataset: Dataset, seed: int) -> list[str]:
    """Returns plain captions on white, and on unseen backgrounds; all captions have a flat drawing."""
    prompts, drawings = choose_prompts(dataset, seed), drawable(dataset)
    return [text for purpose in ("training", "gate") for text in prompts[purpose][:JUDGED_CAPTIONS] if text in drawings]


def draw_in_fewer_steps(pipeline: StableDiffusionPipeline, captions: Sequence[str], seed: int) -> dict[int, np.ndarray]:
    """Generates pictures with fewer and fewer DDIM steps; returns uint8 (captions, 64, 64, 3) by number of steps.

    Args:
        pipeline: the generator, in single precision.
        captions: plain captions.
        seed: picture i starts from the noise of seed + i at every number of steps.
    """
    return {steps: generate(pipeline, captions, seed=seed, steps=steps, guidance=GUIDANCE) for steps in STEPS}


def measure(way: str, extent: str, features: Tensor, texts: Tensor, reference: ReferenceSet) -> Degraded:
    """Computes the metrics of pictures with `features` (n, d), and with embeddings `texts` (n, d) of their captions."""
    return Degraded(
        way,
        extent,
        clip_score(features, texts),
        fid(features, reference),
        kid(reference)(features),
        cmmd(reference)(features),
    )


def clip_score(features: Tensor, texts: Tensor) -> float:
    """Returns the mean of 100 · max(cosine, 0) over pairs of embeddings, both (n, d)."""
    from torch.nn import functional

    return float(100 * functional.cosine_similarity(features, texts).clamp(min=0).mean())


def monotonicity(rows: Sequence[Degraded]) -> dict[str, dict[str, bool | None]]:
    """Returns, by way and metric, whether each row is worse than the previous row; None without values."""
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
    """Returns all figures of the CLIP in `folder`, whose `recipe.json` determines the held-out pictures.

    Args:
        folder: the folder exported by `sdopt train-reference stage=clip`.
        dataset: the drawings.
        captions: the captions from `judged_captions`.
        made: the pictures of these captions from `draw_in_fewer_steps`.
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
    """Returns the CLIP's figures for the family's table."""
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
    """Writes all figures, and their monotonicity, as JSON."""
    kept = {**asdict(evaluation), "monotonic": monotonicity(evaluation.rows)}
    file.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_clip_evaluation(file: Path) -> ClipEvaluation:
    """Reads a file written by `write_clip_evaluation`."""
    kept = json.loads(file.read_text(encoding="utf-8"))
    held_out, seen, background = (Retrieval(**kept[name]) for name in ("held_out", "seen", "background"))
    return ClipEvaluation(held_out, seen, background, tuple(Degraded(**row) for row in kept["rows"]))
