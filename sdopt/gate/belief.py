"""Rules that apply in every gate: they check whether the measurements can be believed, at the main shape.

Rules on figures that every study has fail closed. Rules on the quality pass give no ruling if it was short or cached,
which happens in honest studies, too.
"""

import math

from sdopt.analysis.bounds import share_bounds
from sdopt.analysis.doubts import (
    IDLE_LIMIT,
    SLOW,
    SLOW_SHARE,
    beside_doubts,
    core_doubts,
    error_limit,
    fresh_doubts,
    growth,
    growth_doubts,
    idle_doubts,
    idle_uncounted,
    image_doubts,
    kept_in_pass,
    noise_doubts,
    slow_calls,
    stage_doubts,
    uncompared,
)
from sdopt.analysis.drawn import log_drawn_speedup
from sdopt.analysis.ratios import log_speedup
from sdopt.gate.rulings import unjudged
from sdopt.results.records import StudyResult, VariantResult
from sdopt.results.verdicts import Ruling, Verdict

_CHANCE = 1.05
"""Factor by which the speed-up in a few drawn calls, which do show a gain, may fall short of half of the timed gain."""

_CONFIDENCE = 0.95


def belief_rulings(result: StudyResult, candidate: VariantResult, reference: VariantResult) -> list[Ruling]:
    """Returns the rulings on whether the measurements of two variants can be believed, whatever they show."""
    return [
        _drawn_alike(result, candidate, reference),
        _idle(result, candidate, reference),
        _growing(candidate, reference),
        *_pass_slow(candidate, reference),
        *_pass_growing(candidate, reference),
        *(Ruling("cores", "", Verdict.FAIL, doubt) for doubt in core_doubts(candidate)),
        *_noise(candidate, reference),
        *(Ruling("fresh noise", "", Verdict.FAIL, doubt) for doubt in fresh_doubts(result, candidate)),
        *(Ruling("stages", "", Verdict.INCONCLUSIVE, doubt) for doubt in stage_doubts(result, candidate, reference)),
        *(Ruling("beside the call", "", Verdict.INCONCLUSIVE, doubt) for doubt in beside_doubts(candidate, reference)),
    ]


def _drawn_alike(result: StudyResult, candidate: VariantResult, reference: VariantResult) -> Ruling:
    """Checks that the timed calls of every process drew the same images as the quality pass."""
    rule = "timed as drawn"
    if doubts := image_doubts(result, candidate):
        return Ruling(rule, "", Verdict.FAIL, "; ".join(doubts))
    if doubts := image_doubts(result, reference):
        return unjudged(rule, f"the reference '{reference.name}': {'; '.join(doubts)}")
    for variant in (candidate, reference):
        if missing := uncompared(variant):
            numbers = ", ".join(str(replicate + 1) for replicate in missing)
            return unjudged(
                rule,
                f"no image of a timed call of '{variant.name}' was compared with a drawn one, in process {numbers}",
            )
    count = sum(image.error is not None for m in candidate.measurements for image in m.timed_images)
    within = f"to within a mean squared error of {error_limit(result, candidate):.2g}"
    return Ruling(rule, "", Verdict.PASS, f"{count} images of timed calls equal those of the quality pass, {within}")


def _idle(result: StudyResult, candidate: VariantResult, reference: VariantResult) -> Ruling:
    doubts = [*idle_doubts(candidate), *idle_doubts(reference)]
    if doubts:
        return unjudged("idle", "; ".join(doubts))
    if idle_uncounted(result, candidate) or idle_uncounted(result, reference):
        way_out = "measure with protocol.schedule=blocks, in which none is idle beside another"
        return unjudged("idle", f"this machine's kernel does not count what idle processes use; {way_out}")
    known = [m.idle_cpu for side in (candidate, reference) for m in side.measurements if m.idle_cpu is not None]
    if not known:
        return Ruling("idle", "", Verdict.PASS, "no process had to rest beside another one")
    return Ruling(
        "idle", "", Verdict.PASS, f"idle processes used at most {max(known):.1%} of a core ({IDLE_LIMIT:.0%})"
    )


def _growing(candidate: VariantResult, reference: VariantResult) -> Ruling:
    found, rule = growth(candidate, reference), "memory growth"
    if found is None:
        way_out = "set protocol.rounds to at least 2"
        return unjudged(rule, f"the memory of a process was not measured after two or more calls; {way_out}")
    figures = (found.estimate, found.low, found.high, found.limit)
    if doubts := growth_doubts(candidate, reference):
        return Ruling(rule, "", Verdict.FAIL, "; ".join(doubts), *figures)
    reason = f"grows by {found.estimate:.3g} MiB per call more than the reference; the limit is {found.limit:.3g} MiB"
    return Ruling(rule, "", Verdict.INCONCLUSIVE if found.estimate > found.limit else Verdict.PASS, reason, *figures)


