"""Finds disturbed rounds, and selects the rounds that decide: by counted causes, never by the times themselves."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sdopt.record.records import StudyResult
from sdopt.record.samples import ShapeSamples


def worst_by_round(timed: Iterable[ShapeSamples]) -> list[float]:
    """Returns the largest share in each round that all these samples include; 0 if no share is known."""
    rounds = zip(*(samples.calls for samples in timed), strict=False)
    return [max((call.disturbed for call in calls if call.disturbed is not None), default=0.0) for calls in rounds]


def enough_clean(worst: Sequence[float], rounds: int, limit: float | None) -> bool:
    """Returns whether enough rounds are within the limit of disturbance; without a limit, all rounds are."""
    return limit is None or sum(share <= limit for share in worst) >= rounds


def rounds_left_out(worst: Sequence[float], rounds: int, limit: float | None) -> list[int]:
    """Returns the indices of the rounds to leave out: all but the `rounds` least disturbed; none without a limit.

    Rounds within the limit count as equally good, so the earliest of them are kept.
    """
    if limit is None:
        return []
    ranked = sorted(range(len(worst)), key=lambda round_index: max(worst[round_index], limit))
    return sorted(ranked[rounds:])


@dataclass(frozen=True)
class RoundCounts:
    """The rounds of a study; in blocks, each call of a block is a round.

    Attributes:
        timed: all rounds whose interference is known.
        disturbed: those with a call from which others took more than `protocol.interference`.
        left_out: those that decide nothing.
        undecided: disturbed ones that decide all the same, because there were too few clean ones.
        waited: the largest share of the processor that a worker waited for.
        stolen: the largest share that the hypervisor took.
        on_gpu: the largest share for which others used the GPU.
    """

    timed: int
    disturbed: int
    left_out: int
    undecided: int
    waited: float
    stolen: float
    on_gpu: float


def count_rounds(result: StudyResult) -> RoundCounts | None:
    """Counts the rounds of a study; None where nothing says what disturbed them, or nothing is to be left out."""
    limit = result.config.protocol.interference
    worst: dict[tuple[object, ...], float] = {}
    left_out = set()
    for variant in result.variants:
        for number, measurement in enumerate(variant.measurements):
            in_blocks = bool(result.sessions) and result.sessions[measurement.session].schedule == "blocks"
            for samples in measurement.shapes:
                for call in samples.calls:
                    if (share := call.disturbed) is not None:
                        key = (measurement.session, call.round, *((variant.name, number) if in_blocks else ()))
                        worst[key] = max(share, worst.get(key, 0.0))
                        if call.left_out:
                            left_out.add(key)
    if limit is None or not worst:
        return None
    disturbed = {key for key, share in worst.items() if share > limit}
    calls = [call for row in result.variants for m in row.measurements for at in m.shapes for call in at.calls]
    found = [call.interference for call in calls if call.interference is not None]
    return RoundCounts(
        timed=len(worst),
        disturbed=len(disturbed),
        left_out=len(left_out),
        undecided=len(disturbed - left_out),
        waited=max(one.waited for one in found),
        stolen=max(one.stolen for one in found),
        on_gpu=max((call.gpu.others or 0.0 for call in calls if call.gpu), default=0.0),
    )
