"""Reads the folder `conf/`: its groups, options and data sheets."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from sdopt.config.parse import SECTIONS
from sdopt.config.paths import CONF, CONFIG_NAME
from sdopt.config.typed import build_typed
from sdopt.errors import UsageError
from sdopt.schema import Sheet


def optimization_options(config_dir: Path | None = None) -> Iterator[tuple[str, str]]:
    """Yields (group, option) for each option of each group that is neither a section nor a preset."""
    for folder in [CONF, *([config_dir] if config_dir else [])]:
        for path in sorted(folder.glob("*/*.yaml")):
            if path.parent.name not in (*SECTIONS, "experiment"):
                yield path.parent.name, path.stem


def options_of(group: str, config_dir: Path | None = None) -> list[str]:
    """Returns the options of one group, packaged or the user's own."""
    folders = [CONF, *([config_dir] if config_dir else [])]
    return sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})


@cache
def default_options() -> Mapping[str, Any]:
    """Returns the option that `config.yaml` chooses in each group; a list in a group whose options combine."""
    entries: Any = OmegaConf.to_container(OmegaConf.load(CONF / f"{CONFIG_NAME}.yaml").defaults)
    pairs = [pair for entry in entries if isinstance(entry, dict) for pair in entry.items()]
    return {group: option for group, option in pairs if not group.startswith("override ")}


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
    return f"{group}=[{','.join(option)}]" if isinstance(option, list) else f"{group}={option}"


@cache
def data_sheets() -> Mapping[str, Sheet]:
    """Returns the packaged data sheets, by option of the group `hardware`. Raises UsageError if a file is wrong."""
    problems: list[str] = []
    nodes = {path.stem: OmegaConf.load(path) for path in sorted((CONF / "hardware").glob("*.yaml"))}
    sheets = {
        option: build_typed(f"{option}.sheet", node.sheet, Sheet, problems)
        for option, node in nodes.items()
        if "sheet" in node and node.sheet is not None
    }
    if problems:
        raise UsageError(problems)
    return sheets


def reject_null_groups(overrides: Sequence[str]) -> None:
    """Raises UsageError if an override sets a group to null, on which Hydra would end with a traceback."""
    for override in overrides:
        key, _, value = override.partition("=")
        if value == "null" and (CONF / key).is_dir() and key != "experiment":
            options = ", ".join(sorted(path.stem for path in (CONF / key).glob("*.yaml")))
            advice = f"{key}=[] chooses nothing" if default_choice(key).endswith("]") else "a group cannot be empty"
            raise UsageError(f"{key}=null: {advice}; choose one of {options}")
