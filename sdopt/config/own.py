"""Composes the configuration of a command that has a file of its own in `conf/`, beside that of `sdopt run`."""

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from typing import Any, TypeVar, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from sdopt.config.messages import in_one_line
from sdopt.config.paths import CONF
from sdopt.config.typed import build_typed
from sdopt.errors import UsageError

T = TypeVar("T")


def own_node(command: str, kind: type, overrides: Sequence[str]) -> DictConfig:
    """Returns the file of a command with overrides applied, untyped.

    Args:
        command: as on the command line, `train-reference`; its file is `conf/train_reference.yaml`.
        kind: the dataclass of the configuration; for an unknown key, the error names similar keys of it.
        overrides: the overrides of the command line.

    Raises:
        UsageError: an override names no key, or cannot be read.
    """
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
            return compose(command.replace("-", "_"), list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(_explain(error, command, kind)) from error


def own_config(command: str, kind: type[T], overrides: Sequence[str]) -> T:
    """Returns the typed configuration of a command; see `own_node`.

    Raises:
        UsageError: an override names no key, or a value is of another type or out of its range; all such values are
            reported together.
    """
    problems: list[str] = []
    config: T = build_typed("", own_node(command, kind, overrides), kind, problems)
    if problems:
        raise UsageError(problems)
    return config


def _explain(error: Exception, command: str, kind: type) -> str:
    unknown = re.match(r"Could not override '([^']+)'", str(error))
    if unknown is None:
        return in_one_line(error)
    near = difflib.get_close_matches(unknown[1], list(_keys(kind)), n=2)
    advice = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{unknown[1]}: unknown key; {advice}`sdopt {command} --help` lists all"


def _keys(section: Any, prefix: str = "") -> Iterator[str]:
    """Yields the full name of every key of a dataclass and of the dataclasses in it."""
    for name, kind in get_type_hints(section).items():
        yield f"{prefix}{name}"
        if is_dataclass(kind):
            yield from _keys(kind, f"{prefix}{name}.")
