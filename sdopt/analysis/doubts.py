"""Checks whether measurements can be trusted: images of timed calls, memory that grows, rare slow calls.

An option may be wrong: it may draw other images when it is timed, keep what it should free, or be slow now and then.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from sdopt.analysis.ratios import MINIMUM_PROCESSES, paired
from sdopt.analysis.rounding import UNIT_ROUNDOFF, precision_of
from sdopt.results.records import MeasurementSession, StudyResult, VariantResult
from sdopt.results.samples import Measurement

SMALLEST_ERROR = 1e-6
"""Mean squared difference up to which two images count as the same (60 dB): rounding to bytes alone makes 59 dB."""

OF_FLOOR = 10
"""Two versions of one image count as the same up to this multiple of the numerical floor's mean."""

SMALLEST_GROWTH_MIB = 1.0
"""Growth per call, in MiB, below which memory does not count as growing."""

_MORE_CORES = 0.25
"""Number of cores that a call may use beyond its number of threads."""

_FEWEST_CALLS = 8
"""A quality pass with fewer calls is not checked for slow calls or memory growth."""

SLOW, SLOW_SHARE = 2.0, 0.02
"""A call of the quality pass is slow if it takes more than `SLOW` times the median; `SLOW_SHARE` of calls may be."""

KEPT_MIB, KEPT = 32.0, 0.05
"""Memory may grow by `KEPT_MIB` over the quality pass, or by the share `KEPT` of the peak, whichever is more."""

STEADY_MIB = 0.1
"""Memory may grow by this much with each image of the quality pass, even if it does so steadily."""

_BLOCKS = 6
"""Number of blocks of calls by which steady growth is told from single steps."""


def error_limit(result: StudyResult, variant: VariantResult) -> float:
    """Returns the mean squared difference up to which two images of a variant count as computed alike.

    It is 60 dB, or 2u² for a type of unit roundoff u (both images with an error of u); or, where that is more, a
    multiple of the floor that was measured between two ways to compute the same.
    """
    floor = result.floors.get("numerical", {}).get("mse")
    measured = OF_FLOOR * floor.mean if floor else 0.0
    return max(SMALLEST_ERROR, 2 * UNIT_ROUNDOFF[precision_of(variant) or "float32"] ** 2, measured)


def image_doubts(result: StudyResult, variant: VariantResult) -> list[str]:
    """Says in which processes the images of timed calls are not those that were drawn."""
    limit, found = error_limit(result, variant), []
    for measurement in variant.measurements:
        errors = [
            (image.error, image.prompt_index) for image in measurement.shapes[0].timed_images if image.error is not None
        ]
        wrong = [(error, prompt) for error, prompt in errors if not error <= limit]
        if wrong:
            worst, prompt = max(wrong)
            found.append(
                f"in process {measurement.replicate + 1}, {len(wrong)} of {len(errors)} images of timed calls differ "
                f"from those of the quality pass: by a mean squared error of {worst:.2g} for prompt {prompt + 1}, of "
                f"which rounding explains up to {limit:.2g}"
            )
    return found


def uncompared(variant: VariantResult) -> list[int]:
    """Returns the replicates of timed processes that have no image of a timed call compared with a drawn one."""
    timed = {measurement.replicate for measurement in variant.measurements if measurement.shapes[0].latency_s}
    compared = {
        measurement.replicate
        for measurement in variant.measurements
        if any(image.error is not None for image in measurement.shapes[0].timed_images)
    }
    return sorted(timed - compared)


@dataclass(frozen=True)
class Growth:
    """By how much more memory grows from call to call than the reference's, in MiB; bounds are one-sided, at 95 %."""

    estimate: float
    limit: float
    """Smaller growth does not count."""
    low: float | None = None
    high: float | None = None


