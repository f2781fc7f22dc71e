"""Turns a score and a limit into a ruling: a function for each of `TESTS`, which `ruled` calls."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from sdopt.quality.metrics import family_of
from sdopt.record.records import VariantResult
from sdopt.record.scores import Score
from sdopt.record.verdicts import Ruling, Verdict
from sdopt.schema import Rule
from sdopt.statistics.bounds import (
    TOO_MANY_PROMPTS,
    Bounds,
    jackknife_bounds,
    mean_bounds,
    prompts_to_exclude,
    share_bounds,
)


class UnjudgedError(Exception):
    """Something that a rule needs is missing or not finite; says what, and of which metric."""

    def __init__(self, metric: str, reason: str) -> None:
        super().__init__(reason)
        self.metric, self.reason = metric, reason


_Test = Callable[[Rule, str, Score, float], Ruling]
"""Rules on a score by a limit or a margin; of a change, the score is candidate − reference, and more is better."""

TESTED: dict[str, _Test] = {}
"""The function of each of `TESTS`."""


def _tests(*names: str) -> Callable[[_Test], _Test]:
    """Makes a function the one that rules by some tests."""

    def register(function: _Test) -> _Test:
        TESTED.update(dict.fromkeys(names, function))
        return function

    return register


def ruled(rule: Rule, name: str, score: Score, limit: float) -> Ruling:
    """Returns what a rule's test finds. Raises UnjudgedError if the score lacks what it needs."""
    return TESTED[rule.test](rule, name, score, limit)


def unjudged(rule: str, reason: str, metric: str = "") -> Ruling:
    """Returns the ruling for a rule that could not be judged, with the reason."""
    return Ruling(rule, metric, Verdict.NOT_COMPARABLE, reason)


def find_scores(scores: Mapping[str, Score], metric: str) -> dict[str, Score]:
    """Returns the scores that a rule means: the one of that name, or that metric over every feature measured."""
    if metric in scores:
        return {metric: scores[metric]}
    return {
        name: score for name, score in scores.items() if family_of(name).name == metric
    }


def require_finite(name: str, score: Score) -> None:
    """Raises UnjudgedError if a score or a prompt's value is missing or not finite."""
    if score.estimate is None or not math.isfinite(score.estimate):
        raise UnjudgedError(name, score.note or "the value is not finite")
    values = [*score.per_prompt, *score.leave_one_out]
    if any(value is None or not math.isfinite(value) for value in values):
        raise UnjudgedError(name, "a prompt's value is not finite")


def bounds_of(score: Score, confidence: float | None) -> Bounds:
    """Returns a score with one-sided bounds at a confidence; without a confidence, both bounds are the estimate."""
    value = score.estimate
    assert value is not None
    if confidence is None:
        return Bounds(value, value, value, math.nan, len(score.per_prompt))
    if score.leave_one_out:
        without = np.array(score.leave_one_out, dtype=float)
        return jackknife_bounds(value, without, confidence)
    if score.per_prompt:
        return mean_bounds(np.array(score.per_prompt, dtype=float), confidence)
    return Bounds(value, None, None, math.nan, 0)


def against(
    rule: Rule, name: str, bounds: Bounds, limit: float, at_least: bool
) -> Ruling:
    """Passes if both bounds lie on the right side of a limit, and fails if both lie on the wrong side."""
    low = bounds.low
    high = bounds.high
    if low is None or high is None:
        return _open(rule, name, bounds, limit)
    above = low >= limit if at_least else low > limit
    below = high < limit if at_least else high <= limit
    if not above and not below:
        return _open(rule, name, bounds, limit)
    passes = above if at_least else below
    wrong = "below" if at_least else "above"
    side = f"not {wrong}" if passes else wrong
    bound = _deciding_bound(low, high, above, rule.confidence)
    verdict = Verdict.PASS if passes else Verdict.FAIL
    reason = f"{bound}, {side} the limit {limit:.4g}"
    return _ruling(rule, name, bounds, limit, verdict, reason)


def _deciding_bound(
    low: float,
    high: float,
    above: bool,
    confidence: float | None,
) -> str:
    """Returns the bound that decides in words; tables show two-sided intervals, whose bounds lie farther out."""
    decides = low if above else high
    if not confidence:
        return f"{decides:.4g}"
    side = "at least" if above else "at most"
    return f"{side} {decides:.4g} (one-sided {level_of(confidence)})"


def two_sided(rule: Rule, name: str, bounds: Bounds, low: float, high: float) -> Ruling:
    """Applies two one-sided tests (Schuirmann 1987); returns the worse ruling of the two, or that on the nearer limit."""
    lower = against(rule, name, bounds, low, at_least=True)
    upper = against(rule, name, bounds, high, at_least=False)
    is_high = bounds.estimate - low > high - bounds.estimate
    nearer, other = (upper, lower) if is_high else (lower, upper)
    return max(nearer, other, key=lambda ruling: list(Verdict).index(ruling.verdict))


@_tests("at_least", "at_most", "non_inferior")
def _beside_limit(rule: Rule, name: str, score: Score, limit: float) -> Ruling:
    bounds = bounds_of(score, rule.confidence)
    threshold = -limit if rule.how.figure == "change" else limit
    return against(rule, name, bounds, threshold, rule.how.side == "least")


@_tests("equivalent", "within")
def _between_limits(rule: Rule, name: str, score: Score, limit: float) -> Ruling:
    bounds = bounds_of(score, rule.confidence)
    low = -limit if rule.low is None else rule.low
    high = limit if rule.high is None else rule.high
    return two_sided(rule, name, bounds, low, high)


