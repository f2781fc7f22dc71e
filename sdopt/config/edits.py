"""Edits of a composed configuration: what the overrides of a variant choose and set, without Hydra."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sdopt.config.compositions import Composition, Compositions, distinct
from sdopt.config.groups import has_default, override_of, require_overrides
from sdopt.config.overrides import group_of, parsed_override
from sdopt.errors import UsageError

Choice = Mapping[str, str]
"""Options of one group, by axis."""


@dataclass(frozen=True)
class KeyValue:
    """A key with its value; `new` says that it need not be there yet, as `+` does on a command line."""

    key: str
    value: Any
    new: bool

    @classmethod
    def of(cls, override: str) -> "KeyValue":
        """Reads an override. Raises UsageError if it asks for what is decided before there are variants."""
        parsed = parsed_override(override)
        key = str(parsed.key_or_group)
        if parsed.is_delete() and ("." in key or has_default(key)):
            raise UsageError(f"{override}: a variant takes nothing out; choose another option, or give the key a value")
        if "${" in override:
            raise UsageError(f"{override}: a variant refers to no other key; write the value")
        if parsed.is_sweep_override():
            raise UsageError(f"{override}: a variant has one value; list several variants instead")
        return cls(key, parsed.value(), parsed.is_add() or parsed.is_force_add())


@dataclass(frozen=True)
class Edit:
    """What overrides ask for.

    Attributes:
        choices: the options that they choose, by group; a group without any is taken back.
        settings: the keys that they set, in their order.
        presets: choices that set more than their own group, which Hydra alone composes.
        overrides: the same as overrides of a command line; options that combine are one list.
    """

    choices: Mapping[str, Choice] = field(default_factory=dict)
    settings: Sequence[KeyValue] = ()
    presets: Sequence[str] = ()
    overrides: Sequence[str] = ()


def read_edit(overrides: Sequence[str], compositions: Compositions) -> Edit:
    """Reads the overrides of a variant. Raises UsageError for one that is none, or that only a command line takes."""
    require_overrides(overrides)
    choices: dict[str, Choice] = {}
    words: dict[str, str] = {}
    settings: list[KeyValue] = []
    presets: list[str] = []
    for override in overrides:
        setting = KeyValue.of(override)
        key = setting.key
        options = {} if override == f"~{key}" else compositions.axes(override)
        if "." in key:
            settings.append(setting)
            words[f"{key} {len(settings)}"] = override
        elif options is None:
            if compositions.options(key):
                presets.append(override)
            else:
                settings.append(setting)
            words[key] = override
        else:
            both = {**choices.get(key, {}), **options}
            choices[key] = distinct(both.items()) if options and _combine(both) else options
            words.pop(key, None)
            words[key] = _chosen(key, override, choices[key])
    return Edit(choices, settings, presets, list(words.values()))


def _combine(options: Choice) -> bool:
    return any("." in axis for axis in options)


def _chosen(group: str, override: str, options: Choice) -> str:
    if _combine(options):
        return override_of(group, f"[{','.join(options.values())}]")
    return override if override.startswith(("+", "~")) or has_default(group) else f"+{override}"


def edited(job: Composition, edit: Edit, compositions: Compositions, others: Mapping[str, Choice]) -> Composition:
    """Returns a configuration with an edit.

    Options that combine, and stay chosen, keep the keys that the job has set.

    Args:
        job: the configuration, which stays as it is.
        edit: what to choose and to set.
        compositions: loads options.
        others: what the groups that the edit does not name choose instead of what the job chose; {} to keep that.

    Raises:
        UsageError: a key is not there.
    """
    values, choices = dict(job.values), dict(job.choices)
    for group, options in edit.choices.items():
        if not options and not has_default(group) and group not in values:
            raise UsageError(f"~{group}: no such group is chosen here")
    for group, options in {**others, **edit.choices}.items():
        kept = {} if others else in_group(job.choices, group)
        node: dict[str, Any] = {}
        for axis, option in options.items():
            if "." in axis and kept.get(axis) == option:
                part = at(job.values, axis)
            else:
                part = at(compositions.load_option(group, option) or {}, axis)
            if isinstance(part, dict):
                node = with_value(node, axis, part)
        values[group] = node.get(group)
        if group not in node:
            del values[group]
        for axis in in_group(choices, group):
            del choices[axis]
        choices |= options
    for setting in edit.settings:
        values = _with_setting(values, setting)
    return Composition(values, choices)


def _with_setting(values: Mapping[str, Any], setting: KeyValue) -> dict[str, Any]:
    group, _, name = setting.key.rpartition(".")
    there = at(values, group) if group else values
    known = isinstance(there, dict) and name in there and not _adds_keys(there[name], setting.value)
    if not (setting.new or known):
        raise UsageError(f"{setting.key}: there is no such key here; a new one takes a +, as in +{setting.key}=…")
    return with_value(values, setting.key, setting.value)


def _adds_keys(there: Any, value: Any) -> bool:
    if not (isinstance(there, dict) and isinstance(value, dict)):
        return False
    return any(name not in there or _adds_keys(there[name], part) for name, part in value.items())


def in_group(choices: Mapping[str, str], group: str) -> Choice:
    """Returns the options of one group."""
    return {axis: option for axis, option in choices.items() if group_of(axis) == group}


def at(values: Mapping[str, Any], key: str) -> Any:
    """Returns the value at a key; None if there is none."""
    node: Any = values
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def with_value(values: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Returns a copy of nested mappings with a value at a key; a mapping is merged into the one that is there."""
    first, _, rest = key.partition(".")
    there = values.get(first)
    below = there if isinstance(there, dict) else {}
    if rest:
        value = with_value(below, rest, value)
    elif isinstance(value, dict):
        merged = below
        for name, part in value.items():
            merged = with_value(merged, str(name), part) if "." not in str(name) else {**merged, name: part}
        value = merged
    return {**values, first: value}
