"""Starts the fork server, and processes from it; `worker.process.WorkerProcess` is the worker of a variant.

Imports nothing heavy, so that the server loads libraries while the parent does.
"""

import atexit
import logging
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from sdopt.errors import UsageError
from sdopt.limits import require_limits
from sdopt.scratch import named_caches, own_folder, unwritable

StartContext = ForkServerContext | SpawnContext

_ENVIRONMENT = {
    # Importing xformers asks torch.cuda.is_available(), which would initialise CUDA and spoil every later fork.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # The fork server starts with `python -c`, which would put the working folder first on the path.
    "PYTHONSAFEPATH": "1",
    # These libraries print on import which extras are not installed; users need not see that.
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
}


TALKATIVE = (
    "torchao",
    "torch.utils._pytree",
    "xformers",
    "bitsandbytes.backends.cpu.ops",
)
"""Loggers that warn, on the user's terminal, of TorchAO's kernels that this build of PyTorch cannot use, of missing
ones of xFormers, without which `attention=xformers` is a conflict anyway, and of one for CPUs that bitsandbytes would
fetch from the hub."""


def silence_talkative() -> None:
    """Restricts `TALKATIVE` to errors, for as long as this process lives."""
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)


PRELOADED = ["sdopt.worker.preload"]
"""Modules that the fork server imports before it forks."""

_TORCH_ALONE = ["torch"]
"""Those for a command whose few processes load no pipeline."""


class ServerError(OSError):
    """The fork server has ended, so that no process starts from it."""


def start(process: BaseProcess) -> None:
    """Starts a process. Raises ServerError if the fork server has ended, as it does when an import crashes it."""
    try:
        process.start()
    except (EOFError, ConnectionError) as error:
        raise ServerError(
            "the process that workers are forked from has ended"
        ) from error


def prepare_environment() -> None:
    """Sets environment variables that libraries read on import, unless the user has set them."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def start_fork_server(torch_alone: bool = False) -> StartContext:
    """Starts the process that workers are forked from, and returns without waiting for its imports.

    Its environment is fixed from then on. On platforms without fork, workers are spawned, which takes seconds each.

    Args:
        torch_alone: whether no process will load a pipeline, so that less is imported; a server that is there already
            serves that, too.

    Raises:
        UsageError: no temporary folder can be written, or the compilers' folder cannot be made.
        UnavailableError: the limits of this process are too low to measure anything.
    """
    require_limits()
    _require_compilers_folder()
    prepare_environment()
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    server: Any = forkserver._forkserver
    if torch_alone and server._forkserver_pid is not None:
        return context
    if (
        server._preload_modules != PRELOADED
    ):  # since Python 3.14, any library may have started it
        _end_fork_server(os.getpid())
    context.set_forkserver_preload(_TORCH_ALONE if torch_alone else PRELOADED)
    # Ctrl-C reaches the whole foreground group: it must not end the server in the middle of an import.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The server's socket is in a folder that is removed even if this process is killed.
    before, tempfile.tempdir = tempfile.tempdir, str(own_folder())
    try:
        forkserver.ensure_running()
    finally:
        tempfile.tempdir = before
        signal.signal(signal.SIGINT, handler)
    atexit.register(_end_fork_server, os.getpid())
    return context


_COMPILERS_FOLDER = "TORCHINDUCTOR_CACHE_DIR"


def _require_compilers_folder() -> None:
    """Raises UsageError if PyTorch cannot make the folder that it makes when its compilers are imported.

    Its own error comes at the second import, and names something else.
    """
    folder = Path(named_caches().get(_COMPILERS_FOLDER, "."))
    reason = None if folder.is_dir() else unwritable(folder)
    if reason:
        raise UsageError(
            f"{_COMPILERS_FOLDER}={folder}: {reason}; name another folder, or leave it out"
        )


def _end_fork_server(parent: int) -> None:
    """Ends the server before the process that started it does: nothing of a command is left when it has ended."""
    from multiprocessing import forkserver

    server: Any = forkserver._forkserver
    pid = server._forkserver_pid
    if pid is None or os.getpid() != parent or multiprocessing.active_children():
        return
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(
            pid, signal.SIGTERM
        )  # it may be in the middle of its imports, which nobody needs any more
        os.waitpid(pid, 0)
    server._forkserver_pid = None


def end_resource_tracker() -> None:
    """Ends the process with which `multiprocessing` tracks shared memory, which would outlive this one for a moment.

    A job's control group that is removed at once, or a batch system that looks for strays, would meet it.
    """
    module = sys.modules.get("multiprocessing.resource_tracker")
    tracker = module and module._resource_tracker
    if not tracker or tracker._fd is None or tracker._pid is None:
        return  # there is none, or it is that of the process that this one was forked from
    util: Any = multiprocessing.util
    util._exit_function()  # it has the tracker forget this process's semaphores
    if multiprocessing.active_children():
        return
    os.close(tracker._fd)  # which ends it
    tracker._fd = None
    deadline = time.monotonic() + 1  # a compiler's process may hold the pipe as well
    with suppress(ChildProcessError):
        while os.waitpid(tracker._pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables within the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def independent_children() -> Iterator[None]:
    """Starts worker processes within the block without this process's main module and start method.

    `multiprocessing` imports the main module again in each child: a script without `if __name__ == "__main__":` would
    run again there, and a notebook has no file to import. It also passes on the name of the start method, and a
    launcher such as joblib sets one (`loky`) that the child does not know.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    methods = multiprocessing.get_all_start_methods()
    if multiprocessing.get_start_method(allow_none=True) not in (None, *methods):
        # Not restored: the launcher's process runs jobs and nothing else.
        multiprocessing.set_start_method(methods[0], force=True)
    try:
        yield
    finally:
        sys.modules["__main__"] = main
