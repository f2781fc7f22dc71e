"""Reads which jobs a sweep has, from what Hydra records of its command."""

import re
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


def own_overrides(folder: Path, words: Sequence[str]) -> list[str]:
    """Returns the overrides of a sweep's job that its command has not: one for each value that it sweeps.

    Hydra escapes the words of a job, and not those of the command. What says where results go is none of them.
    Raises LookupError for a copy without the sweep's own files.
    """
    shared = [_meaning(word) for word in shared_overrides(folder)]
    return [word for word in measuring(words) if _meaning(word) not in shared]


def own_words(folder: Path, jobs: Sequence[str]) -> dict[str, str]:
    """Returns the overrides that each job has and not all of them, from what Hydra recorded of each; else all of it."""
    words = {job: _words_of(folder / job) for job in jobs}
    recorded = [set(own) for own in words.values() if own]
    shared = set.intersection(*recorded) if recorded else set()
    named = {}
    for job, own in words.items():
        apart = [word for word in own if word not in shared]
        named[job] = ", ".join(apart or own) or "no overrides recorded"
    return named


def _words_of(job: Path) -> list[str]:
    """Returns the overrides of a job, without those that say where results go; [] where none are recorded."""
    try:
        text = (job / ".hydra" / "overrides.yaml").read_text("utf-8")
        return measuring([str(word) for word in yaml.safe_load(text) or ()])
    except _DAMAGED:
        return []


def measuring(words: Sequence[str]) -> list[str]:
    """Returns the words of a command without those that say where results go, and with which notes."""
    return [word for word in words if not _OF_THE_TRACKER.match(word)]


_OF_THE_TRACKER = re.compile(r"\+*tracking[.=@]")


def _meaning(word: str) -> Any:
    """Returns the key and the value of an override without quotes and escapes; the text of one that sweeps or is odd."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException:
        return word
    if override.is_sweep_override():
        return word
    return override.get_key_element(), override.value()


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
