"""Says of each option whether it runs on a device, and what it would need."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from sdopt.errors import UsageError
from sdopt.hardware.cards import emulated, planned_device
from sdopt.hardware.device import Device
from sdopt.optimizations.base import Optimization
from sdopt.schema import Sheet
from sdopt.variant import Variant


class Composer(Protocol):
    def variant(self, name: str | None, overrides: Sequence[str] = (), plain: bool = False) -> Variant: ...


@dataclass
class OptionReport:
    """Whether one option runs on a device."""

    group: str
    option: str
    runs: bool
    reasons: list[str] = field(default_factory=list)
    """Why not; or, where it runs, what else must be chosen with it."""
    remedy: str = ""
    """The cards that it runs on, where this one is the reason."""


def check_options(
    composer: Composer, options: Iterable[tuple[str, str]], device: Device, sheets: Mapping[str, Sheet]
) -> list[OptionReport]:
    """Each option on the composed configuration: whether it runs on the device, and what it would need.

    Args:
        options: (group, option) pairs.
        sheets: the cards that an option may be tried on where the device is what it lacks.
    """
    made: dict[tuple[str, str], Variant | list[str]] = {}
    for group, option in options:
        made[group, option] = _composed(composer, group, option)
    variants = {key: variant for key, variant in made.items() if isinstance(variant, Variant)}
    reports = []
    for (group, option), variant in made.items():
        if isinstance(variant, Variant):
            reports.append(_check(group, option, variant, variants, device, sheets))
        else:
            reports.append(OptionReport(group, option, False, variant))
    return reports


def _composed(composer: Composer, group: str, option: str) -> Variant | list[str]:
    try:
        return composer.variant(option, [f"{group}={option}"])
    except UsageError as error:
        if not any("+" in problem for problem in error.problems):
            return [problem.removeprefix(f"variant '{option}': ") for problem in error.problems]
    try:
        return composer.variant(option, [f"+{group}={option}"])
    except UsageError as error:
        return [problem.removeprefix(f"variant '{option}': ") for problem in error.problems]


def _check(
    group: str,
    option: str,
    variant: Variant,
    variants: Mapping[tuple[str, str], Variant],
    device: Device,
    sheets: Mapping[str, Sheet],
) -> OptionReport:
    runs, reasons = _on(device, group, variant, variants)
    if runs:
        return OptionReport(group, option, True, reasons)
    able = [name for name, sheet in sheets.items() if _on(planned_device(sheet), group, variant, variants)[0]]
    return OptionReport(group, option, False, reasons, _cards(able, sheets))


def _on(
    device: Device, group: str, variant: Variant, variants: Mapping[tuple[str, str], Variant]
) -> tuple[bool, list[str]]:
    """Whether it runs on a device, by itself or beside one other option; else what is in its way by itself."""
    alone = _conflicts(variant, variant.optimizations, group, device)
    workload = [
        need for axis in _axes(variant, group) for need in variant.optimizations[axis].engages(variant.context(device))
    ]
    if not alone:
        return True, workload
    for (other_group, other_option), other in variants.items():
        if other_group == group:
            continue
        both = {**variant.optimizations, **{axis: other.optimizations[axis] for axis in _axes(other, other_group)}}
        if not _conflicts(variant, both, group, device) and not _conflicts(variant, both, other_group, device):
            return True, [f"together with {other_group}={other_option}", *workload]
    return False, alone


def _axes(variant: Variant, group: str) -> list[str]:
    return [axis for axis in variant.optimizations if axis.partition(".")[0] == group]


def _conflicts(variant: Variant, chosen: Mapping[str, Optimization], group: str, device: Device) -> list[str]:
    ctx = replace(variant, optimizations=chosen).context(emulated(device, variant.hardware))
    axes = [axis for axis in chosen if axis.partition(".")[0] == group]
    return [reason for axis in axes for reason in chosen[axis].conflicts(ctx)]


def _cards(able: Sequence[str], sheets: Mapping[str, Sheet]) -> str:
    """The cards as a compute capability from which on all of them are able, where there is one."""
    if not able:
        return ""
    ordered = sorted(able, key=lambda name: sheets[name].capability or (0, 0))
    lowest = sheets[ordered[0]].capability or (0, 0)
    every = all(name in able for name, sheet in sheets.items() if (sheet.capability or (0, 0)) >= lowest)
    if not every or len(able) < 4:
        return f"runs on {', '.join(ordered)}"
    return f"runs on cards of compute capability {'.'.join(map(str, lowest))} or later ({', '.join(ordered[:3])}, …)"
