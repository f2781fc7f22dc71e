"""Writes the command that measures a variant again, and composes it: only one that gives what was measured is kept."""

from collections.abc import Iterator, Sequence
from typing import Any

from sdopt.config.composer import HydraComposer
from sdopt.config.groups import override_of
from sdopt.config.overrides import group_of, key_of
from sdopt.config.paths import options_of
from sdopt.config.sections import COMMAND_KEYS
from sdopt.errors import UsageError, command_line
from sdopt.record.choices import (
    NONE,
    PLAIN,
    is_plain,
    option_name,
    quoted,
    written_value,
)
from sdopt.record.configuration import RecordedConfig
from sdopt.record.records import StudyResult
from sdopt.study.designs import Plan
from sdopt.study.plan import require_same_task
from sdopt.variant import Variant

_ELSEWHERE = (
    "study",
    "experiment",
    "tracking",
    "hydra",
    "dry_run",
    "objective",
    *COMMAND_KEYS,
)
"""Sections and keys that do not affect how a variant is measured."""

_INTERPOLATED = "${"
"""What an override has whose value may be another one later."""

_BASELINE, _CANDIDATE = "baseline", "candidate"
"""The names of both sides where they differ in more than options."""


def note_commands(composer: HydraComposer, result: StudyResult, plan: Plan) -> None:
    """Records for each variant that was timed the command that compares it again, if there is one."""
    for variant in plan.variants[1:]:
        row = result.variant(variant.name)
        if row.status.timed and not row.command:
            row.command = command_of(composer, variant, plan)


def command_of(composer: HydraComposer, variant: Variant, plan: Plan) -> str:
    """Returns the command that compares a variant of a plan with the baseline again; "" if there is none.

    Where no command composes both, as where the baseline is of another task, it is compared with what the plan compares
    it with.
    """
    references = [
        edge.reference for edge in plan.edges if edge.candidate == variant.name
    ]
    for other in plan.variants:
        if other is plan.baseline or other.name in references:
            command = command_again(composer, variant, other)
            if command:
                return command
    return ""


def command_again(composer: HydraComposer, variant: Variant, baseline: Variant) -> str:
    """Returns the command whose two variants have the configuration, key by key, of a variant and its baseline.

    Args:
        composer: that of the study, inside a Hydra job.
        variant: a variant of the study.
        baseline: what it is compared with.

    Returns:
        the command; "" if none was found that composes both.
    """
    for writing in (_as_pair, _as_explicit):
        try:
            words = list(writing(composer, variant, baseline))
            if _composes(composer, words, variant, baseline):
                return command_line("run", *_folders_of(variant, baseline), *words)
        except UsageError:
            continue  # the other one may do
    return ""


def _composes(
    composer: HydraComposer, words: Sequence[str], variant: Variant, baseline: Variant
) -> bool:
    again = composer.again(words)
    plan = again.current.study.plan(again)
    if len(plan.variants) != 2:
        return False
    require_same_task(plan)
    first, second = plan.variants
    return not differing(baseline.config, first.config) and not differing(
        variant.config, second.config
    )


def _as_pair(
    composer: HydraComposer, variant: Variant, baseline: Variant
) -> Iterator[str]:
    """Yields overrides that compose the variant, and the options of its baseline."""
    optimized = ",".join(_options_of(baseline))
    if optimized:
        yield f"study.baseline=[{optimized}]"
    yield from _complete(composer, _words(variant), variant.config)


def _as_explicit(
    composer: HydraComposer, variant: Variant, baseline: Variant
) -> Iterator[str]:
    """Yields overrides that compose the baseline, and the variant as a list of changes."""
    words = _complete(composer, _words(baseline), baseline.config)
    changes = []
    for group, names in _other_choices(variant, baseline):
        changes.append(_choice(group, names))
    made = composer.again(words).variant(_CANDIDATE, changes)
    changes += _settings(variant.config, made.config)
    listed = ",".join(map(quoted, changes))
    yield from words
    yield "study=explicit"
    yield f"study.variants={{{_BASELINE}:[],{_CANDIDATE}:[{listed}]}}"


# ------------------------------------------------------------------------------------------------------------ choices


def _words(variant: Variant) -> list[str]:
    """Returns the overrides that a variant was composed of, as far as they affect how it is measured."""
    words: dict[str, str] = {}
    for override in variant.overrides:
        key = key_of(override)
        if _INTERPOLATED in override:  # its value, of the environment or of a time
            continue
        if group_of(key) not in _ELSEWHERE and not override.startswith("~"):
            words.pop(key, None)  # the last one counts, at its place
            words[key] = override
    for group, names in _named(variant).items():
        if not names:
            words.pop(group, None)  # a design repeats the default
        elif group not in words:  # a preset chose it
            words[group] = _choice(group, names)
    return list(words.values())


