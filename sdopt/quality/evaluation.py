"""Computes a study's quality scores from its images: tripwires, metrics of each variant, distances of each pair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sdopt.errors import UsageError
from sdopt.guard import explained
from sdopt.hardware.ceilings import tf32
from sdopt.quality.metrics import QualityMetric, measured_metrics, reference_of
from sdopt.quality.tripwires import tripped
from sdopt.record.records import REDRAWN, StudyResult
from sdopt.record.scores import BrokenImage, Score, Spread
from sdopt.schema import Model, Quality
from sdopt.statistics.bounds import pseudo_values, subtract
from sdopt.worker.child import ChildDiedError, call_apart

if TYPE_CHECKING:
    from sdopt.quality.inputs import Inputs, Pictures
    from sdopt.worker.forkserver import StartContext


@dataclass(frozen=True)
class Settings:
    """Settings of an evaluation.

    Attributes:
        metrics: the metrics to compute, as `measured_metrics` lists them.
        reference: the reference set of FID, KID and CMMD; None or `baseline` stands for the baseline's images.
        device: the device on which the networks run.
        trained: whether the model's weights are trained; with random weights, only numerical agreement is meaningful.
        threads: CPU threads of a process that evaluates; None is PyTorch's default.
    """

    metrics: tuple[QualityMetric, ...]
    reference: str | None = None
    device: str = "cpu"
    trained: bool = True
    threads: int | None = None

    @classmethod
    def of(
        cls, quality: Quality, model: Model, device: str, threads: int | None = None
    ) -> Settings:
        """Returns the settings that a run's configuration gives."""
        trained = model.weights != "random"
        return cls(
            measured_metrics(quality, model),
            reference_of(quality, model),
            device,
            trained,
            threads,
        )


class Evaluator:
    """Computes scores and tripwires of variants, and keeps the networks that they share."""

    def __init__(self, settings: Settings) -> None:
        from sdopt.quality.inputs import Networks

        self._settings = settings
        self._networks = Networks(settings.device, settings.reference)

    @property
    def digests(self) -> dict[str, str]:
        """Digest of the weights of every extractor that was used."""
        return self._networks.digests

    def of_variant(self, pictures: Pictures, baseline: Pictures) -> dict[str, Score]:
        """Computes the metrics of a variant by itself."""
        from sdopt.quality.inputs import Inputs

        return self._scores(Inputs(pictures, baseline, self._networks), paired=False)

    def of_pair(self, mine: Pictures, other: Pictures) -> dict[str, Score]:
        """Computes distances between two variants' images; nothing if their prompts or seeds differ."""
        from sdopt.quality.inputs import Inputs

        if mine.draws != other.draws or mine.images.shape != other.images.shape:
            return {}
        return self._scores(Inputs(mine, other, self._networks), paired=True)

    def _scores(self, given: Inputs, paired: bool) -> dict[str, Score]:
        scores = {}
        for metric in self._settings.metrics:
            if (
                metric.family.needs_pair is paired
                and len(given.pictures.records) >= metric.family.least
            ):
                score = metric.family.compute(given, metric.features)
                if score is not None:
                    scores[metric.name] = score
        return scores

    def trips(
        self, pictures: Pictures, reference: Pictures | None
    ) -> list[BrokenImage]:
        """Finds broken images. With random weights, only values that are not finite count."""
        paired = reference is not None and reference.draws == pictures.draws
        trips = tripped(
            pictures.images,
            latents=pictures.latents,
            finite=[record.finite for record in pictures.records],
            draws=pictures.draws,
            reference=reference.images if reference is not None and paired else None,
        )
        broken = []
        for wire, index, detail in trips:
            if self._settings.trained or wire == "non_finite":
                path = "" if index is None else pictures.records[index].path
                broken.append(BrokenImage(wire, path, detail))
        return broken


