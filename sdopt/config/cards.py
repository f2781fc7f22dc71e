"""Offers the data sheets of `conf/hardware/sheets/`, a file per family, to Hydra as options of the group `hardware`."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import yaml  # type: ignore[import-untyped]  # OmegaConf's own dependency; its C parser reads all sheets in some hundredths of a second
from hydra.core.config_store import ConfigStore

from sdopt.config.paths import CONF
from sdopt.errors import UsageError

SHEETS = CONF / "hardware" / "sheets"


@cache
def cards() -> Mapping[str, Any]:
    """Returns the untyped data sheets, by option of the group `hardware`."""
    found: dict[str, Any] = {}
    for path in sorted(SHEETS.glob("*.yaml")):
        with path.open(encoding="utf-8") as file:
            sheets = yaml.load(file, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        if twice := found.keys() & sheets.keys():
            raise UsageError(f"{path}: names {min(twice)} twice")
        found |= sheets
    return found


class _Constant(dict[str, Any]):
    """Options of a group that never change: Hydra copies its whole store for each composition, and then what it loads.

    Copying some hundred sheets would take half of the time of a composition.
    """

    def __deepcopy__(self, _copies: dict[int, Any]) -> "_Constant":
        return self


def offer_cards() -> None:
    """Makes each data sheet an option: `hardware=rtx4090` chooses the first CUDA device, and the sheet of the card."""
    store = ConfigStore.instance()
    for card, sheet in cards().items():
        store.store(f"{card}.yaml", {"defaults": ["auto"], "device": "cuda", "sheet": sheet}, group="hardware")
    store.repo["hardware"] = _Constant(store.repo["hardware"])
