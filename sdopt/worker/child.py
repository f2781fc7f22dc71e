"""Runs a process, or one function in it, at the other end of a pipe: messages, notes, time limits, death and end."""

import os
import pickle
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import process as multiprocessing_process
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Literal, TypeVar

from sdopt.errors import UsageError
from sdopt.measure.processes import end, started_by
from sdopt.worker.forkserver import StartContext, silence_talkative, start

KILL_LIMIT_S = 10.0
"""Seconds that the kernel may take to end a killed process; a process that waits in a driver may never end."""

_STOP_LIMIT_S = 5.0
"""Seconds that a process may take to end by itself after its pipe was closed."""


Message = tuple[Literal["note", "reply", "failure"], Any]
"""What a child sends: notes of its progress, then what it was asked for, or the error that it ended with instead."""


class ChildDiedError(Exception):
    """A process ended before it answered; as a string, the error continues a sentence that begins "the process"."""

    def __init__(self, exit_code: int | None) -> None:
        self.exit_code = exit_code
        super().__init__(exit_code)

    @property
    def signal(self) -> str | None:
        """The name of the signal that killed it, if one did."""
        return (
            signal.Signals(-self.exit_code).name
            if self.exit_code is not None and self.exit_code < 0
            else None
        )

    def __str__(self) -> str:
        if self.exit_code is None:
            return "closed its pipe"
        return (
            f"killed by {self.signal}"
            if self.signal
            else f"ended with exit code {self.exit_code}"
        )


class ChildTimeoutError(Exception):
    """A process took too long to answer, and was killed."""


def print_warning(text: str) -> None:
    """Prints a warning to stderr."""
    print(f"sdopt: warning: {text}", file=sys.stderr)


def _ignore(content: object) -> None:
    pass


class ChildProcess:
    """A child process in its own process group, with a pipe to it. The group is killed if the parent dies.

    A Ctrl-C in the terminal does not reach the child: only the parent decides when the child ends.

    Args:
        context: starts the process.
        target: runs in the process, with its end of the pipe and `arguments`.
        arguments: the arguments of `target`; they are pickled.
        scratch: a folder to remove if the parent dies before it can remove it.
        warn: receives a warning if a process does not end.

    Raises:
        OSError: the process cannot be started, for example because the fork server has ended (ServerError).
    """

    def __init__(
        self,
        context: StartContext,
        target: Callable[..., None],
        *arguments: Any,
        scratch: Path | None = None,
        warn: Callable[[str], None] = print_warning,
    ) -> None:
        self._warn = warn
        self._ended = False
        self._connection, theirs = context.Pipe()
        life, self._life = context.Pipe(duplex=False)
        # Not a daemon: daemonic processes cannot start processes, as compilers do.
        self._process = context.Process(
            target=_main, args=(theirs, life, scratch, target, arguments), daemon=False
        )
        start(self._process)
        theirs.close()
        life.close()

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs and has not been killed."""
        return not self._ended and self._process.is_alive()

    def send(self, message: Any) -> None:
        """Sends a message to the child. Raises ChildDiedError."""
        try:
            self._connection.send(message)
        except OSError:
            raise self._died() from None

    def receive(
        self, timeout_s: float | None = None, note: Callable[[Any], None] = _ignore
    ) -> Any:
        """Returns the child's next answer; `note` receives the content of each note that comes before it.

        Raises:
            ChildTimeoutError: there was no answer in time; the child is killed.
            ChildDiedError: the process ended; the rest of its group is killed.
            Exception: the error that the child sent instead of an answer.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            kind, content = self._next(deadline)
            if kind == "reply":
                return content
            if kind == "failure":
                raise content
            note(content)

    def _next(self, deadline: float | None) -> Message:
        timeout_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            ready = wait([self._connection, self._process.sentinel], timeout_s)
            if not ready:
                self.kill()
                raise ChildTimeoutError
            if self._connection not in ready and not self._connection.poll(0.2):
                raise EOFError
            message: Message = self._connection.recv()
        except (EOFError, OSError):
            raise self._died() from None
        return message

    def stop(self) -> None:
        """Ends the process, gently if it still listens, and all that it started."""
        # Nobody can find what has a session of its own once its parent has ended.
        started = [] if self._ended else started_by(self.pid)
        self._connection.close()
        self._process.join(_STOP_LIMIT_S)
        end(started)
        self.kill()

    def kill(self) -> None:
        """Ends the process and all that it started, at once; gives up after `KILL_LIMIT_S`, with a warning."""
        if self._ended:
            return
        self._ended = True
        end(started_by(self.pid))
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self._process.kill()  # it has no group of its own yet
        self._process.join(KILL_LIMIT_S)
        if self._process.is_alive():
            self._warn(
                f"process {self.pid} was killed, but has not ended within {KILL_LIMIT_S:g} s; it is left running"
            )
            # At exit, Python waits without limit for every registered child process.
            multiprocessing_process._children.discard(self._process)  # type: ignore[attr-defined]
        self._connection.close()
        self._life.close()

    def _died(self) -> ChildDiedError:
        self._process.join(KILL_LIMIT_S)
        code = self._process.exitcode
        self.kill()
        return ChildDiedError(code)