def _pass_slow(candidate: VariantResult, reference: VariantResult) -> list[Ruling]:
    """Rules on rare slow calls in the quality pass, which has many more calls than the timed rounds."""
    mine, other = slow_calls(candidate), slow_calls(reference)
    if mine is None:
        return []
    count, calls, longest = mine
    found, share = share_bounds(count, calls, _CONFIDENCE), count / calls
    reason = (
        f"{count} of {calls} calls that draw images took more than {SLOW:g} times the median, the longest {longest:.3g}"
    )
    if count <= 1 or share <= SLOW_SHARE:
        verdict = Verdict.PASS
    elif (found.low or 0.0) <= SLOW_SHARE or other is None or other[0] / other[1] > SLOW_SHARE:
        verdict = Verdict.INCONCLUSIVE
    else:
        verdict = Verdict.FAIL
    return [Ruling("rarely slow", "", verdict, reason, share, found.low, found.high, SLOW_SHARE)]


def _pass_growing(candidate: VariantResult, reference: VariantResult) -> list[Ruling]:
    """Rules on memory that grows in some calls only: over the whole quality pass, in the process that draws it."""
    mine, other = kept_in_pass(candidate), kept_in_pass(reference)
    if mine is None:
        return []
    grown, limit = mine
    more = grown - max(0.0, other[0] if other else 0.0)
    reason = (
        f"in the quality pass memory grew by {more:.3g} MiB more than the reference's; the limit is {limit:.3g} MiB"
    )
    verdict = Verdict.PASS if more <= limit else Verdict.INCONCLUSIVE if more <= 2 * limit else Verdict.FAIL
    return [Ruling("growth when drawn", "", verdict, reason, more, None, None, limit)]


def _noise(candidate: VariantResult, reference: VariantResult) -> list[Ruling]:
    doubts = [] if noise_doubts(reference) else noise_doubts(candidate)
    return [Ruling("other noise", "", Verdict.FAIL, doubt) for doubt in doubts]


def gain_when_drawn(result: StudyResult, candidate: VariantResult, reference: VariantResult) -> Ruling:
    """Rules on a speed-up that the timed calls showed: the calls that draw images must show it, too.

    They must show half of it (on the log scale), and by their own bound a gain at all: where they cannot tell half of
    it from none, whatever they show proves nothing.
    """
    rule, timed = "gain when drawn", log_speedup(candidate, reference)
    found = log_drawn_speedup(result, candidate, reference)
    repeated = sum(m.repeated for side in (candidate, reference) for m in side.measurements)
    if timed is None or found is None:
        return unjudged(
            rule, "no calls of the quality pass were timed alone in one session with those of the reference"
        )
    drawn = found.interval(2 * _CONFIDENCE - 1)
    figures = (drawn.estimate, drawn.low, drawn.high)
    shown = f"{drawn.estimate:.3g}× in calls that draw images, {timed.ratio:.3g}× in timed ones"
    if repeated:
        why = f"{repeated} timed calls repeated a prompt, so a cache may have made them faster"
        return Ruling(rule, "", Verdict.INCONCLUSIVE, f"{why}: raise quality.prompt_count; {shown}", *figures)
    half = math.sqrt(timed.ratio)
    enough, gains = drawn.estimate * _CHANCE >= half, (drawn.low or 0.0) > 1
    if enough and gains:
        return Ruling(rule, "", Verdict.PASS, shown, *figures)
    batches = {(m.drawn_batch or 0) for side in (candidate, reference) for m in side.measurements if m.drawn_s}
    if batches != {candidate.config.shapes[0].batch_size}:
        why = "the batch sizes differ: measure with the gate, or set quality.batch_size to workload.batch_size"
        return Ruling(rule, "", Verdict.INCONCLUSIVE, f"{shown}; {why}", *figures)
    if enough or drawn.high is None or drawn.high >= half:
        why = "a few calls of single processes differ by as much here: measure again on a quieter machine"
        return Ruling(rule, "", Verdict.INCONCLUSIVE, f"{shown}; {why}", *figures)
    return Ruling(rule, "", Verdict.FAIL, f"{shown}: the calls that draw images do not show the gain", *figures)
