"""Checks for each option whether it runs on a device, and what it needs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sdopt.errors import UsageError
from sdopt.hardware.cards import planned_device
from sdopt.hardware.device import Device
from sdopt.options.base import Context, Optimization
from sdopt.schema import Sheet
from sdopt.study.designs import Composer
from sdopt.variant import Variant

_SHOWN = 3
"""Number of cards that are named as examples if there are more."""


@dataclass
class OptionReport:
    """Whether one option runs on a device."""

    group: str
    option: str
    runs: bool
    reasons: list[str] = field(default_factory=list)
    """Why it does not run; or, if it runs, the choices that it needs besides."""
    remedy: str = ""
    """The cards that it runs on, if this device is the reason."""


def check_options(
    composer: Composer,
    options: Iterable[tuple[str, str]],
    device: Device,
    sheets: Mapping[str, Sheet],
) -> list[OptionReport]:
    """Checks each option on the composed configuration: whether it runs on the device, and what it needs.

    An option that does not run is checked on the cards of other data sheets, too.
    """
    made = compose_options(composer, options)
    others = alternatives(made)
    # What runs depends on a card's compute capability: one card of each is asked.
    asked = {sheet.capability: sheet for sheet in sheets.values() if sheet.capability}
    reports = []
    for (group, option), variant in made.items():
        if not isinstance(variant, Variant):
            reports.append(OptionReport(group, option, False, variant))
            continue
        fit, able = fit_on(device, group, variant, others), list[str]()
        if not fit.runs:
            runs = {
                kind
                for kind, sheet in asked.items()
                if fit_on(planned_device(sheet), group, variant, others).runs
            }
            able = [name for name, sheet in sheets.items() if sheet.capability in runs]
        reports.append(
            OptionReport(group, option, fit.runs, fit.remarks, _cards(able, sheets))
        )
    return reports


@dataclass(frozen=True)
class OptionFit:
    """Whether an option runs on a device."""

    runs: bool
    beside: str = ""
    """The further option that it needs, such as `precision=fp16`; "" if it runs by itself."""
    reasons: tuple[str, ...] = ()
    """If it does not run, why it does not run by itself; else the keys that it needs, and what it needs of the
    workload."""

    @property
    def remarks(self) -> list[str]:
        """All needs and conflicts, as separate texts."""
        return [
            *([f"together with {self.beside}"] if self.beside else []),
            *self.reasons,
        ]


def compose_options(
    composer: Composer,
    options: Iterable[tuple[str, str]],
    settings: Mapping[str, Sequence[str]] | None = None,
) -> dict[tuple[str, str], Variant | list[str]]:
    """Returns the variant with each option by (group, option), or the problems of its configuration.

    `settings` are overrides that go with an option, by the option as in `memory=vae_tiling`.
    """
    made: dict[tuple[str, str], Variant | list[str]] = {}
    for group, option in options:
        chosen = f"{group}={option}"
        try:
            made[group, option] = composer.variant(
                option, [chosen, *(settings or {}).get(chosen, ())]
            )
        except UsageError as error:
            made[group, option] = [
                problem.removeprefix(f"variant '{option}': ")
                for problem in error.problems
            ]
    return made


Alternatives = Mapping[str, Mapping[str, Optimization]]
"""What an option may need beside it: the optimizations of each other one by axis, by the option as in `precision=fp16`."""


def alternatives(made: Mapping[tuple[str, str], Variant | list[str]]) -> Alternatives:
    """Returns the options of `compose_options`, each as what may stand beside another."""
    return {
        f"{group}={option}": _optimizations_of(variant, group)
        for (group, option), variant in made.items()
        if isinstance(variant, Variant)
    }


def fit_on(
    device: Device, group: str, variant: Variant, others: Alternatives
) -> OptionFit:
    """Returns whether an option runs on a device, by itself or with one of the others, and what else it needs."""
    mine = _optimizations_of(variant, group)
    ctx = variant.context(device)
    conflicts = list(_conflicts(ctx, mine))
    beside = ""
    if conflicts:
        found = _makes_it_run(ctx, mine, others)
        if found is None:
            return OptionFit(False, reasons=tuple(conflicts))
        beside = found
    needs: list[str] = []
    for option in mine.values():
        needs += option.lacking(ctx)
        needs += option.ineffective(ctx)
        needs += option.slow_here(ctx)
    return OptionFit(True, beside, tuple(needs))


def _makes_it_run(
    ctx: Context, mine: Mapping[str, Optimization], others: Alternatives
) -> str | None:
    """Returns the first of the others with which options run that conflict by themselves; None if there is none."""
    # Whatever stands beside them, the model and the device stay.
    if any(option.unfit(ctx) or option.unmet(ctx) for option in mine.values()):
        return None
    for name, theirs in others.items():
        if mine.keys() & theirs.keys():
            continue
        both = replace(ctx, chosen={**ctx.chosen, **theirs})
        if any(
            option.excluded(both) or option.conflicts(both) for option in mine.values()
        ):
            continue
        if not any(_conflicts(both, theirs)):
            return name
    return None


def _optimizations_of(variant: Variant, group: str) -> dict[str, Optimization]:
    """Returns the optimizations of a group by axis; the tried option replaces the job's choice on its axis."""
    return {
        axis: option
        for axis, option in variant.optimizations.items()
        if axis.partition(".")[0] == group
    }


def _conflicts(ctx: Context, options: Mapping[str, Optimization]) -> Iterator[str]:
    """Yields the conflicts of some options, with all other choices in place."""
    for option in options.values():
        yield from option.unfit(ctx) or option.incompatible(ctx)


def _cards(able: Sequence[str], sheets: Mapping[str, Sheet]) -> str:
    """Returns in words on which cards an option runs: their names, or the compute capability that it needs."""
    if not able:
        return ""
    capability = {name: sheet.capability or (0, 0) for name, sheet in sheets.items()}
    ordered = sorted(able, key=capability.__getitem__)
    lowest = capability[ordered[0]]
    every = all(name in able for name in sheets if capability[name] >= lowest)
    if not every or len(able) <= _SHOWN:
        return f"runs on {', '.join(ordered[: 2 * _SHOWN])}{', …' if len(able) > 2 * _SHOWN else ''}"
    return f"runs on cards of compute capability {'.'.join(map(str, lowest))} or later ({', '.join(ordered[:_SHOWN])}, …)"
