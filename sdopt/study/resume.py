"""Resumes a study that broke off: checks that it is still the same one, and marks what is to be measured again."""

import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sdopt.errors import UsageError
from sdopt.results.files import parse_result, to_json
from sdopt.results.records import Status, StudyResult

_FAILURES = (Status.FAILED, Status.OUT_OF_MEMORY, Status.KILLED, Status.TIMEOUT)

_CHANGEABLE = ("tracking", "dry_run")

_OF_THE_MOMENT = ("command", "warnings", "device.warning", "device.memory_free_gib", "gpu")

_OWN_CODE = ("code", "sdopt_version", "sdopt_commit", "sdopt_dirty")


def merge_resumed(previous: StudyResult, fresh: StudyResult, folder: Path, retry_failed: bool) -> StudyResult:
    """Returns the previous result, ready to be completed.

    Args:
        previous: what was measured before.
        fresh: the same study as it is composed and planned now.
        folder: of the run, for messages.
        retry_failed: measures also what failed, ran out of memory, was killed or took too long.

    Raises:
        UsageError: it would not be the same study, each difference by name; or nothing could be compared.
    """
    fresh = parse_result(to_json(fresh))
    differing = list(_differences(previous, fresh))
    if differing:
        raise UsageError([f"resume={folder}: not the same study any more: {found}" for found in differing])
    for row in previous.variants:
        if row.status is Status.INTERRUPTED or (retry_failed and row.status in _FAILURES):
            row.status, row.reason = Status.PENDING, ""
    baseline = previous.variant(previous.baseline)
    if baseline.status in _FAILURES and any(row.status is Status.PENDING for row in previous.variants):
        raise UsageError(
            f"resume={folder}: the baseline was not measured (status {baseline.status}: {baseline.reason}), so "
            "there is nothing to compare with; add retry_failed=true to measure it again"
        )
    previous.config = replace(previous.config, tracking=fresh.config.tracking)
    return previous


def _differences(previous: StudyResult, fresh: StudyResult) -> Iterator[str]:
    """Yields what makes samples of one study incomparable with those of the other."""
    yield from _between(vars(previous.environment), vars(fresh.environment), (*_OF_THE_MOMENT, *_OWN_CODE))
    if previous.environment.code != fresh.environment.code:
        # Another sdopt records other keys: each would differ, and none of them is what the user changed.
        commit = (previous.environment.sdopt_commit or "")[:9]
        yield (
            f"it was measured by another sdopt ({previous.environment.sdopt_version} {commit}), "
            "whose samples cannot be continued: start anew, or resume it with that one"
        )
        return
    changed = list(_between(asdict(previous.config), asdict(fresh.config), _CHANGEABLE))
    yield from changed
    was, now = ([(row.name, row.role) for row in result.variants] for result in (previous, fresh))
    if was != now:
        yield f"its variants were {', '.join(name for name, _ in was)}, now {', '.join(name for name, _ in now)}"
        return
    for old, new in zip(previous.variants, fresh.variants, strict=True):
        if not changed:
            for found in _between(asdict(old.config), asdict(new.config), _CHANGEABLE):
                yield f"{old.name}: {found}"
        for found in _between(old.inputs, new.inputs):
            yield f"{old.name}: contents of its {found}"
    edges = [
        [(edge.candidate, edge.reference, edge.credit) for edge in result.comparisons] for result in (previous, fresh)
    ]
    if edges[0] != edges[1]:
        yield "other variants are compared"


def _between(was: Any, now: Any, ignored: tuple[str, ...] = (), key: str = "") -> Iterator[str]:
    """Yields `key: was …, now …` for each leaf that differs."""
    if key in ignored:
        return
    if isinstance(was, dict) and isinstance(now, dict):
        for name in [*was, *(name for name in now if name not in was)]:
            yield from _between(was.get(name), now.get(name), ignored, f"{key}.{name}" if key else str(name))
    elif key == "device.memory_total_gib":
        # Of one machine the kernel reports a little more or less after each start.
        if not math.isclose(was, now, rel_tol=0.01):
            yield f"{key}: was {was:.1f}, now {now:.1f}"
    elif was != now:
        yield f"{key}: was {was}, now {now}"
