"""Finds disturbed rounds, and selects the rounds that decide: by counted causes, never by the times themselves."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sdopt.results.records import StudyResult
from sdopt.results.samples import ShapeSamples


def shares(samples: ShapeSamples) -> list[float | None]:
    """Returns, for each timed call, the share that other work took of the processor or the GPU; None if not known."""
    count = len(samples.latency_s)
    calls = samples.interference if len(samples.interference) == count else [None] * count
    on_gpu = [state.others or 0.0 for state in samples.gpu] if len(samples.gpu) == count else [0.0] * count
    return [
        None if call is None else call.waited + call.stolen + more for call, more in zip(calls, on_gpu, strict=True)
    ]


def worst_by_round(timed: Iterable[ShapeSamples]) -> list[float]:
    """Returns the largest share in each round that all these samples include; 0 if no share is known."""
    found = [shares(samples) for samples in timed]
    return [max((share for share in calls if share is not None), default=0.0) for calls in zip(*found, strict=False)]


def enough_clean(worst: Sequence[float], rounds: int, limit: float | None) -> bool:
    """Returns whether enough rounds are within the limit of disturbance; without a limit, all rounds are."""
    return limit is None or sum(share <= limit for share in worst) >= rounds


def rounds_left_out(worst: Sequence[float], rounds: int, limit: float | None) -> list[int]:
    """Returns the indices of the rounds to leave out: all but the `rounds` least disturbed ones.

    Rounds within the limit count as equally good, so the earliest of them are kept.

    Args:
        worst: the largest share of each round.
        rounds: how many decide.
        limit: share up to which a round is clean; None leaves out none.
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
                for round_index, share in enumerate(shares(samples)):
                    if share is not None:
                        key = (measurement.session, round_index, *((variant.name, number) if in_blocks else ()))
                        worst[key] = max(share, worst.get(key, 0.0))
                        if round_index in samples.left_out:
                            left_out.add(key)
    if limit is None or not worst:
        return None
    disturbed = {key for key, share in worst.items() if share > limit}
    measured = [
        samples for variant in result.variants for measurement in variant.measurements for samples in measurement.shapes
    ]
    calls = [call for samples in measured for call in samples.interference if call is not None]
    return RoundCounts(
        timed=len(worst),
        disturbed=len(disturbed),
        left_out=len(left_out),
        undecided=len(disturbed - left_out),
        waited=max(call.waited for call in calls),
        stolen=max(call.stolen for call in calls),
        on_gpu=max((state.others or 0.0 for samples in measured for state in samples.gpu), default=0.0),
    )
