"""Shows two finished results side by side. Ratios are shown only where the two may be compared."""

from sdopt.gate.differences import changed_choices, device_software, differences
from sdopt.record.records import StudyResult, VariantResult
from sdopt.report.blocks import Block, Cell, Notes, Prose, Table
from sdopt.report.columns import word
from sdopt.report.header import header_of
from sdopt.scratch import CACHES
from sdopt.statistics.figures import first_rows
from sdopt.statistics.measures import SPEEDUP, ratio_text
from sdopt.statistics.ratios import speedup_drift
from sdopt.statistics.rows import Row
from sdopt.statistics.words import gib_text, seconds_parts, unit_text

_OWN = ("study", "tracking", "gate", "hydra", "dry_run", "objective")
"""Keys that change no measurement."""


_CHANGE = "B/A"
"""Of which result a line of the table is, where it is of both."""


def comparison_of(first: StudyResult, second: StudyResult) -> list[Block]:
    """Returns both headers, the variants of both by name, and the differences of the two."""
    reasons = incomparable(first, second)
    blocks: list[Block] = []
    for letter, result in (("A", first), ("B", second)):
        blocks.append(Prose(f"{letter}: {result.started}", strong=True))
        blocks.append(Notes(header_of(result)))
    if reasons:
        blocks.append(Prose("Not comparable, so no ratio of A and B is shown:"))
        blocks.append(Notes(reasons))
    table = _table(first, second, ratios=not reasons)
    blocks.append(table)
    notes = ["Each speed-up is against the baseline of its own run."]
    if any(row[1] == _CHANGE for row in table.rows):
        notes.append(f"{_CHANGE}: the speed-up in B over that in A.")
    blocks.append(Notes(notes))
    changed = []
    for change, names in changed_choices(second, first).items():
        changed.append(f"{change} ({', '.join(names)})")
    if changed and not reasons:
        blocks.append(
            Prose(
                "Variants of the same name choose otherwise, so no ratio of theirs is shown:"
            )
        )
        blocks.append(Notes(changed))
    keys = []
    for key, (before, after) in changed_keys(first, second).items():
        keys.append(f"{key}: {before} → {after}")
    agreement = (
        "Configuration and environment differ in:"
        if keys
        else "Configuration and environment agree."
    )
    return [*blocks, Prose(agreement), Notes(keys)]


def incomparable(first: StudyResult, second: StudyResult) -> list[str]:
    """Returns why no figures of the two results can be compared as ratios; [] if some can."""
    reasons = []
    for what, waiver in differences(second, first):
        if waiver not in ("sdopt", "options"):
            reasons.append(what)
    hardware = second.config.differing(first.config, ["hardware"])
    for key, (after, before) in hardware.items():
        if not key.endswith("price_per_hour"):
            reasons.append(f"{key}: {after} against {before}")
    then = first.environment
    now = second.environment
    both = then.cpu.keys() & now.cpu.keys()
    changed = any(then.cpu[name] != now.cpu[name] for name in both)
    if changed and then.cpu.get("name") == now.cpu.get("name"):
        reasons.append(f"cpu: {now.cpu} against {then.cpu}")
    if then.platform != now.platform:
        reasons.append(f"platform: {now.platform} against {then.platform}")
    return reasons


def changed_keys(first: StudyResult, second: StudyResult) -> dict[str, tuple[str, str]]:
    """Returns the keys of configuration and environment in which two results differ, with both values."""
    before = _settings(first)
    after = _settings(second)
    changed = {}
    for key in {**before, **after}:
        if before.get(key) != after.get(key):
            changed[key] = (str(before.get(key)), str(after.get(key)))
    return changed


def _settings(result: StudyResult) -> dict[str, object]:
    """Returns the keys of the configuration that a measurement depends on, the environment, and its packages."""
    settings: dict[str, object] = {}
    for key, value in result.config.flat().items():
        if not key.startswith(_OWN):
            settings[key] = value
    environment = result.environment
    settings["device"] = environment.device["name"]
    settings |= device_software(environment)
    for part, values in (("gpu", environment.gpu), ("cpu", environment.cpu)):
        for name, value in values.items():
            if name != "processes":  # which are of the moment
                settings[f"{part}.{name}"] = value
    settings["platform"] = environment.platform
    settings["python"] = environment.python
    settings["sdopt"] = environment.sdopt
    for name, value in environment.variables.items():
        if name not in CACHES:
            settings[name] = value
    return {**settings, **environment.packages}


def _table(first: StudyResult, second: StudyResult, ratios: bool) -> Table:
    several = len(first.shapes) > 1 or len(second.shapes) > 1
    results = {"A": _rows(first, several), "B": _rows(second, several)}
    counts: set[int] = set()
    changed: set[str] = set()
    for rows_by_name in results.values():
        counts.update(row.images_per_call for row in rows_by_name.values())
    for names in changed_choices(second, first).values():
        changed.update(names)
    unit = unit_text(len(counts) > 1)
    rows: list[list[Cell | str]] = []
    for name in dict.fromkeys([*results["A"], *results["B"]]):
        heading = name
        both = []
        for letter, rows_by_name in results.items():
            if name in rows_by_name:
                row = rows_by_name[name]
                both.append(row)
                rows.append([heading, letter, *_cells(row, bool(unit))])
                heading = ""
        if not ratios or len(both) < 2 or both[0].name in changed:
            continue
        if change := _change(first, second, *both):
            rows.append(["", _CHANGE, "", "", change, ""])
    headings = ("variant", "", "status", f"latency{unit}", f"speed-up{unit}", "memory")
    return Table(headings, rows, headings[3:])


def _rows(result: StudyResult, several: bool) -> dict[str, Row]:
    """Returns the row of each variant at each shape, by its name in the table; the shape is part of it in `several`."""
    rows = {}
    for name, row in first_rows(result).items():
        for at_shape in row.shapes:
            rows[f"{name}, {at_shape.shape}" if several else name] = at_shape
    return rows


def _cells(row: Row, per_image: bool) -> list[Cell | str]:
    """Returns the status, the time, the speed-up and the memory of a variant."""
    interval = row.image_time if per_image else row.latency
    speedup = row.over_baseline.get(SPEEDUP.name)
    time = seconds_parts(interval)[0] if interval else ""
    memory = "" if row.peak_gib is None else gib_text(row.peak_gib)
    return [word(row.variant.status), time, speedup.text if speedup else "", memory]


def _change(first: StudyResult, second: StudyResult, before: Row, after: Row) -> str:
    """Returns the second result's speed-up over the first's; "" for a baseline, and if one was not timed."""
    if before.is_baseline or after.is_baseline:
        return ""
    later = after.variant, _baseline_at(second, after)
    earlier = before.variant, _baseline_at(first, before)
    if not all(variant.status.measured for variant in (*later, *earlier)):
        return ""
    drift = speedup_drift(later, earlier)
    return ratio_text(drift.interval(first.confidence)) if drift else ""


def _baseline_at(
    result: StudyResult,
    row: Row,
) -> VariantResult:
    """Returns the baseline at the shape of a row."""
    if len(result.shapes) == 1:  # which may differ by variant
        return result.baseline_variant
    return result.at(result.shapes.index(row.shape)).baseline_variant
