"""Commands in processes of their own that need not import PyTorch and diffusers, which takes ten seconds of CPU time.

A command is forked from the fork server of this process's workers, which has imported what commands and their workers
import, and so is the command's own fork server in turn. In all else it is a process as a shell starts one: with a
session, a working folder, output, handlers of signals and workers of its own. Where the start itself is tested
(imports, `sys.path`, variables that libraries read when they are imported) `tests.command.start` starts Python anew.
"""

import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import util
from pathlib import Path

import pytest
import torch

from sdopt.cli import main
from sdopt.scratch import own_folder
from sdopt.worker import forkserver


class Forked:
    """The command in a process that is forked, with those methods of `subprocess.Popen` that tests need."""

    def __init__(self, cwd: Path, arguments: Sequence[str]) -> None:
        self._said = Path(tempfile.mkdtemp(dir=own_folder()))
        context = forkserver.start_fork_server()
        # Not a daemon: those may not start processes.
        self._process = context.Process(target=_run, args=(cwd, arguments, self._said, dict(os.environ)), daemon=False)
        with forkserver.independent_children():
            self._process.start()

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or the negative number of the signal that ended it; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Returns the exit code."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Sends a signal to the process alone."""
        if self.poll() is None:
            os.kill(self.pid, number)

    @property
    def said(self) -> str:
        """What it has said to stdout so far."""
        return (self._said / "out").read_text() if (self._said / "out").exists() else ""

    def kill(self) -> None:
        """Ends the process at once."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits for the end; returns what was said to stdout and stderr."""
        self._process.join(timeout)
        if self.poll() is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("sdopt", timeout)
        return (self._said / "out").read_text(), (self._said / "err").read_text()


def _run(cwd: Path, arguments: Sequence[str], said: Path, environment: dict[str, str]) -> None:
    """Makes the forked process one as a shell starts it, and runs the command."""
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for name, number in (("out", 1), ("err", 2)):
        with (said / name).open("wb") as stream:
            os.dup2(stream.fileno(), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.SIG_DFL)
    util.spawnv_passfds = _fork_server  # type: ignore[assignment]
    sys.exit(main(list(arguments)))


def fork_the_server() -> None:
    """Starts this process's fork server as a fork of it, once it has imported what the server imports."""
    for module in forkserver.PRELOADED:
        with suppress(ImportError):  # the server leaves out what is not installed, too
            import_module(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(util, "spawnv_passfds", _fork_server)
        forkserver.start_fork_server()
    assert not torch.cuda.is_initialized(), "no process can be forked from one that has started CUDA"


def _fork_server(_path: str, arguments: Sequence[str], handles: Sequence[int]) -> int:
    """Takes the place of `spawnv_passfds`, which starts Python anew: forks this process, which has imported all."""
    if pid := os.fork():
        return pid
    # As in a new process: no handles but those that it is given, no handlers, and no server of its own.
    for handle in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if handle > 2 and handle not in handles:
            with suppress(OSError):
                os.close(handle)
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.SIG_DFL)
    multiprocessing.forkserver._forkserver.__init__()  # type: ignore[misc]
    try:
        exec(arguments[-1], {})
    finally:
        os._exit(0)
