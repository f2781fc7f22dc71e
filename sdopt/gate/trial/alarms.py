"""The gate on trial: does it catch what is broken, and does it leave alone what is not?

Sabotaged options are ordinary variants of a study, judged by the gate as any other. False alarms are counted on pairs
that differ by nothing that matters: images of the same prompts from the same noise, computed in another order, and from
other noise; times of processes that are the same. Each trial draws its own prompts and processes from that pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sdopt.analysis.measures import MEASURES
from sdopt.gate.calibration import Calibration
from sdopt.gate.judge import RuleContext, worst
from sdopt.optimizations.base import Contract
from sdopt.quality.evaluation import Evaluator, Settings
from sdopt.quality.inputs import Pictures
from sdopt.quality.metrics import family_of
from sdopt.results.records import (
    ImageRecord,
    Interval,
    Judgement,
    Measurement,
    Ruling,
    Status,
    StudyResult,
    VariantResult,
    Verdict,
)
from sdopt.schema import Gate, Model, Quality

TRIALS = 59
"""With none of 59 false, their rate is below 5 % at 95 % confidence (0.95⁵⁹ < 0.05)."""


@dataclass(frozen=True)
class Caught:
    """What the gate made of one sabotage.

    Attributes:
        name: of the variant.
        contract: what it declared.
        verdict: of the gate.
        by: names of the rules that did not let it pass.
        expected: those of which one should be among them; empty where any is as good.
        effect: the estimate of the first of them over its margin; None where it has none.
    """

    name: str
    contract: str
    verdict: Verdict
    by: tuple[str, ...]
    expected: tuple[str, ...]
    effect: float | None

    @property
    def fits(self) -> bool:
        """Whether it did not pass, for a reason that fits."""
        return self.verdict is not Verdict.PASS and (not self.expected or bool({*self.by} & {*self.expected}))


@dataclass(frozen=True)
class Alarms:
    """Verdicts of trials in which nothing was wrong."""

    kind: str
    verdicts: tuple[Verdict, ...]
    reasons: tuple[str, ...]
    """Of those that failed."""

    def count(self, verdict: Verdict) -> int:
        """Returns how many trials ended with a verdict."""
        return self.verdicts.count(verdict)


def sabotages(result: StudyResult) -> list[Caught]:
    """What the gate said of each sabotaged variant of a judged study; what was expected is a key of its option."""
    return [_caught(result.variant(judgement.candidate), judgement) for judgement in result.judgements]


def _caught(variant: VariantResult, judgement: Judgement) -> Caught:
    expected = str(variant.config.options.get("trial", {}).get("caught_by", ""))
    # An undecided rule is no catch by itself; where a rule fails, that is the reason.
    decisive = [ruling for ruling in judgement.rulings if ruling.verdict is judgement.verdict]
    fitting = [ruling for ruling in decisive if _rule(ruling) in expected.split("|")] or decisive
    return Caught(
        judgement.candidate,
        judgement.contract,
        judgement.verdict,
        tuple(_rule(ruling) for ruling in decisive),
        tuple(filter(None, expected.split("|"))),
        _effect(fitting[0]) if fitting and judgement.verdict is not Verdict.PASS else None,
    )


def _rule(ruling: Ruling) -> str:
    """A rule by its metric's family, or by its own name."""
    if not ruling.metric:
        return ruling.rule
    name = ruling.metric.partition("/")[0]
    return name if name in MEASURES else family_of(name).name


def _effect(ruling: Ruling) -> float | None:
    if ruling.estimate is None or not ruling.margin:
        return None
    return abs(ruling.estimate / ruling.margin)


