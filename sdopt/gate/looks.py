"""Counts how often a study was judged as it grew, because each look is another chance to pass by luck.

The first look has the whole error rate α, so a later one, at a study that was extended, cannot pass: a new study can.
Judging the same data again is the same look.
"""

import json
from collections.abc import Sequence

from sdopt.record.comparisons import Comparison
from sdopt.record.files import short_digest
from sdopt.record.records import StudyResult, VariantResult, now
from sdopt.record.verdicts import Look, Ruling, Verdict
from sdopt.schema import Gate
from sdopt.statistics.pairs import Pair, flattened, paired


def look_at(result: StudyResult, comparison: Comparison, gate: Gate) -> Look:
    """Returns the look that judging a comparison now counts as, without its verdict."""
    candidate, reference = result.sides(comparison)
    pairs = flattened(paired(candidate, reference))
    images = [_images(candidate), _images(reference)]
    times = list(map(_times, pairs))
    data = short_digest(json.dumps([times, images]).encode())
    names = (candidate.name, reference.name)
    seen: dict[str, None] = {}
    for look in result.looks:
        if (look.candidate, look.reference) == names:
            seen[look.data] = None
    seen[data] = None
    return Look(
        candidate=candidate.name,
        reference=reference.name,
        gate=gate.name,
        judged=now(),
        data=data,
        number=list(seen).index(data) + 1,
        processes=len(pairs),
        rounds=sum(map(_rounds, pairs)),
        prompts=min(map(_prompts, images)),
        verdict=Verdict.INCONCLUSIVE,
    )


def _times(pair: Pair) -> list[tuple[int, int, list[float]]]:
    times = []
    for measurement in pair:
        samples = measurement.main
        times.append((measurement.replicate, measurement.session, samples.latency_s))
    return times


def _rounds(pair: Pair) -> int:
    calls = [measurement.main.deciding_s for measurement in pair]
    return min(map(len, calls))


def _images(variant: VariantResult) -> list[tuple[int, int]]:
    """Returns which images there are, by prompt and number."""
    return sorted((image.prompt_index, image.image_index) for image in variant.images)


def _prompts(images: Sequence[tuple[int, int]]) -> int:
    return len({prompt for prompt, _ in images})


def record_look(result: StudyResult, look: Look, verdict: Verdict) -> None:
    """Records a look with its verdict, unless this gate has judged these data before or there are no data."""
    look.verdict = verdict
    is_known = _identity(look) in map(_identity, result.looks)
    if not is_known and (look.processes or look.prompts):
        result.looks.append(look)


def _identity(look: Look) -> tuple[str, ...]:
    return look.candidate, look.reference, look.gate, look.data


def ruling_of(look: Look) -> list[Ruling]:
    """Returns the ruling on a look; none if it is the first one."""
    if look.number == 1:
        return []
    reason = (
        f"it was judged before it was extended, and this is look {look.number}: more data cannot make this study pass, "
        "a new study can"
    )
    return [Ruling("looks", "", Verdict.INCONCLUSIVE, reason)]
