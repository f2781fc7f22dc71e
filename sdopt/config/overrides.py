"""Reads and merges Hydra overrides."""

import re
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException

from sdopt.errors import UsageError, first_line

_LISTS = (ValueType.CHOICE_SWEEP, ValueType.SIMPLE_CHOICE_SWEEP)


def written_key(argument: str) -> str:
    """Returns the key of a word of a command line as it is written, without a `+`; it may be no override at all."""
    return argument.lstrip("+").partition("=")[0]


def merge_overrides(
    overrides: Sequence[str], more: Sequence[str], staying: Collection[str] = ()
) -> list[str]:
    """Appends `more`; a choice of a group in it replaces the earlier choice and the keys that were set for that.

    Args:
        overrides: overrides in the order of a command line.
        more: overrides that win.
        staying: axes such as `memory.vae_tiling` whose keys survive although their group is chosen anew.
    """
    replaced = [key for key in map(key_of, more) if "." not in key]
    merged = []
    for override in overrides:
        key = key_of(override)
        stays = _within(key, staying) and key not in replaced
        if stays or not _within(key, replaced):
            merged.append(override)
    return [*merged, *more]


def _within(key: str, nodes: Collection[str]) -> bool:
    return any(key == node or key.startswith(f"{node}.") for node in nodes)


@cache
def parsed_override(override: str) -> Override:
    """Parses an override.

    Raises:
        UsageError: the text is no override.
    """
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException as error:
        text = override or "''"
        raise UsageError(f"{text}: not an override: {first_line(error)}") from error
    if not parsed.key_or_group:
        raise UsageError(f"{override}: names no key; write key=value")
    return parsed


def listed(override: str) -> list[str] | None:
    """Returns the values that an override sweeps over, as they are written; None if it does not list them.

    Options that a pattern names, as in `precision=glob(*)`, are known to Hydra alone.
    """
    parsed = parsed_override(override)
    if parsed.value_type not in _LISTS:
        return None
    return list(map(str, parsed.sweep_string_iterator()))


def key_of(override: str) -> str:
    """Returns `compiler` for `compiler=inductor` and `+compiler=mine`; `compiler.mode` for `compiler.mode=default`.

    Raises:
        UsageError: the text is no override.
    """
    return str(parsed_override(override).key_or_group)


def asks_dry_run(overrides: Sequence[str]) -> bool:
    """Returns whether a command line asks only for its plan; the last `dry_run` counts, as for Hydra.

    Raises:
        UsageError: a text is no override.
    """
    asks = False
    for override in overrides:
        if key_of(override) == "dry_run":
            _, _, value = override.partition("=")
            asks = value.lower() == "true"
    return asks


def names_and_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separates names of results from overrides of the tracking group. A path that exists is a name, whatever it is."""
    names: list[str] = []
    overrides: list[str] = []
    for word in words:
        tracks = re.match(r"[+~]*tracking(\.\w+)*=", word)
        if tracks and not Path(word).exists():
            overrides.append(word)
        else:
            names.append(word)
    return names, overrides


def group_of(key: str) -> str:
    """Returns the first part of a key or of a group's path: `memory` for `memory.vae_tiling.tile_size`."""
    return key.partition(".")[0].partition("/")[0]
