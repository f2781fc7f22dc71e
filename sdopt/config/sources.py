"""Files of configuration, read as sdopt reads all text, and parsed once."""

import pickle
from functools import cache
from io import StringIO
from pathlib import Path

from hydra._internal.core_plugins import file_config_source
from hydra._internal.sources_registry import SourcesRegistry
from hydra.plugins.config_source import ConfigLoadError, ConfigResult
from omegaconf import OmegaConf
from typing_extensions import override

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
    return pickle.dumps(OmegaConf.load(source))


def read_marked_files() -> None:
    """Lets Hydra read files through the class above: of two sources of one name, it keeps the first."""
    SourcesRegistry.instance().register(FileConfigSource)
