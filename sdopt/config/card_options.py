"""Makes the data sheets of cards options of the group `hardware`, in Hydra's store."""

from functools import cache
from typing import Any

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import OmegaConf

from sdopt.config.paths import cards

_GROUP = "hardware"


class _Cards(dict[str, Any]):
    """The options of the group by file name, each made when Hydra reads it: a command uses one of some hundred."""

    def __getitem__(self, file: str) -> Any:
        node = super().__getitem__(file)
        if node is None:
            sheet = cards()[file.removesuffix(".yaml")]
            option = OmegaConf.create(
                {"defaults": ["auto"], "device": "cuda", "sheet": sheet}
            )
            node = self[file] = ConfigNode(
                file, option, _GROUP, package=None, provider=None
            )
        return node

    def __deepcopy__(self, _copies: dict[int, Any]) -> "_Cards":
        # Hydra copies its whole store for each composition, and then what it loads.
        return self


@cache
def offer_cards() -> None:
    """Makes each data sheet an option: `hardware=rtx4090` chooses the first CUDA device, and the sheet of the card."""
    repo = ConfigStore.instance().repo
    files = [f"{card}.yaml" for card in cards()]
    repo[_GROUP] = _Cards(dict.fromkeys(files) | repo.get(_GROUP, {}))
