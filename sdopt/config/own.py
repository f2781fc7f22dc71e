"""Composes the configuration of a command that has a file of its own in `conf/`, beside that of `sdopt run`."""

from collections.abc import Sequence
from typing import Any, TypeVar

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from sdopt.config.compositions import composition_errors
from sdopt.config.paths import CONF, config_name_of
from sdopt.config.typed import typed
from sdopt.errors import UsageError

T = TypeVar("T")


def own_config(
    command: str, kind: type[T], overrides: Sequence[str], section: str = ""
) -> T:
    """Returns the file of a command, or a section of it, with overrides applied, typed and within its ranges.

    The file of `train-reference` is `conf/train_reference.yaml`; `kind` is its dataclass, or that of the section.

    Raises:
        UsageError: an override names no key, or a value is of another type or out of its range; all such values are
            reported together.
    """
    with (
        composition_errors(),
        initialize_config_dir(version_base="1.3", config_dir=str(CONF)),
    ):
        values: Any = OmegaConf.to_container(
            compose(config_name_of(command), list(overrides)), resolve=True
        )
    problems: list[str] = []
    config: T = typed(section, values[section] if section else values, kind, problems)
    if problems:
        raise UsageError(problems)
    return config
