"""Adds processes until every speed-up reaches the requested precision, or the budget is spent."""

import time

from sdopt.record.records import Precision, Status, StudyResult
from sdopt.schema import Protocol
from sdopt.statistics.precision import processes_needed


class PrecisionPlan:
    """Grants processes to the speed-ups of a study, batch by batch, each of as many as the pilot had.

    Args:
        result: the study; its pilot must be measured before the first batch is granted.
        protocol: says how precise, and for how long.
    """

    def __init__(self, result: StudyResult, protocol: Protocol) -> None:
        self._result, self._protocol = result, protocol
        self._since = time.monotonic()

    def grant(self) -> bool:
        """Lets the next batch begin; False where none is needed, or the budget has no room for it."""
        result, protocol = self._result, self._protocol
        if protocol.precision is None:
            return False
        if result.precision is None:
            result.precision = Precision(granted=result.config.replicates)
        precision = result.precision
        precision.needed = precision.needed or processes_needed(result)
        now = time.monotonic()
        precision.spent_s, self._since = precision.spent_s + now - self._since, now
        running = {row.name for row in result.variants if row.status is Status.PENDING or row.status.measured}
        needed = max((n for name, n in precision.needed.items() if name in running), default=0)
        if needed <= precision.granted:
            return False
        granted = min(needed, precision.granted + result.config.replicates)
        if protocol.budget_s is not None:
            timed = sum(len(row.samples) for row in result.variants)
            # The baseline and the control of each session too.
            more = (granted - precision.granted) * (2 + sum(n > precision.granted for n in precision.needed.values()))
            if precision.spent_s * (1 + more / max(timed, 1)) > protocol.budget_s:
                precision.stopped = f"protocol.budget_s={protocol.budget_s:g} was spent"
                return False
        precision.granted = granted
        return True
