"""Says in one sentence what a ruling found: what is different, which way, by how much, and how much is allowed.

A sentence is made of what the record holds of a ruling (its test, metric, verdict, estimate, bounds and limit), so that
results of earlier versions are told in the same words. The figures of the statistics are `Ruling.reason`.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sdopt.record.comparisons import Comparison
from sdopt.record.records import StudyResult
from sdopt.record.scores import Score
from sdopt.record.verdicts import Judgement, Payoff, Ruling, Verdict

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


_PROPERTIES = {
    "brightness": _Property("are {} darker", "are {} brighter", percent_text, turned=True),
    "contrast": _Property("have {} less contrast", "have {} more contrast", percent_text, turned=True),
    "fine_detail": _Property("have {} less fine detail", "have {} more fine detail", percent_text),
    "ssim": _Property("are {} less alike", "are {} more alike", _number),
    "psnr_db": _Property("are {} dB less alike", "are {} dB more alike", _number),
    "clip_score": _Property("fit their prompts less (CLIP score {} lower)", "fit more (CLIP score {} higher)", _number),
    "score": _Property("score {} lower", "score {} higher", _number),
    "penalty": _Property("have a penalty {} higher", "have a penalty {} lower", _number),
    "fid": _Property("are {} further from the reference set", "are {} closer to the reference set", _number),
    "kid": _Property("are {} further from the reference set", "are {} closer to the reference set", _number),
    "cmmd": _Property("are {} further from the reference set", "are {} closer to the reference set", _number),
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
    return f"is {percent_text(1 / factor - 1)} slower" if factor < 1 else f"is {percent_text(factor - 1)} faster"


def _gains_less(factor: float) -> str:
    way = "less" if factor < 1 else "more"
    return f"gains {percent_text(1 / factor - 1 if factor < 1 else factor - 1)} {way} over its own baseline"


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
    "first_image_s": (lambda seconds: f"takes {seconds:.3g} s to the first image", lambda limit: f"{limit:.3g} s"),
}

UNDISTURBED = "undisturbed"
"""The rule that other programs broke; every ruling on a time has the same doubt."""

_CHECKS = {
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
    "looks": "This study was judged more often than planned",
    "fresh prompts": "The gain may hold for repeated prompts alone",
    UNDISTURBED: "Other programs disturbed the timing",
}
"""What a check of the measurement itself found, by the name of its ruling."""

_PAYOFFS = {
    Payoff.HARM: "It makes worse what it is meant to improve",
    Payoff.NO_BENEFIT: "It gains nothing that counts",
    Payoff.PAYS: "It gains what it is meant to gain",
}


def family(metric: str) -> str:
    """Returns a metric's name without its shape and its features: `perceptual` of `perceptual_emojiclip`."""
    name = metric.partition("/")[0]
    known = [*_PROPERTIES, *_DISTANCES, *_RATIOS]
    fitting = [each for each in known if name == each or name.startswith(f"{each}_")]
    return max(fitting, key=len, default=name)


def sentence(ruling: Ruling, worst: str = "", drift: bool = False) -> str:
    """Returns what a ruling says in one sentence, without a full stop.

    Args:
        ruling: of any rule, with any verdict.
        worst: the prompt whose image is the worst by the ruling's metric; "" if it is not known.
        drift: whether the variant was compared with itself in an earlier result.
    """
    if ruling.doubt:
        return f"{_subject(ruling)} cannot be told: {ruling.doubt}"
    if ruling.verdict is Verdict.NOT_COMPARABLE:
        return _unjudged(ruling)
    if ruling.rule == "must pay":
        known = _PAYOFFS.get(ruling.payoff) if ruling.payoff else "Not enough runs to tell whether it gains anything"
        return f"{known}: {_claims_in_words(ruling.reason.removeprefix(f'{ruling.payoff}: '))}"
    if ruling.rule in _CHECKS:
        return f"{_CHECKS[ruling.rule]}: {ruling.reason}"
    said = _of_figures(ruling, drift)
    return f"{said}, most of all for “{worst}”" if worst and ruling.verdict is Verdict.FAIL else said


