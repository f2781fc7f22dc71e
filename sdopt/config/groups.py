"""Reads the folder `conf/`: its groups, options and data sheets."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from sdopt.config.paths import CONF, CONFIG_NAME, cards, read_yaml
from sdopt.config.sections import SECTION_NAMES
from sdopt.errors import UsageError
from sdopt.schema import Sheet


def optimization_options(config_dir: Path | None = None) -> Iterator[tuple[str, str]]:
    """Yields (group, option) for each option of each group that is neither a section nor a preset.

    Leaves out the group `patch`, which has the user's functions and none of sdopt's, and `serving`, which is not for
    studies.
    """
    for folder in [CONF, *([config_dir] if config_dir else [])]:
        for path in sorted(folder.glob("*/*.yaml")):
            if path.parent.name not in (
                *SECTION_NAMES,
                "experiment",
                "patch",
                "serving",
            ):
                yield path.parent.name, path.stem


@cache
def default_options() -> Mapping[str, Any]:
    """Returns the option that `config.yaml` chooses in each group; a list in a group whose options combine."""
    entries: Any = read_yaml(CONF / f"{CONFIG_NAME}.yaml")["defaults"]
    options: dict[str, Any] = {}
    for entry in entries:
        if isinstance(entry, dict):
            options |= entry
    return {
        group: option
        for group, option in options.items()
        if not group.startswith("override ")
    }


def has_default(group: str) -> bool:
    """Returns whether a group has a default, so that `group=…` chooses in it; without one it takes `+group=…`."""
    return group in default_options()


def override_of(group: str, chosen: str) -> str:
    """Returns the override that chooses in a group: `layout=channels_last`; `+mine=fast` where it has no default."""
    return f"{'' if has_default(group) else '+'}{group}={chosen}"


def default_choice(group: str) -> str:
    """Returns the override that chooses a group's default: `compiler=eager`, `memory=[]`; `~group` if it has none."""
    if not has_default(group):
        return f"~{group}"
    option = default_options()[group]
    return (
        f"{group}=[{','.join(option)}]"
        if isinstance(option, list)
        else f"{group}={option}"
    )


@cache
def data_sheets() -> Mapping[str, Sheet]:
    """Returns the packaged data sheets, by option of the group `hardware`."""
    from pydantic import TypeAdapter

    return TypeAdapter(dict[str, Sheet]).validate_python(cards())


def require_overrides(overrides: Sequence[str]) -> None:
    """Checks what Hydra would take otherwise than it is meant, or refuse without saying which override it is.

    Raises:
        UsageError: a line for each override that is none, or that chooses in a packaged group in a way that it cannot.
    """
    problems: list[str] = []
    for override in overrides:
        try:
            problems += _wrong_choice(override)
        except UsageError as error:
            problems += error.problems
    if problems:
        raise UsageError(problems)


def _wrong_choice(override: str) -> Iterator[str]:
    """Yields why an override cannot choose in its group. Raises UsageError: it is none."""
    # What only reads groups and data sheets, as `sdopt show`, does without Hydra.
    from sdopt.config.overrides import parsed_override

    parsed = parsed_override(override)
    group, value = str(parsed.key_or_group), parsed.value()
    default = default_options().get(group)
    if parsed.package is not None:
        plain = override.lstrip("+~").partition("@")[0].partition("=")[0]
        way = (
            f"write {plain}=…"
            if group in default_options()
            else "leave out what follows the @"
        )
        yield f"{override}: an option has its own place in the configuration; {way}"
    elif not (CONF / group).is_dir() or parsed.is_delete():
        return
    elif isinstance(default, str) and isinstance(value, list) and len(value) > 1:
        yield f"{override}: of this group one option is chosen, and Hydra would take the last; name one"
    elif value is None or isinstance(value, int | float):
        yield f"{override}: names no option of {group}"


def require_chosen(cfg: Mapping[Any, Any]) -> None:
    """Raises UsageError if a configuration lacks a group of options: it would be neither the default nor a choice."""
    lacking = []
    for group, default in default_options().items():
        if group in SECTION_NAMES or group in cfg:
            continue
        if isinstance(default, str):
            lacking.append(
                f"{group}: nothing is chosen; {group}={default} is the default"
            )
    if lacking:
        raise UsageError(lacking)
