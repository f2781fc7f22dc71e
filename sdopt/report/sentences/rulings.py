"""Says in one sentence what a ruling found: what is different, which way, by how much, and how much is allowed.

A sentence is made of what the record holds of a ruling (its test, metric, verdict, estimate, bounds and limit), so that
results of earlier versions are told in the same words. The figures of the statistics are `Ruling.reason`.
"""

import re
from dataclasses import replace
from typing import Any

from sdopt.record.verdicts import BROKEN, UNDISTURBED, Ruling, Verdict
from sdopt.report.sentences.changes import (
    DISTANCES,
    OF_THE_RANGE,
    OVER_ITS_BASELINE,
    PLAIN,
    PROPERTIES,
    RATIOS,
    Change,
    Text,
    amounts_text,
    duration_text,
    excess,
    number_text,
    percent_text,
)
from sdopt.schema import TESTS
from sdopt.statistics.words import decibels_text

CHECKS = {
    "tripwires": "Some images are broken",
    "timed as drawn": "The timed calls make other images than those that were scored",
    "memory growth": "Memory grows with each call",
    "growth when drawn": "Memory grows while the images to score are made",
    "rarely slow": "Some calls are more than twice as slow as usual",
    "cores": "The calls use more processor cores than they are given",
    "steps": "The denoiser ran another number of times",
    "same work": "The two did not do the same work",
    "engaged": "There is no evidence that the option took effect",
    "status": "It was not measured",
    BROKEN: "It fails now",
    "reference": "There is nothing sound to compare it with",
    "variant": "Only one of the two results has it",
    "rules": "The gate has no rules for it",
    "looks": "It was judged before it was extended",
    "fresh prompts": "The gain may hold for repeated prompts alone",
    UNDISTURBED: "Other programs disturbed the timing",
}
"""What a check of the measurement itself is about, by the name of its ruling, whose reason says what it found."""

_QUESTIONS = (
    "tripwires",
    "timed as drawn",
    "memory growth",
    "growth when drawn",
    "rarely slow",
    "cores",
    "steps",
)
"""Checks whose words say what is wrong, which is not known where they are undecided."""

_PAYOFFS = {
    "harm": "It makes worse what it is meant to improve",
    "no benefit": "It gains nothing that counts",
    "it pays": "It gains what it is meant to gain",
}


def figure_of(ruling: Ruling) -> str:
    """Returns what the rule of a ruling compares, as in `RuleTest.figure`; "" for a check of the measurement."""
    test = TESTS.get(ruling.rule)
    return test.figure if test else ""


def family(metric: str) -> str:
    """Returns a metric's name without its shape and its features: `perceptual` of `perceptual_emojiclip`."""
    name = metric.partition("/")[0]
    fitting = []
    for known in [*PROPERTIES, *DISTANCES, *RATIOS, "first_image_s"]:
        if name == known or name.startswith(f"{known}_"):
            fitting.append(known)
    return max(fitting, key=len, default=name)


def sentence(
    ruling: Ruling, worst: str = "", drift: bool = False, whole: float = 0.0
) -> str:
    """Returns what a ruling says in one sentence, without a full stop.

    Args:
        ruling: of any rule, with any verdict.
        worst: the prompt whose image is the worst by the ruling's metric; "" if it is not known.
        drift: whether the variant was compared with itself in an earlier result.
        whole: how much the reference's images have of the property, of which changes are a share; 0 if unknown.
    """
    share = _as_share(ruling, whole)
    if share is not None:
        return _sentence(share, worst, drift).replace(OF_THE_RANGE, "")
    return _sentence(ruling, worst, drift)


