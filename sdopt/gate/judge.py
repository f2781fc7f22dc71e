"""The gate: applies rules fixed beforehand to the measurements of a study. It decides; nothing here measures.

Begin reading at `RuleContext.apply` in `rule_context`, which says where a limit comes from: the rule in `conf/gate/`,
which may have one for each number type, or from a share of the calibrated spread.

Every rule fails closed: a value that is missing, not finite or not comparable never passes. A rule that compares an
estimate with a limit passes if the whole one-sided interval lies on the right side, fails if it lies on the wrong side,
and is inconclusive in between (non-inferiority as in Piaggio et al. 2012, with prompts as the unit that is resampled).

A candidate passes only if all its rules do, so the rules need no correction for their number. Claims of a gain need
one: they are tested together (`paying`). A study that was extended after it was judged cannot pass (`looks`). If other
programs disturbed the timings, rules on time are inconclusive and the candidate cannot pass.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from sdopt.contract import Contract
from sdopt.gate.calibration import Fit
from sdopt.gate.comparability import (
    comparable,
    disturbances,
    effect_seen,
    repeated_prompts,
    same_work,
    steps_left_out,
    tripwires,
    uncounted,
)
from sdopt.gate.looks import look_at, record_look, ruling_of
from sdopt.gate.paying import Claim, answer_claims, must_pay
from sdopt.gate.rule_checks import applicable
from sdopt.gate.rule_context import RuleContext
from sdopt.gate.rulings import unjudged, without_keys
from sdopt.gate.trust import trust_rulings
from sdopt.record.comparisons import Comparison
from sdopt.record.records import Status, StudyResult
from sdopt.record.verdicts import UNDISTURBED, Judgement, Look, Ruling, Verdict, worst
from sdopt.schema import Gate
from sdopt.statistics.changes import changes_of
from sdopt.statistics.giving_up import at_least_slower
from sdopt.statistics.measures import (
    MEASURES,
    MEMORY_RATIO,
    RULED,
    SPEEDUP,
    smallest_change,
    spared_growth,
)


def judge(result: StudyResult, gate: Gate, fit: Fit) -> None:
    """Fills in `result.judgements`: one for each of `judged_comparisons`.

    Records each comparison's look in `result.looks`. `fit` is the calibration for margins: see `calibration_for`.
    """
    result.gate = gate.name
    gate = applicable(gate, result.config.quality, result.config.model)
    comparisons = judged_comparisons(result)
    at_shapes = [_contexts(result, comparison, gate, fit) for comparison in comparisons]
    claims: list[list[Claim]] = []
    for contexts in at_shapes:
        claims.append(claims_of(contexts) if gate.must_pay else [])
    # A claim is tested together with those of all other comparisons.
    answer_claims(list(chain.from_iterable(claims)), gate.confidence)
    result.judgements = []
    for comparison, contexts, claimed in zip(
        comparisons, at_shapes, claims, strict=True
    ):
        look = look_at(result, comparison, gate)
        judged = _judged(result, comparison, contexts, gate, claimed, look)
        result.judgements.append(judged)
        record_look(result, look, judged.verdict)


def _judged(
    result: StudyResult,
    comparison: Comparison,
    contexts: Sequence[RuleContext],
    gate: Gate,
    claims: Sequence[Claim],
    look: Look,
) -> Judgement:
    """Returns the judgement of one comparison, from the answers to its claims."""
    context = contexts[0]
    paying = [claim for claim in claims if claim.answer == "it pays"]
    rulings = rulings_of(contexts, gate, context.contract)
    if context.comparable:
        changes = changes_of(result, context.candidate, context.reference)
        if claims:
            rulings.append(must_pay(claims, changes))
        if context.promises and not paying:
            rulings += effect_seen(changes, context.paired)
        if any(claim.measure is SPEEDUP for claim in paying):
            rulings += repeated_prompts(context.candidate, context.reference)
        rulings += ruling_of(look)
    if result.is_imported:
        rulings = [without_keys(ruling) for ruling in rulings]
    note = "; ".join(_notes(result, context))
    judged = judgement(comparison, context.contract, rulings, note)
    for claim in claims:
        if claim.p_gain is not None:
            judged.claims[claim.name] = claim.p_gain
    judged.gains = [claim.name for claim in paying]
    return judged


def _notes(result: StudyResult, context: RuleContext) -> Iterator[str]:
    """Yields what a reader of a judgement has to know."""
    promises = context.candidate.promises_beside(context.reference)
    if len({promise.contract for promise in promises}) > 1:
        yield (
            "some of its options keep images more closely than others, and it is judged by what the loosest of them "
            f"promises, {context.contract}"
        )
    if context.fit.note:
        yield context.fit.note
    yield from uncounted(result, context.candidate, context.reference)
    if result.per_image:
        yield "speed-ups are per image, because calls make different numbers of images"
    if result.is_imported:
        yield (
            "another program made these images and times: whether its options took effect, "
            "and whether timed calls make the same images, is its own word"
        )


def judged_comparisons(result: StudyResult) -> list[Comparison]:
    """Returns the comparisons that a gate judges: without the repeated baseline and skipped candidates."""
    judged = {row.name for row in result.variants if not row.is_control}
    judged -= {row.name for row in result.variants if row.status is Status.SKIPPED}
    return [edge for edge in result.comparisons if edge.candidate in judged]


def left_unjudged(result: StudyResult) -> bool:
    """Returns whether the study's own gate has judged nothing of what was measured, and so has passed nothing."""
    gate = result.config.gate
    asked = gate.judges and not gate.report_only and result.status == "finished"
    if not asked or result.judgements:
        return False
    return any(variant.status.measured for variant in result.candidates)