def _portable(error: Exception) -> Exception:
    """Returns the error, or one with the same text if the error itself cannot be pickled."""
    try:
        pickle.loads(ForkingPickler.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _main(
    connection: Connection,
    life: Connection,
    scratch: Path | None,
    target: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    """Leaves the parent's process group, and runs `target`; the child's main function."""
    os.setsid()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        # All children would share the numbers of the fork server, and a program has its own.
        numpy_random.seed()
    threading.Thread(
        target=_end_with_the_parent, args=(life, scratch), daemon=True
    ).start()
    target(connection, *arguments)


def _end_with_the_parent(life: Connection, scratch: Path | None) -> None:
    """Waits until the parent's end of a pipe closes, to which it never writes; then kills itself and its descendants.

    A killed parent cannot end its children, and a compiler or a call would run on for minutes.
    """
    with suppress(OSError, EOFError):
        life.recv_bytes()
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)
    end(started_by(os.getpid()))
    os.killpg(0, signal.SIGKILL)


T = TypeVar("T")

_PROBE_LIMIT_S = 300


def call_apart(
    context: StartContext,
    function: Callable[..., T],
    *arguments: Any,
    timeout_s: float | None = None,
    note: Callable[[Any], None] | None = None,
) -> T:
    """Runs `function` in a fresh process; returns its result or re-raises its error.

    It is a function of a module; its arguments, its result and its notes are pickled. With `note` it gets a keyword
    argument of that name; each of its calls there calls `note` here.

    Raises:
        ChildTimeoutError: `function` took too long.
        ChildDiedError: the process ended without a result.
    """
    child = ChildProcess(context, _serve, function, arguments, note is not None)
    try:
        result: T = child.receive(timeout_s, note or _ignore)
    except BaseException:
        child.kill()
        raise
    child.stop()
    return result


def in_process(
    context: StartContext, function: Callable[..., T], *arguments: Any, what: str
) -> T:
    """Runs `function`, which may touch the device, in a fresh process; returns its result or re-raises its error.

    Raises:
        UsageError: the process died, or gave no answer; the message begins with `what`.
    """
    try:
        return call_apart(context, function, *arguments, timeout_s=_PROBE_LIMIT_S)
    except ChildTimeoutError:
        raise UsageError(
            f"{what}: no answer within {_PROBE_LIMIT_S} s; is the device in use?"
        ) from None
    except ChildDiedError as died:
        raise UsageError(
            f"{what}: the process that should answer has ended ({died})"
        ) from None


def _serve(
    connection: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    notes: bool,
) -> None:
    """Sends the result of `function` to the parent, or the error that it raises; does nothing if the pipe is closed."""
    silence_talkative()
    keywords = (
        {"note": lambda content: connection.send(("note", content))} if notes else {}
    )
    try:
        pickled = ForkingPickler.dumps(("reply", function(*arguments, **keywords)))
    except Exception as error:
        pickled = ForkingPickler.dumps(("failure", _portable(error)))
    with suppress(OSError):
        connection.send_bytes(pickled)
