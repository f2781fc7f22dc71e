"""Reads which jobs a sweep has, from what Hydra records of its command."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # PyYAML has none

_SWEEPER = "BasicSweeper"
"""Hydra's own, which runs each combination of values once; others decide while they run."""

_NUMBER = "${hydra.job.num}"

_DAMAGED = (OSError, ValueError, LookupError, TypeError, yaml.YAMLError)


def shared_overrides(folder: Path) -> list[str]:
    """Returns the overrides of a sweep's command, those that it sweeps with all their values.

    Raises LookupError for a copy without the sweep's own files.
    """
    try:
        overrides = _recorded(folder)["overrides"]
        return list(map(str, overrides["task"]))
    except _DAMAGED as error:
        raise LookupError(str(folder)) from error


def planned_jobs(folder: Path) -> dict[str, str]:
    """Returns what each job of a sweep has for itself, as in `attention=math, layout=contiguous`, by its folder.

    Where that is not known before they run, it is {}: their folders have no numbers, or another sweeper chooses.
    """
    try:
        recorded = _recorded(folder)
        subdir = str(recorded["sweep"]["subdir"])
        by_number = _NUMBER in subdir and "${" not in subdir.replace(_NUMBER, "")
        sweeper = recorded["sweeper"]
        if not sweeper["_target_"].endswith(_SWEEPER) or not by_number:
            return {}
        overrides = []
        for key, value in (sweeper["params"] or {}).items():
            overrides.append(f"{key}={value}")
        overrides += recorded["overrides"]["task"]
        swept = _swept(overrides)
    except _DAMAGED:
        return {}
    jobs = {}
    for number, words in enumerate(product(*swept)):
        name = subdir.replace(_NUMBER, str(number))
        jobs[name] = ", ".join(filter(None, words))
    return jobs


def _recorded(folder: Path) -> dict[str, Any]:
    text = (folder / "multirun.yaml").read_text("utf-8")
    recorded: dict[str, Any] = yaml.safe_load(text)["hydra"]
    return recorded


def _swept(overrides: Sequence[str]) -> list[list[str]]:
    """Returns the overrides of each key, one for each value that it sweeps, in Hydra's order; "" for one value alone.

    Raises ValueError if they cannot be told, as those of `glob(*)`.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    words: dict[str, list[str]] = {}
    try:
        parser = OverridesParser.create()
        for override in parser.parse_overrides(list(overrides)):
            key = override.get_key_element()
            words[key] = [""]
            if not override.is_sweep_override():
                continue
            if getattr(override.value(), "shuffle", False):
                raise ValueError(f"{key}: in another order each time")
            values = override.sweep_string_iterator()
            words[key] = [f"{key}={value}" for value in values]
    except HydraException as error:
        raise ValueError(str(error)) from error
    return list(words.values())
