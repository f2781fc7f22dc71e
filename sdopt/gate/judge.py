"""The gate: applies rules fixed beforehand to the measurements of a study. It decides; nothing here measures.

Begin reading at `RuleContext.apply`. `_against_limit` says where a limit comes from: from the rule in `conf/gate/`,
which may have one for each number type, or from a share of the calibrated spread.

Every rule fails closed: a value that is missing, not finite or not comparable never passes. A rule that compares an
estimate with a limit passes if the whole one-sided interval lies on the right side, fails if it lies on the wrong side,
and is inconclusive in between (non-inferiority as in Piaggio et al. 2012, with prompts as the unit that is resampled).

A candidate passes only if all its rules do, so the rules need no correction for their number. Claims of a gain need
one: they are tested together (`paying`). A study that is judged again as it grows divides its error rate α among its
looks (`looks`). If other programs disturbed the timings, rules on time are inconclusive and the candidate cannot pass.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sdopt.contract import Contract, weakest
from sdopt.gate.calibration import FROM_FOLDERS, Fit, how_to_calibrate
from sdopt.gate.looks import look_at, record_look, ruling_of
from sdopt.gate.paying import Claim, ClaimResult, answer_claims, must_pay
from sdopt.gate.rule_checks import applicable
from sdopt.gate.rulings import (
    UnjudgedError,
    against,
    bounds_of,
    every,
    exact,
    find_scores,
    percent,
    precision_of,
    rarely,
    require_finite,
    two_sided,
    unjudged,
    worst,
)
from sdopt.gate.trust import (
    comparable,
    disturbances,
    effect_seen,
    repeated_prompts,
    same_work,
    tripwires,
    trust_rulings,
    uncounted,
)
from sdopt.quality.metrics import family_of
from sdopt.record.comparisons import Comparison
from sdopt.record.records import Promise, Status, StudyResult, VariantResult
from sdopt.record.scores import Score, Spread
from sdopt.record.verdicts import Judgement, Look, Payoff, Ruling, Verdict
from sdopt.schema import Gate, Protocol, Rule
from sdopt.statistics.bounds import Bounds, subtract
from sdopt.statistics.break_even import first_image_s
from sdopt.statistics.changes import changes_of
from sdopt.statistics.giving_up import at_least_slower, bound_text
from sdopt.statistics.measures import (
    FIRST_IMAGE,
    MEASURES,
    MEMORY_RATIO,
    RULED,
    SPEEDUP,
    smallest_change,
    spared_growth,
    with_shape,
)
from sdopt.statistics.ratios import LogRatio, exceeds


def judge(result: StudyResult, gate: Gate, fit: Fit) -> None:
    """Fills in `result.judgements`: one for each of `judged_comparisons`.

    Records each comparison's look in `result.looks`. `fit` is the calibration for margins: see `calibration_for`.
    """
    result.gate = gate.name
    gate = applicable(gate, result.config.quality, result.config.model)
    cases = []
    for comparison in judged_comparisons(result):
        look = look_at(result, comparison, gate)
        contexts = _contexts(result, comparison, gate, fit, 1 / look.allowed)
        cases.append(_Case(comparison, look, contexts, claims_of(contexts, gate) if gate.must_pay else []))
    claims = [claim for case in cases for claim in case.claims]
    # A claim is tested together with those of all other comparisons.
    answers = {answer.claim: answer for answer in answer_claims(claims, gate.confidence)}
    result.judgements = []
    for case in cases:
        judged = _judged(result, case, gate, [answers[claim] for claim in case.claims])
        result.judgements.append(judged)
        record_look(result, case.look, judged.verdict)


_PER_IMAGE = "speed-ups are per image, because calls make different numbers of images"

_SEEN_BY_NOBODY = (
    "another program made these images and times: whether its options took effect, and whether timed calls make the "
    "same images, is its own word"
)


@dataclass(frozen=True)
class _Case:
    """A comparison to judge, the look that judging it now counts as, and the candidate's claims."""

    comparison: Comparison
    look: Look
    contexts: "list[RuleContext]"
    claims: list[Claim]


