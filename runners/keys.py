"""Says what options and keys there are, in words: for `--help`, and for `conf/README.md`."""

import ast
import inspect
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from textwrap import shorten
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic.fields import FieldInfo

from sdopt.config.groups import default_options
from sdopt.config.paths import CONF
from sdopt.options.base import Optimization
from sdopt.schema import OneOf, OneOrMore
from sdopt.study.designs import Design


def options_in_words() -> str:
    """Returns each group with its options, the default first, and what each is."""
    lines: list[str] = []
    for group, default in default_options().items():
        files = sorted(
            (CONF / group).glob("*.yaml"),
            key=lambda path: (path.stem != default, path.stem),
        )
        lines += ["", f"{group}:"]
        lines += [
            f"  {path.stem:<22} {shorten(option_comment(path), 96, placeholder=' …')}"
            for path in files
        ]
    return "\n".join(lines)


def option_comment(path: Path) -> str:
    """Returns the comment that a yaml file begins with, without Hydra's package line; in a preset, its command."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found: list[str] = []
    for line in lines:
        if not line.startswith("#"):
            break
        if "@package" not in line:
            found.append(line.lstrip("# "))
    return " ".join(found)


def own_keys(plain: Any, place: str = "") -> Iterator[str]:
    """Yields each key of a configuration with its value, type and range, and its meaning on the next line.

    `place` is the section in which the configuration is; "" if it is the whole file.
    """
    sections = {place: plain}
    for name, part in vars(plain).items():
        if is_dataclass(part):
            sections[name] = part
    for group, section in sections.items():
        for name, kind, _, meaning in key_rows(group, type(section)):
            key = name.strip("`").removeprefix(".")
            value = getattr(section, key.rpartition(".")[2])
            if not is_dataclass(value):
                shown = json.dumps(value).strip('"')
                yield f"{key}={shown}  ({kind.replace('`', '')})"
                yield f"    {meaning}"


def key_rows(axis: str, cls: type) -> Iterator[tuple[str, ...]]:
    """Yields key, type, default and meaning of each field of a class."""
    hints, meanings = get_type_hints(cls, include_extras=True), _attribute_docs(cls)
    for field in fields(cls):
        if issubclass(cls, Optimization | Design) or field.name != "name":
            yield (
                f"`{axis}.{field.name}`",
                _type_name(hints[field.name]),
                _default(field),
                meanings[field.name],
            )


def _type_name(hint: Any) -> str:
    limits = limits_of(hint)
    if "choices" in limits:
        return ", ".join(f"`{choice}`" for choice in limits["choices"])
    words = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "multiple_of": "a multiple of"}
    bounds = [
        f"{sign} {_shown(limits[key])}" for key, sign in words.items() if key in limits
    ]
    return ", ".join([_name(hint), *bounds])


def limits_of(hint: Any) -> dict[str, Any]:
    """Returns the limits in a key's type, or in that of its items: `ge`, `gt`, `le`, `lt`, `multiple_of`; `choices`."""
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if get_origin(hint) is not Annotated:
        within = (limits_of(part) for part in get_args(hint))
        return next(filter(None, within), {})
    limits: dict[str, Any] = {}
    for metadata in hint.__metadata__:
        if isinstance(metadata, OneOf):
            limits["choices"] = tuple(metadata.choices)
        elif isinstance(metadata, OneOrMore):
            limits |= limits_of(metadata.number)
        elif isinstance(metadata, FieldInfo):
            for bound in metadata.metadata:
                limits |= asdict(bound)
    return limits


def _name(hint: Any) -> str:
    """Returns the name of a key's type without its limits, as Python writes it."""
    if get_origin(hint) is Annotated:
        several = any(isinstance(metadata, OneOrMore) for metadata in hint.__metadata__)
        return "int | list[int]" if several else _name(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(_name(part) for part in get_args(hint))
    if hint is NoneType:
        return "None"
    return (
        hint.__name__
        if isinstance(hint, type)
        else re.sub(r"[\w.]+\.(\w+)", r"\1", str(hint))
    )


def _shown(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _default(field: Field[Any]) -> str:
    if field.default is MISSING:
        return (
            "must be given"
            if field.default_factory is MISSING
            else f"`{field.default_factory()}`"
        )
    return {"None": "null"}.get(str(field.default), f"`{field.default}`")


@cache
def _attribute_docs(cls: type) -> dict[str, str]:
    """Returns the docstring below each field of a dataclass and of its bases, in one line."""
    found: dict[str, str] = {field.name: "" for field in fields(cls)}
    for base in reversed(cls.__mro__):
        if base.__module__ == "builtins":
            continue
        for pair in pairwise(_classes_in(base.__module__)[base.__qualname__].body):
            match pair:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=text)),
                ) if name in found:
                    found[name] = " ".join(str(text).split())
    return found


@cache
def _classes_in(module: str) -> dict[str, ast.ClassDef]:
    """Returns the classes of a module as they are written, by name: Python would read all of it again for each."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
