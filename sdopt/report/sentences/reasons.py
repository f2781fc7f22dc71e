"""Names the rulings that decided a judgement, each cause once, with the prompt whose image is the worst."""

import math
from collections.abc import Iterable, Sequence

from sdopt.record.records import StudyResult
from sdopt.record.verdicts import UNDISTURBED, Judgement, Ruling, Verdict
from sdopt.report.sentences.changes import PROPERTIES
from sdopt.report.sentences.rulings import (
    PROPERTY_OF,
    family,
    figure_of,
    lower,
    sentence,
    subject,
    upper,
)
from sdopt.statistics.bounds import differences
from sdopt.statistics.measures import is_of_images


def reasons_of(judgement: Judgement, result: StudyResult | None = None) -> list[str]:
    """Returns the sentences of the rulings that decided a judgement, each once; those on images before the others.

    Of failures of images, the one that exceeds what is allowed by the largest factor comes first. A reason that several
    rulings share is said once, with what they are about. Of several rules on one property, such as on its mean and on
    each prompt, the first one speaks for all.
    """
    decisive = []
    covered: set[str] = set()
    for cause, rulings in _by_cause(judgement).items():
        properties = _properties(rulings, judgement)
        if properties and properties <= covered:
            continue
        covered |= properties
        decisive.append((cause, rulings))
    if judgement.verdict is Verdict.FAIL:
        decisive.sort(key=lambda one: _place(one[1][0]))
    else:
        # Without an effect, nothing else is worth telling.
        decisive.sort(key=lambda one: one[1][0].rule != "engaged")
    reasons = [_reason(*one, judgement, result) for one in decisive]
    return list(dict.fromkeys(reasons))


def _place(failed: Ruling) -> tuple[int, float]:
    """Returns where a failure stands: after checks of the measurement, images by what they exceed, and then ratios."""
    if not is_of_images(failed.metric):
        return (2 if failed.metric or failed.rule == "must pay" else 0), 0.0
    if failed.estimate is None or not failed.margin:
        return 1, -math.inf
    return 1, -abs(failed.estimate / failed.margin)


def _properties(rulings: Sequence[Ruling], judgement: Judgement) -> set[str]:
    """Returns what rulings are about; whether an option pays is about what it claims."""
    properties: set[str] = set()
    for ruling in rulings:
        if ruling.rule == "must pay":
            properties.update(map(_property_of, judgement.claims))
        elif ruling.metric:
            properties.add(_property_of(ruling.metric))
    return properties


def _by_cause(judgement: Judgement) -> dict[str, list[Ruling]]:
    """Returns the decisive rulings by their cause, which several may share."""
    shared: dict[str, list[Ruling]] = {}
    for ruling in judgement.rulings:
        if ruling.verdict is not judgement.verdict:
            continue
        cause = _cause(ruling, judgement.is_drift)
        shared.setdefault(cause, []).append(ruling)
    return shared


def _cause(ruling: Ruling, drift: bool) -> str:
    if ruling.doubt:
        return ruling.doubt
    if ruling.verdict is Verdict.NOT_COMPARABLE or ruling.rule == UNDISTURBED:
        return ruling.reason
    return sentence(ruling, drift=drift)


def _reason(
    cause: str,
    rulings: Sequence[Ruling],
    judgement: Judgement,
    result: StudyResult | None,
) -> str:
    """Returns one sentence for rulings that share a cause."""
    first = rulings[0]
    if any(ruling.rule == UNDISTURBED for ruling in rulings):
        return upper(cause)
    if len(rulings) > 1 and all(map(_is_open, rulings)):
        subjects = dict.fromkeys(lower(subject(ruling)) for ruling in rulings)
        ending = "cannot be told" if first.doubt else "was not judged"
        return f"{_joined(subjects)} {ending}: {cause}"
    worst = worst_prompt(first, judgement, result)
    whole = 0.0 if result is None else _of_reference(first, judgement, result)
    return sentence(first, worst, judgement.is_drift, whole)


def _of_reference(ruling: Ruling, judgement: Judgement, result: StudyResult) -> float:
    """Returns how much the reference's images have of the property of a ruling; 0 if unknown.

    An earlier result is not at hand: there it follows from the candidate's amount, and how far that is from it.
    """
    name = family(ruling.metric)
    metric = PROPERTY_OF.get(name, name)
    amounts: dict[str, float] = {}
    for variant in result.variants:
        score = variant.quality.get(metric)
        if score is not None and score.estimate is not None:
            amounts[variant.name] = score.estimate
    if judgement.reference in amounts:
        return amounts[judgement.reference]
    change = PROPERTIES.get(metric)
    for other in judgement.rulings:
        is_change = other.metric == metric and figure_of(other) == "change"
        if is_change and change and judgement.candidate in amounts:
            turned = -1.0 if change.turned else 1.0
            return amounts[judgement.candidate] - turned * (other.estimate or 0.0)
    return 0.0


def _is_open(ruling: Ruling) -> bool:
    return bool(ruling.doubt) or ruling.verdict is Verdict.NOT_COMPARABLE


def _property_of(metric: str) -> str:
    """Returns what a ruling on a metric is about, and at which shape; several rules may be about the same."""
    name = family(metric)
    return f"{PROPERTY_OF.get(name, name)}/{metric.partition('/')[2]}"


def _joined(subjects: Iterable[str]) -> str:
    return upper(", ".join(subjects))


def worst_prompt(
    ruling: Ruling, judgement: Judgement, result: StudyResult | None
) -> str:
    """Returns the prompt whose image is the worst by a ruling's metric; "" if that is not recorded."""
    if result is None or ruling.verdict is not Verdict.FAIL:
        return ""
    values = _badness_by_prompt(ruling, judgement, result)
    known = [
        (value, number) for number, value in enumerate(values) if value is not None
    ]
    if not known:
        return ""
    _, worst = max(known)
    for image in reversed(result.variant(judgement.candidate).images):
        if image.prompt_index == worst:
            return image.called
    return ""


def _badness_by_prompt(
    ruling: Ruling,
    judgement: Judgement,
    result: StudyResult,
) -> Sequence[float | None]:
    """Returns how bad each prompt's image is by a ruling's metric; the largest is the worst."""
    for edge in result.comparisons:
        if (
            edge.candidate == judgement.candidate
            and edge.reference == judgement.reference
        ):
            distance = edge.quality.get(ruling.metric)
            if distance is not None and ruling.rule == "at_least":  # as of SSIM
                return [value and -value for value in distance.per_prompt]
            if distance is not None:
                return distance.worst or distance.per_prompt
            break
    image_property = PROPERTIES.get(family(ruling.metric))
    scores = {
        variant.name: variant.quality.get(ruling.metric) for variant in result.variants
    }
    candidate = scores.get(judgement.candidate)
    reference = scores.get(judgement.reference)
    if image_property is None or candidate is None or reference is None:
        return ()
    if len(candidate.per_prompt) != len(reference.per_prompt):
        return ()
    # The way in which the whole set went is the way in which a single prompt is the worst.
    turned = -1.0 if image_property.turned else 1.0
    sign = math.copysign(1.0, (ruling.estimate or 0.0) * turned)
    return differences(candidate.per_prompt, reference.per_prompt, sign)
