"""Ablation designs: which variants a study measures, and which it compares with which.

A design is a frozen dataclass with a yaml in `conf/study/`. It asks a `Composer` for variants and returns a `Plan`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise, product
from typing import ClassVar, Protocol

from typing_extensions import override

from sdopt.errors import UsageError
from sdopt.record.choices import as_override, difference, listed
from sdopt.schema import Configured, Edge, wrong_label
from sdopt.statistics.published import Published, require_published
from sdopt.variant import Variant

BASELINE = "baseline"

CONTROL = "repeated baseline"


@dataclass(frozen=True)
class Plan:
    """The variants of a study, the baseline first, and the edges between them."""

    variants: tuple[Variant, ...]
    edges: tuple[Edge, ...]
    factors: tuple[str, ...] = ()
    """Options of a factorial design, whose effects are estimated from all combinations."""

    @property
    def baseline(self) -> Variant:
        """The first variant."""
        return self.variants[0]


class Composer(Protocol):
    """Makes variants from the job's own configuration."""

    def variant(
        self, name: str | None, overrides: Sequence[str] = (), plain: bool = False
    ) -> Variant:
        """Composes a variant from the job's overrides and then `overrides`.

        Options of one group replace what the job chose there. Within `overrides`, options of one axis replace each
        other, and options of one group that lie on different axes combine: `memory=vae_slicing` and `memory=vae_tiling`
        are `memory=[vae_slicing,vae_tiling]`.

        Args:
            name: the variant's name; None names it by what it chooses beyond the defaults.
            overrides: in the order of a command line; `precision:bf16` is `precision=bf16`.
            plain: leaves out the job's optimizations.

        Raises:
            UsageError: an override is unknown or out of range.
        """

    def chosen(self) -> list[str]:
        """Lists the options that the job chooses beyond the defaults, each as `compiler=inductor`."""

    def without(self, option: str) -> str:
        """Returns the override that takes back one of the job's options and leaves the others."""

    def axes(self, option: str) -> list[str]:
        """Returns the axes that an option chooses on: `precision`; `memory.vae_slicing` for `memory=vae_slicing`.

        Options of different axes combine; of one axis a variant has one.
        """

    def options(self, group: str) -> list[str]:
        """Lists the options of a group beside its default, each as an override. Raises UsageError: no such group."""


@dataclass(frozen=True)
class Design(Configured):
    """The base class of all designs."""

    drops_choices: ClassVar[bool] = False
    """Whether every variant begins without the options that the job chose."""

    name: str = "study"
    """The name of the study, of its MLflow experiment and of its folder."""
    skip_conflicts: bool = False
    """Whether the baseline is measured even if no other variant can run here; if false, that is an error. In either
    case each variant that cannot run is listed as `skipped`, with the reason."""

    def plan(self, composer: Composer) -> Plan:
        """Returns the study's variants and comparisons. Raises UsageError if the design does not fit the job."""
        raise NotImplementedError


@dataclass(frozen=True)
class Pair(Design):
    """Compares the composed configuration with a baseline without optimizations."""

    name: str = "pair"
    baseline: list[str] = field(default_factory=list)
    """Overrides of the baseline, for one that is not the default of every group."""

    @override
    def plan(self, composer: Composer) -> Plan:
        baseline = composer.variant(BASELINE, self.baseline, plain=True)
        candidate = composer.variant(None)
        if candidate.config == baseline.config:
            # A sweep's grid may contain the baseline itself: then only the repeated baseline is compared.
            return Plan((baseline,), ())
        # A task, and a transformer's scheduler, are others than the default, and the baseline's too.
        changed = listed(difference(candidate.choices, baseline.choices))
        candidate = replace(candidate, name=changed or candidate.name)
        edge = Edge(candidate.name, BASELINE, credit(candidate, baseline))
        return Plan((baseline, candidate), (edge,))


@dataclass(frozen=True)
class OneAtATime(Design):
    """Adds each of `options` alone to the baseline."""

    drops_choices = True

    name: str = "one_at_a_time"
    options: list[str] = field(default_factory=list)
    """The options or keys to try, as in `[precision:bf16,workload.steps:10]`. The name of a group, as in `[attention]`,
    stands for all of its options."""

    @override
    def plan(self, composer: Composer) -> Plan:
        baseline = composer.variant(BASELINE, plain=True)
        options = _overrides(_expanded(composer, self.options), "one_at_a_time")
        variants = [
            composer.variant(_name(option), [option], plain=True) for option in options
        ]
        return Plan(
            (baseline, *variants),
            tuple(Edge(v.name, BASELINE, v.name) for v in variants),
        )


