"""Runs one function in a fresh process."""

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from sdopt.errors import UsageError
from sdopt.worker.child import ChildDiedError, ChildProcess, ChildTimeoutError, Note, send_answer
from sdopt.worker.forkserver import StartContext

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

    Args:
        context: starts the process.
        function: a function of a module; its arguments, its result and its notes are pickled.
        arguments: the arguments of `function`.
        timeout_s: limit in seconds; None waits for as long as the process lives.
        note: if given, `function` gets a keyword argument `note`; each of its calls there calls `note` here.

    Raises:
        ChildTimeoutError: `function` took too long.
        ChildDiedError: the process ended without a result.
    """
    child = ChildProcess(context, _serve, function, arguments, note is not None)
    try:
        result: T = child.receive(timeout_s, note or (lambda content: None))
    except BaseException:
        child.kill()
        raise
    child.stop()
    return result


def in_process(context: StartContext, function: Callable[..., T], *arguments: Any, what: str) -> T:
    """Runs `function`, which may touch the device, in a fresh process; returns its result or re-raises its error.

    Raises:
        UsageError: the process died, or gave no answer; the message begins with `what`.
    """
    try:
        return call_apart(context, function, *arguments, timeout_s=_PROBE_LIMIT_S)
    except ChildTimeoutError:
        raise UsageError(f"{what}: no answer within {_PROBE_LIMIT_S} s; is the device in use?") from None
    except ChildDiedError as died:
        raise UsageError(f"{what}: the process that should answer has ended ({died})") from None


def _serve(connection: Connection, function: Callable[..., Any], arguments: tuple[Any, ...], notes: bool) -> None:
    keywords = {"note": lambda content: connection.send(Note(content))} if notes else {}
    send_answer(connection, lambda: function(*arguments, **keywords))
