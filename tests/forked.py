"""Processes of their own that need not import PyTorch, diffusers and MLflow, which takes ten seconds of CPU time.

A command is forked from the fork server of this process's workers, which has imported what commands and their workers
import, and so is the command's own fork server in turn. In all else it is a process as a shell starts one: with a
session, a working folder, output, handlers of signals and workers of its own. So are the processes in which MLflow and
`sdopt.run` work. Where the start itself is tested (imports, `sys.path`, variables that libraries read when they are
imported) `tests.command.start` and the fixture `started_anew` start Python anew.
"""

import multiprocessing.forkserver
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from multiprocessing import Pipe, util
from multiprocessing import process as multiprocessing_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from huggingface_hub import constants

from sdopt import guest
from sdopt.apart import start_apart
from sdopt.cli import main
from sdopt.scratch import own_folder
from sdopt.tracking import store
from sdopt.worker import forkserver


class Forked:
    """A process that is forked, with those methods of `subprocess.Popen` that sdopt and tests need."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = forkserver.start_fork_server()
        # Not a daemon: those may not start processes.
        self._process = context.Process(
            target=_begin, args=(target, arguments, dict(os.environ)), daemon=False
        )
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
        """Sends a signal to the process alone, if it still runs."""
        if self.poll() is None:
            with suppress(
                ProcessLookupError
            ):  # the fork server buries it before it tells the exit code
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends the process at once."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end; returns the exit code."""
        self._process.join(timeout)
        if (code := self.poll()) is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("sdopt", timeout)
        return code


class ForkedCommand(Forked):
    """The command, or a program of a user's own, in a process that is forked.

    Args:
        cwd: its working folder.
        arguments: those of the command.
        environment: further variables; huggingface_hub has read its own before, and is told.
        program: the file of a program that is run instead of the command.
    """

    def __init__(
        self,
        cwd: Path,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        program: Path | None = None,
    ) -> None:
        self._said = Path(tempfile.mkdtemp(dir=own_folder()))
        super().__init__(
            _command, cwd, arguments, self._said, dict(environment), program
        )

    @property
    def said(self) -> str:
        """What it has said to stdout so far."""
        return (self._said / "out").read_text() if (self._said / "out").exists() else ""

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits for the end; returns what was said to stdout and stderr."""
        self.wait(timeout)
        return (self._said / "out").read_text(), (self._said / "err").read_text()


class ForkedFunction(Forked):
    """What `sdopt.apart` starts, forked: a function that is given one end of a pipe."""

    stdout: IO[bytes] | None = None
    stderr: IO[bytes] | None = None

    def __init__(
        self,
        channel: Connection,
        module: str,
        function: str,
        env: Mapping[str, str],
        streams: Any,
    ) -> None:
        with ExitStack() as started:
            passed = []
            for number, name in ((1, "stdout"), (2, "stderr")):
                to = streams.get(name)
                if to == subprocess.PIPE:
                    read, handle = os.pipe()
                    setattr(self, name, os.fdopen(read, "rb"))
                elif to == subprocess.DEVNULL:
                    handle = os.open(os.devnull, os.O_WRONLY)
                else:
                    handle = os.dup(number if to is None else to.fileno())
                # What multiprocessing passes on is a connection, whatever lies behind the handle.
                passed.append(started.enter_context(Connection(handle, readable=False)))
            super().__init__(
                _function,
                _folder(),
                channel,
                module,
                function,
                dict(env),
                list(sys.path),
                passed,
            )
        # As of `subprocess`, this process does not wait for it at its own end.
        multiprocessing_process._children.discard(self._process)  # type: ignore[attr-defined]


def fork_apart(
    module: str, function: str, env: Mapping[str, str] | None = None, **streams: Any
) -> tuple[ForkedFunction, Connection]:
    """Takes the place of `sdopt.apart.start_apart`, which starts Python anew."""
    ours, theirs = Pipe()
    with theirs:
        return ForkedFunction(
            theirs, module, function, os.environ if env is None else env, streams
        ), ours


@pytest.fixture(scope="session", autouse=True)
def forked_apart() -> Iterator[None]:
    """Forks the processes in which MLflow and `sdopt.run` work."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (guest, store):
            patch.setattr(module, "start_apart", fork_apart)
        yield


@pytest.fixture
def started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts those processes as users' programs and commands do."""
    for module in (guest, store):
        monkeypatch.setattr(module, "start_apart", start_apart)


def _folder() -> Path | None:
    """The working folder; None if it was removed."""
    try:
        return Path.cwd()
    except OSError:
        return None


def _begin(
    target: Callable[..., None],
    arguments: Sequence[Any],
    environment: Mapping[str, str],
) -> None:
    """Makes the forked process one as a shell starts it, and runs a function."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.SIG_DFL)
    util.spawnv_passfds = _fork_server  # type: ignore[assignment]
    for module in (guest, store):
        vars(module)["start_apart"] = fork_apart
    target(*arguments)


def _command(
    cwd: Path,
    arguments: Sequence[str],
    said: Path,
    environment: Mapping[str, str],
    program: Path | None,
) -> None:
    os.chdir(cwd)
    os.environ.update(environment)
    if "HF_HUB_CACHE" in environment:
        constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = (
            environment["HF_HUB_CACHE"],
            True,
        )
    for name, number in (("out", 1), ("err", 2)):
        with (said / name).open("wb") as stream:
            os.dup2(stream.fileno(), number)
    if program is None:
        sys.exit(main(list(arguments)))
    forkserver.start_fork_server()  # of which Hydra knows nothing yet
    sys.argv[:] = [str(program)]
    runpy.run_path(str(program), run_name="__main__")


def _function(
    cwd: Path | None,
    channel: Connection,
    module: str,
    function: str,
    environment: Mapping[str, str],
    path: Sequence[str],
    streams: Sequence[Connection],
) -> None:
    if cwd is not None:
        os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    for number, stream in enumerate(streams, 1):
        os.dup2(stream.fileno(), number)
        stream.close()
    # What wrote to a file before cannot write to a pipe.
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2)
    )
    getattr(import_module(module), function)(channel)


def fork_the_server() -> None:
    """Starts this process's fork server as a fork of it, once it has imported what the server imports."""
    for module in forkserver.PRELOADED:
        with suppress(ImportError):  # the server leaves out what is not installed, too
            import_module(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(util, "spawnv_passfds", _fork_server)
        forkserver.start_fork_server()
    assert not torch.cuda.is_initialized(), (
        "no process can be forked from one that has started CUDA"
    )


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
        exec(arguments[arguments.index("-c") + 1], {})
    finally:
        os._exit(0)