@dataclass(frozen=True)
class Cumulative(Design):
    """Adds `options` to the baseline in the order given, and compares each step with the one before it."""

    drops_choices = True

    name: str = "cumulative"
    options: list[str] = field(default_factory=list)
    """The options or keys in the order in which they are added, as in `[precision:bf16,memory:vae_slicing]`."""

    @override
    def plan(self, composer: Composer) -> Plan:
        options = _overrides(self.options, "cumulative")
        steps = [composer.variant(BASELINE, plain=True)]
        steps += [
            composer.variant(f"+ {_name(option)}", options[: n + 1], plain=True)
            for n, option in enumerate(options)
        ]
        edges = [
            Edge(now.name, before.name, _name(option))
            for (before, now), option in zip(pairwise(steps), options, strict=True)
        ]
        return Plan(tuple(steps), tuple(edges))


@dataclass(frozen=True)
class Factorial(Design):
    """Measures every combination of `options`, with at most one option of each axis.

    `sdopt.statistics.effects` estimates main effects and pairwise interactions from it.
    """

    drops_choices = True

    name: str = "factorial"
    options: list[str] = field(default_factory=list)
    """The factors, as in `[precision:bf16,memory:vae_slicing]`; two options of one axis are levels of one factor. The
    name of a group of which a variant has one option, as in `[attention]`, stands for all of them."""

    @override
    def plan(self, composer: Composer) -> Plan:
        options = _overrides(_expanded(composer, self.options), "factorial")
        for group in filter(_is_group, self.options):
            axes = map(composer.axes, composer.options(group))
            if len(set(chain.from_iterable(axes))) > 1:
                raise UsageError(
                    f"study.options: '{group}' is a group whose options combine; name those to try"
                )
        levels = self._levels(composer, options)
        variants = []
        for cell in product(*([None, *rivals] for rivals in levels)):
            chosen = [option for option in cell if option]
            name = ", ".join(map(_name, chosen)) or BASELINE
            variants.append(composer.variant(name, chosen, plain=True))
        edges = [Edge(variant.name, BASELINE, variant.name) for variant in variants[1:]]
        return Plan(tuple(variants), tuple(edges), tuple(map(_name, options)))

    def _levels(self, composer: Composer, options: Sequence[str]) -> list[list[str]]:
        """Groups the options by axis."""
        levels: dict[str, list[str]] = {}
        problems = []
        for option in options:
            axes = composer.axes(option)
            if "." in option.partition("=")[0]:
                problems.append(
                    f"study.options: '{option}' sets a key; study=factorial takes only options of a group"
                )
            elif len(axes) != 1:
                problems.append(
                    f"study.options: '{option}' is {len(axes)} options; study=factorial takes them one by one"
                )
            else:
                levels.setdefault(axes[0], []).append(option)
        if problems:
            raise UsageError(problems)
        return list(levels.values())


@dataclass(frozen=True)
class LeaveOneOut(Design):
    """Measures the composed configuration, and again without each of its options: what *ablation* means in papers.

    A speed-up below 1 in the row of a left-out option is what that option contributes to the combination.
    """

    name: str = "leave_one_out"

    @override
    def plan(self, composer: Composer) -> Plan:
        options = composer.chosen()
        if len(options) <= 1:
            raise UsageError(
                "study=leave_one_out: choose at least two options, as in layout=channels_last precision=bf16"
            )
        baseline, full = (
            composer.variant(BASELINE, plain=True),
            composer.variant("full"),
        )
        without_one = [
            composer.variant(f"without {option}", [composer.without(option)])
            for option in options
        ]
        edges = [Edge(full.name, BASELINE, credit(full, baseline))]
        edges += [
            Edge(variant.name, full.name, option)
            for option, variant in zip(options, without_one, strict=True)
        ]
        return Plan((baseline, full, *without_one), tuple(edges))


