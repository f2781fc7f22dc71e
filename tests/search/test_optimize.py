"""What `sdopt optimize` asks of a search."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from sdopt.config.models import with_own_models
from sdopt.config.overrides import key_of
from sdopt.config.paths import options_of
from sdopt.errors import UsageError
from sdopt.search.config import search_config
from sdopt.search.optimize import optimize_overrides


def asked(*given: str, lora: str | None = None, memory: float | None = None, budget: str | None = None) -> list[str]:
    return optimize_overrides("emoji", lora, memory, budget, given)


def test_every_option_that_it_tries_exists() -> None:
    config = search_config(asked(lora="me/style", memory=8, budget="30m"))
    assert config.memory_gib == 8
    assert config.budget_s == 1800
    assert config.title == "emoji"
    for group, options in (config.options or {}).items():
        assert set(options) <= set(options_of(group))
    assert {"memory", "lora"} <= set(config.groups)
    assert not {"memory", "lora"} & set(search_config(asked()).groups)


@pytest.mark.parametrize(("said", "seconds"), [("90s", 90), ("30m", 1800), ("1.5 h", 5400), ("45", 45)])
def test_budgets(said: str, seconds: int) -> None:
    assert search_config(asked(budget=said)).budget_s == seconds


@pytest.mark.parametrize("said", ["soon", "0m", "-3m"])
def test_what_is_no_budget(said: str) -> None:
    with pytest.raises(UsageError, match=r"--budget .*: give a time, as in 90s, 30m or 2h"):
        asked(budget=said)


def test_a_lora_is_in_the_baseline(tmp_path: Path) -> None:
    file = tmp_path / "my style.safetensors"
    file.touch()
    assert {"lora=loaded", f"lora.path='{file}'"} <= set(asked(lora=str(file)))
    (tmp_path / "below").mkdir()
    assert f"lora.path='{file}'" in asked(lora=str(tmp_path / "below" / ".." / file.name))
    with pytest.raises(UsageError, match="there is no such file"):
        asked(lora="gone.safetensors")


def test_what_is_given_wins() -> None:
    found = asked("search.groups=[precision,caching]", "search.budget_s=60", "lora=fused", lora="me/style", budget="1h")
    keys = [key_of(override) for override in found]
    assert len(keys) == len(set(keys))
    assert "lora=fused" in found
    config = search_config(found)
    assert config.groups == ["precision", "caching"]
    assert set(config.options or {}) == {"precision", "caching"}
    assert config.budget_s == 60


def test_the_search_is_named_after_the_file(tmp_path: Path) -> None:
    file = tmp_path / "dream, v1 (pruned).safetensors"
    save_file({"a": np.zeros(1)}, file)
    found = optimize_overrides(str(file), None, None, None, [])
    assert search_config(with_own_models(found, options_of("model"))).title == "dream_v1_pruned"