def growth(candidate: VariantResult, reference: VariantResult) -> Growth | None:
    """Returns how much memory a candidate's processes keep with each call; None where that was not measured.

    A single step is no growth: of the steps of each process the largest is left out. A reference that shrinks counts as
    one that keeps what it has: a candidate that does keep it does not grow. With fewer than three processes on a side
    there are no bounds.
    """
    mine, other = _steps(candidate), _steps(reference)
    if not mine.size or not other.size:
        return None
    peaks = [m.peak[1] for m in reference.measurements if m.peak]
    limit = max(SMALLEST_GROWTH_MIB, 1.024 * float(np.mean(peaks)) if peaks else 0.0)  # a thousandth of the peak
    found = Growth(float(mine.mean() - max(0.0, other.mean())), limit)
    if min(mine.size, other.size) < MINIMUM_PROCESSES:
        return found
    freedom = mine.size + other.size - 2
    pooled = (mine.var(ddof=1) * (mine.size - 1) + other.var(ddof=1) * (other.size - 1)) / freedom
    width = float(special.stdtrit(freedom, 0.95)) * math.sqrt(pooled * (1 / mine.size + 1 / other.size))
    return replace(found, low=found.estimate - width, high=found.estimate + width)


def _steps(variant: VariantResult) -> np.ndarray:
    """Returns the mean step of held memory from one timed call to the next, in MiB, of each process."""
    found = []
    for measurement in variant.measurements:
        held = [call.held_gib for call in measurement.shapes[0].calls if call.held_gib is not None]
        steps = np.diff(held) * 1024
        if steps.size:
            kept = np.delete(steps, np.argmax(np.abs(steps))) if steps.size > 1 else steps
            found.append(float(kept.mean()))
    return np.array(found)


def growth_doubts(candidate: VariantResult, reference: VariantResult) -> list[str]:
    """Says by how much memory grows from call to call, if the bounds show growth."""
    found = growth(candidate, reference)
    if found is None or found.low is None or found.low <= found.limit:
        return []
    return [f"memory grows by {found.estimate:.3g} MiB with each call (at least {found.low:.3g} at 95 %)"]


def core_doubts(variant: VariantResult) -> list[str]:
    """Says that timed calls used more cores than the run gives a process."""
    known = (call.interference for m in variant.measurements for call in m.shapes[0].calls)
    calls = [found.cores for found in known if found and found.cores is not None]
    threads = variant.config.hardware.threads
    if not calls or threads is None or float(np.median(calls)) <= threads + _MORE_CORES:
        return []
    used = f"the timed calls of '{variant.name}' used {float(np.median(calls)):.2g} cores"
    return [f"{used}, but each process is given {threads} (hardware.threads)"]


def slow_calls(variant: VariantResult) -> tuple[int, int, float] | None:
    """Returns how many calls of the quality pass took more than `SLOW` times the median, of how many, and the longest.

    None if no process drew the images, or if there were too few calls. If several processes drew them, as more prompts
    were added, the last one counts. A single slow call may have any cause.
    """
    for measurement in reversed(variant.measurements):
        if len(measurement.pass_s) >= _FEWEST_CALLS:
            ratios = np.array(measurement.pass_s) / np.median(measurement.pass_s)
            return int((ratios > SLOW).sum()), ratios.size, float(ratios.max())
    return None


