"""Lists the classes of harm that the trial knows, a module each: its `TITLE`, and the `SABOTAGES` that are drawn.

A sabotage that harms time or memory has to be timed: it is a variant of the trial's study, with a yaml in `conf/trial/`
and a line in `conf/experiment/gate_trial.yaml`. A sabotage that harms images alone needs neither: it is listed in the
`SABOTAGES` of its module.
"""

from importlib import import_module
from types import ModuleType

from tests.trial import (
    appearance,
    beside,
    compression,
    conditioning,
    few,
    geometry,
    measuring,
    speed,
    variety,
    weights,
)
from tests.trial.base import Sabotage

CLASSES: tuple[ModuleType, ...] = (
    few,
    appearance,
    geometry,
    variety,
    conditioning,
    weights,
    compression,
    speed,
    measuring,
    beside,
)


def drawn_sabotages() -> dict[str, tuple[str, Sabotage]]:
    """Returns the sabotages that are drawn and not timed, by name: the title of the class, and the option."""
    return {
        name: (module.TITLE, option) for module in CLASSES for name, option in getattr(module, "SABOTAGES", {}).items()
    }


def title_of(target: str) -> str:
    """Returns the title of the class that an option belongs to, by the path of its Python class."""
    title: str = import_module(target.rpartition(".")[0]).TITLE
    return title