def without_keys(ruling: Ruling) -> Ruling:
    """Returns a ruling on what another program made, whose reason names nothing of sdopt that would make more of it."""
    reason = re.sub(r" \((protocol|quality)\.\w+\)", "", ruling.reason)
    reason = re.sub(r"(\d+) processes per variant", r"times of \1 replicates", reason)
    return replace(ruling, reason=reason)


def level_of(confidence: float) -> str:
    """Returns a confidence in words, as `95 %`."""
    return f"{100 * confidence:.4g} %"


def _open(rule: Rule, name: str, bounds: Bounds, limit: float) -> Ruling:
    """Returns an inconclusive ruling that says what would settle it."""
    prompts = _prompts_needed(rule, bounds, limit)
    reason = f"{_interval_text(rule, bounds, limit)}; {_settling(bounds, prompts)}"
    ruling = _ruling(rule, name, bounds, limit, Verdict.INCONCLUSIVE, reason)
    return replace(ruling, prompts=prompts)


def _prompts_needed(rule: Rule, bounds: Bounds, limit: float) -> int | None:
    """Returns about how many prompts would settle an open ruling; None if that is not known."""
    if bounds.unit != "prompt":
        return None
    return bounds.needed(limit, rule.confidence or 0.95)


def _interval_text(rule: Rule, bounds: Bounds, limit: float) -> str:
    if bounds.low is None or bounds.high is None or not rule.confidence:
        return "has no interval"
    level = level_of(rule.confidence)
    return f"[{bounds.low:.4g}, {bounds.high:.4g}] (one-sided {level} bounds) straddles the limit {limit:.4g}"


def _settling(bounds: Bounds, prompts: int | None) -> str:
    """Returns what would settle an open ruling."""
    if bounds.unit != "prompt":
        return "a study with more runs (protocol.replicates) would settle it"
    if prompts is None:
        return "more prompts (quality.prompt_count) would settle it"
    if prompts > TOO_MANY_PROMPTS:
        return "more prompts are unlikely to settle it"
    return f"about {prompts} prompts (quality.prompt_count) would settle it"


def _ruling(
    rule: Rule,
    name: str,
    bounds: Bounds,
    limit: float,
    verdict: Verdict,
    reason: str,
) -> Ruling:
    return Ruling(
        rule.test,
        name,
        verdict,
        reason,
        bounds.estimate,
        bounds.low,
        bounds.high,
        limit,
    )


def percent(factor: float | None) -> str:
    """Returns by how much a factor exceeds 1, as `2.5 %`."""
    if factor is None:
        return "an unknown share"
    return f"{100 * (factor - 1):.1f} %"


@_tests("exact")
def _each_zero(rule: Rule, name: str, score: Score, _limit: float) -> Ruling:
    values = _by_prompt(name, score.per_prompt)
    wrong = sum(value != 0 for value in values)
    verdict = Verdict.PASS
    reason = f"all {len(values)} prompts are the same"
    if wrong:
        verdict = Verdict.FAIL
        reason = f"{wrong} of {len(values)} prompts differ"
    return Ruling(rule.test, name, verdict, reason, score.estimate, margin=0.0)


@_tests("every")
def _none_beyond(rule: Rule, name: str, score: Score, limit: float) -> Ruling:
    # A mean or a share would let one entirely wrong image among many pass.
    values = _by_prompt(name, score.worst or score.per_prompt)
    wrong = sum(value > limit for value in values)
    worst = max(values)
    verdict = Verdict.PASS
    reason = (
        f"none of {len(values)} prompts exceeds {limit:.4g}; the worst has {worst:.4g}"
    )
    if wrong:
        verdict = Verdict.FAIL
        reason = f"{wrong} of {len(values)} prompts exceed {limit:.4g}, the worst with {worst:.4g}"
    return Ruling(rule.test, name, verdict, reason, worst, worst, worst, limit)


@_tests("rarely")
def _few_beyond(rule: Rule, name: str, score: Score, limit: float) -> Ruling:
    assert rule.share is not None
    values = _by_prompt(name, score.worst or score.per_prompt)
    wrong = sum(value > limit for value in values)
    bounds = share_bounds(wrong, len(values), rule.confidence)
    ruling = against(rule, name, bounds, rule.share, at_least=False)
    if not wrong and rule.confidence and ruling.verdict is Verdict.INCONCLUSIVE:
        needed = prompts_to_exclude(rule.share, rule.confidence)
        ruling.reason = f"too few to rule out a share of {rule.share:.3g}; {needed} prompts would suffice"
    ruling.reason = (
        f"{wrong} of {len(values)} prompts exceed {limit:.4g}: share {ruling.reason}"
    )
    return ruling


def _by_prompt(name: str, values: Sequence[float | None]) -> list[float]:
    """Returns the values of a score by prompt, as far as they are known. Raises UnjudgedError if none is."""
    judged = [value for value in values if value is not None]
    if not judged:
        raise UnjudgedError(name, f"{name} has no values by prompt")
    return judged


UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Largest relative error of rounding to a type (Higham, Accuracy and Stability of Numerical Algorithms, 2.1)."""


def precision_of(variant: VariantResult) -> str | None:
    """Returns the coarsest type of a variant's weights and arithmetic, as its choice of `precision` was recorded.

    TensorFloat-32 counts as float32: rounding its products leaves images alike to 60 dB and more. None where the record
    has no such choice, so that a rule with a limit by type cannot be judged.
    """
    precision = variant.config.options.get("precision")
    if not isinstance(precision, dict):
        return None
    types = [str(precision.get("weights")), precision.get("autocast") or "float32"]
    if not UNIT_ROUNDOFF.keys() >= set(types):
        return None
    return max(types, key=UNIT_ROUNDOFF.__getitem__)