def _judged(result: StudyResult, case: _Case, gate: Gate, answers: Sequence[ClaimResult]) -> Judgement:
    """Returns the judgement of one comparison, given the answers to its claims."""
    context = case.contexts[0]
    contract = context.contract
    rulings = rulings_of(case.contexts, gate, contract)
    if context.comparable:
        changes = changes_of(result, context.candidate, context.reference)
        rulings += [must_pay(answers, changes)] if answers else []
        if context.promises and not any(answer.answer is Payoff.PAYS for answer in answers):
            rulings += effect_seen(changes, context.paired)
        if any(answer.answer is Payoff.PAYS and answer.claim.measure is SPEEDUP for answer in answers):
            rulings += repeated_prompts(context.candidate, context.reference)
        rulings += ruling_of(case.look)
    mixed = len({promise.contract for promise in context.candidate.promises_beside(context.reference)}) > 1
    notes = [f"options with different contracts changed; judged by the weakest, {contract}"] if mixed else []
    notes += [context.fit.note] if context.fit.note else []
    notes += uncounted(result, context.candidate, context.reference)
    notes += [_PER_IMAGE] if result.per_image else []
    notes += [_SEEN_BY_NOBODY] if result.is_imported else []
    judged = judgement(case.comparison, contract, rulings, "; ".join(notes))
    judged.claims = {claim.name: claim.p_gain for claim in case.claims if claim.p_gain is not None}
    judged.gains = [answer.claim.name for answer in answers if answer.answer is Payoff.PAYS]
    return judged


def judged_comparisons(result: StudyResult) -> list[Comparison]:
    """Returns the comparisons that a gate judges: without the repeated baseline and skipped candidates."""
    return [
        comparison
        for comparison in result.comparisons
        if not result.variant(comparison.candidate).is_control
        and result.variant(comparison.candidate).status is not Status.SKIPPED
    ]


def left_unjudged(result: StudyResult) -> bool:
    """Returns whether the study's own gate has judged nothing of what was measured, and so has passed nothing."""
    gate = result.config.gate
    judging = gate.judges and not gate.report_only and result.status == "finished" and not result.judgements
    return judging and any(row.status.measured for row in result.candidates)


def exit_code(judgements: Sequence[Judgement], gate: Gate) -> int:
    """Returns 0 if all judgements pass, 1 for a regression, and 3 if something could not be judged."""
    if gate.report_only:
        return 0
    verdicts = {judgement.verdict for judgement in judgements}
    if Verdict.FAIL in verdicts:
        return 1
    passing = {Verdict.PASS, Verdict.INCONCLUSIVE} if gate.inconclusive_passes else {Verdict.PASS}
    return 3 if verdicts - passing else 0


def worst_code(codes: Iterable[int]) -> int:
    """Returns the exit code of a command from those of its parts; 0 if there are none.

    A regression (1) counts most: it needs more notice than what could not be measured or judged.
    """
    found = [0, *codes]
    return 1 if 1 in found else max(found)


def _contexts(result: StudyResult, comparison: Comparison, gate: Gate, fit: Fit, share: float) -> "list[RuleContext]":
    """Returns the comparison at each shape."""
    sees = not result.is_imported

    def at(shape_index: int) -> RuleContext:
        view, edge = result.at(shape_index), comparison.at(shape_index)
        candidate, reference = view.variant(edge.candidate), view.variant(edge.reference)
        return RuleContext(
            candidate,
            reference,
            edge.quality,
            fit,
            lambda metric: RULED[metric].log_ratio(candidate, reference),
            lambda metric: RULED[metric].floor(view, edge),
            share,
            "; ".join(disturbances(view, candidate, reference)),
            trust=tuple(trust_rulings(view, candidate, reference)) if sees and not shape_index else (),
            sees_calls=sees,
            shape=candidate.config.shapes[0].name if len(result.shapes) > 1 else "",
            floors=result.floors.get("numerical", {}),
            memory_growth=spared_growth(gate, reference, result),
            protocol=result.config.protocol,
            slower=at_least_slower(candidate) if reference.name == result.baseline else None,
        )

    return [at(shape_index) for shape_index in range(len(result.shapes))]


def claims_of(contexts: Sequence["RuleContext"], gate: Gate) -> list[Claim]:
    """Returns a candidate's claims at each shape, to be tested together with all other claims of the study."""
    if not contexts[0].comparable:
        return []
    return [
        Claim(
            MEASURES[metric],
            at.ratio(metric),
            smallest_change(MEASURES[metric], at.protocol, at.reference)[0],
            at.floor(metric),
            at.alpha_share,
            at.disturbed if metric == SPEEDUP.name else "",
            at.shape,
            at.memory_growth if metric == MEMORY_RATIO.name else 1.0,
        )
        for at in contexts
        for metric in at.claimed
    ]


