"""Writes the command that measures a variant again, and composes it: only one that gives what was measured is kept."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sdopt.config.composer import HydraComposer
from sdopt.config.groups import choices_of, override_of
from sdopt.config.overrides import group_of, key_of, quoted
from sdopt.config.parse import COMMAND_KEYS
from sdopt.errors import UsageError, command_line
from sdopt.record.choices import PLAIN, is_plain, option_name, written_value
from sdopt.record.configuration import RecordedConfig
from sdopt.record.records import StudyResult
from sdopt.study.designs import Plan
from sdopt.variant import Variant

_ELSEWHERE = ("study", "experiment", "tracking", "hydra", "dry_run", "objective", *COMMAND_KEYS)
"""Sections and keys that do not affect how a variant is measured."""

_EXPLICIT = "baseline", "candidate"
"""The names of both sides where they differ in more than options."""


def note_commands(composer: HydraComposer, result: StudyResult, plan: Plan) -> None:
    """Records for each variant that was timed the command that compares it with the baseline again, if there is one."""
    for variant in plan.variants[1:]:
        row = result.variant(variant.name)
        if row.status.timed and not row.command:
            row.command = command_again(composer, variant, plan.baseline)


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
                return command_line("run", *_folders_of(variant, baseline, words), *words)
        except UsageError:
            continue  # the other one may do
    return ""


def _composes(composer: HydraComposer, words: Sequence[str], variant: Variant, baseline: Variant) -> bool:
    again = HydraComposer(words, composer.hydra_overrides)
    plan = again.current.study.plan(again)
    if len(plan.variants) != 2:
        return False
    sides = zip(plan.variants, (baseline, variant), strict=True)
    return all(not differing(wanted.config, made.config) for made, wanted in sides)


def _as_pair(composer: HydraComposer, variant: Variant, baseline: Variant) -> Iterator[str]:
    """Yields overrides that compose the variant, and the options of its baseline."""
    optimized = [*_chosen(baseline)]
    if optimized:
        yield f"study.baseline=[{','.join(optimized)}]"
    yield from _complete(composer, _words(variant), variant.config)


def _as_explicit(composer: HydraComposer, variant: Variant, baseline: Variant) -> Iterator[str]:
    """Yields overrides that compose the baseline, and the variant as a list of changes."""
    words = _complete(composer, _words(baseline), baseline.config)
    changes = [override_of(group, f"[{','.join(names)}]") for group, names in _group_choices(variant, baseline)]
    made = HydraComposer(words, composer.hydra_overrides).variant(_EXPLICIT[1], changes)
    changes += _settings(variant.config, made.config)
    yield from words
    yield "study=explicit"
    yield f"study.variants={{{_EXPLICIT[0]}:[],{_EXPLICIT[1]}:[{','.join(map(quoted, changes))}]}}"


def _words(variant: Variant) -> list[str]:
    """Returns the overrides that a variant was composed of, as far as they affect how it is measured."""
    found: dict[str, str] = {}
    for override in variant.overrides:
        key = key_of(override)
        if group_of(key) not in _ELSEWHERE and not override.startswith("~"):
            found.pop(key, None)
            found[key] = override
    for group, names in _named(variant).items():
        if not names:
            found.pop(group, None)  # a design repeats the default
        elif group not in found:  # a preset chose it
            found[group] = override_of(group, names[0] if group in PLAIN else f"[{','.join(names)}]")
    return list(found.values())


def _named(variant: Variant) -> dict[str, list[str]]:
    """Returns by group the options that a variant chose beside the default one."""
    found: dict[str, list[str]] = {group: [] for group in PLAIN}
    for axis, option in variant.choices.items():
        names = found.setdefault(group_of(axis), [])
        if option_name(option) != PLAIN.get(axis, "none"):
            names.append(option_name(option))
    return found


def _group_choices(variant: Variant, baseline: Variant) -> Iterator[tuple[str, list[str]]]:
    """Yields the groups in which two variants chose different options, with those of the first."""
    mine, others = _named(variant), _named(baseline)
    for group in dict.fromkeys([*mine, *others]):
        if mine.get(group, []) != others.get(group, []):
            yield group, mine.get(group) or ([PLAIN[group]] if group in PLAIN else [])


def _chosen(baseline: Variant) -> Iterator[str]:
    """Yields the options of a baseline, and their keys, as items of a list."""
    for axis, option in baseline.choices.items():
        if axis in baseline.optimizations and not is_plain(axis, option):
            if option_name(option) != PLAIN.get(axis):
                yield f"{group_of(axis)}:{option_name(option)}"
            changed = {key: value for key, value in baseline.changed.items() if key.startswith(f"{axis}.")}
            yield from (quoted(f"{key}={written_value(value)}") for key, value in changed.items())


def _complete(composer: HydraComposer, words: list[str], wanted: RecordedConfig) -> list[str]:
    """Returns overrides, with those that they lack for a configuration: what a preset, or a file of one, had set."""
    made = HydraComposer(words, composer.hydra_overrides).current.recorded
    found = differing(wanted, made)
    sections = {group_of(key) for key in found}
    named = [f"model={written_value(wanted.model.source)}"] if "model" in sections else []
    if "gate" in sections and wanted.gate.name in choices_of("gate"):
        named.append(f"gate={wanted.gate.name}")
    if named:
        given = {key_of(word) for word in named}
        words = [*named, *(word for word in words if key_of(word) not in given)]
        made = HydraComposer(words, composer.hydra_overrides).current.recorded
    settings = _settings(wanted, made)
    replaced = {key_of(setting) for setting in settings}
    return [*(word for word in words if key_of(word) not in replaced), *settings]


def _settings(wanted: RecordedConfig, made: RecordedConfig) -> list[str]:
    """Returns the overrides that give one configuration the values of another."""
    known = made.flat()
    return [
        f"{'' if key in known else '+'}{key}={written_value(value)}"
        for key, value in differing(wanted, made).items()
        if key in wanted.flat()
    ]


def differing(wanted: RecordedConfig, made: RecordedConfig) -> dict[str, Any]:
    """Returns the keys whose values decide how a variant is measured, and differ, with the wanted ones."""
    mine, others = _measured(wanted.flat()), _measured(made.flat())
    keys = [key for key in mine | others if mine.get(key, _ABSENT) != others.get(key, _ABSENT)]
    return {key: mine.get(key) for key in keys}


_ABSENT = object()


def _measured(flat: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in flat.items() if group_of(key) not in _ELSEWHERE}


def _folders_of(variant: Variant, baseline: Variant, words: Sequence[str]) -> list[str]:
    """Returns the flag that names the user's own groups, if an override chooses in them."""
    chosen = [word for word in words if "." not in key_of(word)]
    names = [f"{key_of(word)}/{name}.yaml" for word in chosen for name in word.partition("=")[2].strip("[]").split(",")]
    names += [f"{group_of(axis)}/{option_name(option)}.yaml" for axis, option in baseline.choices.items()]
    names += [f"{group_of(axis)}/{option_name(option)}.yaml" for axis, option in variant.choices.items()]
    folders = [folder for folder in variant.config_dirs if any((Path(folder) / name).is_file() for name in names)]
    if len(folders) > 1:
        return [f"hydra.searchpath=[{','.join(quoted(f'file://{Path(each).absolute()}') for each in folders)}]"]
    return ["--config-dir", str(Path(folders[0]).absolute())] if folders else []
