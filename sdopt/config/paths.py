"""Paths of the packaged configuration. Must stay light, because shell completion imports it at every TAB."""

import os
from pathlib import Path

import sdopt
from sdopt.errors import UsageError

_PACKAGE = Path(sdopt.__file__).parent

# A wheel carries `conf` inside the package; a checkout has it at the top.
CONF = _PACKAGE / "conf" if (_PACKAGE / "conf").is_dir() else _PACKAGE.parent / "conf"
"""The folder of the packaged groups."""

CONFIG_NAME = "config"
"""The primary configuration in `CONF`."""


def options_of(group: str, config_dir: Path | None = None) -> list[str]:
    """Returns the options of one group, packaged or the user's own."""
    folders = [CONF, *([config_dir] if config_dir else [])]
    return sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})


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
    found = Path(text).expanduser().absolute()
    short = Path(os.path.normpath(found))
    return short if short.exists() and short.samefile(found) else found