def rulings_of(contexts: Sequence["RuleContext"], gate: Gate, contract: Contract) -> list[Ruling]:
    """Applies the gate's rules for a contract at each shape, and those for all; if not comparable, returns why.

    Does not rule on whether the candidate pays: that depends on all claims of the study.
    """
    first = contexts[0]
    if first.candidate.status is Status.SLOWER:
        return [first.too_slow(gate, contract)]
    rulings = comparable(first.candidate, first.reference)
    if rulings:
        return rulings
    rulings = [tripwires(first.candidate)]
    rulings += [same_work(first.candidate, first.reference), *first.trust] if first.sees_calls else []
    for rule in gate.rules.get(contract, []):
        rulings += [at.apply(rule, gate) for at in (contexts if rule.metric in RULED else contexts[:1])]
    if not gate.rules.get(contract):
        rulings.append(unjudged("rules", f"gate={gate.name} has no rules for the contract {contract}"))
    if first.disturbed:
        rulings.append(Ruling("undisturbed", "", Verdict.INCONCLUSIVE, first.disturbed))
    return rulings


def judgement(comparison: Comparison, contract: Contract, rulings: list[Ruling], note: str = "") -> Judgement:
    """Returns the judgement of a comparison: the worst of the rulings counts."""
    verdict = worst([ruling.verdict for ruling in rulings])
    sides = comparison.candidate, comparison.reference, comparison.credit
    return Judgement(*sides, contract, verdict, rulings, note)