def _sentence(ruling: Ruling, worst: str, drift: bool) -> str:
    if ruling.doubt:
        return f"{subject(ruling)} cannot be told: {ruling.doubt}"
    if ruling.rule in _QUESTIONS and ruling.verdict is not Verdict.FAIL:
        return f"{subject(ruling)} cannot be told: {ruling.reason}"
    if ruling.rule in CHECKS:
        what = f"{CHECKS[ruling.rule]}: " if ruling.rule == "tripwires" else ""
        return upper(f"{what}{ruling.reason}")
    if ruling.verdict is Verdict.NOT_COMPARABLE:
        return f"{subject(ruling)} was not judged: {ruling.reason}"
    if ruling.rule == "must pay":
        return _payoff_sentence(ruling)
    text = _of_figures(ruling, drift)
    if worst and ruling.verdict is Verdict.FAIL:
        text += f", most of all for “{worst}”"
    return text


def _as_share(ruling: Ruling, whole: float) -> Ruling | None:
    """Returns a ruling with changes of a property as shares of the reference's; None if it is on something else."""
    name = family(ruling.metric)
    is_change = name in PROPERTY_OF or figure_of(ruling) == "change"
    if not whole or PROPERTY_OF.get(name, name) not in PROPERTY_OF.values():
        return None
    if not is_change:
        return None
    if figure_of(ruling) == "share":

        def share(limit: re.Match[str]) -> str:
            return f"exceed {float(limit[1]) / whole:.4g}"

        return replace(ruling, reason=_EXCEEDED.sub(share, ruling.reason))
    amounts: dict[str, Any] = {}
    for name in ("estimate", "low", "high", "margin"):
        amount = getattr(ruling, name)
        if amount is not None:
            amounts[name] = amount / whole
    return replace(ruling, **amounts)


def _payoff_sentence(ruling: Ruling) -> str:
    claims = _claims_in_words(ruling.reason.removeprefix(f"{ruling.payoff}: "))
    if ruling.payoff is None:
        return f"Not enough runs to tell whether it gains anything: {claims}"
    return f"{_PAYOFFS[ruling.payoff]}: {claims}"


_CLAIM = re.compile(
    r"(?P<ratio>speedup|memory_ratio)(?:/(?P<shape>\S+))? (?P<estimate>[\d.e+-]+)×"
    r"(?: \[(?P<low>[\d.e+-]+), (?P<high>[\d.e+-]+)\] \(one-sided [\d.]+ % bounds\))?"
)
"""A claim of a gain in the reason of a ruling, with its bounds where it has some."""

_AFTER_A_CLAIM = (
    (
        re.compile(r" (?:straddles|excludes) a gain of ([\d.]+ %)"),
        r", and a gain counts from \1 on",
    ),
    (
        re.compile(
            r" has no interval: that takes (\d+ processes|times of \d+ replicates)"
        ),
        r", in too few runs to tell: it takes \1",
    ),
    (re.compile(r"(?<=\w) (?=is no more than|could be chance)"), ", which "),
)
"""What reasons say of a claim, and how it reads in a sentence."""


def _claims_in_words(reason: str) -> str:
    """Returns what was found of each claim of a gain, without the names of ratios and of statistics."""
    reason = _CLAIM.sub(_claim_in_words, reason)
    for pattern, words in _AFTER_A_CLAIM:
        reason = pattern.sub(words, reason)
    return reason


def _claim_in_words(claim: re.Match[str]) -> str:
    name = claim["ratio"]
    change = RATIOS[name]
    at_shape = f" at {claim['shape']}" if claim["shape"] else ""
    if claim["low"] is None:
        text = change.by(excess(name, float(claim["estimate"])))
    else:
        low = excess(name, float(claim["low"]))
        high = excess(name, float(claim["high"]))
        text = change.between(low, high)
    text = lower(text)
    return f"{text}{at_shape}"