def kept_in_pass(variant: VariantResult) -> tuple[float, float] | None:
    """Returns by how many MiB memory grew over the quality pass, and the allowed growth; None without a quality pass.

    Start and end are each a median over a tenth of its calls. If there were several passes, the last one counts.
    """
    for measurement in reversed(variant.measurements):
        held = np.array(measurement.pass_held_gib)
        if held.size >= _FEWEST_CALLS:
            tenth = max(1, held.size // 10)
            grown = 1024 * float(np.median(held[-tenth:]) - np.median(held[:tenth]))
            return grown, max(KEPT_MIB, KEPT * 1024 * (measurement.peak[1] if measurement.peak else 0.0))
    return None


def steady_growth(candidate: VariantResult, reference: VariantResult) -> Growth | None:
    """Returns how steadily memory grows over the quality pass, in MiB with each image, more than the reference's.

    The pass is cut into blocks of calls. An allocator's step is growth from one block to the next; what keeps a little
    of each new prompt grows between all of them. None without a quality pass.
    """
    mine, other = _steps_of_pass(candidate), _steps_of_pass(reference)
    if not mine.size:
        return None
    more = mine - max(0.0, float(other.mean()) if other.size else 0.0)
    width = float(special.stdtrit(more.size - 1, 0.95)) * float(more.std(ddof=1)) / math.sqrt(more.size)
    return Growth(float(more.mean()), STEADY_MIB, float(more.mean()) - width, float(more.mean()) + width)


def _steps_of_pass(variant: VariantResult) -> np.ndarray:
    """Returns the growth from block to block of the last quality pass, in MiB for each image; empty without a pass."""
    for measurement in reversed(variant.measurements):
        held = np.array(measurement.pass_held_gib)
        if held.size >= _FEWEST_CALLS:
            levels = [1024 * float(np.median(block)) for block in np.array_split(held, _BLOCKS)]
            return np.diff(levels) * _BLOCKS / max(len(variant.images), held.size)
    return np.array([])


def creep_doubts(candidate: VariantResult, reference: VariantResult) -> list[str]:
    """Says by how much memory grows with each image of the quality pass, if the bounds show steady growth."""
    found = steady_growth(candidate, reference)
    if found is None or found.low is None or found.low <= found.limit:
        return []
    return [f"memory grows steadily by {found.estimate:.2g} MiB with each image (at least {found.low:.2g} at 95 %)"]


def other_studies(sessions: Iterable[MeasurementSession]) -> list[str]:
    """Returns a doubt that names the studies that were measured beside these sessions; [] if there were none."""
    others = sorted({other for session in sessions for other in session.disturbed_by})
    return [f"other studies were measured on this device at the same time: {', '.join(others)}"] if others else []


def disturbances(result: StudyResult, candidate: VariantResult, reference: VariantResult) -> list[str]:
    """Says what disturbed the rounds of two variants: another study, or other work.

    Sessions that timed no round of both do not count.
    """
    numbers = {mine.session for found in paired(candidate, reference).values() for mine, _ in found}
    sessions = [session for number, session in enumerate(result.sessions) if number in numbers]
    found = other_studies(sessions)
    limit = result.config.protocol.interference
    if limit is None:
        return found
    for side in (candidate, reference):
        worst = [share for m in side.measurements if m.session in numbers for share in _deciding(m)]
        disturbed = sum(share > limit for share in worst)
        if 2 * disturbed > len(worst):
            counted = f"{disturbed} of {len(worst)} calls of '{side.name}' that decide"
            found.append(
                f"other programs took more than {100 * limit:g} % from {counted}: measure again on an idle machine"
            )
    return found


def uncounted(result: StudyResult, candidate: VariantResult, reference: VariantResult) -> list[str]:
    """Says that nothing counted what disturbed the timed calls of two variants, so that `disturbances` saw none."""
    timed = [m for side in (candidate, reference) for m in side.measurements if m.shapes[0].latency_s]
    known = any(True for measurement in timed for _ in _deciding(measurement))
    if known or not timed or result.config.protocol.interference is None:
        return []
    return ["nothing counted what other programs took from these calls, so that other work would not show"]


def _deciding(measurement: Measurement) -> Iterator[float]:
    """Yields, for each timed call that decides, the share that others took, if it is known."""
    for call in measurement.shapes[0].calls:
        if call.disturbed is not None and not call.left_out:
            yield call.disturbed


def doubts_of(result: StudyResult) -> list[str]:
    """Returns all doubts of a study, each with the name of its variant."""
    found = []
    for variant in result.variants:
        if variant.status.timed:
            found += [f"{variant.name}: {doubt}" for doubt in image_doubts(result, variant)]
            found += core_doubts(variant)
    for edge in result.comparisons:
        candidate, reference = result.variant(edge.candidate), result.variant(edge.reference)
        if candidate.status.timed and reference.status.timed:
            pair = candidate, reference
            doubts = [*growth_doubts(*pair), *creep_doubts(*pair)]
            found += [f"{candidate.name}: {doubt}" for doubt in doubts]
    return list(dict.fromkeys(found))
