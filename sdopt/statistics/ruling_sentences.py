"""Says in one sentence what a ruling found: what is different, which way, by how much, and how much is allowed.

A sentence is made of what the record holds of a ruling (its test, metric, verdict, estimate, bounds and limit), so that
results of earlier versions are told in the same words. The figures of the statistics are `Ruling.reason`.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sdopt.record.verdicts import Ruling, Verdict

Text = Callable[[float], str]


def percent_text(share: float) -> str:
    """Returns a share as a percentage of two digits, and no more: `4.3 %`, `0.05 %`."""
    return f"{float(f'{100 * abs(share):.2g}'):g} %"


def _number(value: float) -> str:
    return f"{float(f'{abs(value):.2g}'):g}"


def _decibels(mse: float) -> str:
    return "identical" if mse <= 0 else f"{-10 * math.log10(mse):.0f} dB"


@dataclass(frozen=True)
class _Property:
    """A property of a whole set of images, of which candidate and reference have a mean; a change has a direction.

    Attributes:
        less: what it means if the candidate has less of it.
        more: what it means if it has more.
        turned: whether the recorded difference is the reference's value less the candidate's, as it is for properties
            of which neither way is better.
    """

    less: str
    more: str
    text: Text
    turned: bool = False

    def change(self, difference: float) -> str:
        """Returns how images changed, for a difference as it is recorded."""
        grew = difference < 0 if self.turned else difference > 0
        return (self.more if grew else self.less).format(self.text(difference))


PROPERTIES = {
    "brightness": _Property(
        "are {} darker", "are {} brighter", percent_text, turned=True
    ),
    "contrast": _Property(
        "have {} less contrast",
        "have {} more contrast",
        percent_text,
        turned=True,
    ),
    "fine_detail": _Property(
        "have {} less fine detail", "have {} more fine detail", percent_text
    ),
    "ssim": _Property("are {} less alike", "are {} more alike", _number),
    "psnr_db": _Property("are {} dB less alike", "are {} dB more alike", _number),
    "clip_score": _Property(
        "fit their prompts less (CLIP score {} lower)",
        "fit more (CLIP score {} higher)",
        _number,
    ),
    "score": _Property("score {} lower", "score {} higher", _number),
    "penalty": _Property(
        "have a penalty {} higher", "have a penalty {} lower", _number
    ),
    "fid": _Property(
        "are {} further from the reference set",
        "are {} closer to the reference set",
        _number,
    ),
    "kid": _Property(
        "are {} further from the reference set",
        "are {} closer to the reference set",
        _number,
    ),
    "cmmd": _Property(
        "are {} further from the reference set",
        "are {} closer to the reference set",
        _number,
    ),
}

_ABSOLUTE = {
    "brightness": "a brightness",
    "contrast": "a contrast",
    "fine_detail": "fine detail",
    "ssim": "a structural similarity",
    "psnr_db": "a peak signal-to-noise ratio in dB",
    "clip_score": "a CLIP score",
    "score": "a score",
    "penalty": "a penalty",
    "fid": "a distance from the reference set (FID)",
    "kid": "a distance from the reference set (KID)",
    "cmmd": "a distance from the reference set (CMMD)",
}
"""What a rule on the value itself is about, where it does not compare with the baseline's."""

_DISTANCES: Mapping[str, tuple[str, Text]] = {
    "mse": ("pixels", _decibels),
    "latents_error": ("latents", percent_text),
    "perceptual": ("what images show (perceptual distance)", _number),
    "lpips_alex": ("what images show (LPIPS)", _number),
    "colour_error": ("colours", percent_text),
    "brightness_error": ("brightness", percent_text),
    "contrast_error": ("contrast", percent_text),
    "detail_error": ("fine detail", percent_text),
}
"""What a distance between an image and the baseline's image of the same prompt is about, and how it is written."""


def _slower(factor: float) -> str:
    return (
        f"is {percent_text(1 / factor - 1)} slower"
        if factor < 1
        else f"is {percent_text(factor - 1)} faster"
    )


def _gains_less(factor: float) -> str:
    if factor < 1:
        return f"gains {percent_text(1 / factor - 1)} less over its own baseline"
    return f"gains {percent_text(factor - 1)} more over its own baseline"


