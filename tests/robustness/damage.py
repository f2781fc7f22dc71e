"""Damages documents: every key of a result, replaced by something else."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sdopt.results.files import parse_result, to_json

VERSION_1 = Path(__file__).parents[1] / "results" / "version_1" / "result.json"

REMOVED = object()
"""Stands for a key that is not there."""

WRONG: tuple[Any, ...] = (None, [], {}, "x", -1, 0, 1e400, float("nan"), 10**30, [None], REMOVED)
"""What takes the place of a value."""

Path_ = tuple[str | int, ...]


def document() -> dict[str, Any]:
    """A result in the present schema, as it is read from JSON."""
    found: dict[str, Any] = json.loads(to_json(parse_result(VERSION_1.read_bytes())))
    return found


def keys(node: Any, here: Path_ = (), shape: Path_ = (), seen: set[Path_] | None = None) -> Iterator[Path_]:
    """Yields the path of every key, of lists only the first element."""
    seen = set() if seen is None else seen
    if shape in seen:
        return
    seen.add(shape)
    if here:
        yield here
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield from keys(value, (*here, key), (*shape, key if isinstance(node, dict) else "*"), seen)


def replaced(whole: Any, path: Path_, value: Any) -> Any:
    """Returns a copy of a document with another value at a path."""
    found = copy.copy(whole)
    if len(path) > 1:
        found[path[0]] = replaced(whole[path[0]], path[1:], value)
    elif value is REMOVED:
        del found[path[0]]
    else:
        found[path[0]] = value
    return found
