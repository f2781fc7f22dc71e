"""What `sdopt optimize` asks of a search, and what it answers, with fake workers."""

import json
import re
import shlex
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
from tests.command import SMALL, sdopt
from tests.fakes import Fakes, fake_workers


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


@pytest.mark.parametrize(
    ("said", "seconds"), [("90s", 90), ("30m", 1800), ("1.5 h", 5400), ("soon", None), ("0m", None)]
)
def test_budgets(said: str, seconds: float | None) -> None:
    if seconds is not None:
        assert search_config(asked(budget=said)).budget_s == seconds
    else:
        with pytest.raises(UsageError, match=r"--budget .*: give a time, as in 90s, 30m or 2h"):
            asked(budget=said)


def test_a_budget_without_a_unit_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--budget 45: of what\? 45m are minutes"):
        asked(budget="45")


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


OPTIMIZE = (
    "optimize",
    "emoji",
    "search.groups=[precision]",
    "search.options={precision: [fp32, bf16, fp16]}",
    "search.races=0",
    "gate=none",
    *(each for each in SMALL if not each.startswith(("protocol.replicates", "protocol.programs_s"))),
    "protocol.replicates=3",
)


def test_a_winner_is_a_sentence_a_picture_and_a_program(tmp_path: Path) -> None:
    with fake_workers(Fakes(seconds={"precision=bf16": 0.05})):
        found = sdopt(tmp_path, *OPTIMIZE, "layout=channels_last")
    assert found.code == 0, found.shown
    assert "precision=bf16 is" in found.shown
    assert "2 combinations" in found.shown
    [folder] = (tmp_path / "outputs" / "searches").iterdir()
    command = next(entry["command"] for entry in json.loads((folder / "search.json").read_text())["entries"])
    assert "study.baseline=[layout:channels_last]" in shlex.split(command), (
        "it is measured again over the same baseline"
    )
    shown = sdopt(tmp_path, "show", str(folder)).out
    assert shown.splitlines()[0] in found.out
    program = (folder / "optimized.py").read_text()
    assert not program.startswith("#")
    assert "dtype=torch.bfloat16" in program
    assert program.splitlines()[-1] in found.out
    assert (folder / "before_after.png").stat().st_size > 1000


@pytest.mark.slow
def test_a_winner_of_a_model_that_a_function_builds_is_a_program_that_calls_it(tmp_path: Path) -> None:
    code = "from diffusers import DiffusionPipeline\nfrom sdopt.reference import MODEL\n"
    (tmp_path / "mine.py").write_text(code + "def make():\n    return DiffusionPipeline.from_pretrained(MODEL)\n")
    with fake_workers(Fakes(seconds={"precision=bf16": 0.05})):
        found = sdopt(tmp_path, "optimize", "mine.py:make", *OPTIMIZE[2:])
    assert found.code == 0, found.shown
    [program] = (tmp_path / "outputs" / "searches").glob("*/optimized.py")
    assert f'sys.path.append("{tmp_path}")' in program.read_text()
    assert "from mine import make" in program.read_text()
    assert "pipe.to(torch.bfloat16)" in program.read_text()


def test_without_a_winner_it_names_the_fastest_and_what_speaks_against_it(tmp_path: Path) -> None:
    with fake_workers(Fakes(seconds={"precision=bf16": 0.05, "precision=fp16": 0.2}, black=["precision=bf16"])):
        found = sdopt(tmp_path, *OPTIMIZE, "gate=default", "quality=default", "quality.prompt_count=null")
    assert found.code == 3, found.shown
    assert "Keep the baseline: none of the 2 combinations" in found.shown
    assert re.search(r"precision=bf16 was about (1\.9|2\.0)\d×, but: ", found.shown)
    assert not list(tmp_path.rglob("optimized.py"))
