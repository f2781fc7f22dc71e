"""Pairs the timed processes of two variants: those of one session and replicate, round by round."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain

import numpy as np

from sdopt.record.records import VariantResult
from sdopt.record.samples import Measurement

Pair = tuple[Measurement, Measurement]
"""A process of the candidate, and the one of its reference that was timed beside it."""

Pairs = Mapping[int, Sequence[Pair]]
"""Pairs by replicate: one for each session."""


def paired(
    candidate: VariantResult,
    reference: VariantResult,
    sessions: Collection[int] | None = None,
) -> dict[int, list[Pair]]:
    """Returns, by replicate, the measurements of two variants that share a session and have rounds to pair.

    With `sessions`, all sessions of other numbers are left out.
    """
    partners = {
        (partner.replicate, partner.session): partner
        for partner in reference.measurements
    }
    pairs: dict[int, list[Pair]] = {}
    for measurement in candidate.measurements:
        if sessions is not None and measurement.session not in sessions:
            continue
        partner = partners.get((measurement.replicate, measurement.session))
        if partner is not None and paired_logs(measurement, partner).size:
            pairs.setdefault(measurement.replicate, []).append((measurement, partner))
    return pairs


def flattened(pairs: Pairs) -> list[Pair]:
    """Returns the pairs of all replicates."""
    return list(chain.from_iterable(pairs.values()))


def logs_by_replicate(pairs: Pairs) -> dict[int, np.ndarray]:
    """Returns log(reference / candidate) by round, of each replicate, over all its sessions."""
    logs = {}
    for replicate, of_sessions in pairs.items():
        gains = [paired_logs(*pair) for pair in of_sessions]
        logs[replicate] = np.concatenate(gains)
    return logs


def means_by_replicate(pairs: Pairs) -> np.ndarray:
    """Returns the mean of log(reference / candidate) of each replicate."""
    logs = logs_by_replicate(pairs)
    return np.array([gains.mean() for gains in logs.values()])


def paired_rounds(
    candidate: VariantResult,
    reference: VariantResult,
    replicate: int,
) -> int:
    """Returns how many rounds of a replicate were timed for both variants in the same session."""
    logs = logs_by_replicate(paired(candidate, reference))
    return logs[replicate].size if replicate in logs else 0


def paired_logs(candidate: Measurement, reference: Measurement) -> np.ndarray:
    """Returns log(reference / candidate) by round."""
    blocks = any_in_block([(candidate, reference)])
    times, reference_times = shared_log_times(candidate, reference, blocks)
    gains: np.ndarray = reference_times - times
    return gains


def shared_log_times(
    candidate: Measurement,
    reference: Measurement,
    in_blocks: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the log of the times of the rounds that both have: a budget may time one of them in fewer.

    Rounds of one number belong together. In blocks no two processes share one, and the first ones are taken.
    """
    times = log_times(candidate, in_blocks)
    reference_times = log_times(reference, in_blocks)
    if in_blocks:
        count = min(times.size, reference_times.size)
        return times[:count], reference_times[:count]
    by_round = dict(zip(candidate.shapes[0].deciding_rounds, times, strict=True))
    reference_by_round = dict(
        zip(reference.shapes[0].deciding_rounds, reference_times, strict=True)
    )
    shared = [number for number in by_round if number in reference_by_round]
    return (
        np.array([by_round[number] for number in shared]),
        np.array([reference_by_round[number] for number in shared]),
    )


def log_times(measurement: Measurement, in_blocks: bool) -> np.ndarray:
    """Returns the log of the times of the rounds that decide; in blocks, relative to the baseline before and after.

    A block that broke off before the baseline was measured again gives none.
    """
    samples = measurement.shapes[0]
    times: np.ndarray = np.log(samples.deciding_s)
    if samples.latency_before_s:
        before = np.log(samples.latency_before_s)
        after = np.log(samples.latency_after_s)
        rounds = min(times.size, before.size, after.size)
        return times[:rounds] - (before[:rounds] + after[:rounds]) / 2
    # In blocks, only the baseline itself has no baseline before and after it; its ratio to itself is 1.
    return np.zeros(times.size) if in_blocks else times


def log_images(candidate: VariantResult, reference: VariantResult) -> float:
    """Returns the logarithm of how many images a call of a candidate makes, over those of a call of its reference.

    It turns a ratio of calls into one of images: reference over candidate grows by it.
    """
    return math.log(candidate.config.images_per_call / reference.config.images_per_call)


def any_in_block(pairs: Iterable[Pair]) -> bool:
    """Returns whether any process of the pairs was timed between two passes of the baseline."""
    return any(map(_in_block, chain.from_iterable(pairs)))


def only_beside_each_other(pairs: Sequence[Pair]) -> bool:
    """Returns whether a process can only be compared with its partner: in blocks, and across several sessions."""
    sessions = {measurement.session for measurement, _ in pairs}
    in_block = [_in_block(measurement) for measurement in chain.from_iterable(pairs)]
    return len(sessions) > 1 or (any(in_block) and not all(in_block))


def _in_block(measurement: Measurement) -> bool:
    return bool(measurement.shapes[0].latency_before_s)
