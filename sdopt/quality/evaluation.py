"""From the images of a study to its quality scores: tripwires, metrics of each variant, distances of each pair."""

import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors.torch import load_file

from sdopt.analysis.bounds import pseudo_values, subtract
from sdopt.errors import UsageError
from sdopt.quality.appearance import brightness, contrast, fine_detail
from sdopt.quality.clip_score import clip_scores
from sdopt.quality.distances import ReferenceSet, cmmd, fid, kid, reference_set
from sdopt.quality.features import ClipFeatures, FeatureExtractor, feature_extractor
from sdopt.quality.images import channels_first, read_images
from sdopt.quality.metrics import QualityMetric, family_of
from sdopt.quality.paired import Lpips, latents_error, perceptual_distances, pixel_differences, psnr_db
from sdopt.quality.tripwires import tripped
from sdopt.results.records import BrokenImage, ImageRecord, Score, Spread, StudyResult
from sdopt.worker.calls import call_apart
from sdopt.worker.child import ChildDiedError
from sdopt.worker.draws import LATENTS

if TYPE_CHECKING:
    from sdopt.worker.forkserver import StartContext


@dataclass(frozen=True)
class Settings:
    """What to compute: names of features, of the reference set (None: the baseline's images), and where."""

    features: tuple[str, ...]
    reference: str | None
    lpips: bool
    device: str
    trained: bool
    """Whether the model's weights are; of random ones only numerical parity means anything."""


@dataclass(frozen=True)
class Pictures:
    """The images of one variant, read when they are asked for."""

    folder: Path
    records: Sequence[ImageRecord]

    @cached_property
    def images(self) -> np.ndarray:
        """uint8 (n, height, width, 3)"""
        return read_images([self.folder / record.path for record in self.records])

    @cached_property
    def latents(self) -> np.ndarray | None:
        """Final latents, float32 (n, channels, height, width)."""
        file = (self.folder / self.records[0].path).with_name(LATENTS)
        if not file.is_file():
            return None
        latents = load_file(file)["latents"].float().numpy()
        return latents if len(latents) == len(self.records) else None

    @property
    def draws(self) -> list[tuple[str, int]]:
        """What tells the images apart: prompt and seed."""
        return [(record.prompt, record.seed) for record in self.records]

    @property
    def prompts(self) -> list[int]:
        return [record.prompt_index for record in self.records]