# A GPU would round the networks' convolutions to TF32, and their figures would differ from a CPU's.
@tf32(allowed=False)
def evaluate(
    result: StudyResult, folder: Path, settings: Settings, note: Callable[[str], None]
) -> None:
    """Fills in scores, trips and floors of every variant and comparison that has images.

    Raises:
        UsageError: features or a reference set cannot be loaded.
    """
    from sdopt.quality.inputs import Pictures

    evaluator = Evaluator(settings)
    drawn = {
        variant.name: Pictures(folder, variant.images)
        for variant in result.variants
        if variant.images
    }
    baseline = drawn.get(result.baseline)
    if baseline is None:
        return
    for variant in result.variants:
        if variant.name in drawn:
            note(variant.name)
            reference = None if variant.name == result.baseline else baseline
            found = evaluator.trips(drawn[variant.name], reference)
            variant.trips = [*found, *variant.trips_at_shapes]
            variant.quality = evaluator.of_variant(drawn[variant.name], baseline)
    for comparison in result.comparisons:
        if comparison.candidate in drawn and comparison.reference in drawn:
            note(f"{comparison.candidate} against {comparison.reference}")
            comparison.quality = evaluator.of_pair(
                drawn[comparison.candidate], drawn[comparison.reference]
            )
    for kind, records in result.redrawn.items():
        note(REDRAWN[kind])
        result.floors[kind] = _spreads(evaluator, Pictures(folder, records), baseline)
    result.feature_digests = evaluator.digests


def _spreads(
    evaluator: Evaluator, again: Pictures, baseline: Pictures
) -> dict[str, Spread]:
    """Computes how far the baseline's images differ from other images of the same prompts, in every metric."""
    from sdopt.quality.inputs import Pictures

    redrawn = {(record.prompt_index, record.image_index) for record in again.records}
    records = [
        record
        for record in baseline.records
        if (record.prompt_index, record.image_index) in redrawn
    ]
    first = Pictures(baseline.folder, records)
    # The same prompts in the same order: only the seed or the order of computation differs, and is measured.
    renamed = [
        replace(mine, path=other.path, finite=other.finite, digest=other.digest)
        for mine, other in zip(records, again.records, strict=True)
    ]
    second = Pictures(again.folder, renamed)
    changes = evaluator.of_pair(second, first)
    own = evaluator.of_variant(second, first)
    for name, other in evaluator.of_variant(first, first).items():
        if name in own:
            changes[name] = subtract(own[name], other)
    spreads = {name: _spread_of(change) for name, change in changes.items()}
    return {name: spread for name, spread in spreads.items() if spread is not None}


def _spread_of(change: Score) -> Spread | None:
    """Returns the spread of a change over the prompts; of a metric of a whole set, over its pseudo-values."""
    values = np.array(change.per_prompt, dtype=float)
    if not values.size and change.leave_one_out and change.estimate is not None:
        without = np.array(change.leave_one_out, dtype=float)
        values = pseudo_values(change.estimate, without)
    known = values[np.isfinite(values)]
    if known.size <= 1:
        return None
    return Spread(float(known.mean()), float(known.std(ddof=1)), known.size)


def evaluate_apart(
    result: StudyResult,
    folder: Path,
    settings: Settings,
    context: StartContext,
    note: Callable[[str], None],
) -> None:
    """Runs `evaluate` in a process of its own, so that its memory and crashes do not affect the study.

    Raises:
        UsageError: features or a reference set cannot be loaded.
        EvaluationError: the process died, or a metric failed; the measurements are unchanged.
    """
    try:
        scored = call_apart(context, _evaluated, result, folder, settings, note=note)
    except ChildDiedError as died:
        raise EvaluationError(f"the evaluating process {died}") from None
    for mine, theirs in zip(result.variants, scored.variants, strict=True):
        mine.quality, mine.trips = theirs.quality, theirs.trips
    for edge, other in zip(result.comparisons, scored.comparisons, strict=True):
        edge.quality = other.quality
    result.floors, result.feature_digests = scored.floors, scored.feature_digests


class EvaluationError(Exception):
    """Quality could not be computed; the message says why."""


def _evaluated(
    result: StudyResult, folder: Path, settings: Settings, note: Callable[[str], None]
) -> StudyResult:
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if settings.threads is not None:
        # A small network's threads wait for each other in each layer: six times as long if other work occupies a core.
        torch.set_num_threads(settings.threads)
    try:
        evaluate(result, folder, settings, note)
    except UsageError:
        raise
    except Exception as error:
        raise EvaluationError(explained(error)) from error
    return result
