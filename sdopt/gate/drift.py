"""Compares a later result of a study with an earlier one, to find regressions between commits or versions.

Speed is compared as each result's own speed-up over its own baseline, because times of two runs share no rounds; images
are compared prompt by prompt.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from sdopt.contract import Contract
from sdopt.errors import UsageError
from sdopt.gate.calibration import Fit
from sdopt.gate.comparability import disturbances, steps_left_out
from sdopt.gate.differences import PLACES, Difference, differences
from sdopt.gate.judge import judgement, rulings_of
from sdopt.gate.rule_checks import applicable
from sdopt.gate.rule_context import RuleContext
from sdopt.gate.rulings import unjudged
from sdopt.gate.trust import trust_rulings
from sdopt.quality.metrics import family_of, measured_metrics
from sdopt.record.comparisons import Comparison
from sdopt.record.records import Status, StudyResult, VariantResult
from sdopt.record.scores import Score, Spread
from sdopt.record.verdicts import BROKEN, SINCE, Judgement, Ruling, Verdict
from sdopt.schema import Gate, Quality, Rule
from sdopt.statistics.giving_up import at_least_slower
from sdopt.statistics.measures import SPEEDUP, is_of_images
from sdopt.statistics.ratios import LogRatio, log_speedup, speedup_drift

_Sides = tuple[VariantResult, VariantResult]
"""A variant of one result, and the baseline of the same result."""


def judge_drift(
    later: StudyResult,
    earlier: StudyResult,
    gate: Gate,
    fit: Fit,
    waived: Collection[str] = (),
    folders: tuple[Path, Path] | None = None,
) -> list[Judgement]:
    """Returns one judgement for each variant of either result; the later result is the candidate.

    A variant that only one of them has cannot be judged, and is not comparable.

    Args:
        later: the result to judge.
        earlier: the result to compare it with.
        gate: holds the rules. Each variant is judged as `equivalent`, or as `lossy` if a difference is waived.
        fit: the calibration of the later result, for margins; see `calibration_for`.
        waived: names from `WAIVERS`.
        folders: the folders of both results, to compare their images; without them, paired metrics are omitted.

    Raises:
        UsageError: the results are not comparable; the message names every difference.
    """
    gate = applicable(gate, later.config.quality, later.config.model)
    allowed = differences(later, earlier)
    _require_waived(allowed, waived)
    names = _names(later)
    earlier_names = _names(earlier)
    common = [name for name in names if name in earlier_names]
    if not common:
        raise UsageError("not comparable: the two results have no variant in common")
    contract = Contract.LOSSY if allowed else Contract.EQUIVALENT
    pairs_images = folders is not None and not allowed
    smallest = later.config.protocol.smallest_speedup
    rules = []
    for rule in gate.rules.get(contract, []):
        if _fits(rule, pairs_images):
            rules.append(_of_drift(rule, smallest))
    judged = replace(gate, rules={contract: rules}, must_pay=False)
    moment = earlier.started[:16].replace("T", " ")
    swapped = later.started < earlier.started
    notes = "; ".join(_notes(allowed, folders, fit, moment, swapped))

    def of(
        name: str, rulings: list[Ruling], note: str = "", reference: str = ""
    ) -> Judgement:
        # No moment: CI follows a variant by these names.
        reference = reference or f"{name} of the earlier result"
        comparison = Comparison(name, reference, SINCE)
        return judgement(comparison, contract, rulings, note)

    judgements = []
    if not pairs_images:
        folders = None
    for name in common:
        contexts = _contexts(later, earlier, name, fit, folders)
        lost = _broken(later, earlier, name) or _lost_gain(later, earlier, name, rules)
        rulings = [lost] if lost else rulings_of(contexts, judged, contract)
        judgements.append(of(name, rulings, notes))
    # An option that is gone must not pass.
    for name in [*names, *earlier_names]:
        if name not in common:
            which, reference = "judged", ""
            if name in names:
                which, reference = "earlier", "nothing in the earlier result"
            alone = unjudged("variant", f"the {which} result has no {name}")
            judgements.append(of(name, [alone], reference=reference))
    return judgements


def _names(result: StudyResult) -> list[str]:
    return [variant.name for variant in result.variants if not variant.is_control]


def _require_waived(allowed: Sequence[Difference], waived: Collection[str]) -> None:
    """Raises UsageError for differences that are not waived; the last one says which can be."""
    refused = [difference for difference in allowed if difference[1] not in waived]
    if not refused:
        return
    problems = [f"not comparable: {what}" for what, _ in refused]
    waivers = sorted({waiver for _, waiver in refused} - {""})
    if waivers:
        problems[-1] += (
            f"; `--waive {','.join(waivers)}` allows the differences that can be waived"
        )
    raise UsageError(problems)


def _fits(rule: Rule, pairs_images: bool) -> bool:
    """Returns whether a rule can judge two results: memory and the largest calls were not measured side by side."""
    if is_of_images(rule.metric):
        return pairs_images or not family_of(rule.metric).needs_pair
    return rule.metric == SPEEDUP.name and rule.how.side == "least"


def _of_drift(rule: Rule, smallest: float) -> Rule:
    """Returns a rule as it holds between two results: a gain to be reached is one over the baseline, and not again.

    `smallest` is the smallest change of speed that counts, beyond which a speed-up must not be smaller.
    """
    if rule.metric != SPEEDUP.name or rule.limit is None:
        return rule
    return replace(rule, limit=min(rule.limit, 1 / (1 + smallest)))


def _notes(
    waived: Sequence[Difference],
    folders: tuple[Path, Path] | None,
    fit: Fit,
    moment: str,
    swapped: bool,
) -> Iterator[str]:
    order = ", which was measured after the one that is judged" if swapped else ""
    yield f"held against the result of {moment}{order}"
    if waived:
        yield f"waived: {'; '.join(what for what, _ in waived)}"
    if folders is None:
        yield "images were not compared pair by pair: that takes the image files of both runs"
    elif waived:
        yield "images were not compared pair by pair"
    if fit.note:
        yield fit.note


# Both results, as rules see them --------------------------------------------------------------------------------------


def _contexts(
    later: StudyResult,
    earlier: StudyResult,
    name: str,
    fit: Fit,
    folders: tuple[Path, Path] | None,
) -> list[RuleContext]:
    """Returns a variant of both results at each shape, as the candidate and the reference of rules."""
    distances: Mapping[str, Score] = {}
    if folders:
        distances = _distances(later.variant(name), earlier.variant(name), folders)
    floors = _smaller_floors(later, earlier)
    same_images = _same_images(later.variant(name), earlier.variant(name))

    def at(shape_index: int) -> RuleContext:
        views = later.at(shape_index), earlier.at(shape_index)
        now, then = (_sides(view, name) for view in views)
        known_floors = [view.floor for view in views if view.floor is not None]
        floor = max(known_floors, default=None)

        def speedup(_metric: str) -> LogRatio | None:
            if name == later.baseline:  # whose own speed-up is 1
                return LogRatio(0.0, 0.0)
            return speedup_drift(now, then)

        candidate, _ = now
        reference, _ = then
        return RuleContext(
            candidate,
            reference,
            distances,
            fit,
            speedup,
            lambda _metric: floor,
            disturbed="; ".join(_disturbances(views, (now, then))),
            trust=() if shape_index else _trust(views, (now, then)),
            shape=candidate.config.shapes[0].name if len(later.shapes) > 1 else "",
            floors=floors,
            protocol=later.config.protocol,
            same_images=same_images,
            steps_left_out=steps_left_out(later) or steps_left_out(earlier),
            places=PLACES,
        )

    return [at(shape_index) for shape_index in range(len(later.shapes))]


def _broken(later: StudyResult, earlier: StudyResult, name: str) -> Ruling | None:
    """Returns that a variant worked in the earlier result and fails now; None for every other one."""
    now = later.variant(name)
    if earlier.variant(name).status is not Status.OK or not now.status.failure:
        return None
    said = now.reason.partition("\n")[0]
    return unjudged(BROKEN, f"it worked in the earlier result and fails now: {said}")


def _lost_gain(
    later: StudyResult, earlier: StudyResult, name: str, rules: Sequence[Rule]
) -> Ruling | None:
    """Fails a variant that was timed to the end, and now is so slow that it was not; None for every other one."""
    limits = [
        rule.limit for rule in rules if rule.metric == SPEEDUP.name and rule.limit
    ]
    now = later.variant(name)
    times = at_least_slower(now) if now.status is Status.SLOWER else None
    before = log_speedup(*_sides(earlier, name))
    if times is None or before is None or not limits:
        return None
    low = before.interval(earlier.confidence).low
    limit = max(limits)
    if low is None or 1 / (times * low) >= limit:
        return None
    ratio = 1 / (times * low)
    reason = f"{now.reason}: at most {ratio:.2g} of its earlier gain, below the limit {limit:.4g}"
    return Ruling(
        "at_least",
        SPEEDUP.name,
        Verdict.FAIL,
        reason,
        estimate=ratio,
        margin=limit,
    )


def _sides(result: StudyResult, name: str) -> _Sides:
    return result.variant(name), result.baseline_variant


def _smaller_floors(later: StudyResult, earlier: StudyResult) -> dict[str, Spread]:
    """Returns the smaller of both numerical floors by metric: a regression that raises its own must widen no limit."""
    floors = dict(later.floors.get("numerical", {}))
    for metric, floor in earlier.floors.get("numerical", {}).items():
        if metric not in floors or floor.mean < floors[metric].mean:
            floors[metric] = floor
    return floors


def _disturbances(
    views: tuple[StudyResult, StudyResult],
    sides: tuple[_Sides, _Sides],
) -> list[str]:
    later, earlier = (
        disturbances(view, *pair) for view, pair in zip(views, sides, strict=True)
    )
    return [
        *(f"in the judged result: {cause}" for cause in later),
        *(f"in the earlier result: {cause}" for cause in earlier),
    ]


def _trust(
    views: tuple[StudyResult, StudyResult],
    sides: tuple[_Sides, _Sides],
) -> tuple[Ruling, ...]:
    """Returns the rulings on whether both results can be believed; those on the earlier result never pass or fail."""
    later, earlier = (
        trust_rulings(view, *pair) for view, pair in zip(views, sides, strict=True)
    )
    rulings = list(later)
    for ruling in earlier:
        verdict = ruling.verdict
        if verdict is Verdict.PASS:
            continue
        if verdict is Verdict.FAIL:
            verdict = Verdict.NOT_COMPARABLE
        reason = f"in the earlier result: {ruling.text}"
        rulings.append(replace(ruling, verdict=verdict, reason=reason, doubt=""))
    return tuple(rulings)


def _same_images(now: VariantResult, then: VariantResult) -> bool:
    """Returns whether every image of a variant is the same file in both results."""
    digests = [image.digest for image in now.images]
    earlier_digests = [image.digest for image in then.images]
    return bool(digests) and all(digests) and digests == earlier_digests


def _distances(
    now: VariantResult,
    then: VariantResult,
    folders: tuple[Path, Path],
) -> dict[str, Score]:
    """Returns the distances between a variant's images in the two results, in pixels and latents."""
    from sdopt.quality.evaluation import Evaluator, Settings
    from sdopt.quality.inputs import Pictures

    metrics = measured_metrics(Quality(features=[]), now.config.model)
    later, earlier = folders
    pictures = Pictures(later, now.images), Pictures(earlier, then.images)
    if not now.images or not then.images:
        return {}
    return Evaluator(Settings(metrics)).of_pair(*pictures)