class Evaluator:
    """Computes and keeps what several variants share: extractors, reference sets, features of images."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._extractors: dict[str, FeatureExtractor] = {}
        self._references: dict[tuple[str, tuple[str, ...]], ReferenceSet] = {}
        self._lpips: Lpips | None = None

    def extractor(self, name: str) -> FeatureExtractor:
        if name not in self._extractors:
            self._extractors[name] = feature_extractor(name, self._settings.device)
        return self._extractors[name]

    @property
    def digests(self) -> dict[str, str]:
        """Digest of the weights of every extractor that was used."""
        return {name: extractor.digest for name, extractor in self._extractors.items()}

    @property
    def _against_baseline(self) -> bool:
        return self._settings.reference in (None, "baseline")

    def of_variant(self, pictures: Pictures, baseline: Pictures) -> dict[str, Score]:
        """Metrics that a variant has by itself."""
        if not self._settings.trained:
            return {}
        images, prompts = pictures.images, pictures.prompts
        scores = {
            "brightness": _by_prompt(brightness(images), prompts),
            "contrast": _by_prompt(contrast(images), prompts),
            "fine_detail": _by_prompt(fine_detail(images), prompts),
        }
        for name in self._settings.features:
            extractor = self.extractor(name)
            if isinstance(extractor, ClipFeatures):
                values = clip_scores(images, [record.prompt for record in pictures.records], extractor)
                scores[_named("clip_score", name)] = _by_prompt(values, prompts)
            features = extractor(channels_first(images))
            reference = self._reference(name, baseline)
            if len(features) < 3:
                continue
            scores[_named("fid", name)] = _single(fid(features, reference), f"against {reference.name}")
            # The baseline's images are of the same prompts: those of one prompt are not held against each other.
            paired = self._against_baseline and {*prompts} == {*baseline.prompts}
            groups = baseline.prompts if paired else None
            for family, distance in (("kid", kid(reference, groups)), ("cmmd", cmmd(reference, groups))):
                found = distance.leave_one_out(features, prompts)
                score = _single(found.value, f"against {reference.name}")
                score.leave_one_out = [_finite(value) for value in found.without.tolist()]
                scores[_named(family, name)] = score
        return scores

    def of_pair(self, mine: Pictures, other: Pictures) -> dict[str, Score]:
        """Distances between two variants' images of the same prompts and seeds; nothing where they are of others."""
        if mine.draws != other.draws or mine.images.shape != other.images.shape:
            return {}
        prompts = mine.prompts
        pixels = pixel_differences(mine.images, other.images)
        mse = _by_prompt(pixels.mse, prompts)
        scores = {"mse": mse, "ssim": _by_prompt(pixels.ssim, prompts)}
        if mse.estimate is not None:
            # Of the mean error, because identical images have none.
            note = "of the mean squared error" if mse.estimate else "the images are identical"
            scores["psnr_db"] = Score(psnr_db(mse.estimate), note=note)
        if mine.latents is not None and other.latents is not None and mine.latents.shape == other.latents.shape:
            scores["latents_error"] = _by_prompt(latents_error(mine.latents, other.latents), prompts)
        if not self._settings.trained:
            return scores
        for name in self._settings.features[:1]:
            extractor = self.extractor(name)
            values = perceptual_distances(mine.images, other.images, extractor)
            scores[_named("perceptual", name)] = _by_prompt(values, prompts)
        if self._settings.lpips:
            self._lpips = self._lpips or Lpips("alex", self._settings.device)
            scores["lpips_alex"] = _by_prompt(self._lpips(mine.images, other.images), prompts)
        return scores

    def trips(self, pictures: Pictures, reference: Pictures | None) -> list[BrokenImage]:
        """Broken images. Of random weights only what is not finite is a sign of anything."""
        paired = reference is not None and reference.draws == pictures.draws
        found = tripped(
            pictures.images,
            latents=pictures.latents,
            finite=[record.finite for record in pictures.records],
            draws=pictures.draws,
            reference=reference.images if reference is not None and paired else None,
        )
        return [
            BrokenImage(
                trip.wire, "" if trip.image_index is None else pictures.records[trip.image_index].path, trip.detail
            )
            for trip in found
            if self._settings.trained or trip.wire == "non_finite"
        ]

    def _reference(self, name: str, baseline: Pictures) -> ReferenceSet:
        key = name, tuple(record.path for record in baseline.records) if self._against_baseline else ()
        if key not in self._references:
            extractor = self.extractor(name)
            self._references[key] = (
                ReferenceSet.of_images("the baseline's images", baseline.images, extractor)
                if self._against_baseline
                else reference_set(str(self._settings.reference), extractor)
            )
        return self._references[key]


def evaluate(result: StudyResult, folder: Path, settings: Settings, note: Callable[[str], None]) -> None:
    """Fills in scores, trips and floors of every variant and comparison that has images.

    Raises:
        UsageError: features or a reference set cannot be loaded.
    """
    evaluator = Evaluator(settings)
    drawn = {variant.name: Pictures(folder, variant.images) for variant in result.variants if variant.images}
    baseline = drawn.get(result.baseline)
    if baseline is None:
        return
    for variant in result.variants:
        if variant.name in drawn:
            note(variant.name)
            reference = None if variant.name == result.baseline else baseline
            variant.trips = evaluator.trips(drawn[variant.name], reference)
            variant.quality = evaluator.of_variant(drawn[variant.name], baseline)
    for comparison in result.comparisons:
        if comparison.candidate in drawn and comparison.reference in drawn:
            note(f"{comparison.candidate} against {comparison.reference}")
            comparison.quality = evaluator.of_pair(drawn[comparison.candidate], drawn[comparison.reference])
    for kind, records in result.redrawn.items():
        note(f"the {kind} floor")
        result.floors[kind] = _spreads(evaluator, Pictures(folder, records), baseline)
    result.feature_digests = evaluator.digests


