"""Counts how often a study was judged as it grew, because each look is another chance to pass by luck.

`gate.looks` fixes the number of looks before the first one, and each spends an equal share of the error rate α
(Bonferroni). So the probability that any look errs is at most α, however much data two looks share. Judging the same
data again is the same look. A look beyond the fixed number cannot pass.
"""

import hashlib
import json
from collections.abc import Sequence

from sdopt.record.comparisons import Comparison
from sdopt.record.records import StudyResult, VariantResult, now
from sdopt.record.verdicts import Look, Ruling, Verdict
from sdopt.schema import Gate
from sdopt.statistics.pairs import Pair, flattened, paired


def look_at(
    result: StudyResult,
    comparison: Comparison,
    gate: Gate,
) -> Look:
    """Returns the look that judging a comparison now counts as, without its verdict."""
    candidate = result.variant(comparison.candidate)
    reference = result.variant(comparison.reference)
    pairs = flattened(paired(candidate, reference))
    images = [_images(candidate), _images(reference)]
    data = _digest([list(map(_times, pairs)), images])
    before = []
    for look in result.looks:
        same_candidate = look.candidate == candidate.name
        if same_candidate and look.reference == reference.name:
            before.append(look)
    seen = list(dict.fromkeys([*(look.data for look in before), data]))
    number = seen.index(data) + 1
    allowed = before[0].allowed if before else gate.looks
    return Look(
        candidate=candidate.name,
        reference=reference.name,
        gate=gate.name,
        judged=now(),
        data=data,
        number=number,
        allowed=allowed,
        spent=min(1.0, number / allowed),
        processes=len(pairs),
        rounds=sum(map(_rounds, pairs)),
        prompts=min(map(_prompts, images)),
        verdict=Verdict.INCONCLUSIVE,
    )


def _times(pair: Pair) -> list[tuple[int, int, list[float]]]:
    return [(m.replicate, m.session, m.shapes[0].latency_s) for m in pair]


def _rounds(pair: Pair) -> int:
    return min(len(measurement.shapes[0].deciding_s) for measurement in pair)


def _images(variant: VariantResult) -> list[tuple[int, int]]:
    """Returns which images there are, by prompt and number."""
    return sorted((image.prompt_index, image.image_index) for image in variant.images)


def _prompts(images: Sequence[tuple[int, int]]) -> int:
    return len({prompt for prompt, _ in images})


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def record_look(
    result: StudyResult,
    look: Look,
    verdict: Verdict,
) -> None:
    """Records a look with its verdict, unless this gate has judged these data before or there are no data."""
    look.verdict = verdict
    is_known = _identity(look) in map(_identity, result.looks)
    if not is_known and (look.processes or look.prompts):
        result.looks.append(look)


def _identity(look: Look) -> tuple[str, ...]:
    return look.candidate, look.reference, look.gate, look.data


def ruling_of(look: Look) -> list[Ruling]:
    """Returns the ruling on a look; none if `gate.looks` allows a single one and this is it."""
    if look.number > look.allowed:
        reason = (
            f"look {look.number} of {look.allowed} allowed (gate.looks): the allowed chance of an error is used up, "
            "so more data cannot make this study pass; start a new study"
        )
        return [Ruling("looks", "", Verdict.INCONCLUSIVE, reason)]
    if look.allowed == 1:
        return []
    reason = f"look {look.number} of {look.allowed}: {look.spent:.0%} of the allowed chance of an error is used up"
    return [Ruling("looks", "", Verdict.PASS, reason)]


def spent_of(result: StudyResult) -> list[str]:
    """Returns what the looks at a study have spent, in a line for its report."""
    if not result.looks:
        return []
    last = max(result.looks, key=lambda look: (look.spent, look.number))
    if last.number >= last.allowed:
        rest = "extending this study cannot make it pass, a new study can"
    else:
        rest = f"{1 - last.spent:.0%} of the allowed chance of an error is left"
    return [
        f"This study was judged {last.number} of {last.allowed} times that were planned (gate.looks); {rest}."
    ]