def exit_code(judgements: Sequence[Judgement], gate: Gate) -> int:
    """Returns 0 if all judgements pass, 1 for a regression, and 3 if something could not be judged."""
    if gate.report_only or not judgements:
        return 0
    verdict = worst(judgement.verdict for judgement in judgements)
    passes = verdict is Verdict.INCONCLUSIVE and gate.undecided_passes
    if passes or verdict is Verdict.PASS:
        return 0
    return 1 if verdict is Verdict.FAIL else 3


def worst_code(codes: Iterable[int]) -> int:
    """Returns the exit code of a command from those of its parts; 0 if there are none.

    A regression (1) counts most: it needs more notice than what could not be measured or judged.
    """
    all_codes = [0, *codes]
    return 1 if 1 in all_codes else max(all_codes)


def _contexts(
    result: StudyResult,
    comparison: Comparison,
    gate: Gate,
    fit: Fit,
) -> list[RuleContext]:
    """Returns the comparison at each shape."""
    sees_calls = not result.is_imported

    def at(shape_index: int) -> RuleContext:
        view = result.at(shape_index)
        edge = comparison.at(shape_index)
        candidate, reference = view.sides(edge)
        is_main = shape_index == 0
        trust = (
            trust_rulings(view, candidate, reference) if sees_calls and is_main else []
        )
        over_baseline = reference.name == result.baseline
        return RuleContext(
            candidate,
            reference,
            edge.quality,
            fit.of(reference.name),
            lambda metric: RULED[metric].log_ratio(candidate, reference),
            lambda metric: RULED[metric].floor(view, edge),
            "; ".join(disturbances(view, candidate, reference)),
            trust=tuple(trust),
            sees_calls=sees_calls,
            shape=candidate.config.shapes[0].name if len(result.shapes) > 1 else "",
            floors=result.floors.get("numerical", {}),
            memory_growth=spared_growth(gate, reference, result),
            protocol=result.config.protocol,
            slower=at_least_slower(candidate) if over_baseline else None,
            steps_left_out=steps_left_out(result),
        )

    return [at(shape_index) for shape_index in range(len(result.shapes))]


def claims_of(contexts: Sequence[RuleContext]) -> list[Claim]:
    """Returns a candidate's claims at each shape, to be tested together with all other claims of the study."""
    claims: list[Claim] = []
    if not contexts[0].comparable:
        return claims
    for context in contexts:
        for metric in context.claimed:
            measure = MEASURES[metric]
            smallest, _ = smallest_change(measure, context.protocol, context.reference)
            claims.append(
                Claim(
                    measure,
                    context.ratio(metric),
                    smallest,
                    context.floor(metric),
                    context.disturbed if measure is SPEEDUP else "",
                    context.shape,
                    context.memory_growth if measure is MEMORY_RATIO else 1.0,
                )
            )
    return claims


def rulings_of(
    contexts: Sequence[RuleContext],
    gate: Gate,
    contract: Contract,
) -> list[Ruling]:
    """Applies the gate's rules for a contract at each shape, and those for all; if not comparable, returns why.

    Does not rule on whether the candidate pays: that depends on all claims of the study.
    """
    first = contexts[0]
    if first.candidate.status is Status.SLOWER:
        return [first.too_slow(gate, contract)]
    rulings = comparable(first.candidate, first.reference, first.places)
    if rulings:
        return rulings
    rulings.append(tripwires(first.candidate))
    if first.sees_calls:
        rulings.append(
            same_work(first.candidate, first.reference, first.steps_left_out)
        )
        rulings += first.trust
    rules = gate.rules.get(contract, [])
    for rule in rules:
        at_shapes = contexts if rule.metric in RULED else [first]
        rulings += [context.apply(rule, gate) for context in at_shapes]
    if not rules:
        reason = f"no rules for the contract {contract} in gate={gate.name}"
        rulings.append(unjudged("rules", reason))
    if first.disturbed:
        rulings.append(Ruling(UNDISTURBED, "", Verdict.INCONCLUSIVE, first.disturbed))
    return rulings


def judgement(
    comparison: Comparison,
    contract: Contract,
    rulings: list[Ruling],
    note: str = "",
) -> Judgement:
    """Returns the judgement of a comparison: the worst of the rulings counts."""
    verdict = worst(ruling.verdict for ruling in rulings)
    return Judgement(
        comparison.candidate,
        comparison.reference,
        comparison.credit,
        contract,
        verdict,
        rulings,
        note,
    )