def _spreads(evaluator: Evaluator, again: Pictures, baseline: Pictures) -> dict[str, Spread]:
    """How far the baseline's images differ from others of the same prompts, in every metric."""
    kept = {(record.prompt_index, record.image_index) for record in again.records}
    first = Pictures(
        baseline.folder, [record for record in baseline.records if (record.prompt_index, record.image_index) in kept]
    )
    # The same prompts in the same order; what differs, seed or order of computation, is what is measured.
    renamed = [
        ImageRecord(mine.prompt, mine.prompt_index, mine.image_index, mine.seed, other.path, other.finite)
        for mine, other in zip(first.records, again.records, strict=True)
    ]
    second = Pictures(again.folder, renamed)
    spreads = {
        name: _spread_of(score.per_prompt)
        for name, score in evaluator.of_pair(second, first).items()
        if score.per_prompt
    }
    mine, other = evaluator.of_variant(second, first), evaluator.of_variant(first, first)
    for name in mine.keys() & other.keys():
        difference = subtract(mine[name], other[name])
        if difference.per_prompt:
            spreads[name] = _spread_of(difference.per_prompt)
        elif difference.leave_one_out and difference.estimate is not None:
            without = np.array(difference.leave_one_out, dtype=float)
            spreads[name] = _spread_of(pseudo_values(difference.estimate, without).tolist())
    return {name: spread for name, spread in spreads.items() if spread is not None}


def _spread_of(values: Sequence[float | None]) -> Spread | None:
    known = np.array([value for value in values if value is not None and math.isfinite(value)])
    return Spread(float(known.mean()), float(known.std(ddof=1)), known.size) if known.size > 1 else None


def _named(family: str, features: str) -> str:
    return QualityMetric(family_of(family), features).name


def _single(value: float, note: str) -> Score:
    return Score(_finite(value), note=note)


def _by_prompt(values: Sequence[float | None] | np.ndarray, prompts: Sequence[int]) -> Score:
    """The mean of each prompt's images, and of all prompts; None where a value is not finite."""
    by_prompt: dict[int, list[float]] = {}
    for prompt, value in zip(prompts, values, strict=True):
        by_prompt.setdefault(prompt, []).append(math.nan if value is None else float(value))
    means = [float(np.mean(found)) for _, found in sorted(by_prompt.items())]
    return Score(_finite(float(np.mean(means))), [_finite(mean) for mean in means])


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def evaluate_apart(
    result: StudyResult, folder: Path, settings: Settings, context: "StartContext", note: Callable[[str], None]
) -> None:
    """`evaluate` in a process of its own, whose memory and crashes are not the study's.

    Raises:
        UsageError: features or a reference set cannot be loaded.
        EvaluationError: the process died, or a metric failed; what was measured is not touched.
    """
    try:
        scored = call_apart(context, _evaluated, result, folder, settings, note=note)
    except ChildDiedError as died:
        raise EvaluationError(f"the evaluating process {died}") from None
    for mine, found in zip(result.variants, scored.variants, strict=True):
        mine.quality, mine.trips = found.quality, found.trips
    for edge, other in zip(result.comparisons, scored.comparisons, strict=True):
        edge.quality = other.quality
    result.floors, result.feature_digests = scored.floors, scored.feature_digests


class EvaluationError(Exception):
    """Quality could not be computed; the message says why."""


def _evaluated(result: StudyResult, folder: Path, settings: Settings, note: Callable[[str], None]) -> StudyResult:
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        evaluate(result, folder, settings, note)
    except UsageError:
        raise
    except Exception as error:
        traceback.print_exc()
        raise EvaluationError(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}") from error
    return result
