"""Builds typed dataclasses from a composed configuration, and names every invalid key."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib import import_module
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf, StringNode
from omegaconf.errors import OmegaConfBaseException

from sdopt.options.base import Optimization
from sdopt.schema import out_of_range
from sdopt.study.designs import Design

_TARGETED = (Design, Optimization)
"""Base classes of which a node names a subclass with `_target_`."""

_BUILT: dict[tuple[str, type, str], Any] = {}
"""The objects built so far, by path, class and content: the variants of a study have most of their nodes in common."""


def build_typed(path: str, node: Any, kind: Any, problems: list[str]) -> Any:
    """Builds the dataclass of a node, key by key, so that every problem is found and names its key.

    Args:
        path: the path of the node in the configuration; empty for the root.
        node: the configuration node at that path.
        kind: the dataclass, or its base class if the node names it with `_target_`; or a list or a mapping of some.
        problems: receives the errors.

    Returns:
        The object, or None if there are problems.
    """
    found: list[str] = []
    made = _build(path, node, kind, found)
    problems += found
    return None if found else made


def _build(path: str, node: Any, kind: Any, problems: list[str]) -> Any:
    of = get_args(kind)
    if not of:
        return _build_one(path, node, kind, problems)
    if get_origin(kind) is dict and (node is None or OmegaConf.is_dict(node)):
        return {str(key): _build(f"{path}.{key}", node[key], of[1], problems) for key in node or {}}
    if get_origin(kind) is not dict and OmegaConf.is_list(node):
        return get_origin(kind)(_build(f"{path}[{i}]", item, of[0], problems) for i, item in enumerate(node))
    problems.append(f"{path}: must be a {'mapping' if get_origin(kind) is dict else 'list'}, not {node!r}")
    return None


def _build_one(path: str, node: Any, kind: Any, problems: list[str]) -> Any:
    if not isinstance(node, DictConfig):
        problems.append(f"{path}: must be a group of keys, not {node!r}")
        return None
    values: Any = OmegaConf.to_container(node, resolve=False)
    target = values.pop("_target_", None)
    cls = _class_of(path, target, kind, problems) if kind in _TARGETED else kind
    if cls is None:
        return None
    content = repr(values)
    key = path, cls, content
    if key not in _BUILT:
        made = _build_anew(path, node, cls, values, problems)
        if made is None or "${" in content:  # an interpolation may have another value in another configuration
            return made
        _BUILT[key] = made
    return _BUILT[key]


def _build_anew(path: str, node: DictConfig, cls: Any, values: Mapping[Any, Any], problems: list[str]) -> Any:
    try:
        schema = OmegaConf.structured(cls)
    except OmegaConfBaseException as error:
        reason = f"{str(error).splitlines()[0]} of its field {error.full_key}"
        problems.append(
            f"{path}._target_={node._target_}: {reason}; a YAML file can hold only numbers, strings, lists and mappings"
        )
        return None
    OmegaConf.set_readonly(schema, False)
    within = _set_fields(schema, cls, path, node, values, problems)
    required = {field.name for field in fields(cls) if field.default is MISSING and field.default_factory is MISSING}
    lacking = sorted(_full(path, name) for name in required - set(values))
    problems += [f"{full}: must be given, as in {full}=…" for full in lacking]
    if problems:
        return None
    given: Any = OmegaConf.to_object(OmegaConf.masked_copy(schema, [key for key in values if key not in within]))
    return cls(**given, **within)


def _full(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _class_of(path: str, target: Any, kind: type, problems: list[str]) -> Any:
    """Imports the class that a node names; returns None if it is not derived from `kind`."""
    if not isinstance(target, str):
        problems.append(f"{path}._target_: must name a class derived from {kind.__module__}.{kind.__name__}")
        return None
    try:
        module, _, name = target.rpartition(".")
        cls = getattr(import_module(module), name)
    except Exception as error:  # importing a user's own module may raise anything
        reason = str(error.__cause__ or error).splitlines()[0]
        problems.append(f"{path}._target_={target}: cannot be imported ({reason}); is its folder on PYTHONPATH?")
        return None
    if isinstance(cls, type) and is_dataclass(cls) and issubclass(cls, kind):
        return cls
    problems.append(f"{path}._target_={target}: must be a dataclass derived from {kind.__name__}")
    return None


def _set_fields(
    schema: DictConfig, cls: Any, path: str, node: DictConfig, values: Mapping[Any, Any], problems: list[str]
) -> dict[str, Any]:
    """Merges a node's values into the schema of its class, each checked by type and range.

    Returns:
        The fields that hold dataclasses, built: a schema would take them without their ranges.
    """
    limits = {field.name: field.metadata for field in fields(cls)}
    hints = get_type_hints(cls)
    within: dict[str, Any] = {}
    for key, value in values.items():
        full = _full(path, key)
        if key not in limits:
            problems.append(f"{full}: unknown key; the keys are {', '.join(limits) or 'none'}")
        elif OmegaConf.is_missing(node, key):
            problems.append(f"{full}: must be given, as in {full}=…")
        elif (kind := _structure(hints[key])) and (value is not None or NoneType not in get_args(hints[key])):
            within[key] = _build(full, node[key], kind, problems)
        else:
            problems += _set_field(schema, key, full, node, limits[key], hints[key])
    return within


def _set_field(
    schema: DictConfig, key: str, full: str, node: DictConfig, limits: Mapping[str, Any], hint: Any
) -> list[str]:
    """Merges one value into a schema; returns what is wrong with it."""
    try:
        if misfit := _misfit(full, node[key], hint):
            return [misfit]
        # YAML reads no as false and 1.50 as 1.5: the text would be another one.
        if isinstance(schema._get_node(key), StringNode) and isinstance(node[key], bool | float):
            return [f"{full}={node[key]}: must be text; write it in quotes"]
        # Null is a number only where it is the default.
        numbers = "each" in limits and not (node[key] is None and schema[key] is None)
        schema.merge_with({key: _numbers(node[key]) if numbers else node[key]})
        wrong = out_of_range(schema[key], limits)
    except OmegaConfBaseException as error:
        if "each" in limits and isinstance(node[key], str):
            return [f"{full}={node[key]}: must be a whole number, or a list of them"]
        said = str(error).splitlines()[0]
        if said.startswith("Interpolation key"):
            said += "; for a ${ that names no key write \\${"
        return [f"{full}: {said}"]
    return [f"{full}={schema[key]}: {wrong}"] if wrong else []


def _misfit(full: str, value: Any, hint: Any) -> str | None:
    """Returns why a value is not the list, the mapping or the single value that its type asks for; None if it is."""
    kind, within = get_origin(hint), [each for each in get_args(hint) if each is not NoneType]
    found: Iterator[str | None] = iter(())
    if kind in (Union, UnionType):
        found = iter([] if value is None else [_misfit(full, value, within[0])])
    elif kind is list and OmegaConf.is_list(value):
        found = (_misfit(full, item, within[0]) for item in value)
    elif kind is dict and OmegaConf.is_dict(value):
        found = (_misfit(f"{full}.{key}", value[key], within[1]) for key in value)
    elif kind is list:
        return f"{full}: must be a list, as in [{'' if value is None else value}]"
    elif kind is dict:
        return f"{full}: must be a mapping, as in {{name: …}}, not {value}"
    elif hint is not Any and OmegaConf.is_list(value):
        return f"{full}: must be one value, not the list {value}"
    elif hint is not Any and OmegaConf.is_dict(value):
        return f"{full}: {value} is a mapping; leave out the space after a colon, or write key=value"
    return next(filter(None, found), None)


@dataclass
class _Numbers:
    values: list[int]


def _numbers(given: Any) -> Any:
    """Returns a whole number, or a list of them, each of that type. Raises OmegaConfBaseException."""
    is_list = OmegaConf.is_list(given)
    found: Any = OmegaConf.merge(OmegaConf.structured(_Numbers), {"values": given if is_list else [given]})
    return found["values"] if is_list else found["values"][0]


def _structure(annotation: Any) -> Any:
    """Returns an annotation, without `| None`, that is a dataclass or a list or mapping of them; None for others."""
    within = get_args(annotation)
    if get_origin(annotation) in (Union, UnionType):
        return next(filter(None, map(_structure, within)), None)
    return annotation if is_dataclass(annotation) or any(map(_structure, within)) else None