@dataclass(frozen=True)
class RuleContext:
    """Both sides of a comparison at one shape, and the data that rules need.

    Attributes:
        candidate: the variant to judge.
        reference: the variant to compare it with.
        paired: distances between the images of both, pair by pair.
        fit: the model's calibration, for limits and margins that are shares of its spread.
        ratio: returns a measure in `RULED` with its error; None if it was not measured.
        floor: returns the ratio by which two identical baselines differed in a measure; None if it is not known.
        alpha_share: the share of each rule's α that this look may spend.
        disturbed: what disturbed the times; "" if nothing did.
        trust: rulings on whether the measurements can be believed; only the first shape has them.
        shape: the shape's name if the study has several; "" if it has one.
        floors: by metric, how far the baseline's images move when it computes in another order.
        sees_calls: whether sdopt made the calls, and saw what they did.
        memory_growth: the factor by which memory may grow without harm on this GPU.
        protocol: says which changes of speed and memory are too small to count.
        slower: how many times as long as the baseline's its calls take at least, if its timing ended early for that.
    """

    candidate: VariantResult
    reference: VariantResult
    paired: Mapping[str, Score]
    fit: Fit
    ratio: Callable[[str], LogRatio | None]
    floor: Callable[[str], float | None]
    alpha_share: float = 1.0
    disturbed: str = ""
    trust: tuple[Ruling, ...] = ()
    shape: str = ""
    floors: Mapping[str, Spread] = field(default_factory=dict)
    sees_calls: bool = True
    memory_growth: float = 1.0
    protocol: Protocol = field(default_factory=Protocol)
    slower: float | None = None

    @property
    def promises(self) -> list[Promise]:
        """The promises of both sides' options, on the axes where the two sides differ."""
        return [*self.candidate.promises_beside(self.reference), *self.reference.promises_beside(self.candidate)]

    @property
    def contract(self) -> Contract:
        """The weakest contract among `promises`; different work, such as another scheduler, is `lossy`."""
        if (self.candidate.contract is Contract.LOSSY) != (self.reference.contract is Contract.LOSSY):
            return Contract.LOSSY
        return weakest((promise.contract for promise in self.promises), default=self.candidate.contract)

    @property
    def claimed(self) -> list[str]:
        """The measures in which the candidate's options claim a gain that the reference does not have."""
        claims = {claim for promise in self.candidate.promises_beside(self.reference) for claim in promise.claims}
        return [name for name, measure in MEASURES.items() if measure.claim in claims]

    @property
    def comparable(self) -> bool:
        """Whether the two can be compared at all."""
        return not comparable(self.candidate, self.reference)

    def apply(self, rule: Rule, gate: Gate) -> Ruling:
        """Applies one rule, at the share of its α that this look may spend.

        Most rules pass if the whole one-sided interval is on the right side of the limit, fail if it is on the wrong
        side, and are inconclusive in between (`rulings.against`); `exact` and `every` fail by a single prompt. A rule
        on a ratio fails only if the harm also exceeds the A/A floor, and is inconclusive on disturbed times.

        The limit is the rule's own, in `conf/gate/`:
        - of a ratio, a limit against harm is widened to the smallest change that counts (`protocol.smallest_speedup`,
          `protocol.smallest_memory`, `protocol.smallest_memory_mib`), and of memory to
          `gate.spare_memory` (`_performance`);
        - of images, it may be one for each number type of the reference (`limits`), or a share of the calibrated
          spread (`of_seeds`, `deviations`): of the file `gate.calibration`, or that which sdopt ships for the model
          (`_threshold`). `of_floor` lowers it to a multiple of what rounding alone changes (`_tied`).
        """
        if rule.confidence is not None:
            rule = replace(rule, confidence=1 - (1 - rule.confidence) * self.alpha_share)
        try:
            if rule.metric in RULED:
                return self._performance(rule, gate)
            if rule.metric == FIRST_IMAGE:
                return self._first_image(rule)
            return self._despite_files(self._of_images(rule))
        except UnjudgedError as lacking:
            return unjudged(rule.test, lacking.reason, lacking.metric)

    def _despite_files(self, ruling: Ruling) -> Ruling:
        """Leaves a failure open that the file formats of imported images may explain."""
        apart = self.candidate.files_apart(self.reference)
        if apart and ruling.verdict is Verdict.FAIL:
            ruling.verdict = Verdict.INCONCLUSIVE
            ruling.doubt = f"{apart}: what a format loses counts as a difference"
        return ruling

    def too_slow(self, gate: Gate, contract: Contract) -> Ruling:
        """Rules on a candidate whose timing ended early: it fails if a rule or a claim asks for speed."""
        if self.slower is None:
            return unjudged("status", f"it was not timed to the end: {self.candidate.reason}")
        reason = f"slower, at least {bound_text(self.slower)}"
        limits = [rule.limit for rule in gate.rules.get(contract, []) if rule.metric == SPEEDUP.name]
        exceeded = any(limit is not None and limit > 1 / self.slower for limit in limits)
        if exceeded or (gate.must_pay and SPEEDUP.name in self.claimed):
            return Ruling("speed", with_shape(SPEEDUP.name, self.shape), Verdict.FAIL, reason)
        return unjudged("status", f"{reason}, and not timed to the end (protocol.give_up)")

    def _first_image(self, rule: Rule) -> Ruling:
        """Applies a limit to the seconds until the first image of the first process, which alone starts by itself."""
        found, limit = first_image_s(self.candidate), rule.limit
        if found is None:
            raise UnjudgedError(rule.metric, f"{rule.metric} was not measured")
        assert limit is not None
        verdict = Verdict.PASS if found <= limit else Verdict.FAIL
        reason = f"{found:.3g} s from loading to the first image, and the limit is {limit:.4g} s"
        return Ruling(rule.test, rule.metric, verdict, reason, estimate=found, margin=limit)

    def _of_images(self, rule: Rule) -> Ruling:
        """Applies a rule on a quality metric; with too few images for that metric, the rule stays unjudged."""
        least = family_of(rule.metric).decides_from
        if len(self.candidate.images) < least:
            raise UnjudgedError(rule.metric, f"{rule.metric} needs at least {least:,} images")
        found = find_scores({**self.candidate.quality, **self.paired}, rule.metric)
        if len(found) != 1:
            reason = f"is ambiguous: {', '.join(found)}" if found else "was not measured"
            raise UnjudgedError(rule.metric, f"{rule.metric} {reason}")
        [(name, score)] = found.items()
        require_finite(name, score)
        if rule.test in ("non_inferior", "equivalent"):
            return self._difference(rule, name, score)
        if rule.test == "exact":
            return exact(rule, name, score)
        if rule.test == "within":
            assert rule.low is not None
            assert rule.high is not None
            return two_sided(rule, name, bounds_of(score, rule.confidence), rule.low, rule.high)
        return self._against_limit(rule, name, score)

    def _against_limit(self, rule: Rule, name: str, score: Score) -> Ruling:
        """Tests a value against its limit: that for the reference's number type, or that of `_threshold`."""
        if rule.limits and (kind := precision_of(self.reference)):
            rule = replace(rule, limit=rule.limits[kind])
        limit = self._threshold(rule, name, rule.limit, rule.of_seeds, lambda spread: spread.mean)
        if rule.of_floor is not None:
            limit = self._tied(rule, name, limit, rule.of_floor)
        if rule.test == "every":
            return every(rule, name, score, limit)
        if rule.test == "rarely":
            return rarely(rule, name, score, limit)
        return against(rule, name, bounds_of(score, rule.confidence), limit, at_least=rule.test == "at_least")

    def _tied(self, rule: Rule, name: str, limit: float, times: float) -> float:
        """Lowers a limit to `times` the numerical floor (the baseline computed in another order)."""
        if self.candidate.choices.get("precision") != self.reference.choices.get("precision"):
            return limit
        floor = self.floors.get(name)
        if floor is None:
            why = "has no such score" if self.floors else "was not measured: see the reason of the repeated baseline"
            floor_name = "how much the baseline's images change when it computes in another order"
            reason = f"{floor_name} {why}, and the limit follows it; measure again, or leave out of_floor"
            raise UnjudgedError(name, reason)
        return min(limit, max(times * floor.mean, rule.least))

    def _difference(self, rule: Rule, name: str, mine: Score) -> Ruling:
        """Applies a rule to candidate − reference, signed so that more is better."""
        other = self.reference.quality.get(name)
        if other is None:
            raise UnjudgedError(name, f"the reference has no {name}")
        require_finite(name, other)
        if len(mine.per_prompt) != len(other.per_prompt) or len(mine.leave_one_out) != len(other.leave_one_out):
            raise UnjudgedError(name, f"{name} was measured on different prompts for candidate and reference")
        margin = self._threshold(rule, name, rule.margin, rule.deviations, lambda spread: spread.deviation)
        better = 1.0 if family_of(name).higher_is_better else -1.0
        bounds = bounds_of(subtract(mine, other, better), rule.confidence)
        if rule.test == "equivalent":
            return two_sided(rule, name, bounds, -margin, margin)
        return against(rule, name, bounds, -margin, at_least=True)

    def _threshold(
        self, rule: Rule, name: str, given: float | None, share: float | None, whole: Callable[[Spread], float]
    ) -> float:
        """Returns the rule's own limit or margin, or a share of the calibrated spread."""
        if given is not None:
            return given
        if rule.limits:
            reason = "the rule has a limit for each precision, and that of the reference is not known"
            raise UnjudgedError(name, f"{reason}: name it (sdopt judge --precision float32)")
        assert share is not None
        known = self.fit.calibration.metrics.get(name) if self.fit.calibration else None
        if known is None:
            config = self.candidate.config
            how = how_to_calibrate(config) if self.sees_calls else FROM_FOLDERS
            why = self.fit.refusal or f"no calibration for {config.model.name}: {how}"
            raise UnjudgedError(name, f"{why}, or give the rule a limit or margin")
        return max(share * whole(known), rule.least)

    def _performance(self, rule: Rule, gate: Gate) -> Ruling:
        """Applies a rule to the speed-up, the slowest calls or the memory ratio.

        A limit against harm always tolerates a harm too small to count. The rule fails only if the harm also exceeds
        the A/A floor, and is inconclusive on times that were disturbed.
        """
        measured, limit, at_least = self.ratio(rule.metric), rule.limit, rule.test == "at_least"
        name = with_shape(rule.metric, self.shape)
        if measured is None and self.slower is not None and rule.metric == SPEEDUP.name:
            return self.too_slow(gate, self.contract)
        if measured is None:
            raise UnjudgedError(name, f"{rule.metric} was not measured")
        assert limit is not None
        found = measured.interval(2 * (rule.confidence or 0.95) - 1)
        low, high = (found.low, found.high) if rule.confidence else (found.estimate, found.estimate)
        bounds = Bounds(found.estimate, low, high, math.nan, found.n, found.unit)
        measure = RULED[rule.metric]
        smallest, _ = smallest_change(measure, self.protocol, self.reference)
        if not at_least and not measure.higher_is_better and limit >= 1:
            limit = max(limit, smallest, self.memory_growth if measure is MEMORY_RATIO else 1.0)
        elif at_least and measure.higher_is_better and limit <= 1:
            limit = min(limit, 1 / smallest)
        ruling = against(rule, name, bounds, limit, at_least)
        floor = self.floor(rule.metric)
        if ruling.verdict is Verdict.FAIL and (floor is None or not exceeds(bounds.estimate, floor)):
            ruling.verdict = Verdict.INCONCLUSIVE
            ruling.doubt = f"two equal processes differed by {percent(floor)}"
        if measure is not MEMORY_RATIO and self.disturbed and ruling.verdict is not Verdict.INCONCLUSIVE:
            ruling.verdict = Verdict.INCONCLUSIVE
            ruling.doubt = self.disturbed
        return ruling