def _of_figures(ruling: Ruling, drift: bool) -> str:
    """Returns the sentence of a rule that compares a figure with a limit."""
    if ruling.estimate is None or ruling.margin is None:
        return f"{subject(ruling)}: {ruling.reason}"
    if figure_of(ruling) == "zero":
        prompts = _counted(ruling)
        return f"Images must be identical to {_others(drift)}, and {prompts} differ"
    change = _change(ruling, ruling.estimate, drift) + _at_shape(ruling)
    limit = _limit(ruling, ruling.estimate, ruling.margin)
    if drift and family(ruling.metric) == "speedup" and ruling.margin < 1:
        limit = f"{percent_text(1 - ruling.margin)} allowed"
    if ruling.verdict is not Verdict.INCONCLUSIVE:
        return f"{change} ({limit})"
    lacking = "runs" if family(ruling.metric) in RATIOS else "prompts"
    _, separator, needed = ruling.reason.rpartition("; ")
    found = f"{lower(change)} ({limit})"
    if ruling.estimate == 0 and family(ruling.metric) in {**DISTANCES, **PROPERTY_OF}:
        found = f"no image differs from {_others(drift)}"
    text = f"Not enough {lacking} to tell: {found}"
    return f"{text}: {needed}" if separator else text


def _counted(ruling: Ruling) -> str:
    """Returns how many prompts a ruling has found to be wrong, as its reason says it: `3 of 96 prompts`."""
    counted = re.match(r"\d+ of \d+ prompts", ruling.reason)
    return counted[0] if counted else "some prompts"


def _others(drift: bool) -> str:
    """Returns what images are compared with."""
    return "those of the earlier result" if drift else "the baseline's"


def _change(ruling: Ruling, estimate: float, drift: bool) -> str:
    """Returns what a ruling found, as the beginning of a sentence; between its bounds where they leave it open."""
    name = family(ruling.metric)
    figure = figure_of(ruling)
    if figure == "share":
        return _share_text(ruling, drift)
    low, high = estimate, estimate
    is_open = ruling.verdict is Verdict.INCONCLUSIVE
    if is_open and ruling.low is not None and ruling.high is not None:
        low, high = ruling.low, ruling.high
    if name in RATIOS:
        return _ratio_text(name, low, high, drift)
    if name == "first_image_s":
        return f"It takes {amounts_text(low, high, duration_text)} to the first image"
    if name in PROPERTIES:
        change = PROPERTIES[name]
        if figure == "value":
            return f"{change.subject} {amounts_text(low, high, _figure)}"
        changed = _changed(change, low, high)
        return f"{changed} than {_others(drift)}"
    whose = "Images"
    if figure == "worst":
        whose = f"Images of {_counted(ruling)}"
    amount = _distance_amount(name, low, high)
    if figure == "worst" and name not in _MEASURED_AS:
        amount = f"up to {amount}"
    return f"{whose} {_distance_text(name, amount, drift)}"


def _ratio_text(name: str, low: float, high: float, drift: bool) -> str:
    if drift and name == "speedup":  # no time, of which some would be added
        return _changed(OVER_ITS_BASELINE, low - 1, high - 1)
    return _changed(RATIOS[name], excess(name, low), excess(name, high))


_MEASURED_AS = ("mse", "perceptual", "lpips_alex")
"""Distances whose amount is named after the words for them."""


PROPERTY_OF = {
    "detail_error": "fine_detail",
    "brightness_error": "brightness",
    "contrast_error": "contrast",
}
"""Distances of single images by a property that a set of images has too, of which changes are told as shares."""


def _distance_amount(name: str, low: float, high: float) -> str:
    """Returns a distance, or the two between which it lies; of squared errors the likeness, the smaller one first."""
    least = max(0.0, low)
    if name == "mse":
        return amounts_text(high, least, decibels_text)
    return amounts_text(least, high, _distance(name)[-1])


def _changed(change: Change, low: float, high: float) -> str:
    return change.by(low) if low == high else change.between(low, high)


def _figure(value: float) -> str:
    return f"{value:.4g}"


