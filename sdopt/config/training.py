"""Composes the configuration of `sdopt train-reference`."""

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from sdopt.config.messages import in_one_line
from sdopt.config.paths import CONF
from sdopt.config.reference import key_rows
from sdopt.config.typed import build_typed
from sdopt.errors import UsageError
from sdopt.training.config import TrainReferenceConfig


def training_config(overrides: Sequence[str]) -> TrainReferenceConfig:
    """Returns `conf/train_reference.yaml` with overrides applied, typed and within its ranges.

    Raises:
        UsageError: an override names no key, or a value is of another type or out of its range; all such values are
            reported together.
    """
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
            node = compose("train_reference", list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(_explain(error)) from error
    problems: list[str] = []
    config: TrainReferenceConfig = build_typed("", node, TrainReferenceConfig, problems)
    if not problems and Path(config.export.companions).resolve() == Path(config.folder).resolve():
        problems.append(
            f"export.companions={config.export.companions}: choose another folder than `folder`; "
            "stages of the companions' names work there"
        )
    if problems:
        raise UsageError(problems)
    return config


def training_keys() -> Iterator[str]:
    """Yields each key with its value, its type and range, and in a line below its meaning."""
    plain = training_config([])
    for group, section in [("", plain), *((key, part) for key, part in vars(plain).items() if is_dataclass(part))]:
        for name, kind, _, meaning in key_rows(group, type(section)):
            key = name.strip("`").removeprefix(".")
            value = getattr(section, key.rpartition(".")[2])
            if not is_dataclass(value):
                shown = json.dumps(value).strip('"')
                yield f"{key}={shown}  ({kind.replace('`', '')})"
                yield f"    {meaning}"


def _explain(error: Exception) -> str:
    unknown = re.match(r"Could not override '([^']+)'", str(error))
    if unknown is None:
        return in_one_line(error)
    near = difflib.get_close_matches(unknown[1], list(_keys(TrainReferenceConfig)), n=2)
    advice = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{unknown[1]}: there is no such key; {advice}`sdopt train-reference --help` lists all"


def _keys(section: Any, prefix: str = "") -> Iterator[str]:
    """Yields the full name of every key of a dataclass and of the dataclasses in it."""
    for name, kind in get_type_hints(section).items():
        yield f"{prefix}{name}"
        if is_dataclass(kind):
            yield from _keys(kind, f"{prefix}{name}.")
