"""What options leave changed in the process is named, and put back."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline

import sdopt
from sdopt.library.process import _GENERATORS, _SWITCHES, ProcessChanges, _same
from sdopt.reference import LORAS
from tests.once import packaged_pipe


@pytest.fixture
def pipe() -> StableDiffusionPipeline:
    return packaged_pipe()


def settings() -> dict[str, Any]:
    return {name: read() for name, (read, _) in (_SWITCHES | _GENERATORS).items()}


def differences(before: dict[str, Any]) -> set[str]:
    return {name for name, now in settings().items() if not _same(now, before[name])}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "attention").mkdir()
    (tmp_path / "attention" / "careless.yaml").write_text("_target_: tests.library.options.Careless\n")
    return tmp_path


def test_what_an_option_sets_is_named_and_put_back(pipe: StableDiffusionPipeline, folder: Path) -> None:
    before = settings()
    sdopt.optimize(pipe, attention="careless", config_dir=folder)
    try:
        changed = differences(before)
        assert len(changed) >= 12
        torch.set_default_dtype(torch.float32)  # the program itself
        report = sdopt.prove(pipe, num_inference_steps=1, height=16, width=16)
        assert {line.partition(":")[0] for line in report.process} == changed
        assert "changed in the whole process: deterministic algorithms: (False, False) before, (True, True) now" in str(
            report
        )
    finally:
        sdopt.undo(pipe)
    # A call without a generator draws from the global one, so that only the first of its states is compared.
    assert differences(before) == set()


def test_what_fails_leaves_nothing_behind(
    pipe: StableDiffusionPipeline, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such layout")

    monkeypatch.setattr("sdopt.options.layout.Layout.apply", fail)
    before = settings()
    with pytest.raises(RuntimeError, match="no such layout"):
        sdopt.optimize(pipe, attention="careless", layout="channels_last", config_dir=folder)
    assert differences(before) == set()


def test_options_of_sdopt_leave_the_process_as_it_was(pipe: StableDiffusionPipeline) -> None:
    before = settings()
    chosen: dict[str, Any] = {"lora": "loaded", "attention": "math", "layout": "channels_last", "caching": "tome"}
    sdopt.optimize(pipe, f"lora.path={LORAS}", "lora.weight_name=fxemoji.safetensors", **chosen)
    assert differences(before) == set()
    assert sdopt.prove(pipe, height=16, width=16).process == ()


def test_what_the_program_changes_stays() -> None:
    changes, threads = ProcessChanges(), torch.get_num_threads()
    with changes.noted():
        torch.set_num_threads(threads + 1)
    try:
        torch.set_num_threads(threads + 2)
        changes.put_back()
        assert torch.get_num_threads() == threads + 2
    finally:
        torch.set_num_threads(threads)
    with changes.noted(applying=True):
        torch.rand(1)
        random.random()
        np.random.rand()
    assert [line.partition(":")[0] for line in changes.lines()] == [
        "NumPy's global generator",
        "Python's global generator",
    ]
    changes.put_back()
