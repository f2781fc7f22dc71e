"""The gate: rules fixed beforehand, applied to what a study measured. It decides; nothing here measures.

Every rule fails closed: what is missing, not finite or not comparable never passes. A rule that compares an estimate
with a limit passes where the whole one-sided interval lies on the right side, fails where it lies on the wrong one, and
is inconclusive in between (non-inferiority as in Piaggio et al. 2012, with prompts as the unit that is resampled).

A candidate passes where all its rules do, so they need no correction for their number. Claims of a gain do: they are
tested together (`paying`), and a study that is judged again as it grows shares its chance of error among its looks
(`looks`). Of a study that another one disturbed no verdict is better than inconclusive, and none on time is worse.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sdopt.analysis.bounds import Bounds, subtract
from sdopt.analysis.changes import changes_of
from sdopt.analysis.doubts import disturbances
from sdopt.analysis.measures import MEASURES, MEMORY_RATIO, RULED, SPEEDUP, smallest_factor, with_shape
from sdopt.analysis.rounding import precision_of
from sdopt.analysis.timing import exceeds
from sdopt.errors import UsageError
from sdopt.gate.belief import belief_rulings, gain_when_drawn
from sdopt.gate.calibration import Calibration, fitting_calibration
from sdopt.gate.looks import look_at, record_look, ruling_of
from sdopt.gate.paying import Answer, Claim, answer_claims, must_pay
from sdopt.gate.rulings import (
    above,
    below,
    bounds_of,
    every,
    exact,
    find_scores,
    percent,
    problem_of,
    rarely,
    two_sided,
    unjudged,
)
from sdopt.gate.work import comparable, same_work, tripwires
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
from sdopt.schema import Gate, Rule


def judge(result: StudyResult, gate: Gate, calibration: Calibration | None) -> None:
    """Fills in `result.judgements`: one for each comparison whose candidate was not skipped, the A/A control aside.

    Each comparison's look is noted in `result.looks`.
    """
    result.gate = gate.name
    edges = [
        comparison
        for comparison in result.comparisons
        if result.variant(comparison.candidate).role != "control"
        and result.variant(comparison.candidate).status is not Status.SKIPPED
    ]
    looks = [look_at(result, comparison, gate) for comparison in edges]
    fitting, said = fitting_calibration(calibration, result.config, named=gate.calibration is not None)
    contexts = [
        replace(_context(result, comparison, fitting, 1 / look.allowed), uncalibrated="" if fitting else said)
        for comparison, look in zip(edges, looks, strict=True)
    ]
    claims = [context.claims(gate) if gate.must_pay else [] for context in contexts]
    found = iter(answer_claims([claim for made in claims for claim in made], gate.confidence))
    result.judgements = []
    for comparison, look, context, made in zip(edges, looks, contexts, claims, strict=True):
        answers = [next(found) for _ in made]
        contract = context.contract
        rulings = context.rulings(gate, contract)
        if context.comparable:
            changes = changes_of(result, context.candidate, context.reference)
            rulings += [must_pay(answers, changes)] if answers else []
            if any(answer.answer is Answer.GAIN and answer.claim.measure is SPEEDUP for answer in answers):
                rulings.append(gain_when_drawn(context.candidate, context.reference))
            rulings += ruling_of(look)
        mixed = len({promise.contract for promise in context.promises_of(context.candidate)}) > 1
        notes = [f"several promises changed; judged by the weakest, {contract}"] if mixed else []
        notes += [said] if fitting and said else []
        judged = judgement(comparison, contract, rulings, "; ".join(notes))
        judged.claims = {claim.name: claim.p_gain for claim in made if claim.p_gain is not None}
        judged.gains = [answer.claim.name for answer in answers if answer.answer is Answer.GAIN]
        result.judgements.append(judged)
        record_look(result, look, judged.verdict)


def exit_code(judgements: Sequence[Judgement], report_only: bool = False) -> int:
    """0 where all passed, 1 for a regression, 3 where something could not be judged."""
    if report_only:
        return 0
    verdicts = {judgement.verdict for judgement in judgements}
    if Verdict.FAIL in verdicts:
        return 1
    return 3 if verdicts - {Verdict.PASS} else 0


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Returns the worst verdict, or NOT_COMPARABLE if there are none."""
    order = list(Verdict)
    return max(verdicts, key=order.index, default=Verdict.NOT_COMPARABLE)


def _context(
    result: StudyResult, comparison: Comparison, calibration: Calibration | None, share: float
) -> "RuleContext":
    def at(place: int) -> RuleContext:
        view, edge = result.at(place), comparison.at(place)
        candidate, reference = view.variant(edge.candidate), view.variant(edge.reference)
        return RuleContext(
            candidate,
            reference,
            edge.quality,
            calibration,
            lambda metric, confidence: RULED[metric].ratio(candidate, reference, confidence),
            lambda metric: RULED[metric].floor(view, edge),
            share,
            "; ".join(disturbances(view, candidate, reference)),
            belief=tuple(belief_rulings(view, candidate, reference)) if not place else (),
            floors=result.floors.get("numerical", {}),
        )

    return of_shapes([at(place) for place in range(len(result.shapes))])


