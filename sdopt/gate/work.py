"""Checks whether two variants can be compared: both measured, on the same work, and neither with broken images."""

from collections.abc import Mapping, Sequence

from sdopt.gate.rulings import find_scores, unjudged
from sdopt.record.records import Status, VariantResult
from sdopt.record.scores import Score
from sdopt.record.verdicts import Ruling, Verdict


def comparable(candidate: VariantResult, reference: VariantResult) -> list[Ruling]:
    """Returns a ruling for each reason why two variants cannot be compared at all."""
    rulings = []
    if not candidate.status.measured:
        rulings.append(
            unjudged("status", f"the variant was not measured (status {candidate.status}): {candidate.reason}")
        )
    elif candidate.status is Status.NOT_ENGAGED:
        rulings.append(
            Ruling("engaged", "", Verdict.FAIL, f"there is no evidence that it took effect: {candidate.reason}")
        )
    if reference.status is not Status.OK:
        rulings.append(unjudged("reference", f"the reference '{reference.name}' has the status {reference.status}"))
    elif reference.trips:
        wires = ", ".join(sorted({trip.wire for trip in reference.trips}))
        rulings.append(unjudged("reference", f"images of the reference '{reference.name}' are broken: {wires}"))
    other = [
        f"{key} ({mine} against {theirs})"
        for key, (mine, theirs) in candidate.config.incomparable_work(reference.config).items()
    ]
    if other:
        rulings.append(unjudged("same work", f"not the same work: {', '.join(other)}"))
    return rulings


def tripwires(candidate: VariantResult) -> Ruling:
    """Fails if an image of the candidate is broken."""
    if not candidate.images:
        return unjudged("tripwires", "there are no images")
    if not candidate.trips:
        return Ruling("tripwires", "", Verdict.PASS, f"none of {len(candidate.images)} images is broken")
    first = candidate.trips[0]
    where = f" ({first.path})" if first.path else ""
    broken = candidate.broken_images  # none if only the file of latents has changed
    share = f"; {broken} of {len(candidate.images)} images are broken" if broken else ""
    return Ruling("tripwires", "", Verdict.FAIL, f"{first.wire}: {first.detail}{where}{share}")


def same_work(candidate: VariantResult, reference: VariantResult) -> Ruling:
    """Checks that a variant configured for as many steps as its reference took them."""
    asked = [(v.config.workload.steps, v.config.scheduler) for v in (candidate, reference)]
    mine, other = candidate.denoiser_calls, reference.denoiser_calls
    if asked[0] != asked[1]:
        return Ruling(
            "steps", "", Verdict.PASS, "not compared: the variant chooses another scheduler or number of steps"
        )
    if mine is None or other is None:
        silent = " and ".join(side.name for side in (candidate, reference) if side.denoiser_calls is None)
        return unjudged("steps", f"the denoiser never ran in an observed call of {silent}")
    if mine != other:
        return Ruling(
            "steps", "", Verdict.FAIL, f"the denoiser ran {mine} times per call, in the reference {other} times"
        )
    return Ruling("steps", "", Verdict.PASS, f"the denoiser ran {mine} times per call on both sides")


def effect_seen(changes: Sequence[str] | None, paired: Mapping[str, Score]) -> list[Ruling]:
    """Rules on options whose evidence is only their own word, such as that a hook is attached.

    Args:
        changes: how the trace of the candidate differs from the reference's (`sdopt.statistics.changes`).
        paired: distances between the images of both, pair by pair.
    """
    errors = [error for score in find_scores(paired, "mse").values() for error in score.per_prompt]
    if changes is None or changes or not errors or any(error != 0 for error in errors):
        return []
    seen = "sdopt's own trace and every image are the same as the reference's"
    return [Ruling("engaged", "", Verdict.INCONCLUSIVE, f"that it took effect is only the option's own word: {seen}")]