def _larger(factor: float) -> str:
    way = "more" if factor >= 1 else "less"
    return f"takes {percent_text(factor - 1)} {way} memory"


def _longer(factor: float) -> str:
    way = "longer" if factor >= 1 else "less long"
    return f"has slowest calls that take {percent_text(factor - 1)} {way}"


_RATIOS: Mapping[str, tuple[Callable[[float], str], Text]] = {
    "speedup": (_slower, lambda limit: percent_text(1 / limit - 1)),
    "memory_ratio": (_larger, lambda limit: percent_text(limit - 1)),
    "tail_ratio": (_longer, lambda limit: percent_text(limit - 1)),
    "first_image_s": (
        lambda seconds: f"takes {seconds:.3g} s to the first image",
        lambda limit: f"{limit:.3g} s",
    ),
}

UNDISTURBED = "undisturbed"
"""The rule that other programs broke; every ruling on a time has the same doubt."""

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
    "reference": "There is nothing sound to compare it with",
    "variant": "Only one of the two results has it",
    "rules": "The gate has no rules for it",
    "looks": "It was judged before it was extended",
    "fresh prompts": "The gain may hold for repeated prompts alone",
    UNDISTURBED: "Other programs disturbed the timing",
}
"""What a check of the measurement itself found, by the name of its ruling."""

_PAYOFFS = {
    "harm": "It makes worse what it is meant to improve",
    "no benefit": "It gains nothing that counts",
    "it pays": "It gains what it is meant to gain",
}


def family(metric: str) -> str:
    """Returns a metric's name without its shape and its features: `perceptual` of `perceptual_emojiclip`."""
    name = metric.partition("/")[0]
    fitting = []
    for known in [*PROPERTIES, *_DISTANCES, *_RATIOS]:
        if name == known or name.startswith(f"{known}_"):
            fitting.append(known)
    return max(fitting, key=len, default=name)


def sentence(ruling: Ruling, worst: str = "", drift: bool = False) -> str:
    """Returns what a ruling says in one sentence, without a full stop.

    Args:
        ruling: of any rule, with any verdict.
        worst: the prompt whose image is the worst by the ruling's metric; "" if it is not known.
        drift: whether the variant was compared with itself in an earlier result.
    """
    if ruling.doubt:
        return f"{subject(ruling)} cannot be told: {ruling.doubt}"
    if ruling.verdict is Verdict.NOT_COMPARABLE:
        return _unjudged(ruling)
    if ruling.rule == "must pay":
        return _payoff_sentence(ruling)
    if ruling.rule in CHECKS:
        return f"{CHECKS[ruling.rule]}: {ruling.reason}"
    text = _of_figures(ruling, drift)
    if worst and ruling.verdict is Verdict.FAIL:
        text += f", most of all for “{worst}”"
    return text


def _payoff_sentence(ruling: Ruling) -> str:
    claims = _claims_in_words(ruling.reason.removeprefix(f"{ruling.payoff}: "))
    if ruling.payoff is None:
        return f"Not enough runs to tell whether it gains anything: {claims}"
    return f"{_PAYOFFS[ruling.payoff]}: {claims}"


_CLAIM = re.compile(
    r"(?P<ratio>speedup|memory_ratio)(?P<shape>/\S+)? [\d.e+-]+× \[(?P<low>[\d.e+-]+), (?P<high>[\d.e+-]+)\] "
    r"\(one-sided [\d.]+ % bounds\) (?:straddles|excludes) a gain of (?P<gain>[\d.]+ %)"
)


def _claims_in_words(reason: str) -> str:
    """Returns what was found of each claim of a gain, without the names of ratios and of statistics."""

    def worded(claim: re.Match[str]) -> str:
        shape = f" at {claim['shape'][1:]}" if claim["shape"] else ""
        bounds = f"{claim['low']}× to {claim['high']}×"
        if claim["ratio"] == "speedup":
            change = f"its speed is {bounds}{shape}, and a gain"
        else:
            change = f"it takes {bounds} the memory{shape}, and a saving"
        return f"{change} counts from {claim['gain']} on"

    return _CLAIM.sub(worded, reason)


