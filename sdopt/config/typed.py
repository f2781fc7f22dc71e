"""Builds typed dataclasses from a composed configuration: pydantic checks types and ranges, and every key is named."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache
from importlib import import_module
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import ErrorDetails

from sdopt.errors import first_line
from sdopt.options.base import Optimization
from sdopt.study.designs import Design

_TARGETED = (Design, Optimization)
"""Base classes of which a node names a subclass with `_target_`."""

_BUILT: dict[tuple[str, type, str], Any] = {}
"""The objects built so far, by path, class and content: the variants of a study have most of their nodes in common."""


MISSING = "???"
"""What a file writes for a key that it leaves to the user."""


def typed(path: str, node: Any, kind: type, problems: list[str]) -> Any:
    """Builds the dataclass of a node; every problem is found and names its key.

    Args:
        path: the path of the node in the configuration; empty for the root.
        node: the plain values at that path.
        kind: the dataclass, or its base class if the node names it with `_target_`.
        problems: receives the errors.

    Returns:
        The object, or None if there are problems.
    """
    if not isinstance(node, Mapping):
        problems.append(f"{path}: must be a group of keys, not {node!r}")
        return None
    keys = dict(node)
    target = keys.pop("_target_", None)
    cls = _class_of(path, target, kind, problems) if kind in _TARGETED else kind
    if cls is None:
        return None
    content = path, cls, repr(keys)
    if content not in _BUILT:
        wrong: list[str] = []
        built = _validated(path, keys, cls, wrong)
        problems += wrong
        if wrong:
            return None
        _BUILT[content] = built
    return _BUILT[content]


def _class_of(path: str, target: Any, kind: type, problems: list[str]) -> Any:
    """Imports the class that a node names; returns None if it is not derived from `kind`."""
    if not isinstance(target, str):
        problems.append(
            f"{path}._target_: must name a class derived from {kind.__module__}.{kind.__name__}"
        )
        return None
    try:
        module, _, name = target.rpartition(".")
        cls = getattr(import_module(module), name)
    except Exception as error:  # importing a user's own module may raise anything
        reason = first_line(error.__cause__ or error)
        problems.append(
            f"{path}._target_={target}: cannot be imported ({reason}); is its folder on PYTHONPATH?"
        )
        return None
    if isinstance(cls, type) and is_dataclass(cls) and issubclass(cls, kind):
        return cls
    problems.append(
        f"{path}._target_={target}: must be a dataclass derived from {kind.__name__}"
    )
    return None


@cache
def _adapter(cls: type) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def _validated(
    path: str, values: dict[str, Any], cls: type, problems: list[str]
) -> Any:
    lacking = list(_missing(path, values))
    problems += [f"{key}: must be given, as in {key}=…" for key in lacking]
    try:
        built = _adapter(cls).validate_python(values, extra="forbid")
    except PydanticUserError as error:  # of a user's own class
        problems.append(
            f"{path}: {cls.__name__} has a field of a type that no yaml can hold: {first_line(error)}"
        )
        return None
    except ValidationError as error:
        for problem in error.errors(include_url=False):
            key = _key_of(path, problem)
            if key not in lacking:
                problems.append(
                    f"{key}{_shown(problem)}: {problem['msg'].removeprefix('Value error, ')}"
                )
        return None
    problems += _misread(path, values, built)
    return built


def _missing(path: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Yields the full names of the keys that a file leaves to the user."""
    for key, value in values.items():
        if value == MISSING:
            yield _joined(path, key)
        elif isinstance(value, dict):
            yield from _missing(_joined(path, key), value)


def _key_of(path: str, problem: ErrorDetails) -> str:
    key = path
    for part in problem["loc"]:
        key = f"{key}[{part}]" if isinstance(part, int) else _joined(key, part)
    return key


def _shown(problem: ErrorDetails) -> str:
    """Returns `=VALUE` for a single value that is wrong in itself."""
    value = problem["input"]
    unknown = problem["type"] == "unexpected_keyword_argument"
    return f"={value}" if isinstance(value, str | int | float) and not unknown else ""


def _joined(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _misread(key: str, value: Any, made: Any) -> Iterator[str]:
    """Yields where a value became another one than the user wrote, without an error of pydantic's."""
    if isinstance(value, dict):
        parts = vars(made) if is_dataclass(made) else made
        for name, part in value.items():
            yield from _misread(
                _joined(key, name), part, parts[name if name in parts else str(name)]
            )
    elif isinstance(value, list):
        for number, (item, part) in enumerate(zip(value, made, strict=True)):
            yield from _misread(f"{key}[{number}]", item, part)
    elif isinstance(value, bool) and not isinstance(made, bool):
        yield f"{key}={value}: must be a number"
    elif isinstance(value, float) and isinstance(made, str):  # 1.50 is read as 1.5
        yield f"{key}={value}: must be text; write it in quotes"
    elif isinstance(made, float) and not math.isfinite(made):
        yield f"{key}={value}: must be a finite number"