def false_alarms(
    result: StudyResult, folder: Path, gate: Gate, calibration: Calibration | None, trials: int = TRIALS, seed: int = 0
) -> list[Alarms]:
    """Judges pairs that are the same but for chance.

    Args:
        result: a study whose baseline and control were drawn once more for both floors.
        folder: where its images are.
        gate: the rules.
        calibration: for margins.
        trials: of each kind.
        seed: of what each trial draws.

    Returns:
        `numerical`: same noise, other order of computation, as `equivalent`. `sampling`: other noise, by the rules of
        `lossy` that compare a variant's own scores: pairs of other noise are other pictures.
    """
    settings = Settings.of(Quality(), Model(), "cpu")
    evaluator = Evaluator(settings)
    baseline = result.variant(result.baseline)
    processes = [m for v in result.variants if v.role == "control" or v is baseline for m in v.measurements]
    own = [rule for rule in gate.rules.get(Contract.LOSSY, []) if rule.metric in MEASURES or _unpaired(rule.metric)]
    judged = {
        "numerical": (Contract.EQUIVALENT, gate),
        "sampling": (Contract.LOSSY, replace(gate, rules={Contract.LOSSY: own})),
    }
    found: list[Alarms] = []
    for kind, (contract, rules) in judged.items():
        random = np.random.default_rng([seed, len(found)])
        verdicts, reasons = [], []
        for _ in range(trials):
            sides = _same_twice(result, folder, kind, processes, evaluator, calibration, random)
            rulings = sides.rulings(replace(rules, must_pay=False), contract)
            verdicts.append(worst([ruling.verdict for ruling in rulings]))
            reasons += [f"{_rule(r)}: {r.reason}" for r in rulings if r.verdict is Verdict.FAIL]
        found.append(Alarms(kind, tuple(verdicts), tuple(reasons)))
    return found


def _unpaired(metric: str) -> bool:
    return not family_of(metric).needs_pair


def _same_twice(
    result: StudyResult,
    folder: Path,
    kind: str,
    processes: Sequence[Measurement],
    evaluator: Evaluator,
    calibration: Calibration | None,
    random: np.random.Generator,
) -> RuleContext:
    """Two variants that differ by chance: images of randomly chosen prompts, times of equal processes."""
    baseline, again = result.variant(result.baseline), result.redrawn[kind]
    prompts = sorted({record.prompt_index for record in again})
    kept = set(random.choice(prompts, size=max(2, 2 * len(prompts) // 3), replace=False).tolist())
    first = [record for record in baseline.images if record.prompt_index in kept]
    second = [record for record in again if record.prompt_index in kept]
    # Of other noise, but the same draw as far as the comparison goes.
    second = [replace(there, seed=here.seed) for here, there in zip(first, second, strict=True)]
    # Labels are exchanged within a replicate, whose processes were measured in turn: a study compares no others.
    by_replicate: dict[int, list[Measurement]] = {}
    for process in processes:
        by_replicate.setdefault(process.replicate, []).append(process)
    whole = [found for found in by_replicate.values() if len(found) > 1]
    pairs = [[found[i] for i in random.permutation(len(found))[:2]] for found in whole]
    sides = [
        _variant(baseline, records, [replace(pair[side], session=0) for pair in pairs], random)
        for side, records in enumerate((second, first))
    ]
    pictures = [Pictures(folder, side.images) for side in sides]
    reference = Pictures(folder, baseline.images)
    for side, own in zip(sides, pictures, strict=True):
        side.quality = evaluator.of_variant(own, reference)
    candidate, other = sides

    def ratio(metric: str, confidence: float) -> Interval | None:
        return MEASURES[metric].ratio(candidate, other, confidence)

    return RuleContext(candidate, other, evaluator.of_pair(*pictures), calibration, ratio, lambda _metric: result.floor)


def _variant(
    like: VariantResult, images: list[ImageRecord], measurements: list[Measurement], random: np.random.Generator
) -> VariantResult:
    """A variant like another, of other images, with the rounds of its processes resampled."""
    resampled: list[Any] = [
        replace(m, latency_s=random.choice(m.deciding_s, size=len(m.deciding_s)).tolist(), left_out=[])
        for m in measurements
    ]
    return replace(like, status=Status.OK, images=images, measurements=resampled, trips=[], quality={})
