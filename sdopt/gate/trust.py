"""Checks whether the measurements of variants can be trusted, in every gate.

An option may be wrong: it may draw other images when it is timed, keep what it should free, or be slow now and then.
Rules on figures that every study has fail closed, at the main shape. Rules on the quality pass give no ruling if it was
short, which happens in honest studies, too.
"""

import math

import numpy as np
import scipy

from sdopt.gate.rulings import UNIT_ROUNDOFF, precision_of, unjudged
from sdopt.record.records import StudyResult, VariantResult
from sdopt.record.samples import Measurement
from sdopt.record.verdicts import Ruling, Verdict
from sdopt.statistics.bounds import share_bounds
from sdopt.statistics.ratios import two_samples
from sdopt.statistics.words import decibels_text

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

_CONFIDENCE = 0.95

_DRAWN = "timed as drawn"


def trust_rulings(
    result: StudyResult,
    candidate: VariantResult,
    reference: VariantResult,
) -> list[Ruling]:
    """Returns the rulings on whether the measurements of two variants can be trusted, whatever they show."""
    return [
        _drawn_alike(result, candidate, reference),
        _growing(candidate, reference),
        *_of_pass(candidate, reference),
        *_cores(candidate),
    ]


def doubts_of(result: StudyResult) -> list[str]:
    """Returns all doubts of a study, each with the name of its variant: which of these rules it breaks."""
    doubts: list[str] = []
    for variant in result.variants:
        if variant.status.timed:
            doubt = image_doubt(result, variant)
            doubts += [f"{variant.name}: {doubt}"] if doubt else []
    for edge in result.comparisons:
        candidate, reference = result.sides(edge)
        if not candidate.status.timed or not reference.status.timed:
            continue
        for ruling in trust_rulings(result, candidate, reference):
            if ruling.verdict is Verdict.FAIL and ruling.rule != _DRAWN:
                doubts.append(f"{candidate.name}: {ruling.reason}")
        if result.is_imported and _copied(candidate, reference):
            doubts.append(
                f"{candidate.name}: its times are those of '{reference.name}' to the last digit, as those of a copied "
                "table are: chance would change some of them"
            )
    return list(dict.fromkeys(doubts))


_ALIKE_BY_CHANCE = 2
"""Different times of which two tables may consist by chance, where they are rounded coarsely."""


def _copied(candidate: VariantResult, reference: VariantResult) -> bool:
    """Returns whether each call of two variants took the same time, and not all of them the same."""
    times: set[float] = set()
    for calls in candidate.samples.values():
        times.update(calls)
    return candidate.samples == reference.samples and len(times) > _ALIKE_BY_CHANCE


# Images of timed calls ------------------------------------------------------------------------------------------------


def error_limit(result: StudyResult, variant: VariantResult) -> float:
    """Returns the mean squared difference up to which two images of a variant count as computed alike.

    It is 60 dB, or 2u² for a type of unit roundoff u (both images with an error of u); or, where that is more, a
    multiple of the floor that was measured between two ways to compute the same.
    """
    unit = UNIT_ROUNDOFF[precision_of(variant) or "float32"]
    floor = result.floors.get("numerical", {}).get("mse")
    measured = OF_FLOOR * floor.mean if floor else 0.0
    return max(SMALLEST_ERROR, 2 * unit**2, measured)


def image_doubt(result: StudyResult, variant: VariantResult) -> str:
    """Says in which processes the images of timed calls are not those that were drawn; "" if they are."""
    limit = error_limit(result, variant)
    compared = 0
    wrong: list[tuple[float, int]] = []
    processes = []
    for measurement in variant.measurements:
        for image in measurement.main.timed_images:
            if image.error is None:
                continue
            compared += 1
            if not image.error <= limit:
                wrong.append((image.error, image.prompt_index))
                processes.append(str(measurement.replicate + 1))
    if not wrong:
        return ""
    worst, prompt = max(wrong)
    return (
        f"{len(wrong)} of {compared} images of timed calls, in process {', '.join(dict.fromkeys(processes))}, differ "
        f"from those that were scored: likeness {decibels_text(worst)} for prompt {prompt + 1} (at least "
        f"{decibels_text(limit)} needed)"
    )


