"""Tests the CLIP: it must find the caption of a picture, and each figure over it must show that pictures get worse."""

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
"""How many training pictures the distances are measured to."""

JUDGED_CAPTIONS = 80
"""How many captions of each kind are drawn in fewer and fewer steps."""

WRONG = (0.1, 0.25, 0.5, 1.0)

STEPS = (25, 10, 5, 3, 2)

METRICS = {"clip_score": -1, "fid": 1, "kid": 1, "cmmd": 1}
"""The figures over the CLIP, and which way each moves when pictures get worse."""


@dataclass(frozen=True)
class Degraded:
    """The figures of one set of pictures, degraded in one way to one extent.

    Attributes:
        way: the change that was made to the pictures.
        extent: how much, in words; the first row of each way is that of the untouched pictures.
        clip_score: mean of 100 · max(cosine, 0) over pictures and their captions (Hessel et al. 2021, scaled by 100).
        fid: Fréchet distance to the reference, over this CLIP's features; None if the pictures did not change.
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
    """Every figure of the CLIP's card.

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


def degradations(
    extractor: ClipFeatures,
    dataset: Dataset,
    held_out: np.ndarray,
    made: Mapping[int, np.ndarray],
    captions: Sequence[str],
    seed: int,
) -> tuple[Degraded, ...]:
    """Measures the figures over `extractor` as pictures get worse, in six ways.

    Four ways degrade the held-out drawings, whose distances are to drawings of the CLIP's training; the fifth swaps
    their captions. The sixth takes pictures that were generated in fewer and fewer steps; those distances are to the
    flat drawings of the same captions.

    Args:
        extractor: the CLIP.
        dataset: where the drawings are.
        held_out: the drawings that the CLIP's training never saw, on white.
        made: what `draw_in_fewer_steps` returns.
        captions: of which those pictures were made; see `drawable`.
        seed: of noise, and of the choice of references and wrong captions.
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
            # The same noise at every amount.
            source = np.random.default_rng([seed, 8])
            degraded = np.stack([way.spoil(picture, amount, source) for picture in pictures])
            features = extractor(channels_first(degraded))
            yield measure(way.name, way.unit.format(amount), features, texts, reference)


def _wrong_captions(features: Tensor, texts: Tensor, order: np.ndarray) -> Iterator[Degraded]:
    """Gives ever more pictures the caption of another one. Distances stay as they are: no picture changes."""
    yield Degraded("wrong captions", "none", clip_score(features, texts), None, None, None)
    given = np.arange(len(texts))
    for share in WRONG:
        # The first ones of `order` each take the caption of the one before: none of them keeps its own.
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
    """Returns, by plain caption, the position of its flat drawing and the name of its background (None: white)."""
    return {
        on_background(record.label, colour): (index, colour)
        for index, record in enumerate(dataset.records)
        if record.style == "flat"
        for colour in (None, *BACKGROUNDS)
    }


def judged_captions(dataset: Dataset, seed: int) -> list[str]:
    """Returns plain captions on white, and on backgrounds that training never showed; all have a flat drawing."""
    prompts, drawings = choose_prompts(dataset, seed), drawable(dataset)
    return [text for purpose in ("training", "gate") for text in prompts[purpose][:JUDGED_CAPTIONS] if text in drawings]


def draw_in_fewer_steps(pipeline: StableDiffusionPipeline, captions: Sequence[str], seed: int) -> dict[int, np.ndarray]:
    """Draws captions in fewer and fewer DDIM steps: by their number, uint8 pictures (captions, 64, 64, 3).

    Args:
        pipeline: the generator, in single precision.
        captions: plain.
        seed: picture i starts from the noise of seed + i at every number of steps.
    """
    return {steps: generate(pipeline, captions, seed=seed, steps=steps, guidance=GUIDANCE) for steps in STEPS}


def measure(way: str, extent: str, features: Tensor, texts: Tensor, reference: ReferenceSet) -> Degraded:
    """Measures all four figures of pictures with `features` (n, d), whose captions' embeddings are `texts` (n, d)."""
    return Degraded(
        way,
        extent,
        clip_score(features, texts),
        fid(features, reference),
        kid(reference)(features),
        cmmd(reference)(features),
    )


def clip_score(features: Tensor, texts: Tensor) -> float:
    """Returns the mean of 100 · max(cosine, 0) of embeddings (n, d) in pairs."""
    from torch.nn import functional

    return float(100 * functional.cosine_similarity(features, texts).clamp(min=0).mean())


def monotonicity(rows: Sequence[Degraded]) -> dict[str, dict[str, bool | None]]:
    """Returns, by way and metric, whether every row is worse than the one before; None without figures."""
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
    """Measures all figures of the CLIP in `folder`, whose `recipe.json` says which pictures it never saw.

    Args:
        folder: what `sdopt train-reference stage=clip` exported.
        dataset: where the drawings are.
        captions: what `judged_captions` returns.
        made: what `draw_in_fewer_steps` makes of them.
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
    """Returns the CLIP's figures in the table of the family."""
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
    """Writes all figures as JSON, and whether they are monotonic."""
    kept = {**asdict(evaluation), "monotonic": monotonicity(evaluation.rows)}
    file.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_clip_evaluation(file: Path) -> ClipEvaluation:
    """Reads what `write_clip_evaluation` wrote."""
    kept = json.loads(file.read_text(encoding="utf-8"))
    held_out, seen, background = (Retrieval(**kept[name]) for name in ("held_out", "seen", "background"))
    return ClipEvaluation(held_out, seen, background, tuple(Degraded(**row) for row in kept["rows"]))
