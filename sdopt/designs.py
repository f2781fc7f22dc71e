"""Ablation designs: which variants a study measures, and which it compares with which.

A design is a frozen dataclass with a yaml in `conf/study/`. It asks a `Composer` for variants and returns a `Plan`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sdopt.errors import UsageError
from sdopt.schema import ExplicitEdge
from sdopt.variant import Variant

BASELINE = "baseline"
CONTROL = "baseline (A/A control)"


@dataclass(frozen=True)
class Edge:
    """Candidate against reference, and the option that the difference is credited to."""

    candidate: str
    reference: str
    credit: str


@dataclass(frozen=True)
class Plan:
    """The variants of a study, the baseline first, and the edges between them."""

    variants: tuple[Variant, ...]
    edges: tuple[Edge, ...]

    @property
    def baseline(self) -> Variant:
        return self.variants[0]


class Composer(Protocol):
    """Makes variants out of the job's own configuration."""

    def variant(self, name: str | None, overrides: Sequence[str] = (), plain: bool = False) -> Variant:
        """Composes the job's overrides and then `overrides`; with `plain`, without the job's optimizations.

        Args:
            name: the variant's name; None names it by what it chooses beyond the defaults.

        Raises:
            UsageError: an override is unknown or out of range.
        """


@dataclass(frozen=True)
class Design:
    """Base of all designs."""

    name: str = "study"
    """Name of the study: of its MLflow experiment and of its folder."""

    def plan(self, composer: Composer) -> Plan:
        raise NotImplementedError


@dataclass(frozen=True)
class Pair(Design):
    """The composed configuration against a baseline without optimizations.

    `baseline` holds overrides that make up the baseline, where it is not the default of every group.
    """

    name: str = "pair"
    baseline: list[str] = field(default_factory=list)

    def plan(self, composer: Composer) -> Plan:
        baseline = composer.variant(BASELINE, self.baseline, plain=True)
        candidate = composer.variant(None)
        if candidate.optimizations == baseline.optimizations:
            # A sweep's grid holds the baseline itself: the A/A control is then all there is to compare.
            return Plan((baseline,), ())
        return Plan((baseline, candidate), (Edge(candidate.name, BASELINE, credit(candidate, baseline)),))


@dataclass(frozen=True)
class Explicit(Design):
    """Variants written out by name, each a list of overrides on the composed configuration; the first is the baseline.

    `edges` defaults to each variant against the first.
    """

    name: str = "explicit"
    variants: dict[str, list[str]] = field(default_factory=dict)
    edges: list[ExplicitEdge] = field(default_factory=list)

    def plan(self, composer: Composer) -> Plan:
        if not self.variants:
            raise UsageError("study.variants: study=explicit needs at least one variant, as {name: [overrides]}")
        variants = {name: composer.variant(name, overrides) for name, overrides in self.variants.items()}
        first, *others = variants
        edges = self.edges or [ExplicitEdge(name, first) for name in others]
        unknown = [name for edge in edges for name in (edge.candidate, edge.reference) if name not in variants]
        if unknown:
            known = ", ".join(variants)
            raise UsageError([f"study.edges: no variant is called '{name}'; there are {known}" for name in unknown])
        return Plan(
            tuple(variants.values()),
            tuple(
                Edge(e.candidate, e.reference, e.credit or credit(variants[e.candidate], variants[e.reference]))
                for e in edges
            ),
        )


def credit(candidate: Variant, reference: Variant) -> str:
    """The choices by which two variants differ, as in `precision=bf16, attention=math`."""
    changed = difference(candidate.choices, reference.choices)
    return ", ".join(f"{axis}={option}" for axis, option in changed.items()) or "nothing"


def difference(choices: Mapping[str, str], reference: Mapping[str, str]) -> dict[str, str]:
    """Choices that are not those of the reference; an axis that only the reference has is `none`."""
    axes = [*choices, *(axis for axis in reference if axis not in choices)]
    return {axis: choices.get(axis, "none") for axis in axes if choices.get(axis) != reference.get(axis)}
