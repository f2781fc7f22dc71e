"""Shell completion, as bash asks for it."""

import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from sdopt.schema import Tracking
from tests.command import sdopt


def query(
    monkeypatch: pytest.MonkeyPatch, cwd: Path, line: str, shell: str = "bash"
) -> list[str]:
    monkeypatch.setenv("COMP_LINE", line)
    finished = sdopt(cwd, "-sc", f"query={shell}")
    assert finished.code == 0
    return finished.out.split()


@pytest.mark.parametrize(
    ("line", "choices"),
    [
        ("sdopt ru", ["run"]),
        ("sdopt run layout=", ["layout=channels_last", "layout=contiguous"]),
        ("sdopt run precision=bf16 workload.st", ["workload.steps="]),
        ("sdopt run -m study=cum", ["study=cumulative"]),
        ("sdopt doctor layout=chan", ["layout=channels_last"]),
        ("sdopt gpu-suite parts.noise.li", ["parts.noise.limit_s="]),
        ("sdopt train-reference denoiser.st", ["denoiser.steps="]),
        ("sdopt nothing layout=", []),
        ("sdopt show ", []),
        ("sdopt optimize ", []),
        (
            "sdopt ui ",
            ["--port", *(f"tracking.{each.name}=" for each in fields(Tracking))],
        ),
        ("sdopt ui attention", []),
        ("sdopt optimize mine.safetensors layout=chan", ["layout=channels_last"]),
    ],
)
def test_commands_groups_options_and_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, choices: list[str]
) -> None:
    assert query(monkeypatch, tmp_path, line) == choices


def test_results_the_newest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"outputs/runs/pair/2026-01-0{day}_10-00-00-0" for day in (1, 2)]
    for name in names:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "result.json").touch()
    load = "outputs/load/pair/2026-01-03_10-00-00-0"
    (tmp_path / load).mkdir(parents=True)
    (tmp_path / load / "load.json").touch()
    assert query(monkeypatch, tmp_path, "sdopt show ") == [load, *names[::-1]]
    assert query(monkeypatch, tmp_path, "sdopt gate ") == names[::-1]
    assert query(monkeypatch, tmp_path, f"sdopt compare {names[0]}") == names[:1]


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_in_bash(tmp_path: Path) -> None:
    script = tmp_path / "sdopt"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m sdopt.cli "$@"\n')
    script.chmod(0o755)
    program = """
        eval "$(sdopt -sc install=bash)"
        COMP_LINE="sdopt run precision=b"; COMP_POINT=${#COMP_LINE}; COMP_CWORD=2
        hydra_bash_completion
        echo "${COMPREPLY[@]}"
        complete -p sdopt
    """
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[0] == "precision=bf16"
    assert done.stdout.splitlines()[1].endswith("hydra_bash_completion sdopt")
