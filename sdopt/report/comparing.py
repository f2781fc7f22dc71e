"""Shows two finished results side by side. Ratios are shown only where the two may be compared."""

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sdopt.gate.drift import changed_choices, differences
from sdopt.record.records import StudyResult
from sdopt.report.header import header_of
from sdopt.statistics.figures import Figures, figures_by_variant, ratio_text
from sdopt.statistics.measures import SPEEDUP
from sdopt.statistics.ratios import speedup_drift
from sdopt.statistics.words import memory_text, seconds_parts

_OWN = ("study", "tracking", "gate", "hydra", "dry_run", "objective")
"""Keys that change no measurement."""


def comparison_of(first: StudyResult, second: StudyResult) -> Group:
    """Returns both headers, the variants of both by name, and the differences of the two, for a terminal."""
    reasons = incomparable(first, second)
    parts: list[RenderableType] = []
    for letter, result in (("A", first), ("B", second)):
        parts.append(Text(f"{letter}: {result.started}", "bold"))
        parts += [Text(f"   {line}") for line in header_of(result)]
    if reasons:
        parts.append(Text("Not comparable, so no ratio of A and B is shown:", "yellow"))
        parts += [Text(f"  {reason}", "yellow") for reason in reasons]
    parts.append(_table(first, second, ratios=not reasons))
    parts.append(Text("  Each speed-up is against the baseline of its own run.", "dim"))
    if not reasons:
        parts.append(Text("  B/A: the speed-up in B over that in A.", "dim"))
    changed = [f"{what} ({', '.join(names)})" for what, names in changed_choices(second, first).items()]
    if changed and not reasons:
        parts.append(Text("Variants of the same name choose otherwise, so no ratio of theirs is shown:", "yellow"))
        parts += [Text(f"  {what}", "yellow") for what in changed]
    keys = changed_keys(first, second)
    parts.append(Text("Configuration and environment differ in:" if keys else "Configuration and environment agree."))
    parts += [Text(f"  {key}: {mine} → {other}") for key, (mine, other) in keys.items()]
    return Group(*parts)


def incomparable(first: StudyResult, second: StudyResult) -> list[str]:
    """Returns why no figures of the two results can be compared as ratios; [] if some can."""
    known = differences(second, first)
    found = [difference.what for difference in known if difference.waiver not in ("sdopt", "options")]
    hardware = second.config.differing(first.config, ["hardware"])
    found += [
        f"{key}: {mine} against {other}"
        for key, (mine, other) in hardware.items()
        if not key.endswith("price_per_hour")
    ]
    then, now = first.environment, second.environment
    if then.cpu != now.cpu and then.cpu.get("name") == now.cpu.get("name"):
        found.append(f"cpu: {now.cpu} against {then.cpu}")
    if then.platform != now.platform:
        found.append(f"platform: {now.platform} against {then.platform}")
    return found


def changed_keys(first: StudyResult, second: StudyResult) -> dict[str, tuple[str, str]]:
    """Returns the keys of configuration and environment in which two results differ, with both values."""
    mine, other = _known(first), _known(second)
    keys = [key for key in (*first.config.flat(), *second.config.flat()) if not key.startswith(_OWN)]
    keys += ["device", "platform", "python", "sdopt"]
    keys += sorted({*first.environment.packages, *second.environment.packages})
    return {key: (str(mine.get(key)), str(other.get(key))) for key in keys if mine.get(key) != other.get(key)}


def _known(result: StudyResult) -> dict[str, object]:
    found = result.environment
    sdopt = f"{found.sdopt_version} {(found.sdopt_commit or '')[:9]}{'+dirty' if found.sdopt_dirty else ''}"
    named = {"device": found.device["name"], "platform": found.platform, "python": found.python, "sdopt": sdopt}
    return {**result.config.flat(), **named, **found.packages}


def _table(first: StudyResult, second: StudyResult, ratios: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("variant", overflow="fold")
    for heading in ("", "status", "latency", "speed-up", "memory"):
        table.add_column(heading, justify="left" if heading in ("", "status") else "right", no_wrap=True)
    mine, other = figures_by_variant(first), figures_by_variant(second)
    changed = {name for names in changed_choices(second, first).values() for name in names}
    for name in dict.fromkeys([*mine, *other]):
        shown = [(letter, found[name]) for letter, found in (("A", mine), ("B", other)) if name in found]
        for number, (letter, row) in enumerate(shown):
            table.add_row("" if number else escape(name), letter, *_cells(row))
        same = len(shown) == 2 and name not in changed
        if ratios and same and (change := _change(first, second, name)):
            table.add_row("", "B/A", "", "", change, "")
    return table


def _cells(row: Figures) -> tuple[str, ...]:
    speedup = row.overall.get(SPEEDUP.name)
    return (
        str(row.variant.status),
        seconds_parts(row.latency)[0] if row.latency else "",
        speedup.text if speedup else "",
        memory_text(row).partition(" (")[0],
    )


def _change(first: StudyResult, second: StudyResult, name: str) -> str:
    """Returns the second result's speed-up over the first's; "" for a baseline, and if one was not timed."""
    if name in (first.baseline, second.baseline):
        return ""
    later = second.variant(name), second.variant(second.baseline)
    earlier = first.variant(name), first.variant(first.baseline)
    if not all(variant.status.measured for variant in (*later, *earlier)):
        return ""
    found = speedup_drift(later, earlier, first.confidence)
    return ratio_text(found) if found else ""
