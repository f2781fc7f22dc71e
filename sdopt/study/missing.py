"""Determines what a study still has to measure; asked before each session."""

from dataclasses import dataclass

from sdopt.record.records import Status, StudyResult
from sdopt.statistics.ratios import paired_rounds


@dataclass(frozen=True)
class Missing:
    """What a study still has to measure; for a new study, everything."""

    rounds: int
    timed: frozenset[tuple[str, int]]
    """Variants, each with a replicate, to time for `rounds` rounds: both sides of every comparison that lacks rounds,
    and the baselines."""
    unfinished: frozenset[tuple[str, int]]
    """Variants, each with a replicate, without evidence, stages and images."""

    @property
    def processes(self) -> frozenset[tuple[str, int]]:
        """All processes that take part in the next session."""
        return self.timed | self.unfinished

    @property
    def variants(self) -> frozenset[str]:
        """The names of the variants that take part in the next session."""
        return frozenset(name for name, _ in self.processes)


def missing_of(result: StudyResult) -> Missing:
    """Returns what a study still has to measure. A variant that failed is a result, and not missing."""
    rounds = result.config.protocol.rounds
    pending = {row.name for row in result.variants if row.status is Status.PENDING}
    usable = {row.name for row in result.variants if row.status is Status.PENDING or row.status.measured}
    lacking: dict[tuple[str, int], int] = {}
    pairs = [(edge.candidate, edge.reference) for edge in result.comparisons]
    for pair in [*pairs, *((name, result.baseline) for name in pending - {result.baseline})]:
        if usable.issuperset(pair) and not pending.isdisjoint(pair):
            candidate, reference = map(result.variant, pair)
            at_shapes = [
                (candidate.at(shape_index), reference.at(shape_index)) for shape_index in range(len(result.shapes))
            ]
            for replicate in range(result.replicates_of(candidate.name)):
                there = min(paired_rounds(*sides, replicate) for sides in at_shapes)
                if there < rounds:
                    for name in pair:
                        lacking[name, replicate] = max(rounds - there, lacking.get((name, replicate), 0))
    # Processes of different sessions are not comparable: each has a baseline and a floor of its own.
    baselines = [row.name for row in result.variants if row.name == result.baseline or row is result.control]
    for replicate in {replicate for _, replicate in lacking}:
        lacking |= {(name, replicate): 0 for name in baselines if name in usable and (name, replicate) not in lacking}
    complete = {(row.name, m.replicate) for row in result.variants for m in row.measurements if m.complete}
    wanted = {(name, replicate) for name in pending for replicate in range(result.replicates_of(name))}
    wanted |= {(row.name, m.replicate) for row in result.variants if row.name in pending for m in row.measurements}
    return Missing(max(lacking.values(), default=0), frozenset(lacking), frozenset(wanted - complete))
