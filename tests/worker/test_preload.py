"""Preloading: a library that fails or crashes on import costs the warm start, and nothing else."""

import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sdopt.schema import Hardware
from sdopt.worker import machine
from sdopt.worker.forkserver import ServerError
from sdopt.worker.machine import Machine, find_machine
from sdopt.worker.preload import import_all
from tests.command import ROOT
from tests.fixtures import CPU

XFORMERS = """
import os
if os.environ.get("XFORMERS_FORCE_DISABLE_TRITON", "0") != "1":
    raise RuntimeError("asked for the compute capability, which starts CUDA")
"""
"""As xformers 0.0.35 behaves where there is a card."""

PROBE = """
import multiprocessing
from sdopt.worker.forkserver import start_fork_server

if __name__ == "__main__":
    context = start_fork_server()
    from sdopt.schema import Hardware
    from sdopt.worker.machine import find_machine

    machine, context = find_machine(context, Hardware(device="cpu"), dict)
    print(machine.preloaded, context.get_start_method(), *machine.warnings, sep="|")
"""


def library(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str
) -> None:
    (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)


class TestImports:
    @pytest.mark.parametrize("users", [None, "0", "1"])
    def test_xformers_does_not_start_cuda_in_the_server(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, users: str | None
    ) -> None:
        """And the user's variable is left as it was."""
        monkeypatch.delenv("XFORMERS_FORCE_DISABLE_TRITON", raising=False)
        if users is not None:
            monkeypatch.setenv("XFORMERS_FORCE_DISABLE_TRITON", users)
        library(tmp_path, monkeypatch, "like_xformers", XFORMERS)
        assert import_all(["like_xformers"]) == {}
        assert os.environ.get("XFORMERS_FORCE_DISABLE_TRITON") == users

    @pytest.mark.parametrize(("hip", "seen"), [(None, ""), ("6.4", "0")])
    def test_are_made_as_on_a_machine_without_a_card(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        hip: str | None,
        seen: str,
    ) -> None:
        """A library that finds a card asks for its capability, which starts CUDA and spoils every later fork."""
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        library(
            tmp_path,
            monkeypatch,
            "asks",
            "import os\nSEEN = os.environ['CUDA_VISIBLE_DEVICES']",
        )
        assert import_all(["asks"]) == {}
        assert seen == sys.modules["asks"].SEEN
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"

    def test_of_what_python_compiles_anew_say_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As Python 3.12 says it of an invalid escape sequence in a file that it compiles."""
        library(
            tmp_path,
            monkeypatch,
            "badly_written",
            "import warnings\nwarnings.warn('invalid escape', SyntaxWarning)",
        )
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert import_all(["badly_written"]) == {}
        assert not said

    @pytest.mark.parametrize(
        ("source", "said"),
        [
            ("raise RuntimeError('no\\n  kernels')", "RuntimeError: no kernels"),
            ("import sys\nsys.exit(3)", "SystemExit: 3"),
            (
                "import nothing_of_that_name",
                "ModuleNotFoundError: No module named 'nothing_of_that_name'",
            ),
        ],
    )
    def test_that_fail_say_why_and_the_others_are_made(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
    ) -> None:
        library(tmp_path, monkeypatch, "broken_one", source)
        library(tmp_path, monkeypatch, "sound_one", "")
        assert import_all(["broken_one", "sound_one"]) == {"broken_one": said}
        assert "sound_one" in sys.modules


@pytest.mark.slow  # each imports PyTorch
@pytest.mark.parametrize(
    ("xformers", "preloaded", "said"),
    [
        (
            "raise RuntimeError('built for another PyTorch')",
            "True|forkserver",
            "failed before: RuntimeError: built for",
        ),
        (
            "import os\nos._exit(11)",
            "False|spawn",
            "has ended: each worker imports PyTorch again, which takes seconds",
        ),
    ],
)
def test_a_library_that_fails_or_crashes_does_not_end_a_command(
    tmp_path: Path, xformers: str, preloaded: str, said: str
) -> None:
    """What a command finds on a machine where diffusers imports this xformers."""
    about = tmp_path / "xformers-0.0.35.dist-info"
    for folder in (tmp_path / "xformers", about):
        folder.mkdir()
    (tmp_path / "xformers" / "__init__.py").write_text(xformers)
    (tmp_path / "xformers" / "ops.py").touch()
    (about / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: xformers\nVersion: 0.0.35\n"
    )
    (tmp_path / "probe.py").write_text(PROBE)
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command, environment = (
        [sys.executable, str(tmp_path / "probe.py")],
        os.environ | {"PYTHONPATH": path},
    )
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    )
    assert "Traceback" not in done.stderr
    assert done.stdout.startswith(f"{preloaded}|")
    assert said in done.stdout


class TestServer:
    @pytest.mark.parametrize("trouble", ["ended", "bad fork"])
    def test_that_cannot_fork_is_replaced_by_spawning(
        self, monkeypatch: pytest.MonkeyPatch, trouble: str
    ) -> None:
        found, asked = (
            Machine(CPU, {}, preloaded=True, bad_fork=trouble == "bad fork"),
            [],
        )

        def ask(context: Any, _probe: object, wanted: str, what: str) -> Machine:
            asked.append(context)
            if len(asked) == 1 and trouble == "ended":
                raise ServerError("the process that workers are forked from has ended")
            return (
                found
                if len(asked) == 1
                else replace(found, bad_fork=False, warnings=("another",))
            )

        monkeypatch.setattr(machine, "in_process", ask)
        given: Any = object()
        chosen, context = find_machine(given, Hardware(device="cpu"), dict)
        assert asked == [given, context]
        assert context.get_start_method() == "spawn"
        assert chosen.warnings[0].endswith(
            "each worker imports PyTorch again, which takes seconds"
        )
        assert chosen.warnings[1:] == ("another",)
