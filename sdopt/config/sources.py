"""Files of configuration, read as sdopt reads all text, and parsed once."""

import pickle
from collections.abc import Sequence
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins import file_config_source
from hydra._internal.sources_registry import SourcesRegistry
from hydra.plugins.config_source import ConfigLoadError, ConfigResult
from omegaconf import OmegaConf
from typing_extensions import override

from sdopt.errors import UsageError
from sdopt.text_files import read_text


class FileConfigSource(file_config_source.FileConfigSource):
    """Hydra's own, but for byte order marks.

    Hydra takes one for a part of the first line, so that the `# @package` of a preset is lost without a word.
    """

    @override
    def load_config(self, config_path: str) -> ConfigResult:
        file = Path(self.path, self._normalize_file_name(config_path)).resolve()
        if not file.exists():
            raise ConfigLoadError(f"Config not found : {file}")
        text = read_text(file)
        return ConfigResult(
            provider=self.provider,
            path=f"{self.scheme()}://{self.path}",
            config=pickle.loads(_parsed(str(file), text)),
            header=self._get_header_dict(text),
        )


@cache
def _parsed(name: str, text: str) -> bytes:
    """Parses YAML once for all variants of a study; Hydra changes what it is given, so each gets its own."""
    source = StringIO(text)
    source.name = name  # errors of YAML name it
    config = OmegaConf.load(source)
    node: Any = OmegaConf.to_container(config)
    if isinstance(node, dict):
        _require_chosen_once(name, node.get("defaults") or ())
    return pickle.dumps(config)


def _require_chosen_once(name: str, defaults: Sequence[Any]) -> None:
    """Raises UsageError if a file overrides a group twice: Hydra takes the first, although it says the last."""
    chosen: dict[str, Any] = {}
    for entry in defaults:
        if not isinstance(entry, dict):
            continue
        for key, option in entry.items():
            if not str(key).startswith("override "):
                continue
            if chosen.setdefault(key, option) != option:
                raise UsageError(
                    f"{name}: '{key}: {option}' would have no effect after '{key}: {chosen[key]}'; leave one of them out"
                )


def read_marked_files() -> None:
    """Lets Hydra read files through the class above: of two sources of one name, it keeps the first."""
    SourcesRegistry.instance().register(FileConfigSource)
