"""Damages documents: a key of a result, replaced by something else."""

import copy
import json
from pathlib import Path
from typing import Any

RESULT = Path(__file__).with_name("result.json")

Path_ = tuple[str | int, ...]


def document() -> dict[str, Any]:
    """A small result, as it is read from JSON."""
    found: dict[str, Any] = json.loads(RESULT.read_bytes())
    return found


def replaced(whole: Any, path: Path_, value: Any) -> Any:
    """Returns a copy of a document with another value at a path."""
    found = copy.copy(whole)
    found[path[0]] = (
        replaced(whole[path[0]], path[1:], value) if len(path) > 1 else value
    )
    return found
