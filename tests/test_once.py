"""What the tests make once for all of them is not made anew: they would be slower, and nobody would see it."""

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl

from sdopt.config.paths import CONF


def test_files_of_the_same_choices_are_merged_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[object] = []
    load = ConfigLoaderImpl._load_single_config

    def noted(loader: ConfigLoaderImpl, default: object, repo: object) -> object:
        read.append(default)
        return load(loader, default, repo)  # type: ignore[arg-type]

    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        first = compose("config", ["precision=bf16"])
        monkeypatch.setattr(ConfigLoaderImpl, "_load_single_config", noted)
        second = compose("config", ["precision=bf16", "workload.steps=7"])
        assert read == []
        assert second.workload.steps == 7
        assert first.workload.steps != 7
        assert second.precision == first.precision