@dataclass(frozen=True)
class Explicit(Design):
    """Takes variants written out by name, each a list of overrides on the composed configuration.

    The first variant is the baseline.
    """

    name: str = "explicit"
    variants: dict[str, list[str]] | None = None
    """The overrides of each variant, by its name."""
    edges: list[Edge] = field(default_factory=list)
    """The comparisons, as in `{candidate: a, reference: b}`; without them, each variant against the first."""
    only: list[str] = field(default_factory=list)
    """Names of the variants to measure, as a part of a longer study; an empty list measures all. A variant that
    nothing is left to compare with is compared with the first of them."""
    published: Published | None = None
    """An article's figures for these variants, which `published.md` puts beside those measured. Presets that reproduce
    an article have them."""

    @override
    def plan(self, composer: Composer) -> Plan:
        written = self.variants or {}
        names = list(written)
        if not names:
            raise UsageError(
                "study.variants: study=explicit needs at least one variant, as {name: [overrides]}"
            )
        problems = [
            f"study.variants: '{name}': a variant's name {wrong}"
            for name in names
            if (wrong := wrong_label(name))
        ]
        if CONTROL in names:
            problems.append(
                f"study.variants: '{CONTROL}' is the name of the second baseline; choose another"
            )
        unknown = [name for name in self.only if name not in names]
        problems += [
            f"study.only: no variant '{name}'; choose from {', '.join(names)}"
            for name in unknown
        ]
        for edge in self.edges:
            problems += [f"study.edges: {said}" for said in _problems_of(edge, names)]
        variants = {}
        for name in [name for name in names if name in (self.only or names)]:
            try:
                variants[name] = composer.variant(name, written[name])
            except UsageError as error:
                problems += error.problems
        if problems:
            raise UsageError(problems)
        if self.published is not None:
            require_published(self.published, names)
        edges = []
        for edge in self._edges_of(list(variants)):
            sides = variants[edge.candidate], variants[edge.reference]
            edges.append(replace(edge, credit=edge.credit or credit(*sides)))
        return Plan(tuple(variants.values()), tuple(edges))

    def _edges_of(self, names: list[str]) -> list[Edge]:
        """Returns the comparisons among some of the variants."""
        first, *others = names
        edges = [
            edge
            for edge in self.edges
            if edge.candidate in others and edge.reference in names
        ]
        if self.edges and not self.only:
            return edges
        compared = {edge.candidate for edge in edges}
        return edges + [Edge(name, first) for name in others if name not in compared]


def _problems_of(edge: Edge, variants: list[str]) -> list[str]:
    """Returns why an edge between two of the variants is not possible; the first variant is the baseline."""
    unknown = [
        name for name in (edge.candidate, edge.reference) if name not in variants
    ]
    if unknown:
        return [
            f"no variant '{name}'; choose from {', '.join(variants)}"
            for name in unknown
        ]
    if edge.candidate == edge.reference:
        return [f"'{edge.candidate}' is compared with itself; name another one"]
    if edge.candidate == variants[0]:
        # The baseline's options are on both sides of every comparison, so they cannot be a candidate's gain.
        turned = f"{{candidate: {edge.reference}, reference: {edge.candidate}}}"
        return [
            f"'{edge.candidate}' is the baseline, the first variant, and no candidate: write {turned}"
        ]
    return []


def _name(option: str) -> str:
    """Returns an option as results write it, without the `+` that chooses in a group without a default."""
    return option.lstrip("+")


def _is_group(option: str) -> bool:
    return not set(option) & set(":=")


def _expanded(composer: Composer, options: Sequence[str]) -> list[str]:
    """Returns options, with those of a group in the place of its name."""
    named: list[str] = []
    for option in options:
        named += composer.options(option) if _is_group(option) else [option]
    return named


def _overrides(options: list[str], design: str) -> list[str]:
    """Returns the options of a design as overrides. Raises UsageError: there are none, one is none, or comes twice."""
    overrides = [as_override(option) for option in options]
    if groups := [option for option in overrides if "=" not in option]:
        raise UsageError(
            [
                f"study.options: '{group}' is no option; write group:option, as in precision:bf16"
                for group in groups
            ]
        )
    repeated = sorted({option for option in overrides if overrides.count(option) > 1})
    if not overrides:
        raise UsageError(
            f"study.options: {design} needs them, as in study.options=[precision:bf16,attention:math]"
        )
    if repeated:
        raise UsageError(
            [f"study.options: '{option}' is listed twice" for option in repeated]
        )
    return overrides


def credit(candidate: Variant, reference: Variant) -> str:
    """Returns the choices by which a candidate differs, as in `precision=bf16, memory=vae_slicing`."""
    return listed(difference(candidate.choices, reference.choices)) or "nothing"
