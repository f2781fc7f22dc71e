"""Ablation designs: which variants a study measures, and which it compares with which.

A design is a frozen dataclass with a yaml in `conf/study/`. It asks a `Composer` for variants and returns a `Plan`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
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
    factors: tuple[str, ...] = ()
    """Options whose effects are estimated from the product of them all."""

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

    def chosen(self) -> list[str]:
        """The options that the job chooses beyond the defaults, as overrides (`compiler=inductor`), by axis."""

    def without(self, option: str) -> str:
        """The override that takes an option back: its axis at the default."""


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
        if candidate.config == baseline.config:
            # A sweep's grid holds the baseline itself: the A/A control is then all there is to compare.
            return Plan((baseline,), ())
        return Plan((baseline, candidate), (Edge(candidate.name, BASELINE, credit(candidate, baseline)),))


@dataclass(frozen=True)
class OneAtATime(Design):
    """Each of `options` alone on the baseline."""

    name: str = "one_at_a_time"
    options: list[str] = field(default_factory=list)

    def plan(self, composer: Composer) -> Plan:
        baseline = composer.variant(BASELINE, plain=True)
        variants = [composer.variant(option, [option], plain=True) for option in _listed(self.options, "one_at_a_time")]
        return Plan((baseline, *variants), tuple(Edge(v.name, BASELINE, v.name) for v in variants))


@dataclass(frozen=True)
class Cumulative(Design):
    """`options` added to the baseline in the order given; each step is compared with the one before it."""

    name: str = "cumulative"
    options: list[str] = field(default_factory=list)

    def plan(self, composer: Composer) -> Plan:
        options = _listed(self.options, "cumulative")
        steps = [composer.variant(BASELINE, plain=True)]
        steps += [composer.variant(f"+ {option}", options[: n + 1], plain=True) for n, option in enumerate(options)]
        edges = [
            Edge(now.name, before.name, option) for before, now, option in zip(steps, steps[1:], options, strict=False)
        ]
        return Plan(tuple(steps), tuple(edges))


@dataclass(frozen=True)
class Factorial(Design):
    """The product of `options`: every combination, with at most one option of each axis.

    Main effects and pairwise interactions are estimated from it; see `sdopt.analysis.effects`.
    """

    name: str = "factorial"
    options: list[str] = field(default_factory=list)

    @property
    def factors(self) -> list[str]:
        """The options as overrides, in the order given."""
        options = _listed(self.options, "factorial")
        keys = [option for option in options if "." in option.partition("=")[0]]
        if keys:
            raise UsageError([f"study.options: '{key}' sets a key; factorial takes options of a group" for key in keys])
        return options

    def plan(self, composer: Composer) -> Plan:
        axes: dict[str, list[str]] = {}
        for option in self.factors:
            axes.setdefault(option.partition("=")[0], []).append(option)
        cells = [
            [option for option in cell if option] for cell in product(*([None, *options] for options in axes.values()))
        ]
        variants = [composer.variant(", ".join(cell) or BASELINE, cell, plain=True) for cell in cells]
        edges = [Edge(variant.name, BASELINE, variant.name) for variant in variants[1:]]
        return Plan(tuple(variants), tuple(edges), tuple(self.factors))


@dataclass(frozen=True)
class LeaveOneOut(Design):
    """The composed configuration, and it again without each of its options: what *ablation* means in papers.

    A speed-up below 1 in the row of an option that was left out is what the option contributes to the combination.
    """

    name: str = "leave_one_out"

    def plan(self, composer: Composer) -> Plan:
        options = composer.chosen()
        if len(options) < 2:
            raise UsageError(
                "study=leave_one_out: choose at least two options, as in layout=channels_last precision=bf16"
            )
        baseline, full = composer.variant(BASELINE, plain=True), composer.variant("full")
        left = {
            f"without {option}": composer.variant(f"without {option}", [composer.without(option)]) for option in options
        }
        edges = [Edge(full.name, BASELINE, credit(full, baseline))]
        edges += [Edge(name, full.name, name.removeprefix("without ")) for name in left]
        return Plan((baseline, full, *left.values()), tuple(edges))


@dataclass(frozen=True)
class Explicit(Design):
    """Variants written out by name, each a list of overrides on the composed configuration; the first is the baseline.

    `edges` defaults to each variant against the first.
    """

    name: str = "explicit"
    variants: dict[str, list[str]] | None = None
    edges: list[ExplicitEdge] = field(default_factory=list)

    def plan(self, composer: Composer) -> Plan:
        if not self.variants:
            raise UsageError("study.variants: study=explicit needs at least one variant, as {name: [overrides]}")
        if CONTROL in self.variants:
            raise UsageError(f"study.variants: '{CONTROL}' is the name of the second baseline; choose another")
        variants, problems = {}, []
        for name, overrides in self.variants.items():
            try:
                variants[name] = composer.variant(name, overrides)
            except UsageError as error:
                problems += error.problems
        if problems:
            raise UsageError(problems)
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


def _listed(options: list[str], design: str) -> list[str]:
    """The options as overrides."""
    overrides = [as_override(option) for option in options]
    repeated = sorted({option for option in overrides if overrides.count(option) > 1})
    if not overrides:
        raise UsageError(f"study.options: {design} needs them, as in study.options=[precision:bf16,attention:math]")
    if repeated:
        raise UsageError([f"study.options: '{option}' is listed twice" for option in repeated])
    return overrides


def as_override(option: str) -> str:
    """`precision:bf16` as `precision=bf16`: Hydra's grammar takes no bare `=` within a list."""
    return option if "=" in option else option.replace(":", "=", 1)


def credit(candidate: Variant, reference: Variant) -> str:
    """The choices by which two variants differ, as in `precision=bf16, attention=math`."""
    changed = difference(candidate.choices, reference.choices)
    return ", ".join(f"{axis}={option}" for axis, option in changed.items()) or "nothing"


def difference(choices: Mapping[str, str], reference: Mapping[str, str]) -> dict[str, str]:
    """Choices that are not those of the reference; an axis that only the reference has is `none`."""
    axes = [*choices, *(axis for axis in reference if axis not in choices)]
    return {axis: choices.get(axis, "none") for axis in axes if choices.get(axis) != reference.get(axis)}
