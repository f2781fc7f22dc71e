"""Edits of a composed configuration: what the overrides of a variant choose and set, without Hydra."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sdopt.config.compositions import Composition, Compositions, Values, distinct
from sdopt.config.groups import has_default, override_of, require_overrides
from sdopt.config.overrides import group_of, parsed_override
from sdopt.errors import UsageError

Choice = Mapping[str, str]
"""Options of one group, by axis."""


KeyValue = tuple[str, Any, bool]
"""A key, its value, and whether it need not be there yet, as with `+` on a command line."""


def key_value(override: str) -> KeyValue:
    """Reads an override. Raises UsageError if it asks for what is decided before there are variants."""
    parsed = parsed_override(override)
    key = str(parsed.key_or_group)
    takes_out = parsed.is_delete() and ("." in key or has_default(key))
    if takes_out or "${" in override or parsed.is_sweep_override():
        raise UsageError(f"{override}: a variant gives a key one value of its own")
    return key, parsed.value(), parsed.is_add() or parsed.is_force_add()


@dataclass
class Edit:
    """What overrides ask for.

    Attributes:
        choices: the options that they choose, by group; a group without any is taken back.
        settings: the keys that they set, in their order.
        presets: choices that set more than their own group, which Hydra alone composes.
    """

    choices: dict[str, Choice] = field(default_factory=dict)
    settings: list[KeyValue] = field(default_factory=list)
    presets: list[str] = field(default_factory=list)
    _words: dict[str, str] = field(default_factory=dict)

    @property
    def overrides(self) -> list[str]:
        """The same as overrides of a command line; options that combine are one list."""
        return list(self._words.values())

    def add(self, override: str, compositions: Compositions) -> None:
        """Reads one more override. Raises UsageError: two of the options exclude each other."""
        setting = key_value(override)
        group, _, _ = setting
        if "." in group:
            self.settings.append(setting)
            self._words.pop(override, None)  # what is set last stands last
            self._words[override] = override
            return
        options = compositions.axes(override)
        if override == f"~{group}":
            options = {}
        if options is not None:
            self._choose(group, options, override)
            return
        self._words[group] = override
        if compositions.options(group):
            self.presets.append(override)
        else:
            self.settings.append(setting)

    def _choose(self, group: str, options: Choice, override: str) -> None:
        before = self.choices.get(group, {})
        both = {**before, **options}
        combine = any("." in axis for axis in both)
        if options and combine:
            options = distinct(both.items())
            names = ",".join(options.values())
            override = override_of(group, f"[{names}]")
        elif not override.startswith(("+", "~")):
            override = override_of(group, override.partition("=")[2])
        self.choices[group] = options
        self._words.pop(group, None)
        self._words[group] = override


def read_edit(overrides: Sequence[str], compositions: Compositions) -> Edit:
    """Reads the overrides of a variant. Raises UsageError for one that is none, or that only a command line takes."""
    require_overrides(overrides)
    edit = Edit()
    for override in overrides:
        edit.add(override, compositions)
    return edit


def edited(
    job: Composition,
    edit: Edit,
    compositions: Compositions,
    others: Mapping[str, Choice],
) -> Composition:
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
    values = dict(job.values)
    choices = dict(job.choices)
    for group, options in {**others, **edit.choices}.items():
        if not (options or has_default(group) or group in values):
            raise UsageError(f"~{group}: no such group is chosen here")
        staying = {} if others else in_group(job.choices, group)
        for axis in in_group(choices, group):
            del choices[axis]
        choices |= options
        node: Values = {}
        for axis, option in options.items():
            stays = "." in axis and staying.get(axis) == option
            source = job.values if stays else compositions.load_option(group, option)
            part = at(source, axis)
            if isinstance(part, dict):
                node = with_value(node, axis, part)
        if group in node:
            values[group] = node[group]
        else:
            values.pop(group, None)
    for setting in edit.settings:
        values = _with_setting(values, setting)
    return Composition(values, choices)


def _with_setting(values: Values, setting: KeyValue) -> dict[str, Any]:
    key, value, new = setting
    group, _, name = key.rpartition(".")
    there = at(values, group) if group else values
    is_there = isinstance(there, dict) and name in there
    if value == {} and is_there and there[name]:
        raise UsageError(
            f"{key}={{}}: keys are merged into those that are there, so that this changes nothing; set them"
        )
    if not new and (not is_there or _adds_keys(there[name], value)):
        raise UsageError(
            f"{key}: there is no such key here; a new one takes a +, as in +{key}=…"
        )
    return with_value(values, key, value)


def _adds_keys(there: Any, value: Any) -> bool:
    if not isinstance(there, dict) or not isinstance(value, dict):
        return False
    return any(
        name not in there or _adds_keys(there[name], part)
        for name, part in value.items()
    )


def in_group(choices: Choice, group: str) -> Choice:
    """Returns the options of one group."""
    return {axis: option for axis, option in choices.items() if group_of(axis) == group}


def at(values: Values | None, key: str) -> Any:
    """Returns the value at a key; None if there is none."""
    node: Any = values
    for part in key.split("."):
        if not isinstance(node, Mapping):
            return None
        node = node.get(part)
    return node


def with_value(values: Values, key: str, value: Any) -> dict[str, Any]:
    """Returns a copy of nested mappings with a value at a key; a mapping is merged into the one that is there."""
    first, _, rest = key.partition(".")
    below = values.get(first)
    if not isinstance(below, dict):
        below = {}
    if rest:
        value = with_value(below, rest, value)
    elif isinstance(value, dict):
        value = _merged(below, value)
    return {**values, first: value}


def _merged(below: Values, more: Values) -> dict[str, Any]:
    merged = dict(below)
    for name, value in more.items():
        there = merged.get(name)
        if isinstance(there, dict) and isinstance(value, dict):
            merged[name] = _merged(there, value)
        else:
            merged[name] = value
    return merged