def _named(variant: Variant) -> dict[str, list[str]]:
    """Returns by group the options that a variant chose beside the default one."""
    named: dict[str, list[str]] = {group: [] for group in PLAIN}
    for axis, option in variant.choices.items():
        names = named.setdefault(group_of(axis), [])
        name = option_name(option)
        if name != PLAIN.get(axis, NONE):
            names.append(name)
    return named


def _choice(group: str, names: Sequence[str]) -> str:
    """Returns the override that chooses options of a group."""
    if group in PLAIN:
        return override_of(group, names[0])
    return override_of(group, f"[{','.join(names)}]")


def _other_choices(
    variant: Variant, baseline: Variant
) -> Iterator[tuple[str, list[str]]]:
    """Yields the groups in which two variants chose different options, with those of the first."""
    mine, theirs = _named(variant), _named(baseline)
    for group in dict.fromkeys([*mine, *theirs]):
        names = mine.get(group, [])
        if names != theirs.get(group, []):
            default = [PLAIN[group]] if group in PLAIN else []
            yield group, names or default


def _options_of(baseline: Variant) -> Iterator[str]:
    """Yields the options of a baseline, and their keys, as items of a list."""
    for axis, option in baseline.choices.items():
        if axis not in baseline.optimizations or is_plain(axis, option):
            continue
        name = option_name(option)
        if name != PLAIN.get(axis):
            yield f"{group_of(axis)}:{name}"
        for key, value in baseline.changed.items():
            if key.startswith(f"{axis}."):
                yield quoted(f"{key}={written_value(value)}")


# --------------------------------------------------------------------------------------------------------------- keys


def _complete(
    composer: HydraComposer, words: list[str], wanted: RecordedConfig
) -> list[str]:
    """Returns overrides, with those that they lack for a configuration: what a preset, or a file of one, had set."""
    made = composer.again(words).current.recorded
    sections = {group_of(key) for key in differing(wanted, made)}
    named = []
    if "model" in sections:
        named.append(f"model={written_value(wanted.model.source)}")
    if "gate" in sections and wanted.gate.name in options_of("gate"):
        named.append(f"gate={wanted.gate.name}")
    if named:
        words = _replaced(named, words)
        made = composer.again(words).current.recorded
    settings = _settings(wanted, made)
    return [*_replaced([], words, settings), *settings]


def _replaced(
    first: list[str], words: Sequence[str], last: Sequence[str] = ()
) -> list[str]:
    """Returns overrides after some others, without those whose keys these or some later ones have."""
    keys = {key_of(word) for word in (*first, *last)}
    return [*first, *(word for word in words if key_of(word) not in keys)]


def _settings(wanted: RecordedConfig, made: RecordedConfig) -> list[str]:
    """Returns the overrides that give one configuration the values of another."""
    known, values = made.flat(), wanted.flat()
    settings = []
    for key in differing(wanted, made):
        if key in values:
            sign = "" if key in known else "+"
            value = values[key]
            if isinstance(value, float) and value.is_integer():
                value = int(value)  # as people write it: 130, not 130.0
            settings.append(f"{sign}{key}={written_value(value)}")
    return settings


def differing(wanted: RecordedConfig, made: RecordedConfig) -> list[str]:
    """Returns the keys that decide how a variant is measured, and have other values in two configurations."""
    mine, theirs = _measured(wanted), _measured(made)
    return [
        key
        for key in mine | theirs
        if mine.get(key, _ABSENT) != theirs.get(key, _ABSENT)
    ]


_ABSENT = object()


def _measured(config: RecordedConfig) -> dict[str, Any]:
    return {
        key: value
        for key, value in config.flat().items()
        if group_of(key) not in _ELSEWHERE
    }


def _folders_of(variant: Variant, baseline: Variant) -> list[str]:
    """Returns the flag that names the user's own groups, if one of the two has an option of theirs."""
    files = set()
    for side in (variant, baseline):
        for axis, option in side.choices.items():
            files.add(f"{group_of(axis)}/{option_name(option)}.yaml")
        for override in side.overrides:  # of sections, which are no choices
            key, _, value = override.lstrip("+").partition("=")
            if group_of(key) in _ELSEWHERE:  # what an experiment sets is written out
                continue
            files.add(f"{key}/{value}.yaml")
    holding = variant.folders_with(files)
    if len(holding) > 1:
        paths = ",".join(quoted(f"file://{folder}") for folder in holding)
        return [f"hydra.searchpath=[{paths}]"]
    return ["--config-dir", str(holding[0])] if holding else []
