"""Checks whether two variants can be compared at all, and what disturbed their timed calls, in every gate."""

from collections.abc import Collection, Mapping, Sequence

from sdopt.gate.rulings import find_scores, unjudged
from sdopt.record.records import Status, StudyResult, VariantResult
from sdopt.record.samples import Call
from sdopt.record.scores import Score
from sdopt.record.verdicts import Ruling, Verdict
from sdopt.statistics.pairs import flattened, paired


def comparable(
    candidate: VariantResult, reference: VariantResult, places: Collection[str] = ()
) -> list[Ruling]:
    """Returns a ruling for each reason why two variants cannot be compared at all.

    `places` are keys of files that may lie elsewhere, because their contents were compared.
    """
    rulings = []
    if not candidate.status.measured or candidate.status is Status.SLOWER:
        reason = f"the variant was not measured (status {candidate.status}): {candidate.reason}"
        rulings.append(unjudged("status", reason))
    elif candidate.status is Status.NOT_ENGAGED:
        reason = f"there is no evidence that it took effect: {candidate.reason}"
        rulings.append(Ruling("engaged", "", Verdict.FAIL, reason))
    if reference.status is not Status.OK:
        reason = f"the reference '{reference.name}' has the status {reference.status}"
        rulings.append(unjudged("reference", reason))
    elif reference.trips:
        wires = reference.tripped
        reason = f"images of the reference '{reference.name}' are broken: {wires}"
        rulings.append(unjudged("reference", reason))
    other_work = candidate.other_work(reference, places)
    if other_work:
        rulings.append(unjudged("same work", other_work))
    return rulings


def tripwires(candidate: VariantResult) -> Ruling:
    """Fails if an image of the candidate is broken."""
    count = len(candidate.images)
    if not count:
        return unjudged("tripwires", "there are no images")
    if not candidate.trips:
        reason = f"none of {count} images is broken"
        return Ruling("tripwires", "", Verdict.PASS, reason)
    first = candidate.trips[0]
    reason = f"{first.wire}: {first.detail}"
    if first.path:
        reason += f" ({first.path})"
    if candidate.broken_images:  # none if only the file of latents has changed
        reason += f"; {candidate.broken_images} of {count} in all"
    return Ruling("tripwires", "", Verdict.FAIL, reason)


def steps_left_out(result: StudyResult) -> bool:
    """Returns whether a budget left no time for the calls that count the denoiser's steps."""
    return result.budget is not None and not result.budget.stages


def same_work(
    candidate: VariantResult, reference: VariantResult, left_out: bool = False
) -> Ruling:
    """Checks that a variant configured for as many steps as its reference took them.

    `left_out` is whether a budget left no time for the calls that count them.
    """
    if not candidate.config.runs_as_often(reference.config):
        reason = "not compared: the variant chooses another scheduler, number of steps or guidance scale"
        return Ruling("steps", "", Verdict.PASS, reason)
    calls = candidate.denoiser_calls
    reference_calls = reference.denoiser_calls
    if calls is None or reference_calls is None:
        sides = (candidate, reference)
        silent = " and ".join(
            side.name for side in sides if side.denoiser_calls is None
        )
        reason = f"the denoiser never ran in an observed call of {silent}"
        if left_out:
            reason = f"protocol.budget_s left no time for a call of {silent} that counts them"
        return unjudged("steps", reason)
    if calls != reference_calls:
        reason = f"the denoiser ran {calls} times per call, in the reference {reference_calls} times"
        return Ruling("steps", "", Verdict.FAIL, reason)
    reason = f"the denoiser ran {calls} times per call on both sides"
    return Ruling("steps", "", Verdict.PASS, reason)


def effect_seen(
    changes: Sequence[str] | None,
    distances: Mapping[str, Score],
) -> list[Ruling]:
    """Rules on options whose evidence is only their own word, such as that a hook is attached.

    `changes` are those between the traces of both, and `distances` those between their images.
    """
    if changes is None or changes:
        return []
    errors: list[float | None] = []
    for score in find_scores(distances, "mse").values():
        errors += score.per_prompt
    if not errors or any(error != 0 for error in errors):
        return []
    reason = (
        "that it took effect is only the option's own word: "
        "sdopt's own trace and every image are the same as the reference's"
    )
    return [Ruling("engaged", "", Verdict.INCONCLUSIVE, reason)]


# What the times may be wrong by ---------------------------------------------------------------------------------------


def repeated_prompts(
    candidate: VariantResult,
    reference: VariantResult,
) -> list[Ruling]:
    """Rules on a speed-up of calls that repeated prompts and noise: remembering may have made them faster."""
    calls = [*candidate.calls, *reference.calls]
    repeated = sum(call.repeated for call in calls)
    if not repeated:
        return []
    reason = (
        f"{repeated} timed calls repeated a prompt, "
        "so a cache may have made them faster: raise quality.prompt_count"
    )
    return [Ruling("fresh prompts", "", Verdict.INCONCLUSIVE, reason)]


def disturbances(
    result: StudyResult,
    candidate: VariantResult,
    reference: VariantResult,
) -> list[str]:
    """Says what disturbed the rounds of two variants: other work, another study included.

    Sessions that timed no round of both do not count.
    """
    limit = result.config.protocol.interference
    if limit is None:
        return []
    pairs = flattened(paired(candidate, reference))
    sessions = {measurement.session for measurement, _ in pairs}
    disturbed = []
    for variant in (candidate, reference):
        shares: list[float] = []
        for measurement in variant.measurements:
            if measurement.session in sessions:
                shares += _deciding(measurement.main.calls)
        count = sum(share > limit for share in shares)
        if 2 * count > len(shares):
            disturbed.append(
                f"other programs took more than {100 * limit:g} % "
                f"from {count} of {len(shares)} calls of '{variant.name}' that decide: "
                "measure again on an idle machine"
            )
    return list(dict.fromkeys(disturbed))  # a baseline may be compared with itself


def uncounted(
    result: StudyResult,
    candidate: VariantResult,
    reference: VariantResult,
) -> list[str]:
    """Says that nothing counted what disturbed the timed calls of two variants, so that `disturbances` saw none."""
    if result.config.protocol.interference is None:
        return []
    calls = [*candidate.calls, *reference.calls]
    if not calls or _deciding(calls):
        return []
    return [
        "nothing counted what other programs took from these calls, so that other work would not show"
    ]


def _deciding(calls: Sequence[Call]) -> list[float]:
    """Returns, for each timed call that decides, the share that others took, if it is known."""
    deciding = (call.disturbed for call in calls if not call.left_out)
    return [share for share in deciding if share is not None]
