"""Checks for each option whether it runs on a device, and what it needs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sdopt.errors import UsageError
from sdopt.hardware.cards import planned_device
from sdopt.hardware.device import Device
from sdopt.options.base import Optimization
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
    variants = {
        key: variant for key, variant in made.items() if isinstance(variant, Variant)
    }
    # What runs depends on a card's compute capability: one card of each is asked.
    asked = {sheet.capability: sheet for sheet in sheets.values() if sheet.capability}
    reports = []
    for (group, option), variant in made.items():
        if not isinstance(variant, Variant):
            reports.append(OptionReport(group, option, False, variant))
            continue
        fit, able = fit_on(device, group, variant, variants), list[str]()
        if not fit.runs:
            runs = {
                kind
                for kind, sheet in asked.items()
                if fit_on(planned_device(sheet), group, variant, variants).runs
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


def fit_on(
    device: Device,
    group: str,
    variant: Variant,
    variants: Mapping[tuple[str, str], Variant],
) -> OptionFit:
    """Returns whether an option runs on a device, by itself or with another option, and what else it needs."""
    mine = _optimizations_of(variant, group)
    alone = _conflicts(variant, variant.optimizations, mine, device)
    ctx = variant.context(device)
    needs = tuple(
        need
        for option in mine.values()
        for need in [
            *option.lacking(ctx),
            *option.ineffective(ctx),
            *option.slow_here(ctx),
        ]
    )
    if not alone:
        return OptionFit(True, reasons=needs)
    for (other_group, other_option), other in variants.items():
        theirs = _optimizations_of(other, other_group)
        if mine.keys() & theirs.keys():
            continue
        both = {**variant.optimizations, **theirs}
        if not _conflicts(variant, both, mine.keys() | theirs.keys(), device):
            return OptionFit(True, f"{other_group}={other_option}", needs)
    return OptionFit(False, reasons=tuple(alone))


def _optimizations_of(variant: Variant, group: str) -> dict[str, Optimization]:
    """Returns the optimizations of a group by axis; the tried option replaces the job's choice on its axis."""
    return {
        axis: option
        for axis, option in variant.optimizations.items()
        if axis.partition(".")[0] == group
    }


def _conflicts(
    variant: Variant,
    chosen: Mapping[str, Optimization],
    axes: Iterable[str],
    device: Device,
) -> list[str]:
    """Returns the conflicts of the options on some axes, with all other choices in place."""
    ctx = replace(variant, optimizations=chosen).context(device)
    return [
        reason
        for axis in axes
        for reason in chosen[axis].unfit(ctx) or chosen[axis].incompatible(ctx)
    ]


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
