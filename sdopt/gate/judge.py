"""The gate: rules fixed beforehand, applied to what a study measured. It decides; nothing here measures.

Every rule fails closed: what is missing, not finite or not comparable never passes. A rule that compares an estimate
with a limit passes where the whole one-sided interval lies on the right side, fails where it lies on the wrong one, and
is inconclusive in between (non-inferiority as in Piaggio et al. 2012, with prompts as the unit that is resampled).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sdopt.analysis.bounds import Bounds, share_bounds, subtract
from sdopt.analysis.claims import p_value
from sdopt.analysis.measures import MEASURES
from sdopt.analysis.timing import exceeds
from sdopt.gate.calibration import Calibration
from sdopt.gate.rulings import above, below, bounds_of, find_scores, percent, problem_of, two_sided, unjudged
from sdopt.optimizations.base import Contract
from sdopt.quality.metrics import family_of
from sdopt.results.records import (
    Comparison,
    Interval,
    Judgement,
    Promise,
    Ruling,
    Score,
    Spread,
    Status,
    StudyResult,
    VariantResult,
    Verdict,
)
from sdopt.schema import WORK, Gate, Rule

_CHOICES = ("scheduler.", "workload.steps", "hardware.threads", "hardware.price_per_hour")
"""Settings that a candidate may choose: where they differ, that is what is judged."""


def judge(result: StudyResult, gate: Gate, calibration: Calibration | None) -> None:
    """Fills in `result.judgements`: one for each comparison whose candidate was not skipped, the A/A control aside."""
    result.gate = gate.name
    result.judgements = [
        _judge(result, comparison, gate, calibration)
        for comparison in result.comparisons
        if result.variant(comparison.candidate).role != "control"
        and result.variant(comparison.candidate).status is not Status.SKIPPED
    ]


def exit_code(judgements: Sequence[Judgement], report_only: bool = False) -> int:
    """0 where all passed, 1 for a regression, 3 where something could not be judged."""
    if report_only:
        return 0
    verdicts = {judgement.verdict for judgement in judgements}
    if Verdict.FAIL in verdicts:
        return 1
    return 3 if verdicts - {Verdict.PASS} else 0


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The one that counts; of nothing, that nothing could be compared."""
    order = list(Verdict)
    return max(verdicts, key=order.index, default=Verdict.NOT_COMPARABLE)


def _judge(result: StudyResult, comparison: Comparison, gate: Gate, calibration: Calibration | None) -> Judgement:
    candidate, reference = result.variant(comparison.candidate), result.variant(comparison.reference)

    def ratio(metric: str, confidence: float) -> Interval | None:
        return MEASURES[metric].ratio(candidate, reference, confidence)

    def floor(metric: str) -> float | None:
        return MEASURES[metric].floor(result, comparison)

    sides = RuleContext(candidate, reference, comparison.quality, calibration, ratio, floor)
    contract = sides.contract
    rulings = sides.rulings(gate, contract)
    mixed = len({promise.contract for promise in sides.promises_of(candidate)}) > 1
    note = f"several promises changed; judged by the weakest, {contract}" if mixed else ""
    claims = {metric: p for metric in sides.claimed if (p := sides.no_gain(metric)) is not None}
    return judgement(comparison, contract, rulings, note, claims)


def judgement(
    comparison: Comparison, contract: str, rulings: list[Ruling], note: str = "", claims: dict[str, float] | None = None
) -> Judgement:
    """The worst of the rulings counts."""
    verdict = worst([ruling.verdict for ruling in rulings])
    sides = comparison.candidate, comparison.reference, comparison.credit
    return Judgement(*sides, contract, verdict, rulings, note, claims or {})