def _limit(ruling: Ruling, estimate: float, limit: float) -> str:
    """Returns how much a rule allows, or how much it asks for."""
    name = family(ruling.metric)
    figure = figure_of(ruling)
    if name in RATIOS:
        return _limit_of_ratio(name, limit)
    if name in PROPERTIES and figure == "value":
        return _limit_of_value(ruling, estimate, limit)
    if name == "mse" and figure != "share":
        return f"at least {decibels_text(limit)} needed"
    if name == "first_image_s":
        allowed = duration_text(limit)
    elif figure == "share":
        allowed = f"{percent_text(limit)} of prompts"
    elif name in PROPERTIES:
        allowed = PROPERTIES[name].text(limit)
    else:
        allowed = _distance(name)[-1](limit)
    return f"{allowed.removesuffix(OF_THE_RANGE)} allowed"


def _limit_of_value(ruling: Ruling, estimate: float, limit: float) -> str:
    """Returns the least or the largest value that a rule allows."""
    side = TESTS[ruling.rule].side
    if side == "both" and ruling.verdict is Verdict.INCONCLUSIVE:
        return f"the limit is {_figure(limit)}"
    if side == "least" or estimate < limit:
        return f"at least {_figure(limit)} needed"
    return f"at most {_figure(limit)} allowed"


def _limit_of_ratio(name: str, limit: float) -> str:
    """Returns the harm that a rule allows, or the gain that it asks for."""
    is_gain = limit > 1 if name == "speedup" else limit < 1
    amount = percent_text(excess(name, limit))
    if not is_gain:
        return f"{amount} allowed"
    change = RATIOS[name]
    way = change.more if name == "speedup" else change.less
    return f"{way.format(amount)} needed"


_EXCEEDED = re.compile(r"exceed ([\d.e+-]+)")
"""The limit that some prompts exceed, in the reason of a ruling."""


def _share_text(ruling: Ruling, drift: bool) -> str:
    """Returns for how many prompts images differ by more than a limit."""
    name = family(ruling.metric)
    whose = f"Images of {_counted(ruling)}"
    exceeded = _EXCEEDED.search(ruling.reason)
    if exceeded is None:
        return f"{whose} differ from {_others(drift)} in {_distance(name)[0]}"
    amount = f"more than {_distance(name)[-1](float(exceeded[1]))}"
    return f"{whose} {_distance_text(name, amount, drift)}"


def _distance(name: str) -> tuple[str, str, Text]:
    return DISTANCES.get(name, (name, "", number_text))


def _distance_text(name: str, amount: str, drift: bool) -> str:
    """Returns by how much images differ from others, after whose images they are."""
    about, words, _ = _distance(name)
    return (words or PLAIN).format(others=_others(drift), about=about, amount=amount)


def _at_shape(ruling: Ruling) -> str:
    shape = ruling.metric.partition("/")[2]
    return f" at {shape}" if shape else ""


def lower(text: str) -> str:
    """Returns a sentence as it continues another one."""
    return text[:1].lower() + text[1:]


def upper(text: str) -> str:
    """Returns a text as the beginning of a sentence."""
    return text[:1].upper() + text[1:]


def subject(ruling: Ruling) -> str:
    """Returns what a ruling is about, at the beginning of a sentence."""
    name = family(ruling.metric)
    if ruling.rule == "must pay":
        return "Whether it gains anything"
    subjects = {
        "speedup": "Whether it is slower",
        "memory_ratio": "Whether it takes more memory",
        "tail_ratio": "Whether its slowest calls take longer",
        "first_image_s": "How long the first image takes",
    }
    if name in subjects:
        return f"{subjects[name]}{_at_shape(ruling)}"
    if name in DISTANCES:
        return f"Whether images differ in {DISTANCES[name][0]}"
    if ruling.metric:
        return f"Whether images differ ({ruling.metric})"
    words = CHECKS.get(ruling.rule, ruling.rule)
    return f"Whether {lower(words)}" if ruling.rule in _QUESTIONS else words