_CLAIM = re.compile(
    r"(?P<ratio>speedup|memory_ratio)(?P<shape>/\S+)? [\d.e+-]+× \[(?P<low>[\d.e+-]+), (?P<high>[\d.e+-]+)\] "
    r"\(one-sided [\d.]+ % bounds\) (?:straddles|excludes) a gain of (?P<gain>[\d.]+ %)"
)


def _claims_in_words(reason: str) -> str:
    """Returns what was found of each claim of a gain, without the names of ratios and of statistics."""

    def worded(found: re.Match[str]) -> str:
        at = f" at {found['shape'][1:]}" if found["shape"] else ""
        if found["ratio"] == "speedup":
            return f"its speed is {found['low']}× to {found['high']}×{at}, and a gain counts from {found['gain']} on"
        memory = f"it takes {found['low']}× to {found['high']}× the memory{at}"
        return f"{memory}, and a saving counts from {found['gain']} on"

    return _CLAIM.sub(worded, reason)


def _of_figures(ruling: Ruling, drift: bool) -> str:
    """Returns the sentence of a rule that compares a figure with a limit."""
    if ruling.estimate is None or ruling.margin is None:
        return f"{_subject(ruling)}: {ruling.reason}"
    if ruling.rule == "exact":
        return f"Images must be identical to {_others(drift)}, and {_counted(ruling)} differ"
    found, allowed = _found_and_allowed(ruling, ruling.estimate, ruling.margin, drift)
    if ruling.verdict is not Verdict.INCONCLUSIVE:
        return f"{found} ({allowed} allowed)"
    settle = ruling.reason.rpartition("; ")[2]
    more = f": {settle}" if settle != ruling.reason else ""
    lacking = "runs" if family(ruling.metric) in _RATIOS else "prompts"
    return f"Not enough {lacking} to tell: {_lower(found)}, give or take, and {allowed} is allowed{more}"


def _counted(ruling: Ruling) -> str:
    """Returns how many prompts a ruling has found to be wrong, as its reason says it: `3 of 96 prompts`."""
    counted = re.match(r"\d+ of \d+ prompts", ruling.reason)
    return counted[0] if counted else "some prompts"


def _others(drift: bool) -> str:
    return "those of the earlier result" if drift else "the baseline's"


def _found_and_allowed(ruling: Ruling, estimate: float, limit: float, drift: bool) -> tuple[str, str]:
    """Returns what a ruling found, as the beginning of a sentence, and how much of it is allowed."""
    name = family(ruling.metric)
    about, text = _DISTANCES.get(name, (name, _number))
    if name in _RATIOS:
        change, limit_text = _RATIOS[name]
        if drift and name == "speedup":
            change = _gains_less
        return f"It {change(estimate)}{_at_shape(ruling)}", limit_text(limit)
    if ruling.rule == "rarely":
        exceeded = re.search(r"exceed ([\d.e+-]+)", ruling.reason)
        least = f" by more than {text(float(exceeded[1]))}" if exceeded else ""
        return f"{_counted(ruling)} differ in {about}{least}", f"{percent_text(limit)} of prompts"
    if name == "mse":
        apart = f"Pixels of {_counted(ruling)} are too far off" if ruling.rule == "every" else "Pixels are too far off"
        return f"{apart}, alike to {_decibels(estimate)} only", f"no less than {_decibels(limit)}"
    if name in _PROPERTIES:
        known = _PROPERTIES[name]
        if ruling.rule in ("at_least", "at_most", "within"):
            return f"Images have {_ABSOLUTE[name]} of {estimate:.4g}", f"{limit:.4g}"
        return f"Images {known.change(estimate)} than {_others(drift)}", known.text(limit)
    which, most = ("Images", "") if ruling.rule != "every" else (f"Images of {_counted(ruling)}", "up to ")
    return f"{which} differ from {_others(drift)} in {about} by {most}{text(estimate)}", text(limit)


def _at_shape(ruling: Ruling) -> str:
    shape = ruling.metric.partition("/")[2]
    return f" at {shape}" if shape else ""


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _subject(ruling: Ruling) -> str:
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
    return f"Whether images differ ({ruling.metric})" if ruling.metric else _CHECKS.get(ruling.rule, ruling.rule)


def _unjudged(ruling: Ruling) -> str:
    if ruling.rule in _CHECKS:
        return f"{_CHECKS[ruling.rule]}: {ruling.reason}"
    return f"{_subject(ruling)} was not judged: {ruling.reason}"


