"""Shows two finished results side by side. Ratios are shown only where the two may be compared."""

from collections.abc import Mapping

from sdopt.gate.differences import (
    changed_choices,
    changed_in_both,
    device_software,
    differences,
)
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

_Rows = dict[str, Row]
"""The row of each variant at each shape, by its name in the table."""


def comparison_of(first: StudyResult, second: StudyResult) -> list[Block]:
    """Returns both headers, the variants of both by name, and the differences of the two."""
    blocks: list[Block] = []
    for letter, result in (("A", first), ("B", second)):
        heading = f"{letter}: {result.started}"
        blocks.append(Prose(heading, strong=True))
        blocks.append(Notes(header_of(result)))
    choices: list[str] = []
    chosen_otherwise: set[str] = set()
    for change, names in changed_choices(second, first).items():
        choices.append(f"{change} ({', '.join(names)})")
        chosen_otherwise.update(names)
    most_shapes = max(len(first.shapes), len(second.shapes))
    before = _rows(first, with_shape=most_shapes > 1)
    after = _rows(second, with_shape=most_shapes > 1)
    ratios: dict[str, str] = {}
    reasons = incomparable(first, second)
    if reasons:
        blocks.append(
            Prose("Not comparable, so no ratio of A and B is shown (B against A):")
        )
        blocks.append(Notes(reasons))
    else:
        for name in before.keys() & after.keys():
            if before[name].name not in chosen_otherwise:
                ratios[name] = _ratio(first, second, before[name], after[name])
    blocks.append(_table(before, after, ratios))
    notes = ["Each speed-up is against the baseline of its own run."]
    if any(ratios.values()):
        notes.append(f"{_CHANGE}: the speed-up in B over that in A.")
    blocks.append(Notes(notes))
    if choices and not reasons:
        text = "Variants of the same name choose otherwise, so no ratio of theirs is shown (B against A):"
        blocks.append(Prose(text))
        blocks.append(Notes(choices))
    agreement = "Configuration and environment agree."
    if choices:
        agreement = "What else was configured, and the environment agree."
    keys = []
    for key, (earlier, later) in changed_keys(first, second).items():
        agreement = "Configuration and environment differ in (B against A):"
        keys.append(f"{key}: {later} against {earlier}")
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
    same_name = then.cpu.get("name") == now.cpu.get("name")
    if same_name and changed_in_both(now.cpu, then.cpu):
        reasons.append(f"cpu: {now.cpu} against {then.cpu}")
    if then.platform != now.platform:
        reasons.append(f"platform: {now.platform} against {then.platform}")
    return reasons


def changed_keys(
    first: StudyResult,
    second: StudyResult,
) -> dict[str, tuple[str, str]]:
    """Returns the keys of configuration and environment in which two results differ, with both values."""
    before = _settings(first)
    after = _settings(second)
    changed = {}
    for key in {**before, **after}:
        earlier = before.get(key)
        later = after.get(key)
        if earlier != later:
            changed[key] = (str(earlier), str(later))
    return changed


def _settings(result: StudyResult) -> dict[str, object]:
    """Returns the keys of the configuration that a measurement depends on, the environment, and its packages."""
    environment = result.environment
    configuration: dict[str, object] = {}
    for key, value in result.config.flat().items():
        if not key.startswith(_OWN):
            configuration[key] = value
    devices: dict[str, object] = {}
    for name, value in environment.gpu.items():
        if name != "processes":  # which are of the moment
            devices[f"gpu.{name}"] = value
    for name, value in environment.cpu.items():
        devices[f"cpu.{name}"] = value
    variables = dict(environment.variables)
    for name in CACHES:
        variables.pop(name, None)
    return {
        **configuration,
        "device": environment.device["name"],
        **device_software(environment),
        **devices,
        "platform": environment.platform,
        "python": environment.python,
        "sdopt": environment.sdopt,
        **variables,
        **environment.packages,
    }


def _table(before: _Rows, after: _Rows, ratios: Mapping[str, str]) -> Table:
    """Returns the table of both results' rows, by name, with the ratio of B and A below those that have one."""
    counts: set[int] = set()
    for rows in (before, after):
        counts.update(row.images_per_call for row in rows.values())
    per_image = len(counts) > 1
    lines: list[list[Cell | str]] = []
    for name in {**before, **after}:
        heading = name
        for letter, rows in (("A", before), ("B", after)):
            if name in rows:
                cells = _cells(rows[name], per_image)
                lines.append([heading, letter, *cells])
                heading = ""
        if ratios.get(name):
            lines.append(["", _CHANGE, "", "", ratios[name], ""])
    unit = unit_text(per_image)
    headings = ("variant", "", "status", f"latency{unit}", f"speed-up{unit}", "memory")
    return Table(headings, lines, headings[3:])


def _rows(result: StudyResult, with_shape: bool) -> _Rows:
    """Returns the row of each variant at each shape, by its name in the table, of which the shape may be a part."""
    rows = {}
    for name, row in first_rows(result).items():
        for at_shape in row.shapes:
            key = f"{name}, {at_shape.shape}" if with_shape else name
            rows[key] = at_shape
    return rows


def _cells(row: Row, per_image: bool) -> list[Cell | str]:
    """Returns the status, the time, the speed-up and the memory of a variant."""
    time = row.image_time if per_image else row.latency
    speedup = row.over_baseline.get(SPEEDUP.name)
    return [
        word(row.variant.status),
        seconds_parts(time)[0] if time else "",
        speedup.text if speedup else "",
        "" if row.peak_gib is None else gib_text(row.peak_gib),
    ]


def _ratio(
    first: StudyResult,
    second: StudyResult,
    before: Row,
    after: Row,
) -> str:
    """Returns the second result's speed-up over the first's; "" for baselines, and if one was not timed."""
    if any(row.is_baseline or row.variant.is_control for row in (before, after)):
        return ""
    later = (after.variant, _baseline_at(second, after))
    earlier = (before.variant, _baseline_at(first, before))
    for variant in (*later, *earlier):
        if not variant.status.measured:
            return ""
    drift = speedup_drift(later, earlier)
    return ratio_text(drift.interval(first.confidence)) if drift else ""


def _baseline_at(result: StudyResult, row: Row) -> VariantResult:
    """Returns the baseline at the shape of a row."""
    if len(result.shapes) == 1:  # which may differ by variant
        return result.baseline_variant
    at_shape = result.at(result.shapes.index(row.shape))
    return at_shape.baseline_variant
