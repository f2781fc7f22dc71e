"""How workers start: forked from a warm server that has imported and computed nothing."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sdopt.errors import UsageError
from sdopt.worker.forkserver import prepare_environment, start_fork_server
from sdopt.worker.host import PipelineHost
from sdopt.worker.machine import probe_machine
from sdopt.worker.process import WorkerProcess
from tests.fixtures import Compose


class TestServer:
    def test_has_its_modules_in_place(self) -> None:
        """A server ignores what it cannot import: then no worker is forked from a warm one."""
        machine, _ = probe_machine(start_fork_server(), "cpu")
        assert machine.preloaded
        assert not machine.bad_fork
        assert machine.device.type == "cpu"

    def test_ends_before_the_command_does(self) -> None:
        """Also in the middle of its imports: a container's or a job's limits would find a process that is left."""
        script = """
from multiprocessing import forkserver
from sdopt.worker.forkserver import start_fork_server

start_fork_server()
print(forkserver._forkserver._forkserver_pid)
"""
        ended = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        )
        assert not Path("/proc", ended.stdout.strip()).exists()

    def test_leaves_no_tracker_of_shared_memory(self) -> None:
        script = """
import os
from multiprocessing import resource_tracker
from sdopt.worker.forkserver import end_resource_tracker

end_resource_tracker()  # there is none
resource_tracker.ensure_running()
pid = resource_tracker._resource_tracker._pid
end_resource_tracker()
print(os.path.exists(f"/proc/{pid}"))
"""
        ended = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        )
        assert ended.stdout == "False\n"

    def test_of_pytorch_alone_gives_way_to_that_of_a_study(self) -> None:
        script = """
from multiprocessing import forkserver
from sdopt.worker.forkserver import start_fork_server

server = forkserver._forkserver
begun = []
for torch_alone in (True, True, False, True):
    start_fork_server(torch_alone)
    begun.append((server._forkserver_pid, *server._preload_modules))
print([modules for pid, *modules in begun])
print(len({pid for pid, *modules in begun}))
"""
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        )
        alone, full = "['torch']", "['sdopt.worker.preload']"
        modules = f"{alone}, {alone}, {full}, {full}"
        assert done.stdout.splitlines() == [f"[{modules}]", "2"]

    @pytest.mark.slow  # it imports PyTorch
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
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == "set() False"

    def test_the_users_environment_wins(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DIFFUSERS_VERBOSITY", "debug")
        monkeypatch.delenv("TOKENIZERS_PARALLELISM")
        prepare_environment()
        assert os.environ["DIFFUSERS_VERBOSITY"] == "debug"
        assert os.environ["TOKENIZERS_PARALLELISM"] == "false"

    def test_a_compilers_folder_that_cannot_be_made_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """PyTorch makes it when it is imported, and names something else when it cannot."""
        (tmp_path / "file").touch()
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
        with pytest.raises(UsageError, match=r"TORCHINDUCTOR_CACHE_DIR=.*is no folder"):
            start_fork_server()

    @pytest.mark.slow
    def test_workers_can_be_spawned_where_they_cannot_be_forked(
        self, variant: Compose, tmp_path: Path
    ) -> None:
        context = multiprocessing.get_context("spawn")
        machine, _ = probe_machine(context, "cpu")
        assert not machine.preloaded
        worker = WorkerProcess(
            context,
            machine.device,
            120,
            variant(),
            tmp_path / "log",
            tmp_path / "scratch",
        )
        try:
            worker.ask(PipelineHost.prepare)
            assert worker.ask(PipelineHost.time_once).seconds > 0
        finally:
            worker.stop()
