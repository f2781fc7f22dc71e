"""Rules that apply in every gate: they check whether the measurements can be believed, at the main shape.

Rules on figures that every study has fail closed. Rules on the quality pass give no ruling if it was short or cached,
which happens in honest studies, too.
"""

from sdopt.analysis.bounds import share_bounds
from sdopt.analysis.doubts import (
    SLOW,
    SLOW_SHARE,
    core_doubts,
    creep_doubts,
    error_limit,
    growth,
    growth_doubts,
    image_doubts,
    kept_in_pass,
    slow_calls,
    uncompared,
)
from sdopt.gate.rulings import unjudged
from sdopt.results.records import StudyResult, VariantResult
from sdopt.results.verdicts import Ruling, Verdict

_CONFIDENCE = 0.95


def belief_rulings(result: StudyResult, candidate: VariantResult, reference: VariantResult) -> list[Ruling]:
    """Returns the rulings on whether the measurements of two variants can be believed, whatever they show."""
    return [
        _drawn_alike(result, candidate, reference),
        _growing(candidate, reference),
        *_pass_slow(candidate, reference),
        *_pass_growing(candidate, reference),
        *(Ruling("cores", "", Verdict.FAIL, doubt) for doubt in core_doubts(candidate)),
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
    count = sum(image.error is not None for m in candidate.measurements for image in m.shapes[0].timed_images)
    within = f"to within a mean squared error of {error_limit(result, candidate):.2g}"
    return Ruling(rule, "", Verdict.PASS, f"{count} images of timed calls equal those of the quality pass, {within}")


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
    """Rules on memory that grows in some calls only, or a little with each: over the quality pass, in its process."""
    mine, other = kept_in_pass(candidate), kept_in_pass(reference)
    if mine is None:
        return []
    grown, limit = mine
    more = grown - max(0.0, other[0] if other else 0.0)
    reason = (
        f"in the quality pass memory grew by {more:.3g} MiB more than the reference's; the limit is {limit:.3g} MiB"
    )
    verdict = Verdict.PASS if more <= limit else Verdict.INCONCLUSIVE if more <= 2 * limit else Verdict.FAIL
    if doubts := creep_doubts(candidate, reference):
        verdict, reason = Verdict.FAIL, "; ".join([*doubts, reason])
    return [Ruling("growth when drawn", "", verdict, reason, more, None, None, limit)]


def repeated_prompts(candidate: VariantResult, reference: VariantResult) -> list[Ruling]:
    """Rules on a speed-up of calls that repeated prompts and noise: remembering may have made them faster."""
    repeated = sum(
        call.repeated for side in (candidate, reference) for m in side.measurements for call in m.shapes[0].calls
    )
    if not repeated:
        return []
    why = f"{repeated} timed calls repeated a prompt, so a cache may have made them faster: raise quality.prompt_count"
    return [Ruling("fresh prompts", "", Verdict.INCONCLUSIVE, why)]