def _of_figures(ruling: Ruling, drift: bool) -> str:
    """Returns the sentence of a rule that compares a figure with a limit."""
    if ruling.estimate is None or ruling.margin is None:
        return f"{subject(ruling)}: {ruling.reason}"
    if ruling.rule == "exact":
        return f"Images must be identical to {_others(drift)}, and {_counted(ruling)} differ"
    change, allowed = _change_and_limit(
        ruling,
        ruling.estimate,
        ruling.margin,
        drift,
    )
    if ruling.verdict is not Verdict.INCONCLUSIVE:
        return f"{change} ({allowed} allowed)"
    lacking = "runs" if family(ruling.metric) in _RATIOS else "prompts"
    text = f"Not enough {lacking} to tell: {lower(change)}, give or take, and {allowed} is allowed"
    _, separator, needed = ruling.reason.rpartition("; ")
    return f"{text}: {needed}" if separator else text


def _counted(ruling: Ruling) -> str:
    """Returns how many prompts a ruling has found to be wrong, as its reason says it: `3 of 96 prompts`."""
    counted = re.match(r"\d+ of \d+ prompts", ruling.reason)
    return counted[0] if counted else "some prompts"


def _others(drift: bool) -> str:
    """Returns what images are compared with."""
    return "those of the earlier result" if drift else "the baseline's"


def _change_and_limit(
    ruling: Ruling,
    estimate: float,
    limit: float,
    drift: bool,
) -> tuple[str, str]:
    """Returns what a ruling says of its estimate, as the beginning of a sentence, and how much of it is allowed."""
    name = family(ruling.metric)
    if name in _RATIOS:
        change_text, limit_text = _RATIOS[name]
        if drift and name == "speedup":
            change_text = _gains_less
        text = f"It {change_text(estimate)}{_at_shape(ruling)}"
        return text, limit_text(limit)
    if ruling.rule == "rarely":
        return _rarely_text(ruling), f"{percent_text(limit)} of prompts"
    if name == "mse":
        pixels = "Pixels"
        if ruling.rule == "every":
            pixels = f"Pixels of {_counted(ruling)}"
        alike = f"alike to {_decibels(estimate)} only"
        return (
            f"{pixels} are too far off, {alike}",
            f"no less than {_decibels(limit)}",
        )
    if name in PROPERTIES:
        if ruling.rule in ("at_least", "at_most", "within"):
            return (
                f"Images have {_ABSOLUTE[name]} of {estimate:.4g}",
                f"{limit:.4g}",
            )
        image_property = PROPERTIES[name]
        change = image_property.change(estimate)
        text = f"Images {change} than {_others(drift)}"
        return text, image_property.text(limit)
    about, text_of = _distance(name)
    change = f"differ from {_others(drift)} in {about}"
    if ruling.rule == "every":
        text = f"Images of {_counted(ruling)} {change} by up to {text_of(estimate)}"
    else:
        text = f"Images {change} by {text_of(estimate)}"
    return text, text_of(limit)


def _rarely_text(ruling: Ruling) -> str:
    """Returns for how many prompts images differ by more than a limit."""
    about, text_of = _distance(family(ruling.metric))
    text = f"{_counted(ruling)} differ in {about}"
    exceeded = re.search(r"exceed ([\d.e+-]+)", ruling.reason)
    if exceeded is None:
        return text
    return f"{text} by more than {text_of(float(exceeded[1]))}"


def _distance(name: str) -> tuple[str, Text]:
    return _DISTANCES.get(name, (name, _number))


def _at_shape(ruling: Ruling) -> str:
    shape = ruling.metric.partition("/")[2]
    return f" at {shape}" if shape else ""


def lower(text: str) -> str:
    """Returns a sentence as it continues another one."""
    return text[:1].lower() + text[1:]


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
    if name in _DISTANCES:
        return f"Whether images differ in {_DISTANCES[name][0]}"
    if ruling.metric:
        return f"Whether images differ ({ruling.metric})"
    return CHECKS.get(ruling.rule, ruling.rule)


def _unjudged(ruling: Ruling) -> str:
    if ruling.rule in CHECKS:
        return f"{CHECKS[ruling.rule]}: {ruling.reason}"
    return f"{subject(ruling)} was not judged: {ruling.reason}"
