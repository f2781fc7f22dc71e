"""Counts how often a study was judged as it grew, because each look is another chance to pass by luck.

`gate.looks` fixes the number of looks before the first one, and each spends an equal share of the error rate α
(Bonferroni). So the probability that any look errs is at most α, however much data two looks share. Judging the same
data again is the same look. A look beyond the fixed number cannot pass.
"""

import hashlib
import json

from sdopt.record.comparisons import Comparison
from sdopt.record.records import StudyResult, now
from sdopt.record.verdicts import Look, Ruling, Verdict
from sdopt.schema import Gate
from sdopt.statistics.ratios import paired


def look_at(result: StudyResult, comparison: Comparison, gate: Gate) -> Look:
    """Returns the look that judging a comparison now counts as, without its verdict."""
    candidate, reference = result.variant(comparison.candidate), result.variant(comparison.reference)
    pairs = [pair for found in paired(candidate, reference).values() for pair in found]
    times = [[(m.replicate, m.session, m.shapes[0].latency_s) for m in pair] for pair in pairs]
    images = [sorted((i.prompt_index, i.image_index) for i in side.images) for side in (candidate, reference)]
    data = hashlib.sha256(json.dumps([times, images]).encode()).hexdigest()[:16]
    before = [look for look in result.looks if (look.candidate, look.reference) == (candidate.name, reference.name)]
    seen = list(dict.fromkeys([*(look.data for look in before), data]))
    allowed = before[0].allowed if before else gate.looks
    number = seen.index(data) + 1
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
        rounds=sum(min(len(m.shapes[0].deciding_s) for m in pair) for pair in pairs),
        prompts=min(len({prompt for prompt, _ in side}) for side in images),
        verdict=Verdict.INCONCLUSIVE,
    )


def record_look(result: StudyResult, look: Look, verdict: Verdict) -> None:
    """Records a look with its verdict, unless this gate has judged these data before or there are no data."""
    look.verdict = verdict
    known = any(
        (other.candidate, other.reference, other.gate, other.data)
        == (look.candidate, look.reference, look.gate, look.data)
        for other in result.looks
    )
    if not known and (look.processes or look.prompts):
        result.looks.append(look)


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
    return [f"This study was judged {last.number} of {last.allowed} times that were planned (gate.looks); {rest}."]
