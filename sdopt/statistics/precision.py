"""Finds how many processes an interval of a wanted width needs."""

import math
from collections.abc import Mapping

from sdopt.errors import UsageError
from sdopt.record.records import StudyResult
from sdopt.schema import Gate, Protocol
from sdopt.statistics.ratios import MINIMUM_PROCESSES, pilot_speedup


def require_precision(protocol: Protocol, gate: Gate) -> None:
    """Raises UsageError if no number of processes could reach the precision."""
    if protocol.precision is None:
        return
    pilot = gate.replicates if protocol.replicates is None else protocol.replicates
    if pilot >= MINIMUM_PROCESSES:
        return
    problem = (
        f"protocol.precision={protocol.precision:g}: needs protocol.replicates={MINIMUM_PROCESSES} or more, "
        f"not {pilot}: their deviation decides how many processes are added"
    )
    raise UsageError([problem])


def processes_needed(result: StudyResult) -> dict[str, int]:
    """Returns by candidate how many processes its speed-ups need for an interval as narrow as `protocol.precision`.

    Candidates without an interval are left out. To measure until an interval is narrow enough means to stop when it
    happens to look narrow, and such intervals miss the truth too often. So sdopt uses Stein's two stages (1945): the
    deviation among the first `protocol.replicates` processes, the pilot, fixes the number of processes, and the
    interval around the mean of all processes uses that same deviation. The coverage is then as stated, whatever the
    deviation, because deviation and mean of normal samples are independent.
    """
    needed: dict[str, int] = {}
    if result.config.protocol.precision is None:
        return needed
    wanted_width = math.log1p(result.config.protocol.precision)
    for edge in result.comparisons:
        candidate, reference = result.sides(edge)
        if candidate.role == "control":
            continue
        for shape_index in range(len(result.shapes)):
            pilot = pilot_speedup(candidate.at(shape_index), reference.at(shape_index))
            width = pilot.half_width(result.confidence) if pilot else None
            if pilot is None or width is None:
                continue
            processes = math.ceil(pilot.n * (width / wanted_width) ** 2)
            most = needed.get(candidate.name, 0)
            needed[candidate.name] = max(processes, pilot.n, most)
    return needed


def kept_going(result: StudyResult) -> Mapping[str, tuple[int, int]]:
    """Returns how many processes each candidate has and needs, for those that needed more than the pilot had."""
    if result.precision is None:
        return {}
    counts = {}
    for name, needed in result.precision.needed.items():
        if needed > result.config.replicates:
            processes = len(result.variant(name).samples)
            counts[name] = (processes, needed)
    return counts
