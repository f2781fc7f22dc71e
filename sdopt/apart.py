"""Starts a function in a Python process of its own, from any thread, notebook or daemonic worker; imports little."""

import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from sdopt.errors import UnavailableError


def start_apart(
    module: str, function: str, env: Mapping[str, str] | None = None, **streams: Any
) -> "tuple[subprocess.Popen[bytes], Connection]":
    """Starts `function(connection)` of a module in a new process; returns the process and the other end.

    It is in a session of its own, so that Ctrl-C reaches only this process, and it finds the modules that this one
    finds. Unlike `multiprocessing`, it imports neither this process's main module nor minds where it is started.
    `streams` are `stdout` and `stderr`, as `subprocess.Popen` takes them.

    Raises:
        UnavailableError: no process can be started.
    """
    begin = "import sys; handle, *sys.path[:] = sys.argv[1:]; from multiprocessing.connection import Connection; "
    begin += f"from {module} import {function}; {function}(Connection(int(handle)))"
    ours, theirs = Pipe()
    with theirs:
        command = [
            sys.executable or "python3",
            "-c",
            begin,
            str(theirs.fileno()),
            *sys.path,
        ]
        try:
            started = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=env,
                **streams,
            )
        except OSError as error:
            ours.close()
            raise UnavailableError(
                f"{command[0]}: no process can be started from it ({error.strerror})"
            ) from error
    return started, ours