def _comparable(candidate: VariantResult, reference: VariantResult) -> list[Ruling]:
    """What keeps two variants from being compared at all."""
    rulings = []
    if not candidate.status.measured:
        rulings.append(unjudged("status", f"the variant {candidate.status}: {candidate.reason}"))
    elif candidate.status is Status.NOT_ENGAGED:
        rulings.append(Ruling("engaged", "", Verdict.FAIL, f"it took no effect: {candidate.reason}"))
    if reference.status is not Status.OK:
        rulings.append(unjudged("reference", f"the reference '{reference.name}' {reference.status}"))
    elif reference.trips:
        wires = ", ".join(sorted({trip.wire for trip in reference.trips}))
        rulings.append(unjudged("reference", f"images of the reference '{reference.name}' are broken: {wires}"))
    other = [
        f"{key} ({mine} against {theirs})"
        for key, (mine, theirs) in candidate.config.differing(reference.config, (*WORK, "hardware")).items()
        if not key.startswith(_CHOICES)
    ]
    if other:
        rulings.append(unjudged("same work", f"not the same work: {', '.join(other)}"))
    return rulings


def _tripwires(candidate: VariantResult) -> Ruling:
    if not candidate.images:
        return unjudged("tripwires", "there are no images")
    if not candidate.trips:
        return Ruling("tripwires", "", Verdict.PASS, f"none of {len(candidate.images)} images is broken")
    first = candidate.trips[0]
    where = f" ({first.path})" if first.path else ""
    share = f"; {candidate.broken_images} of {len(candidate.images)} images are broken"
    return Ruling("tripwires", "", Verdict.FAIL, f"{first.wire}: {first.detail}{where}{share}")


def _same_work(candidate: VariantResult, reference: VariantResult) -> Ruling:
    """A variant that was told to take as many steps as its reference must take them."""
    asked = [(v.config.workload.steps, v.config.scheduler) for v in (candidate, reference)]
    mine, other = candidate.denoiser_calls, reference.denoiser_calls
    if asked[0] != asked[1]:
        return Ruling("steps", "", Verdict.PASS, "another scheduler or number of steps is the choice that is judged")
    if mine is None or other is None:
        return unjudged("steps", "the denoiser's calls were not counted (protocol.stage_calls=0?)")
    if mine != other:
        return Ruling(
            "steps", "", Verdict.FAIL, f"the denoiser ran {mine} times a call, in the reference {other} times"
        )
    return Ruling("steps", "", Verdict.PASS, f"the denoiser ran {mine} times a call on both sides")


