"""Turns a score and a limit into a ruling: a function for each of `TESTS`, which `ruled` calls."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from sdopt.quality.metrics import family_of
from sdopt.record.records import VariantResult
from sdopt.record.scores import Score
from sdopt.record.verdicts import Ruling, Verdict, worst
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
    meant = {}
    for name, score in scores.items():
        if family_of(name).name == metric:
            meant[name] = score
    return meant


def require_finite(name: str, score: Score) -> None:
    """Raises UnjudgedError if a score or a prompt's value is missing or not finite."""
    if score.estimate is None or not math.isfinite(score.estimate):
        raise UnjudgedError(name, score.note or "the value is not finite")
    for value in (*score.per_prompt, *score.leave_one_out):
        if value is None or not math.isfinite(value):
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
    bound = f"{low if above else high:.4g}"
    if rule.confidence:
        # Tables show two-sided intervals, whose bounds lie farther out.
        side = "at least" if above else "at most"
        bound = f"{side} {bound} (one-sided {level_of(rule.confidence)})"
    verdict = Verdict.FAIL
    place = "below" if at_least else "above"
    if above == at_least:
        verdict = Verdict.PASS
        place = f"not {place}"
    reason = f"{bound}, {place} the limit {limit:.4g}"
    return _ruling(rule, name, bounds, limit, verdict, reason)


def two_sided(rule: Rule, name: str, bounds: Bounds, low: float, high: float) -> Ruling:
    """Applies two one-sided tests (Schuirmann 1987); returns the worse ruling of the two, or that on the nearer limit."""
    lower = against(rule, name, bounds, low, at_least=True)
    upper = against(rule, name, bounds, high, at_least=False)
    rulings = [lower, upper]
    if bounds.estimate - low > high - bounds.estimate:
        rulings = [upper, lower]
    verdict = worst(ruling.verdict for ruling in rulings)
    return next(ruling for ruling in rulings if ruling.verdict is verdict)


@_tests("at_least", "at_most", "non_inferior")
def _beside_limit(rule: Rule, name: str, score: Score, limit: float) -> Ruling:
    bounds = bounds_of(score, rule.confidence)
    if rule.how.figure == "change":
        limit = -limit
    at_least = rule.how.side == "least"
    return against(rule, name, bounds, limit, at_least)


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
    interval = _interval_text(rule, bounds, limit)
    reason = f"{interval}; {_settling(bounds, prompts)}"
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
    interval = f"[{bounds.low:.4g}, {bounds.high:.4g}]"
    level = level_of(rule.confidence)
    return f"{interval} (one-sided {level} bounds) straddles the limit {limit:.4g}"


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
        estimate=bounds.estimate,
        low=bounds.low,
        high=bounds.high,
        margin=limit,
    )


def percent(factor: float | None) -> str:
    """Returns by how much a factor exceeds 1, as `2.5 %`."""
    if factor is None:
        return "an unknown share"
    return f"{100 * (factor - 1):.1f} %"


@_tests("exact")
def _each_zero(rule: Rule, name: str, score: Score, _limit: float) -> Ruling:
    values = _by_prompt(name, score.per_prompt)
    same = values.count(0)
    verdict = Verdict.PASS
    reason = f"all {len(values)} prompts are the same"
    if same < len(values):
        verdict = Verdict.FAIL
        reason = f"{len(values) - same} of {len(values)} prompts differ"
    return Ruling(rule.test, name, verdict, reason, score.estimate, margin=0.0)


@_tests("every")
def _none_beyond(rule: Rule, name: str, score: Score, limit: float) -> Ruling:
    # A mean or a share would let one entirely wrong image among many pass.
    values, beyond, exceed = _beyond(name, score, limit)
    largest = max(values)
    verdict = Verdict.FAIL
    reason = f"{exceed}, the worst with {largest:.4g}"
    if not beyond:
        verdict = Verdict.PASS
        none = f"none of {len(values)} prompts exceeds {limit:.4g}"
        reason = f"{none}; the worst has {largest:.4g}"
    return Ruling(
        rule.test,
        name,
        verdict,
        reason,
        estimate=largest,
        low=largest,
        high=largest,
        margin=limit,
    )


@_tests("rarely")
def _few_beyond(rule: Rule, name: str, score: Score, limit: float) -> Ruling:
    assert rule.share is not None
    values, beyond, exceed = _beyond(name, score, limit)
    bounds = share_bounds(beyond, len(values), rule.confidence)
    ruling = against(rule, name, bounds, rule.share, at_least=False)
    if not beyond and rule.confidence and ruling.verdict is Verdict.INCONCLUSIVE:
        needed = prompts_to_exclude(rule.share, rule.confidence)
        ruling.reason = f"too few to rule out a share of {rule.share:.3g}; {needed} prompts would suffice"
    ruling.reason = f"{exceed}: share {ruling.reason}"
    return ruling


def _beyond(name: str, score: Score, limit: float) -> tuple[list[float], int, str]:
    """Returns the worst value of each prompt, and how many exceed a limit, also in words. Raises UnjudgedError."""
    values = _by_prompt(name, score.worst or score.per_prompt)
    beyond = sum(value > limit for value in values)
    exceed = f"{beyond} of {len(values)} prompts exceed {limit:.4g}"
    return values, beyond, exceed


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
    weights = str(precision.get("weights"))
    arithmetic = precision.get("autocast") or "float32"
    if weights not in UNIT_ROUNDOFF or arithmetic not in UNIT_ROUNDOFF:
        return None
    return max(weights, arithmetic, key=UNIT_ROUNDOFF.__getitem__)
