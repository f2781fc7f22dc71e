"""Shows two finished results side by side. Ratios are shown only where the two may be compared."""

from sdopt.gate.differences import changed_choices, differences
from sdopt.record.records import StudyResult
from sdopt.report.blocks import Block, Cell, Notes, Prose, Table
from sdopt.report.columns import word
from sdopt.report.header import header_of
from sdopt.statistics.figures import first_rows
from sdopt.statistics.measures import SPEEDUP, ratio_text
from sdopt.statistics.ratios import speedup_drift
from sdopt.statistics.words import gib_text, seconds_parts, unit_text

_OWN = ("study", "tracking", "gate", "hydra", "dry_run", "objective")
"""Keys that change no measurement."""


def comparison_of(first: StudyResult, second: StudyResult) -> list[Block]:
    """Returns both headers, the variants of both by name, and the differences of the two."""
    reasons = incomparable(first, second)
    changed = [f"{what} ({', '.join(names)})" for what, names in changed_choices(second, first).items()]
    keys = changed_keys(first, second)
    blocks: list[Block] = []
    for letter, result in (("A", first), ("B", second)):
        blocks += [Prose(f"{letter}: {result.started}", strong=True), Notes(header_of(result))]
    if reasons:
        blocks += [Prose("Not comparable, so no ratio of A and B is shown:"), Notes(reasons)]
    blocks.append(_table(first, second, ratios=not reasons))
    told = [] if reasons else ["B/A: the speed-up in B over that in A."]
    blocks.append(Notes(["Each speed-up is against the baseline of its own run.", *told]))
    if changed and not reasons:
        blocks += [Prose("Variants of the same name choose otherwise, so no ratio of theirs is shown:"), Notes(changed)]
    blocks.append(Prose("Configuration and environment differ in:" if keys else "Configuration and environment agree."))
    return [*blocks, Notes([f"{key}: {mine} → {other}" for key, (mine, other) in keys.items()])]


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
    keys = [key for key in {**mine, **other} if mine.get(key) != other.get(key)]
    return {key: (str(mine.get(key)), str(other.get(key))) for key in keys}


def _known(result: StudyResult) -> dict[str, object]:
    found = result.environment
    keys = {key: value for key, value in result.config.flat().items() if not key.startswith(_OWN)}
    named = {"device": found.device["name"], "platform": found.platform, "python": found.python, "sdopt": found.sdopt}
    return {**keys, **named, **found.packages}


def _table(first: StudyResult, second: StudyResult, ratios: bool) -> Table:
    rows: list[list[Cell | str]] = []
    mine, other = first_rows(first), first_rows(second)
    changed = {name for names in changed_choices(second, first).values() for name in names}
    unit = unit_text(len({row.images_per_call for row in (*mine.values(), *other.values())}) > 1)
    for name in dict.fromkeys([*mine, *other]):
        shown = [(letter, found[name]) for letter, found in (("A", mine), ("B", other)) if name in found]
        for number, (letter, row) in enumerate(shown):
            taken = row.image_time if unit else row.latency
            time = seconds_parts(taken)[0] if taken else ""
            memory = gib_text(row.headline_memory[1]) if row.headline_memory else ""
            speedup = row.over_baseline.get(SPEEDUP.name)
            status = word(row.variant.status)
            rows.append(["" if number else name, letter, status, time, speedup.text if speedup else "", memory])
        same = len(shown) == 2 and name not in changed
        if ratios and same and (change := _change(first, second, name)):
            rows.append(["", "B/A", "", "", change, ""])
    headings = ("variant", "", "status", f"latency{unit}", f"speed-up{unit}", "memory")
    return Table(headings, rows, headings[3:])


def _change(first: StudyResult, second: StudyResult, name: str) -> str:
    """Returns the second result's speed-up over the first's; "" for a baseline, and if one was not timed."""
    if name in (first.baseline, second.baseline):
        return ""
    later = second.variant(name), second.variant(second.baseline)
    earlier = first.variant(name), first.variant(first.baseline)
    if not all(variant.status.measured for variant in (*later, *earlier)):
        return ""
    found = speedup_drift(later, earlier)
    return ratio_text(found.interval(first.confidence)) if found else ""
