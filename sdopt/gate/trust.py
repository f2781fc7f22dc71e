"""Checks whether variants can be compared, and their measurements be trusted, in every gate.

An option may be wrong: it may draw other images when it is timed, keep what it should free, or be slow now and then.
Rules on figures that every study has fail closed, at the main shape. Rules on the quality pass give no ruling if it was
short, which happens in honest studies, too.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from scipy import special

from sdopt.gate.rulings import UNIT_ROUNDOFF, find_scores, precision_of, unjudged
from sdopt.record.records import Status, StudyResult, VariantResult
from sdopt.record.samples import Measurement
from sdopt.record.scores import Score
from sdopt.record.verdicts import Ruling, Verdict
from sdopt.statistics.bounds import share_bounds
from sdopt.statistics.ratios import paired, two_samples

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


def trust_rulings(result: StudyResult, candidate: VariantResult, reference: VariantResult) -> list[Ruling]:
    """Returns the rulings on whether the measurements of two variants can be trusted, whatever they show."""
    return [
        _drawn_alike(result, candidate, reference),
        _growing(candidate, reference),
        *_of_pass(candidate, reference),
        *_cores(candidate),
    ]


def doubts_of(result: StudyResult) -> list[str]:
    """Returns all doubts of a study, each with the name of its variant: which of these rules it breaks."""
    timed = [variant for variant in result.variants if variant.status.timed]
    found = [f"{variant.name}: {doubt}" for variant in timed for doubt in image_doubts(result, variant)]
    for edge in result.comparisons:
        candidate, reference = result.variant(edge.candidate), result.variant(edge.reference)
        if candidate.status.timed and reference.status.timed:
            rulings = trust_rulings(result, candidate, reference)
            failed = [each for each in rulings if each.verdict is Verdict.FAIL and each.rule != _DRAWN]
            found += [f"{candidate.name}: {each.reason}" for each in failed]
    return list(dict.fromkeys(found))


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


def _drawn_alike(result: StudyResult, candidate: VariantResult, reference: VariantResult) -> Ruling:
    """Checks that the timed calls of every process drew the same images as the quality pass."""
    if doubts := image_doubts(result, candidate):
        return Ruling(_DRAWN, "", Verdict.FAIL, "; ".join(doubts))
    if doubts := image_doubts(result, reference):
        return unjudged(_DRAWN, f"the reference '{reference.name}': {'; '.join(doubts)}")
    for variant in (candidate, reference):
        timed = {m.replicate for m in variant.measurements if m.shapes[0].latency_s}
        if missing := sorted(timed - {m.replicate for m in variant.measurements if _compared(m)}):
            numbers = ", ".join(str(replicate + 1) for replicate in missing)
            none = f"no image of a timed call of '{variant.name}' was compared with a drawn one"
            return unjudged(_DRAWN, f"{none}, in process {numbers}")
    count = sum(map(_compared, candidate.measurements))
    within = f"to within a mean squared error of {error_limit(result, candidate):.2g}"
    return Ruling(_DRAWN, "", Verdict.PASS, f"{count} images of timed calls equal those of the quality pass, {within}")


def _compared(measurement: Measurement) -> int:
    """Returns the number of images of timed calls that were compared with a drawn one."""
    return sum(image.error is not None for image in measurement.shapes[0].timed_images)


def _growing(candidate: VariantResult, reference: VariantResult) -> Ruling:
    """Rules on memory that a candidate's processes keep with each call, more than the reference's.

    A reference that shrinks counts as one that keeps what it has. Bounds are one-sided, at 95 %; with fewer than three
    processes on a side there are none.
    """
    mine, other, rule = _steps(candidate), _steps(reference), "memory growth"
    if not mine.size or not other.size:
        way_out = "set protocol.rounds to at least 2"
        return unjudged(rule, f"the memory of a process was not measured after two or more calls; {way_out}")
    peaks = reference.peaks_gib
    limit = max(SMALLEST_GROWTH_MIB, 1.024 * float(np.mean(peaks)) if peaks else 0.0)  # a thousandth of the peak
    grown = float(mine.mean() - max(0.0, other.mean()))
    width = two_samples(mine, other).half_width(2 * _CONFIDENCE - 1)
    low, high = (None, None) if width is None else (grown - width, grown + width)
    verdict = Verdict.INCONCLUSIVE if grown > limit else Verdict.PASS
    if low is not None and low > limit:
        verdict = Verdict.FAIL
    reason = f"memory grows by {grown:.3g} MiB per call more than the reference's; the limit is {limit:.3g} MiB"
    return Ruling(rule, "", verdict, reason, grown, low, high, limit)


def _steps(variant: VariantResult) -> np.ndarray:
    """Returns the mean step of held memory from one timed call to the next, in MiB, of each process.

    A single step is no growth: of the steps of each process the largest is left out.
    """
    found = []
    for measurement in variant.measurements:
        held = [call.held_gib for call in measurement.shapes[0].calls if call.held_gib is not None]
        steps = np.diff(held) * 1024
        if steps.size:
            kept = np.delete(steps, np.argmax(np.abs(steps))) if steps.size > 1 else steps
            found.append(float(kept.mean()))
    return np.array(found)


def _cores(variant: VariantResult) -> list[Ruling]:
    """Fails if timed calls used more cores than the run gives a process."""
    known = (call.interference for m in variant.measurements for call in m.shapes[0].calls)
    calls = [found.cores for found in known if found and found.cores is not None]
    threads = variant.config.hardware.threads
    if not calls or threads is None or float(np.median(calls)) <= threads + _MORE_CORES:
        return []
    used = f"timed calls used {float(np.median(calls)):.2g} cores"
    return [Ruling("cores", "", Verdict.FAIL, f"{used}, but each process is given {threads} (hardware.threads)")]


def _of_pass(candidate: VariantResult, reference: VariantResult) -> list[Ruling]:
    """Rules on the quality pass, which has many more calls than the timed rounds; none if it was short."""
    mine, other = _last_pass(candidate), _last_pass(reference)
    if mine is None:
        return []
    return [_rarely_slow(mine, other), _growing_when_drawn(mine, other, len(candidate.images), len(reference.images))]


def _last_pass(variant: VariantResult) -> Measurement | None:
    """Returns the last process that drew all images; None if none did, or with too few calls.

    Several did where more prompts were added later.
    """
    return next((m for m in reversed(variant.measurements) if len(m.pass_s) >= _FEWEST_CALLS), None)


def _rarely_slow(mine: Measurement, other: Measurement | None) -> Ruling:
    """Rules on rare slow calls; a single one may have any cause."""
    ratios = _over_median(mine)
    count, calls = int((ratios > SLOW).sum()), ratios.size
    found, share = share_bounds(count, calls, _CONFIDENCE), count / calls
    reason = (
        f"{count} of {calls} calls that draw images took more than {SLOW:g} times the median, "
        f"the longest {ratios.max():.3g}"
    )
    if count <= 1 or share <= SLOW_SHARE:
        verdict = Verdict.PASS
    elif (found.low or 0.0) <= SLOW_SHARE or other is None or (_over_median(other) > SLOW).mean() > SLOW_SHARE:
        verdict = Verdict.INCONCLUSIVE
    else:
        verdict = Verdict.FAIL
    return Ruling("rarely slow", "", verdict, reason, share, found.low, found.high, SLOW_SHARE)


def _over_median(measurement: Measurement) -> np.ndarray:
    ratios: np.ndarray = np.array(measurement.pass_s) / np.median(measurement.pass_s)
    return ratios


def _growing_when_drawn(mine: Measurement, other: Measurement | None, images: int, others_images: int) -> Ruling:
    """Rules on memory that grows in some calls only, or a little with each: over the quality pass, in its process.

    The pass is cut into blocks of calls. An allocator's step is growth from one block to the next; what keeps a little
    of each new prompt grows between all of them.
    """
    more = _kept(mine) - max(0.0, _kept(other) if other else 0.0)
    limit = max(KEPT_MIB, KEPT * 1024 * (mine.peak[1] if mine.peak else 0.0))
    reason = (
        f"in the quality pass memory grew by {more:.3g} MiB more than the reference's; the limit is {limit:.3g} MiB"
    )
    verdict = Verdict.PASS if more <= limit else Verdict.INCONCLUSIVE if more <= 2 * limit else Verdict.FAIL
    usual = float(_block_steps(other, others_images).mean()) if other else 0.0
    steps = _block_steps(mine, images) - max(0.0, usual)
    width = float(special.stdtrit(steps.size - 1, _CONFIDENCE)) * float(steps.std(ddof=1)) / math.sqrt(steps.size)
    if steps.mean() - width > STEADY_MIB:
        verdict = Verdict.FAIL
        least = f"(at least {steps.mean() - width:.2g} at 95 %)"
        reason = f"memory grows steadily by {steps.mean():.2g} MiB with each image {least}; {reason}"
    return Ruling("growth when drawn", "", verdict, reason, more, None, None, limit)


def _kept(measurement: Measurement) -> float:
    """Returns by how many MiB memory grew over a quality pass, from the median of its first tenth to its last."""
    held = measurement.pass_held_gib
    tenth = max(1, len(held) // 10)
    return 1024 * float(np.median(held[-tenth:]) - np.median(held[:tenth]))


def _block_steps(measurement: Measurement, images: int) -> np.ndarray:
    """Returns the growth from block to block of a quality pass, in MiB for each image."""
    held = np.array(measurement.pass_held_gib)
    levels = [1024 * float(np.median(block)) for block in np.array_split(held, _BLOCKS)]
    steps: np.ndarray = np.diff(levels) * _BLOCKS / max(images, held.size)
    return steps


def repeated_prompts(candidate: VariantResult, reference: VariantResult) -> list[Ruling]:
    """Rules on a speed-up of calls that repeated prompts and noise: remembering may have made them faster."""
    repeated = sum(
        call.repeated for side in (candidate, reference) for m in side.measurements for call in m.shapes[0].calls
    )
    if not repeated:
        return []
    why = f"{repeated} timed calls repeated a prompt, so a cache may have made them faster: raise quality.prompt_count"
    return [Ruling("fresh prompts", "", Verdict.INCONCLUSIVE, why)]


def disturbances(result: StudyResult, candidate: VariantResult, reference: VariantResult) -> list[str]:
    """Says what disturbed the rounds of two variants: other work, another study included.

    Sessions that timed no round of both do not count.
    """
    numbers = {mine.session for found in paired(candidate, reference).values() for mine, _ in found}
    found: list[str] = []
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


def comparable(candidate: VariantResult, reference: VariantResult) -> list[Ruling]:
    """Returns a ruling for each reason why two variants cannot be compared at all."""
    rulings = []
    if not candidate.status.measured or candidate.status is Status.SLOWER:
        rulings.append(
            unjudged("status", f"the variant was not measured (status {candidate.status}): {candidate.reason}")
        )
    elif candidate.status is Status.NOT_ENGAGED:
        rulings.append(
            Ruling("engaged", "", Verdict.FAIL, f"there is no evidence that it took effect: {candidate.reason}")
        )
    if reference.status is not Status.OK:
        rulings.append(unjudged("reference", f"the reference '{reference.name}' has the status {reference.status}"))
    elif reference.trips:
        wires = ", ".join(sorted({trip.wire for trip in reference.trips}))
        rulings.append(unjudged("reference", f"images of the reference '{reference.name}' are broken: {wires}"))
    if other := candidate.other_work(reference):
        rulings.append(unjudged("same work", f"not the same work: {', '.join(other)}"))
    return rulings


def tripwires(candidate: VariantResult) -> Ruling:
    """Fails if an image of the candidate is broken."""
    if not candidate.images:
        return unjudged("tripwires", "there are no images")
    if not candidate.trips:
        return Ruling("tripwires", "", Verdict.PASS, f"none of {len(candidate.images)} images is broken")
    first = candidate.trips[0]
    where = f" ({first.path})" if first.path else ""
    broken = candidate.broken_images  # none if only the file of latents has changed
    share = f"; {broken} of {len(candidate.images)} images are broken" if broken else ""
    return Ruling("tripwires", "", Verdict.FAIL, f"{first.wire}: {first.detail}{where}{share}")


def same_work(candidate: VariantResult, reference: VariantResult) -> Ruling:
    """Checks that a variant configured for as many steps as its reference took them."""
    asked = [(v.config.workload.steps, v.config.scheduler) for v in (candidate, reference)]
    mine, other = candidate.denoiser_calls, reference.denoiser_calls
    if asked[0] != asked[1]:
        return Ruling(
            "steps", "", Verdict.PASS, "not compared: the variant chooses another scheduler or number of steps"
        )
    if mine is None or other is None:
        silent = " and ".join(side.name for side in (candidate, reference) if side.denoiser_calls is None)
        return unjudged("steps", f"the denoiser never ran in an observed call of {silent}")
    if mine != other:
        return Ruling(
            "steps", "", Verdict.FAIL, f"the denoiser ran {mine} times per call, in the reference {other} times"
        )
    return Ruling("steps", "", Verdict.PASS, f"the denoiser ran {mine} times per call on both sides")


def effect_seen(changes: Sequence[str] | None, paired: Mapping[str, Score]) -> list[Ruling]:
    """Rules on options whose evidence is only their own word, such as that a hook is attached.

    `changes` are those between the traces of both, and `paired` the distances between their images.
    """
    errors = [error for score in find_scores(paired, "mse").values() for error in score.per_prompt]
    if changes is None or changes or not errors or any(error != 0 for error in errors):
        return []
    seen = "sdopt's own trace and every image are the same as the reference's"
    return [Ruling("engaged", "", Verdict.INCONCLUSIVE, f"that it took effect is only the option's own word: {seen}")]