def reasons_of(judgement: Judgement, result: StudyResult | None = None) -> list[str]:
    """Returns the sentences of the rulings that decided a judgement, each once; those on images before the others.

    A reason that several rulings share is said once, with what they are about. Of several rules on one property, such
    as on its mean and on each prompt, the first one speaks for all.
    """
    decisive = [ruling for ruling in judgement.rulings if ruling.verdict is judgement.verdict]
    shared: dict[str, list[Ruling]] = {}
    for ruling in decisive:
        alone = ruling.verdict is Verdict.NOT_COMPARABLE or ruling.rule == UNDISTURBED
        cause = ruling.doubt or (ruling.reason if alone else sentence(ruling, drift=judgement.is_drift))
        shared.setdefault(cause, []).append(ruling)
    found = []
    told: set[str] = set()
    for cause, rulings in shared.items():
        subjects = {_property_of(ruling) for ruling in rulings if ruling.metric}
        if subjects and subjects <= told:
            continue
        told |= subjects
        if any(ruling.rule == UNDISTURBED for ruling in rulings):
            found.append(f"{_CHECKS[UNDISTURBED]}: {cause}")
        elif len(rulings) > 1 and all(ruling.doubt or ruling.verdict is Verdict.NOT_COMPARABLE for ruling in rulings):
            about = list(dict.fromkeys(_lower(_subject(ruling)) for ruling in rulings))
            ending = "cannot be told" if rulings[0].doubt else "was not judged"
            found.append(f"{_joined(about)} {ending}: {cause}")
        else:
            worst = worst_prompt(rulings[0], judgement, result)
            found.append(sentence(rulings[0], worst, judgement.is_drift))
    return list(dict.fromkeys(found))


_SAME_PROPERTY = {"detail_error": "fine_detail", "brightness_error": "brightness", "contrast_error": "contrast"}
"""Distances of single images by a property that a set of images has, too."""


def _property_of(ruling: Ruling) -> str:
    """Returns what a ruling is about, and at which shape; several rules may be about the same."""
    name = family(ruling.metric)
    return f"{_SAME_PROPERTY.get(name, name)}/{ruling.metric.partition('/')[2]}"


def _joined(subjects: Sequence[str]) -> str:
    text = ", ".join(subjects)
    return text[:1].upper() + text[1:]


def worst_prompt(ruling: Ruling, judgement: Judgement, result: StudyResult | None) -> str:
    """Returns the prompt whose image is the worst by a ruling's metric; "" if that is not recorded."""
    if result is None or ruling.verdict is not Verdict.FAIL:
        return ""
    values = _by_prompt(ruling, judgement, result)
    known = [(value, number) for number, value in enumerate(values) if value is not None]
    if not known:
        return ""
    _, worst = max(known)
    prompts = {image.prompt_index: image.prompt for image in result.variant(judgement.candidate).images}
    return prompts.get(worst, "")


def _by_prompt(ruling: Ruling, judgement: Judgement, result: StudyResult) -> Sequence[float | None]:
    """Returns how bad each prompt's image is by a ruling's metric; the largest is the worst."""
    edge: Comparison | None = next(
        (
            each
            for each in result.comparisons
            if each.candidate == judgement.candidate and each.reference == judgement.reference
        ),
        None,
    )
    paired: Mapping[str, Score] = edge.quality if edge else {}
    if ruling.metric in paired:
        score = paired[ruling.metric]
        return score.worst or score.per_prompt
    names = {row.name for row in result.variants}
    if family(ruling.metric) not in _PROPERTIES or not {judgement.candidate, judgement.reference} <= names:
        return ()
    mine, other = (
        result.variant(name).quality.get(ruling.metric) for name in (judgement.candidate, judgement.reference)
    )
    if mine is None or other is None or len(mine.per_prompt) != len(other.per_prompt):
        return ()
    # The way in which the whole set went is the way in which a single prompt is the worst.
    turned = -1.0 if _PROPERTIES[family(ruling.metric)].turned else 1.0
    sign = math.copysign(1.0, (ruling.estimate or 0.0) * turned)
    found: list[float | None] = []
    for one, two in zip(mine.per_prompt, other.per_prompt, strict=True):
        found.append(None if one is None or two is None else sign * (one - two))
    return found
