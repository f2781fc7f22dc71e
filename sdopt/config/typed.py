"""Builds typed dataclasses from composed configuration, and names every key that is wrong."""

from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sdopt.optimizations.base import Optimization
from sdopt.schema import out_of_range
from sdopt.study.designs import Design


def build_typed(path: str, node: Any, kind: type, problems: list[str]) -> Any:
    """Builds the dataclass of a node, key by key, so that every problem is found and names its key."""
    if not isinstance(node, DictConfig):
        problems.append(f"{path}: must be a group of keys, not {node!r}")
        return None
    values: Any = OmegaConf.to_container(node, resolve=False)
    target = values.pop("_target_", None)
    cls: Any = kind
    if kind in (Design, Optimization):
        if not isinstance(target, str):
            problems.append(f"{path}._target_: must name a class derived from {kind.__module__}.{kind.__name__}")
            return None
        try:
            module, _, name = target.rpartition(".")
            cls = getattr(import_module(module), name)
        except Exception as error:  # whatever importing a user's own module raises
            reason = str(error.__cause__ or error).splitlines()[0]
            problems.append(f"{path}._target_={target}: cannot be imported ({reason}); is its folder on PYTHONPATH?")
            return None
        if not (isinstance(cls, type) and is_dataclass(cls) and issubclass(cls, kind)):
            problems.append(f"{path}._target_={target}: must be a dataclass derived from {kind.__name__}")
            return None
    try:
        schema = OmegaConf.structured(cls)
    except OmegaConfBaseException as error:
        reason = f"{str(error).splitlines()[0]} of its field {error.full_key}"
        problems.append(f"{path}._target_={target}: {reason}; a yaml holds numbers, strings, lists and mappings")
        return None
    OmegaConf.set_readonly(schema, False)
    limits = {field.name: field.metadata for field in fields(cls)}
    hints = get_type_hints(cls)
    within: dict[str, Any] = {}
    before = len(problems)
    for key in values:
        full = _full(path, key)
        if key not in limits:
            problems.append(f"{full}: unknown key; there are {', '.join(limits) or 'none'}")
            continue
        if OmegaConf.is_missing(node, key):
            problems.append(f"{full}: must be given, as in {full}=…")
            continue
        kind_within = _dataclass_within(hints[key])
        if kind_within is not None and values[key] is not None:
            within[key] = build_typed(full, node[key], kind_within, problems)
            continue
        try:
            schema = OmegaConf.merge(schema, {key: node[key]})
            wrong = out_of_range(schema[key], limits[key])
        except OmegaConfBaseException as error:
            problems.append(f"{full}: {str(error).splitlines()[0]}")
        else:
            if wrong:
                problems.append(f"{full}={schema[key]}: {wrong}")
    for field in fields(cls):
        if field.name not in values and field.default is MISSING and field.default_factory is MISSING:
            full = _full(path, field.name)
            problems.append(f"{full}: must be given, as in {full}=…")
    if len(problems) > before:
        return None
    given: Any = OmegaConf.to_object(OmegaConf.masked_copy(schema, [key for key in values if key not in within]))
    return cls(**given, **within)


def _full(path: str, key: str) -> str:
    """Joins a section's path and a key; the root's path is empty."""
    return f"{path}.{key}" if path else key


def _dataclass_within(annotation: Any) -> Any:
    """`Sheet` of `Sheet` and of `Sheet | None`."""
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else [annotation]
    return next((kind for kind in kinds if is_dataclass(kind)), None)
