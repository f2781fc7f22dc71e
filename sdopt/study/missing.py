"""Says what a study still has to measure."""

from dataclasses import dataclass

from sdopt.analysis.timing import paired_rounds
from sdopt.results.records import Status, StudyResult


@dataclass(frozen=True)
class Missing:
    """What a study still has to measure; of a new study that is everything."""

    rounds: int
    timed: frozenset[str]
    """Variants that are timed for `rounds` rounds: all sides of all comparisons that lack some, and the baselines."""
    unfinished: frozenset[str]
    """Variants without evidence, stages and images of each replicate."""

    @property
    def variants(self) -> frozenset[str]:
        """All variants that take part in the next session."""
        return self.timed | self.unfinished


def missing_of(result: StudyResult) -> Missing:
    """Returns what a study still has to measure. A variant that failed is a result, and not missing."""
    rounds, replicates = result.config.protocol.rounds, range(result.config.replicates)
    pending = {row.name for row in result.variants if row.status is Status.PENDING}
    usable = {row.name for row in result.variants if row.status is Status.PENDING or row.status.measured}
    lacking: dict[str, int] = {}
    pairs = [(edge.candidate, edge.reference) for edge in result.comparisons]
    for pair in [*pairs, *((name, result.baseline) for name in pending - {result.baseline})]:
        if usable.issuperset(pair) and not pending.isdisjoint(pair):
            candidate, reference = map(result.variant, pair)
            there = min(paired_rounds(candidate, reference, replicate) for replicate in replicates)
            if there < rounds:
                lacking |= {name: max(rounds - there, lacking.get(name, 0)) for name in pair}
    if lacking:
        # Processes of different sessions are not comparable: each has a baseline and a floor of its own.
        control = next(row.name for row in result.variants if row.role == "control")
        lacking |= {name: 0 for name in (result.baseline, control) if name in usable and name not in lacking}
    complete = {(row.name, m.replicate) for row in result.variants for m in row.measurements if m.complete}
    unfinished = {name for name in pending if any((name, replicate) not in complete for replicate in replicates)}
    return Missing(max(lacking.values(), default=0), frozenset(lacking), frozenset(unfinished))