def _drawn_alike(
    result: StudyResult,
    candidate: VariantResult,
    reference: VariantResult,
) -> Ruling:
    """Checks that the timed calls of every process drew the same images as the quality pass."""
    if doubt := image_doubt(result, candidate):
        return Ruling(_DRAWN, "", Verdict.FAIL, doubt)
    if doubt := image_doubt(result, reference):
        return unjudged(_DRAWN, f"the reference '{reference.name}': {doubt}")
    for variant in (candidate, reference):
        processes = _uncompared_processes(variant)
        if processes:
            numbers = ", ".join(str(replicate + 1) for replicate in processes)
            return unjudged(
                _DRAWN,
                f"no image of a timed call of '{variant.name}' was compared with a drawn one, "
                f"in process {numbers}",
            )
    count = sum(map(_compared, candidate.measurements))
    reason = (
        f"{count} images of timed calls equal those of the quality pass, "
        f"to within a mean squared error of {error_limit(result, candidate):.2g}"
    )
    return Ruling(_DRAWN, "", Verdict.PASS, reason)


def _uncompared_processes(variant: VariantResult) -> list[int]:
    """Returns the processes that were timed, and of which no image was compared."""
    compared = {one.replicate for one in variant.measurements if _compared(one)}
    return sorted(variant.samples.keys() - compared)


def _compared(measurement: Measurement) -> int:
    """Returns the number of images of timed calls that were compared with a drawn one."""
    images = measurement.main.timed_images
    return sum(image.error is not None for image in images)


# Timed calls ----------------------------------------------------------------------------------------------------------


def _growing(candidate: VariantResult, reference: VariantResult) -> Ruling:
    """Rules on memory that a candidate's processes keep with each call, more than the reference's.

    A reference that shrinks counts as one that keeps what it has. Bounds are one-sided, at 95 %; with fewer than three
    processes on a side there are none.
    """
    rule = "memory growth"
    steps = _steps(candidate)
    reference_steps = _steps(reference)
    if not steps.size or not reference_steps.size:
        return unjudged(
            rule,
            "it takes two rounds or more, with the memory of a process measured after each",
        )
    limit = SMALLEST_GROWTH_MIB
    if reference.peaks_gib:
        limit = max(
            limit, 1.024 * float(np.mean(reference.peaks_gib))
        )  # a thousandth of the peak
    growth = float(steps.mean() - max(0.0, reference_steps.mean()))
    low = high = None
    width = two_samples(steps, reference_steps).half_width(2 * _CONFIDENCE - 1)
    if width is not None:
        low, high = growth - width, growth + width
    verdict = Verdict.PASS
    if low is not None and low > limit:
        verdict = Verdict.FAIL
    elif growth > limit:
        verdict = Verdict.INCONCLUSIVE
    reason = f"memory grows by {growth:.3g} MiB per call more than the reference's; the limit is {limit:.3g} MiB"
    return Ruling(
        rule,
        "",
        verdict,
        reason,
        growth,
        low,
        high,
        limit,
    )


def _steps(variant: VariantResult) -> np.ndarray:
    """Returns the mean step of held memory from one timed call to the next, in MiB, of each process.

    A single step is no growth: of the steps of each process the largest is left out.
    """
    means = []
    for measurement in variant.measurements:
        held = [call.held_gib for call in measurement.main.calls]
        steps = np.diff([gib for gib in held if gib is not None]) * 1024
        if steps.size > 1:
            largest = np.argmax(np.abs(steps))
            steps = np.delete(steps, largest)
        if steps.size:
            means.append(float(steps.mean()))
    return np.array(means)


def _cores(variant: VariantResult) -> list[Ruling]:
    """Fails if timed calls used more cores than the run gives a process."""
    counted = [call.interference for call in variant.calls if call.interference]
    cores = [cause.cores for cause in counted if cause.cores is not None]
    threads = variant.config.hardware.threads
    if not cores or threads is None:
        return []
    median = float(np.median(cores))
    if median <= threads + _MORE_CORES:
        return []
    reason = f"timed calls used {median:.2g} cores, but each process is given {threads} (hardware.threads)"
    return [Ruling("cores", "", Verdict.FAIL, reason)]


# The quality pass -----------------------------------------------------------------------------------------------------


def _of_pass(candidate: VariantResult, reference: VariantResult) -> list[Ruling]:
    """Rules on the quality pass, which has many more calls than the timed rounds; none if it was short."""
    candidate_pass = _last_pass(candidate)
    reference_pass = _last_pass(reference)
    if candidate_pass is None:
        return []
    steps = _block_steps(candidate_pass, candidate.config.images_per_call)
    if reference_pass is not None:
        of_call = reference.config.images_per_call
        usual = _block_steps(reference_pass, of_call).mean()
        steps = steps - max(0.0, float(usual))
    return [
        _rarely_slow(candidate_pass, reference_pass),
        _growing_when_drawn(candidate_pass, reference_pass, steps),
    ]


