"""Where sdopt runs: modules that are named like libraries, variables that lead nowhere, ports in use, few handles."""

import errno
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

import pytest

from runners import end_with_code
from sdopt.limits import SIZES
from sdopt.record.files import read_result
from sdopt.schema import Tracking
from sdopt.tracking.client import TrackingError
from sdopt.tracking.runs import log_study
from tests.command import ROOT, SMOKE, refused, sdopt
from tests.robustness.damage import RESULT
from tests.study.test_robustness import full, small_disk

QUICK = (*SMOKE, "workload.steps=1", "protocol.stage_calls=0")


def run_apart(
    folder: Path,
    *arguments: str,
    limits: Mapping[int, int] = MappingProxyType({}),
    **environment: str,
) -> "Ended":
    """Runs the command in a process of its own, as `python -m`, with limits as `ulimit` sets them."""

    def limit() -> None:
        for number, allowed in limits.items():
            resource.setrlimit(number, (allowed, allowed))

    # Without PYTHONSAFEPATH, which a command in this process has set: as a shell starts it.
    inherited = {
        name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"
    }
    return subprocess.run(
        [sys.executable, "-m", "sdopt.cli", *arguments],
        cwd=folder,
        env={**inherited, "PYTHONPATH": str(ROOT), **environment},
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


Ended = subprocess.CompletedProcess[str]


@pytest.mark.slow
def test_modules_of_the_working_folder_hide_no_library(tmp_path: Path) -> None:
    for name in ("queue", "mlflow", "torch", "random", "yaml", "hydra"):
        (tmp_path / f"{name}.py").write_text('raise SystemExit("the wrong one")')
    ended = run_apart(tmp_path, "run", *QUICK)
    assert ended.returncode == 0, ended.stderr
    assert "the wrong one" not in ended.stdout + ended.stderr
    [path] = tmp_path.rglob("result.json")
    assert read_result(path).status == "finished"


def test_the_working_folder_comes_last(tmp_path: Path) -> None:
    for name in ("selectors", "queue", "random"):
        (tmp_path / f"{name}.py").write_text('raise SystemExit("the wrong one")')
    ended = run_apart(tmp_path, "skill")
    assert ended.returncode == 0, ended.stderr
    assert "sdopt run" in ended.stdout


@pytest.mark.slow
def test_variables_that_lead_nowhere_and_few_handles(tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    # Below a file not even root can make a folder.
    nowhere = dict.fromkeys(
        ("HOME", "TMPDIR", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME"), str(file / "nowhere")
    )
    ended = run_apart(
        tmp_path, "run", *QUICK, limits={resource.RLIMIT_NOFILE: 64}, **nowhere
    )
    assert ended.returncode == 0, ended.stderr
    [path] = tmp_path.rglob("result.json")
    assert read_result(path).status == "finished"


def test_too_little_for_any_study_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (2**20,) * 2)
    ended = sdopt(tmp_path, "run", *QUICK)
    assert ended.code == 3
    assert ended.err.startswith("sdopt: address space is limited to 1 MiB")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_least_of_each_limit_is_enough(tmp_path: Path) -> None:
    least = {limit: allowed for limit, *_, allowed in SIZES}
    ended = run_apart(tmp_path, "run", *QUICK, limits=least)
    assert ended.returncode == 0, ended.stderr
    _, line = ended.stderr.splitlines()
    assert line.startswith("sdopt: no plot: address space is limited to 8192 MiB, but")
    [path] = tmp_path.rglob("result.json")
    assert read_result(path).status == "finished"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed")
def test_a_disk_that_fills_up_while_a_result_is_logged(tmp_path: Path) -> None:
    result = read_result(RESULT)
    with small_disk(tmp_path / "disk", "8m") as disk:
        tracking = Tracking(
            uri=f"sqlite:///{disk}/mlflow.db",
            artifacts=f"{disk}/artifacts",
            images=False,
        )
        log_study(replace(result, id="1"), tmp_path, tracking)
        filler = full(disk)
        with pytest.raises(TrackingError) as caught:
            log_study(result, tmp_path, tracking)
        [problem] = caught.value.problems
        assert problem.startswith(tracking.uri)
        assert "full" in problem or "No space left" in problem or "I/O error" in problem
        filler.unlink()
        assert log_study(result, tmp_path, tracking).new


@pytest.mark.slow  # in MLflow's own process, which takes seconds to start
def test_a_port_in_use(tmp_path: Path) -> None:
    (tmp_path / "there.db").touch()
    store = f"tracking.uri=sqlite:///{tmp_path}/there.db"
    with socket.create_server(("127.0.0.1", 0)) as used:
        taken = str(used.getsockname()[1])
        refused(
            tmp_path,
            "ui",
            "--port",
            taken,
            store,
            says="already in use; choose another port",
        )
    refused(
        tmp_path,
        "ui",
        "--port",
        "99999",
        store,
        says="--port 99999: must be between 1 and 65535",
    )


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            PermissionError(errno.EACCES, "Permission denied", "there"),
            "there: Permission denied; run as a user with",
        ),
        (
            OSError(errno.EMFILE, "Too many open files", "it"),
            "it: Too many open files; raise the limit of open files",
        ),
        (
            OSError(errno.ENOMEM, "Cannot allocate memory"),
            "Cannot allocate memory; raise the memory limit (ulimit -v)",
        ),
        (MemoryError(), "out of memory; raise the memory limit (ulimit -v)"),
        (
            ImportError("it.so: failed to map segment"),
            "it.so: failed to map segment; raise the memory limit",
        ),
        (
            RuntimeError("can't start new thread"),
            "can't start new thread; raise the limit of processes (ulimit -u)",
        ),
    ],
)
def test_what_the_machine_refuses_is_one_line(
    error: Exception,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)

    def refused(argv: list[str]) -> int:
        raise error

    assert end_with_code(refused)([]) == 3
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sdopt: {said}")


def test_a_gate_in_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    shutil.copy(RESULT, tmp_path / "result.json")  # in which its look is kept
    finished = sdopt(
        tmp_path,
        "gate",
        str(tmp_path),
        "gate=default",
        "--output",
        str(tmp_path / "file" / "below"),
    )
    assert finished.code == 3
    assert "below: Not a directory" in finished.err
    assert "Traceback" not in finished.err
