"""Sweeps on a real Ray cluster, in an environment that has the extra `ray`."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from sdopt.record.files import read_result
from tests.command import SMOKE, Process, eventually, start
from tests.runners import ray_head

pytestmark = pytest.mark.slow

SWEEP = (
    "run",
    "-m",
    *SMOKE,
    "workload.steps=1",
    "protocol.rounds=30",
    "hydra.sweep.dir=outputs/sweep",
)
RAY = ("hydra/launcher=ray", "+hydra.launcher.ray.init.object_store_memory=null")


@pytest.fixture(scope="module")
def head() -> Iterator[ray_head.Head]:
    with ray_head.running("ray", "ray") as head:
        yield head


def begin(cwd: Path, head: ray_head.Head, *arguments: str) -> Process:
    return start(cwd, *SWEEP, *RAY, *arguments, **head.environment)


def send(number: int, process: Process, job: str) -> None:
    """Sends a signal to the Ray process of a job once it has timed a round."""
    folder = process.cwd / "outputs" / "sweep" / job

    def timed() -> bool:
        assert process.popen.poll() is None, process.finish().shown
        return (folder / "result.json").is_file() and bool(
            read_result(folder).variants[0].samples
        )

    assert eventually(timed, 300), f"job {job} measures nothing"
    worker = ray_head.worker_in(folder)
    assert worker is not None
    os.kill(worker, number)


def test_a_job_that_is_killed_is_a_row_and_is_measured_later(
    head: ray_head.Head, tmp_path: Path
) -> None:
    axes = ("attention=default,math", "layout=contiguous,channels_last")
    process = begin(tmp_path, head, *axes, "+hydra.launcher.ray.remote.max_retries=0")
    send(signal.SIGKILL, process, "2")
    ended = process.finish(600)
    assert ended.code == 3, ended.shown
    assert "WorkerCrashedError" in ended.err
    # Two jobs run at once, on the same cores: one waits.
    assert "which measures on" in ended.shown
    folder = tmp_path / "outputs" / "sweep"
    [row] = [
        line
        for line in (folder / "sweep.md").read_text().splitlines()
        if line.startswith("| 2 |")
    ]
    assert row.startswith("| 2 | attention=math |")
    assert (
        "the study has not ended: its process still runs, was killed, or lost its machine"
        in row
    )
    finished = {
        path: path.read_bytes()
        for path in (folder / "0" / "result.json", folder / "1" / "result.json")
    }

    resumed = start(
        tmp_path, "run", f"resume={folder}", "retry_failed=true", **head.environment
    ).finish(600)
    assert resumed.code == 0, resumed.err
    assert {path: path.read_bytes() for path in finished} == finished
    studies = [read_result(folder / str(number)) for number in range(4)]
    assert {study.status for study in studies} == {"finished"}
    assert len(studies[2].sessions) == 2


@pytest.mark.parametrize(
    ("number", "code", "status", "sessions"),
    [(signal.SIGKILL, 0, "finished", 2), (signal.SIGTERM, 3, "interrupted", 1)],
)
def test_a_job_that_is_killed_comes_back_by_itself_and_after_sigterm_ends_as_at_ctrl_c(
    head: ray_head.Head,
    tmp_path: Path,
    number: int,
    code: int,
    status: str,
    sessions: int,
) -> None:
    process = begin(tmp_path, head, "attention=math")
    send(number, process, "0")
    ended = process.finish(600)
    assert ended.code == code, ended.shown
    folder = tmp_path / "outputs" / "sweep" / "0"
    study = read_result(folder)
    assert (study.status, len(study.sessions)) == (status, sessions)
    assert (folder / "report.html").is_file()