def _last_pass(variant: VariantResult) -> Measurement | None:
    """Returns the last process that drew all images; None if none did, or with too few calls.

    Several did where more prompts were added later.
    """
    for measurement in reversed(variant.measurements):
        if len(measurement.pass_s) >= _FEWEST_CALLS:
            return measurement
    return None


def _rarely_slow(measurement: Measurement, reference: Measurement | None) -> Ruling:
    """Rules on rare slow calls; a single one may have any cause."""
    ratios = _over_median(measurement)
    count = int((ratios > SLOW).sum())
    share = count / ratios.size
    bounds = share_bounds(count, ratios.size, _CONFIDENCE)
    reason = (
        f"{count} of {ratios.size} calls that make images took more than {SLOW:g} times as long as usual, the longest "
        f"{ratios.max():.3g} times ({100 * SLOW_SHARE:g} % of calls allowed)"
    )
    verdict = Verdict.FAIL
    if count <= 1 or share <= SLOW_SHARE:
        verdict = Verdict.PASS
    elif (bounds.low or 0.0) <= SLOW_SHARE or _often_slow(reference):
        verdict = Verdict.INCONCLUSIVE
    return Ruling(
        "rarely slow",
        "",
        verdict,
        reason,
        share,
        bounds.low,
        bounds.high,
        SLOW_SHARE,
    )


def _often_slow(measurement: Measurement | None) -> bool:
    """Returns whether more than a few calls of a quality pass are slow, or may be, without one."""
    return measurement is None or bool(
        (_over_median(measurement) > SLOW).mean() > SLOW_SHARE
    )


def _over_median(measurement: Measurement) -> np.ndarray:
    ratios: np.ndarray = np.array(measurement.pass_s) / np.median(measurement.pass_s)
    return ratios


def _growing_when_drawn(
    measurement: Measurement,
    reference: Measurement | None,
    steps: np.ndarray,
) -> Ruling:
    """Rules on memory that grows in some calls only, or a little with each: over the quality pass, in its process.

    The pass is cut into blocks of calls. An allocator's step is growth from one block to the next; what keeps a little
    of each new prompt grows between all of them: `steps` is by how much for each image, beyond the reference's.
    """
    usual = _growth(reference) if reference else 0.0
    growth = _growth(measurement) - max(0.0, usual)
    _, peak = measurement.peak or ("", 0.0)
    limit = max(KEPT_MIB, KEPT * 1024 * peak)
    reason = (
        f"over the images to score memory grew by {growth:.3g} MiB more than the reference's; "
        f"the limit is {limit:.3g} MiB"
    )
    verdict = Verdict.FAIL
    if growth <= limit:
        verdict = Verdict.PASS
    elif growth <= 2 * limit:
        verdict = Verdict.INCONCLUSIVE
    quantile = float(scipy.special.stdtrit(steps.size - 1, _CONFIDENCE))
    width = quantile * float(steps.std(ddof=1)) / math.sqrt(steps.size)
    least = steps.mean() - width
    if least > STEADY_MIB:
        verdict = Verdict.FAIL
        steadily = f"memory grows steadily by {steps.mean():.2g} MiB with each image (at least {least:.2g} at 95 %)"
        reason = f"{steadily}; {reason}"
    return Ruling("growth when drawn", "", verdict, reason, growth, None, None, limit)


def _growth(measurement: Measurement) -> float:
    """Returns by how many MiB memory grew over a quality pass, from the median of its first tenth to its last."""
    held = measurement.pass_held_gib
    tenth = max(1, len(held) // 10)
    before = np.median(held[:tenth])
    after = np.median(held[-tenth:])
    return 1024 * float(after - before)


def _block_steps(measurement: Measurement, of_call: int) -> np.ndarray:
    """Returns the growth from block to block of a quality pass, in MiB for each of the images that a call makes."""
    held = np.array(measurement.pass_held_gib)
    blocks = np.array_split(held, _BLOCKS)
    levels = [1024 * float(np.median(block)) for block in blocks]
    steps: np.ndarray = np.diff(levels) * _BLOCKS / (of_call * held.size)
    return steps