def of_shapes(contexts: Sequence["RuleContext"]) -> "RuleContext":
    """Returns the context of a comparison's main shape, with those of its further shapes in it, each by its name."""
    if len(contexts) > 1:
        contexts = [replace(context, shape=context.candidate.config.shapes[0].name) for context in contexts]
    return replace(contexts[0], further=tuple(contexts[1:]))


def judgement(comparison: Comparison, contract: str, rulings: list[Ruling], note: str = "") -> Judgement:
    """Returns the judgement of a comparison: the worst of the rulings counts."""
    verdict = worst([ruling.verdict for ruling in rulings])
    sides = comparison.candidate, comparison.reference, comparison.credit
    return Judgement(*sides, contract, verdict, rulings, note)


@dataclass(frozen=True)
class RuleContext:
    """Both sides of a comparison at one shape, and what a rule may ask of them.

    Attributes:
        candidate: what is judged.
        reference: what it is held against.
        paired: distances between their images, pair by pair.
        calibration: of the model, for margins.
        ratio: the interval of `speedup` or `memory_ratio` at a two-sided confidence; None where it was not measured.
        floor: by which ratio two baselines differed in one of them; None where that is not known.
        share: of each rule's chance of error, that this look may spend.
        disturbed: by what the times were disturbed; "" where by nothing.
        belief: whether the measurements of both can be believed, at the main shape.
        shape: its name, where the study has several; "" where it has one.
        floors: how far two baselines differ that compute in another order, by metric.
        uncalibrated: why `calibration` is None, and what to do; "" where it is there.
        further: the same comparison at further shapes. Images were drawn at the main shape alone.
    """

    candidate: VariantResult
    reference: VariantResult
    paired: Mapping[str, Score]
    calibration: Calibration | None
    ratio: Callable[[str, float], Interval | None]
    floor: Callable[[str], float | None]
    share: float = 1.0
    disturbed: str = ""
    belief: tuple[Ruling, ...] = ()
    shape: str = ""
    floors: Mapping[str, Spread] = field(default_factory=dict)
    uncalibrated: str = ""
    further: "tuple[RuleContext, ...]" = ()

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

    @property
    def comparable(self) -> bool:
        """Whether the two can be compared at all."""
        return not comparable(self.candidate, self.reference)

    def claims(self, gate: Gate) -> list[Claim]:
        """What the candidate claims at each shape, for all claims of the study to be tested together."""
        if not self.comparable:
            return []
        return [
            Claim(
                MEASURES[metric],
                MEASURES[metric].log_ratio(at.candidate, at.reference),
                at.smallest(metric, gate),
                at.floor(metric),
                at.share,
                at.disturbed if metric == SPEEDUP.name else "",
                at.shape,
            )
            for at in (self, *self.further)
            for metric in self.claimed
        ]

    def smallest(self, metric: str, gate: Gate) -> float:
        """The smallest factor, at least 1, by which a measure must differ to count."""
        return smallest_factor(RULED[metric], gate, self.reference)

    def rulings(self, gate: Gate, contract: Contract) -> list[Ruling]:
        """Every rule of the gate for a contract, and those that hold for all; where nothing can be compared, why.

        Whether the candidate pays is not among them: that depends on all claims of the study.
        """
        rulings = comparable(self.candidate, self.reference)
        if rulings:
            return rulings
        rulings = [tripwires(self.candidate), same_work(self.candidate, self.reference), *self.belief]
        for rule in gate.rules.get(contract, []):
            further = self.further if rule.metric in RULED else ()
            rulings += [at.apply(rule, gate) for at in (self, *further)]
        if not gate.rules.get(contract):
            rulings.append(unjudged("rules", f"gate={gate.name} has no rules for the contract {contract}"))
        if self.disturbed:
            rulings.append(Ruling("undisturbed", "", Verdict.INCONCLUSIVE, self.disturbed))
        return rulings

    def apply(self, rule: Rule, gate: Gate) -> Ruling:
        """Applies one rule, with the share of its chance of error that this look may spend."""
        if rule.confidence is not None:
            rule = replace(rule, confidence=1 - (1 - rule.confidence) * self.share)
        if rule.metric in RULED:
            return self._performance(rule, gate)
        try:
            least = family_of(rule.metric).decides_from
        except UsageError as error:  # the rules of a result that another sdopt wrote
            return unjudged(rule.test, error.problems[0], rule.metric)
        return self._of_images(rule, least)

    def _of_images(self, rule: Rule, least: int) -> Ruling:
        """A rule on a metric of images, which decides nothing below so many of them."""
        if len(self.candidate.images) < least:
            return unjudged(rule.test, f"{rule.metric} decides nothing below {least:,} images", rule.metric)
        mine = find_scores(self.candidate.quality, rule.metric)
        between = find_scores(self.paired, rule.metric)
        found = [*mine.items(), *between.items()]
        if len(found) != 1:
            said = f"is ambiguous: {', '.join(name for name, _ in found)}" if found else "was not measured"
            return unjudged(rule.test, f"{rule.metric} {said}", rule.metric)
        ((name, score),) = found
        if between or rule.test not in ("non_inferior", "equivalent"):
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
            return exact(rule, name, score)
        if rule.test == "within":
            if rule.low is None or rule.high is None:
                return unjudged(rule.test, "the rule has no low and high", name)
            return two_sided(rule, name, bounds_of(score, rule.confidence), rule.low, rule.high)
        return self._against_limit(rule, name, score)

    def _against_limit(self, rule: Rule, name: str, score: Score) -> Ruling:
        if rule.limits and rule.limit is None:
            rule = self._at_precision(rule)
        limit = self._threshold(rule, name, rule.limit, rule.of_seeds, lambda spread: spread.mean)
        if isinstance(limit, Ruling):
            return limit
        if rule.of_floor is not None:
            limit = self._tied(rule, name, limit, rule.of_floor)
            if isinstance(limit, Ruling):
                return limit
        if rule.test == "every":
            return every(rule, name, score, limit)
        if rule.test == "rarely":
            return rarely(rule, name, score, limit)
        bounds = bounds_of(score, rule.confidence)
        return (above if rule.test == "at_least" else below)(rule, name, bounds, limit)

    def _at_precision(self, rule: Rule) -> Rule:
        """The rule with its limit for the type that the reference computes in; without one where that is not known."""
        kind = precision_of(self.reference)
        return replace(rule, limit=rule.limits.get(kind)) if kind else rule

    def _tied(self, rule: Rule, name: str, limit: float, times: float) -> float | Ruling:
        """A limit, lowered to a multiple of what another order of computation changes in the baseline itself."""
        if self.candidate.choices.get("precision") != self.reference.choices.get("precision"):
            return limit
        floor = self.floors.get(name)
        if floor is None:
            said = "the numerical floor, to which its limit is tied, was not drawn (quality.floor_prompts=0?)"
            return unjudged(rule.test, said, name)
        return min(limit, max(times * floor.mean, rule.least))

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
        if rule.limits:
            said = "the rule has no limit for the precision of the reference, which is not known; give it one limit"
            return unjudged(rule.test, said, name)
        if share is None:
            return unjudged(rule.test, "the rule has neither limit nor of_seeds, margin nor deviations", name)
        known = self.calibration.metrics.get(name) if self.calibration else None
        if known is None:
            model = self.candidate.config.model.name
            why = self.uncalibrated or f"no calibration for {model}: run `sdopt calibrate`"
            return unjudged(rule.test, f"{why}, or give the rule a limit or margin", name)
        return max(share * whole(known), rule.least)

    def _performance(self, rule: Rule, gate: Gate) -> Ruling:
        """A rule on the speed-up, the largest calls or the memory ratio.

        Its limit never asks for less than what counts. It fails only where the harm exceeds the A/A floor as well, and
        decides nothing on times that were disturbed.
        """
        bounds, name = self._ratio(rule.metric, rule.confidence), with_shape(rule.metric, self.shape)
        if bounds is None:
            return unjudged(rule.test, f"{rule.metric} was not measured", name)
        if rule.limit is None or rule.test not in ("at_least", "at_most"):
            return unjudged(rule.test, f"{rule.metric} is judged by at_least or at_most and a limit", name)
        smallest = self.smallest(rule.metric, gate)
        limit = rule.limit
        if rule.test == "at_most" and not RULED[rule.metric].higher_is_better and limit >= 1:
            limit = max(limit, smallest)
        elif rule.test == "at_least" and RULED[rule.metric].higher_is_better and limit <= 1:
            limit = min(limit, 1 / smallest)
        ruling = (above if rule.test == "at_least" else below)(rule, name, bounds, limit)
        floor = self.floor(rule.metric)
        if ruling.verdict is Verdict.FAIL and (floor is None or not exceeds(bounds.estimate, floor)):
            ruling.verdict = Verdict.INCONCLUSIVE
            ruling.reason += f"; but two equal processes differed by {percent(floor)}"
        if rule.metric != MEMORY_RATIO.name and self.disturbed and ruling.verdict is not Verdict.INCONCLUSIVE:
            ruling.verdict = Verdict.INCONCLUSIVE
            ruling.reason += f"; but {self.disturbed}"
        return ruling

    def _ratio(self, metric: str, confidence: float | None) -> Bounds | None:
        interval = self.ratio(metric, 2 * (confidence or 0.95) - 1)
        if interval is None:
            return None
        low, high = (interval.low, interval.high) if confidence else (interval.estimate, interval.estimate)
        return Bounds(interval.estimate, low, high, math.nan, interval.n, interval.unit)
