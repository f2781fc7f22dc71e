"""How workers start: forked from a warm server that has imported and computed nothing, each a group of its own."""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sdopt.errors import UsageError
from sdopt.results.records import Status
from sdopt.worker.forkserver import prepare_environment, start_fork_server
from sdopt.worker.machine import probe_machine
from sdopt.worker.process import Worker
from sdopt.worker.protocol import WorkerError
from tests.command import parents
from tests.conftest import CPU, Compose


@pytest.fixture
def worker(variant: Compose, tmp_path: Path) -> Iterator[Worker]:
    worker = Worker(start_fork_server(), variant("hardware.threads=1"), CPU, tmp_path / "log", timeout_s=60)
    yield worker
    worker.kill()


class TestServer:
    def test_has_its_modules_in_place(self) -> None:
        """A server ignores what it cannot import: then no worker is forked from a warm one."""
        machine = probe_machine(start_fork_server(), "cpu")
        assert machine.preloaded
        assert not machine.bad_fork
        assert machine.device.type == "cpu"

    def test_computes_nothing_while_it_imports(self) -> None:
        """A thread pool in the server hangs the first matrix product of a child. Constants of libraries need none."""
        script = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode

class Seen(TorchDispatchMode):
    found = []
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        Seen.found.append(str(function))
        return function(*args, **(kwargs or {}))

with Seen():
    import sdopt.worker.preload
print(set(Seen.found) - {"aten.lift_fresh.default"}, torch.cuda.is_initialized())
"""
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "set() False"

    def test_the_users_environment_wins(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OMP_WAIT_POLICY", "active")
        monkeypatch.delenv("TOKENIZERS_PARALLELISM")
        prepare_environment()
        assert os.environ["OMP_WAIT_POLICY"] == "active"
        assert os.environ["TOKENIZERS_PARALLELISM"] == "false"

    def test_a_mistake_in_the_device_comes_back_whole(self) -> None:
        with pytest.raises(UsageError) as caught:
            probe_machine(start_fork_server(), "gpu")
        assert caught.value.problems == ["hardware.device=gpu: choose auto, cpu, cuda or cuda:N"]

    @pytest.mark.slow
    def test_workers_can_be_spawned_where_they_cannot_be_forked(self, variant: Compose, tmp_path: Path) -> None:
        context = multiprocessing.get_context("spawn")
        machine = probe_machine(context, "cpu")
        assert not machine.preloaded
        worker = Worker(context, variant(), machine.device, tmp_path / "log", timeout_s=120)
        try:
            worker.ask("prepare")
            assert worker.ask("time_once")[0] > 0
        finally:
            worker.stop()


class TestWorker:
    def test_is_a_session_and_a_group_of_its_own(self, worker: Worker) -> None:
        worker.ask("prepare")
        assert os.getsid(worker.pid) == os.getpgid(worker.pid) == worker.pid
        assert os.getsid(worker.pid) != os.getsid(0)

    def test_is_a_child_of_the_server(self, worker: Worker) -> None:
        worker.ask("prepare")
        tree = parents()
        assert tree[worker.pid] != os.getpid()
        assert tree[tree[worker.pid]] == os.getpid()

    def test_answers_one_thing_after_the_other(self, worker: Worker) -> None:
        worker.ask("prepare")
        seconds, joules = worker.ask("time_once")
        assert seconds > 0
        assert joules is None
        assert worker.ask("compile_report")[1] == 0

    def test_survives_a_request_that_fails(self, worker: Worker) -> None:
        worker.ask("prepare")
        with pytest.raises(WorkerError) as caught:
            worker.ask("no_such_request")
        assert caught.value.status is Status.FAILED
        assert caught.value.reason.startswith("AttributeError: ")
        assert worker.ask("compile_report")[1] == 0

    def test_ends_when_told_and_takes_its_cache_along(self, worker: Worker) -> None:
        worker.ask("prepare")
        cache = worker._cache
        assert cache.is_dir()
        worker.stop()
        assert worker.pid not in parents()
        assert not cache.exists()
        worker.stop()
        worker.kill()

    def test_ends_before_it_has_begun(self, worker: Worker) -> None:
        worker.kill()
        assert worker.pid not in parents()

    def test_says_which_signal_ended_it(self, worker: Worker) -> None:
        worker.ask("prepare")
        os.kill(worker.pid, signal.SIGSEGV)
        with pytest.raises(WorkerError) as caught:
            worker.ask("time_once")
        assert caught.value.status is Status.KILLED
        assert caught.value.reason == "killed by SIGSEGV during 'time_once'"

    def test_has_a_time_limit_for_each_answer(self, variant: Compose, tmp_path: Path) -> None:
        worker = Worker(start_fork_server(), variant(), CPU, tmp_path / "log", timeout_s=0.01)
        with pytest.raises(WorkerError) as caught:
            worker.ask("prepare")
        assert caught.value.status is Status.TIMEOUT
        assert caught.value.reason == "no answer to 'prepare' within 0.01 s (protocol.timeout_s)"
        assert worker.pid not in parents()