@dataclass(frozen=True)
class RuleContext:
    """Both sides of a comparison, and what a rule may ask of them.

    Attributes:
        candidate: what is judged.
        reference: what it is held against.
        paired: distances between their images, pair by pair.
        calibration: of the model, for margins.
        ratio: the interval of `speedup` or `memory_ratio` at a two-sided confidence; None where it was not measured.
        floor: by which ratio two baselines differed in one of them; None where that is not known.
    """

    candidate: VariantResult
    reference: VariantResult
    paired: Mapping[str, Score]
    calibration: Calibration | None
    ratio: Callable[[str, float], Interval | None]
    floor: Callable[[str], float | None]

    @property
    def promises(self) -> list[Promise]:
        """What is promised on either side by the options in which the two differ."""
        return [*self.promises_of(self.candidate), *self.promises_of(self.reference)]

    def promises_of(self, side: VariantResult) -> list[Promise]:
        """Of one side alone."""
        mine, other = self.candidate.choices, self.reference.choices
        return [promise for axis, promise in side.promises.items() if mine.get(axis) != other.get(axis)]

    @property
    def contract(self) -> Contract:
        """The weakest of those promises; other work, as another scheduler is, promises nothing of the images."""
        order = list(Contract)
        if (self.candidate.contract == Contract.LOSSY) != (self.reference.contract == Contract.LOSSY):
            return Contract.LOSSY
        promised = [Contract(promise.contract) for promise in self.promises]
        return max(promised, key=order.index, default=Contract(self.candidate.contract))

    @property
    def claimed(self) -> list[str]:
        """The measures in which the candidate's options claim a gain that the reference does not have."""
        claims = {claim for promise in self.promises_of(self.candidate) for claim in promise.claims}
        return [name for name, measure in MEASURES.items() if measure.claim in claims]

    def rulings(self, gate: Gate, contract: Contract) -> list[Ruling]:
        """Every rule of the gate for a contract, and those that hold for all; where nothing can be compared, why."""
        rulings = _comparable(self.candidate, self.reference)
        if rulings:
            return rulings
        rulings = [_tripwires(self.candidate), _same_work(self.candidate, self.reference)]
        rulings += [self.apply(rule) for rule in gate.rules.get(contract, [])]
        if not gate.rules.get(contract):
            rulings.append(unjudged("rules", f"gate={gate.name} has no rules for the contract {contract}"))
        if gate.must_pay and self.claimed:
            rulings.append(self.pays())
        return rulings

    def apply(self, rule: Rule) -> Ruling:
        if rule.metric in MEASURES:
            return self._performance(rule)
        least = family_of(rule.metric).decides_from
        if len(self.candidate.images) < least:
            return unjudged(rule.test, f"{rule.metric} decides nothing below {least:,} images", rule.metric)
        mine = find_scores(self.candidate.quality, rule.metric)
        paired = find_scores(self.paired, rule.metric)
        if len(mine) + len(paired) > 1:
            return unjudged(rule.test, f"{rule.metric} is ambiguous: {', '.join([*mine, *paired])}", rule.metric)
        if paired:
            ((name, score),) = paired.items()
            return self._value(rule, name, score)
        if not mine:
            return unjudged(rule.test, f"{rule.metric} was not measured", rule.metric)
        ((name, score),) = mine.items()
        if rule.test in ("at_least", "at_most", "within", "exact", "rarely"):
            return self._value(rule, name, score)
        other = self.reference.quality.get(name)
        if other is None:
            return unjudged(rule.test, f"the reference has no {name}", name)
        return self._difference(rule, name, score, other)

    def _value(self, rule: Rule, name: str, score: Score) -> Ruling:
        """A rule on a value itself, as a distance between paired images is."""
        problem = problem_of(score)
        if problem:
            return unjudged(rule.test, problem, name)
        if rule.test == "exact":
            values = [value for value in score.per_prompt if value is not None]
            wrong = sum(value != 0 for value in values)
            if not values:
                return unjudged(rule.test, f"{name} has no values by prompt", name)
            verdict = Verdict.FAIL if wrong else Verdict.PASS
            said = f"{wrong} of {len(values)} prompts differ" if wrong else f"all {len(values)} prompts are the same"
            return Ruling(rule.test, name, verdict, said, score.estimate, max(values), max(values), 0.0)
        bounds = bounds_of(score, rule.confidence)
        if rule.test == "within":
            if rule.low is None or rule.high is None:
                return unjudged(rule.test, "the rule has no low and high", name)
            return two_sided(rule, name, bounds, rule.low, rule.high)
        limit = self._threshold(rule, name, rule.limit, rule.of_seeds, lambda spread: spread.mean)
        if isinstance(limit, Ruling):
            return limit
        if rule.test == "rarely":
            return self._rarely(rule, name, score, limit)
        if rule.test == "at_least":
            return above(rule, name, bounds, limit)
        if rule.test == "at_most":
            return below(rule, name, bounds, limit)
        return unjudged(rule.test, f"{name} is a distance to the reference: test it with at_most", name)

    def _rarely(self, rule: Rule, name: str, score: Score, limit: float) -> Ruling:
        """A rule on the share of prompts whose value exceeds the limit; a mean hides the few that went wrong."""
        if rule.share is None:
            return unjudged(rule.test, "the rule has no share", name)
        above = [value > limit for value in score.per_prompt if value is not None]
        if not above:
            return unjudged(rule.test, f"{name} has no values by prompt", name)
        ruling = below(rule, name, share_bounds(sum(above), len(above), rule.confidence), rule.share)
        ruling.reason = f"{sum(above)} of {len(above)} prompts exceed {limit:.4g}: {ruling.reason}"
        return ruling

    def _difference(self, rule: Rule, name: str, mine: Score, other: Score) -> Ruling:
        """A rule on candidate − reference, signed so that more is better."""
        problem = problem_of(mine) or problem_of(other)
        if problem:
            return unjudged(rule.test, problem, name)
        if len(mine.per_prompt) != len(other.per_prompt) or len(mine.leave_one_out) != len(other.leave_one_out):
            return unjudged(rule.test, f"{name} has other prompts on both sides", name)
        margin = self._threshold(rule, name, rule.margin, rule.deviations, lambda spread: spread.deviation)
        if isinstance(margin, Ruling):
            return margin
        better = 1.0 if family_of(name).higher_is_better else -1.0
        bounds = bounds_of(subtract(mine, other, better), rule.confidence)
        if rule.test == "equivalent":
            return two_sided(rule, name, bounds, -margin, margin)
        return above(rule, name, bounds, -margin)

    def _threshold(
        self, rule: Rule, name: str, given: float | None, share: float | None, whole: Callable[[Spread], float]
    ) -> float | Ruling:
        """A limit or margin as the rule gives it, or a share of something calibrated; without either, why not."""
        if given is not None:
            return given
        if share is None:
            return unjudged(rule.test, "the rule has neither limit nor of_seeds, margin nor deviations", name)
        known = self.calibration.metrics.get(name) if self.calibration else None
        if known is None:
            model = self.candidate.config.model.name
            advice = "run `sdopt calibrate`, or give the rule a limit or margin"
            return unjudged(rule.test, f"no calibration for {model}: {advice}", name)
        return share * whole(known)

    def _performance(self, rule: Rule) -> Ruling:
        """A rule on the speed-up or the memory ratio: fails only where the harm exceeds the A/A floor as well."""
        bounds = self._ratio(rule.metric, rule.confidence)
        if bounds is None:
            return unjudged(rule.test, f"{rule.metric} was not measured", rule.metric)
        if rule.limit is None or rule.test not in ("at_least", "at_most"):
            return unjudged(rule.test, f"{rule.metric} is judged by at_least or at_most and a limit", rule.metric)
        ruling = (above if rule.test == "at_least" else below)(rule, rule.metric, bounds, rule.limit)
        floor = self.floor(rule.metric)
        if ruling.verdict is Verdict.FAIL and (floor is None or not exceeds(bounds.estimate, floor)):
            ruling.verdict = Verdict.INCONCLUSIVE
            ruling.reason += f"; but two equal processes differed by {percent(floor)}"
        return ruling

    def pays(self) -> Ruling:
        """An option that claims latency or memory must gain in one of them, and harm none that it claims."""
        gains: list[str] = []
        harms: list[str] = []
        open_: list[str] = []
        said: list[str] = []
        for metric in self.claimed:
            claim = MEASURES[metric].claim
            bounds = self._ratio(metric, 0.95)
            if bounds is None:
                open_.append(claim)
                said.append(f"{claim}: not measured")
                continue
            better = MEASURES[metric].gain(bounds.estimate)
            shown = f"{metric} {bounds.estimate:.3g}×"
            if bounds.low is None or bounds.high is None:
                open_.append(claim)
                said.append(f"{shown} has no interval: more rounds or protocol.replicates would give one")
                continue
            shown += f" [{bounds.low:.3g}, {bounds.high:.3g}]"
            floor = self.floor(metric)
            if floor is None:
                open_.append(claim)
                said.append(f"{shown}, but the A/A floor is not known")
            elif bounds.low <= 1 <= bounds.high:
                said.append(f"{shown} includes 1")
            elif not exceeds(better, floor):
                said.append(f"{shown} is within the A/A floor of {percent(floor)}")
            else:
                (gains if better > 1 else harms).append(claim)
                said.append(shown)
        reason = "; ".join(said)
        if harms:
            return Ruling("must pay", "", Verdict.FAIL, f"harm: {reason}")
        if gains:
            return Ruling("must pay", "", Verdict.PASS, f"it pays: {reason}")
        if open_:
            return Ruling("must pay", "", Verdict.INCONCLUSIVE, reason)
        return Ruling("must pay", "", Verdict.FAIL, f"no benefit: {reason}")

    def no_gain(self, metric: str) -> float | None:
        """The one-sided p value that the candidate gains nothing in a measure; None where there is no interval."""
        return p_value(lambda confidence: self.ratio(metric, confidence), MEASURES[metric].alternative)

    def _ratio(self, metric: str, confidence: float | None) -> Bounds | None:
        interval = self.ratio(metric, 2 * (confidence or 0.95) - 1)
        if interval is None:
            return None
        low, high = (interval.low, interval.high) if confidence else (interval.estimate, interval.estimate)
        return Bounds(interval.estimate, low, high, math.nan, interval.n, interval.unit)
