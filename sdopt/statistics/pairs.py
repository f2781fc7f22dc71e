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
    partners = {}
    for partner in reference.measurements:
        partners[partner.replicate, partner.session] = partner
    pairs: dict[int, list[Pair]] = {}
    for measurement in candidate.measurements:
        replicate = measurement.replicate
        session = measurement.session
        if sessions is not None and session not in sessions:
            continue
        if (replicate, session) not in partners:
            continue
        pair = (measurement, partners[replicate, session])
        if paired_logs(*pair).size:
            pairs.setdefault(replicate, []).append(pair)
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
    means = [gains.mean() for gains in logs.values()]
    return np.array(means)


def paired_rounds(
    candidate: VariantResult,
    reference: VariantResult,
    replicate: int,
) -> int:
    """Returns how many rounds of a replicate were timed for both variants in the same session."""
    pairs = paired(candidate, reference).get(replicate, [])
    return sum(paired_logs(*pair).size for pair in pairs)


def paired_logs(candidate: Measurement, reference: Measurement) -> np.ndarray:
    """Returns log(reference / candidate) by round."""
    in_blocks = any_in_block([(candidate, reference)])
    times, reference_times = shared_log_times(candidate, reference, in_blocks)
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
    _, shared, reference_shared = np.intersect1d(
        candidate.main.deciding_rounds,
        reference.main.deciding_rounds,
        return_indices=True,
    )
    return times[shared], reference_times[reference_shared]


def log_times(measurement: Measurement, in_blocks: bool) -> np.ndarray:
    """Returns the log of the times of the rounds that decide; in blocks, relative to the baseline before and after.

    A block that broke off before the baseline was measured again gives none.
    """
    samples = measurement.main
    times: np.ndarray = np.log(samples.deciding_s)
    if samples.latency_before_s:
        before = np.log(samples.latency_before_s)
        after = np.log(samples.latency_after_s)
        rounds = min(times.size, before.size, after.size)
        around = (before[:rounds] + after[:rounds]) / 2
        return times[:rounds] - around
    # In blocks, only the baseline itself has no baseline before and after it; its ratio to itself is 1.
    return np.zeros(times.size) if in_blocks else times


def log_images(candidate: VariantResult, reference: VariantResult) -> float:
    """Returns the logarithm of how many images a call of a candidate makes, over those of a call of its reference.

    It turns a ratio of calls into one of images: reference over candidate grows by it.
    """
    images = candidate.config.images_per_call
    return math.log(images / reference.config.images_per_call)


def any_in_block(pairs: Iterable[Pair]) -> bool:
    """Returns whether any process of the pairs was timed between two passes of the baseline."""
    processes = chain.from_iterable(pairs)
    return any(map(_in_block, processes))


def only_beside_each_other(pairs: Sequence[Pair]) -> bool:
    """Returns whether a process can only be compared with its partner: in blocks, and across several sessions."""
    sessions = {measurement.session for measurement, _ in pairs}
    processes = chain.from_iterable(pairs)
    kinds = set(map(_in_block, processes))
    return len(sessions) > 1 or len(kinds) > 1


def _in_block(measurement: Measurement) -> bool:
    samples = measurement.main
    return bool(samples.latency_before_s)
