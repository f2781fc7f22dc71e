"""Paths and data sheets of the packaged configuration. Must stay light: shell completion imports it at every TAB."""

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # OmegaConf's own dependency; its C parser reads all sheets in some hundredths of a second

from sdopt.about import PACKAGE
from sdopt.errors import UsageError

# A wheel carries `conf` inside the package; a checkout has it at the top.
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"
"""The folder of the packaged groups."""

CONFIG_NAME = "config"
"""The primary configuration in `CONF`."""

SHEETS = CONF / "hardware" / "sheets"
"""The data sheets of cards, a file per family."""


def config_name_of(command: str) -> str:
    """Returns the primary configuration of a command: its own file in `CONF`, or else that of `sdopt run`."""
    name = command.replace("-", "_")
    return name if (CONF / f"{name}.yaml").is_file() else CONFIG_NAME


def options_of(group: str, config_dir: Path | None = None) -> list[str]:
    """Returns the options of one group, packaged or the user's own."""
    folders = [CONF]
    if config_dir:
        folders.append(config_dir)
    names: set[str] = set()
    for folder in folders:
        files = (folder / group).glob("*.yaml")
        names.update(path.stem for path in files)
    return sorted(names)


def study_named(name: object, experiment: object) -> object:
    """Returns the name of a study: that of its preset, if this leaves the name that the design has by itself."""
    if not experiment or experiment == "null" or name not in options_of("study"):
        return name
    return str(experiment).rpartition("/")[2]


def own_folder(given: str) -> Path:
    """Returns the folder that `--config-dir` names. Raises UsageError if it is not there, or cannot be read."""
    folder = Path(given).expanduser()
    if not folder.is_dir():
        raise UsageError(f"--config-dir {folder}: no such folder")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise UsageError(f"--config-dir {folder}: cannot be read; make it readable")
    return folder


def whole_path(text: str) -> Path:
    """Returns an absolute path, and one without `..` where that leads to the same file, which a link may prevent."""
    path = Path(text).expanduser().absolute()
    short = Path(os.path.normpath(path))
    return short if short.exists() and short.samefile(path) else path


def read_yaml(path: Path) -> Any:
    """Reads a packaged file with YAML's parser in C: OmegaConf's takes fifty times as long."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(path.read_text(encoding="utf-8"), loader)


@cache
def cards() -> Mapping[str, Any]:
    """Returns the untyped data sheets, by option of the group `hardware`."""
    by_name: dict[str, Any] = {}
    for path in sorted(SHEETS.glob("*.yaml")):
        sheets = read_yaml(path)
        if twice := by_name.keys() & sheets.keys():
            raise UsageError(f"{path}: names {min(twice)} twice")
        by_name |= sheets
    return by_name
