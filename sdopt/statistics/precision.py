"""Computes how many processes a speed-up needs for an interval of the requested width (`protocol.precision`).

To measure until an interval is narrow enough means to stop when it happens to look narrow, and such intervals miss the
truth too often. So sdopt uses Stein's two stages (1945): the deviation among the first `protocol.replicates` processes,
the pilot, fixes the number of processes, and the interval around the mean of all processes uses that same deviation.
The coverage is then as stated, whatever the deviation, because deviation and mean of normal samples are independent.
"""

import math
from collections.abc import Mapping

from scipy import special

from sdopt.errors import UsageError
from sdopt.record.records import StudyResult
from sdopt.schema import Gate, Protocol
from sdopt.statistics.ratios import MINIMUM_PROCESSES, pilot_speedup


def require_precision(protocol: Protocol, gate: Gate) -> None:
    """Raises UsageError if no number of processes could reach the precision, or if there is a budget without one."""
    problems = []
    pilot = gate.replicates if protocol.replicates is None else protocol.replicates
    if protocol.precision is not None and pilot < MINIMUM_PROCESSES:
        problems.append(
            f"protocol.precision={protocol.precision:g}: needs protocol.replicates={MINIMUM_PROCESSES} or more, not "
            f"{pilot}: their deviation decides how many processes are added"
        )
    if protocol.budget_s is not None and protocol.precision is None:
        problems.append(
            f"protocol.budget_s={protocol.budget_s:g}: limits the time for protocol.precision, which is not set; "
            "set both or neither"
        )
    if problems:
        raise UsageError(problems)


def processes_needed(result: StudyResult) -> dict[str, int]:
    """Returns by candidate how many processes its speed-ups need; candidates without an interval are left out."""
    precision, found = result.config.protocol.precision, dict[str, int]()
    if precision is None:
        return found
    for edge in result.comparisons:
        candidate, reference = result.variant(edge.candidate), result.variant(edge.reference)
        if candidate.role == "control":
            continue
        for shape_index in range(len(result.shapes)):
            pilot = pilot_speedup(candidate.at(shape_index), reference.at(shape_index))
            if pilot is not None and pilot.error is not None:
                width = float(special.stdtrit(pilot.freedom, (1 + result.confidence) / 2)) * pilot.error
                needed = math.ceil(pilot.n * (width / math.log1p(precision)) ** 2)
                found[candidate.name] = max(needed, pilot.n, found.get(candidate.name, 0))
    return found


def kept_going(result: StudyResult) -> Mapping[str, tuple[int, int]]:
    """Returns how many processes each candidate has and needs, for those that needed more than the pilot had."""
    if result.precision is None:
        return {}
    return {
        name: (len(result.variant(name).samples), needed)
        for name, needed in result.precision.needed.items()
        if needed > result.config.replicates
    }
