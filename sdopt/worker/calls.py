"""Runs one function in a fresh process."""

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from sdopt.errors import UsageError
from sdopt.worker.forkserver import StartContext, start

T = TypeVar("T")

_PROBE_LIMIT_S = 300


def in_process(context: StartContext, function: Callable[..., T], *arguments: Any, what: str) -> T:
    """Runs `function` in a fresh process, which may touch the device; returns its result, or raises what it raises.

    Raises:
        UsageError: the process died, or gave no answer; begins with `what`.
        ServerError: no process can be started, because the fork server has ended.
    """
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, function, arguments), daemon=True)
    start(process)
    theirs.close()
    try:
        if not ours.poll(_PROBE_LIMIT_S):
            process.kill()
            raise UsageError(f"{what}: no answer within {_PROBE_LIMIT_S} s; is the device in use?")
        answer: T | Exception = ours.recv()
    except EOFError:
        process.join()
        raise UsageError(f"{what}: asking for it ended with exit code {process.exitcode}") from None
    process.join()
    if isinstance(answer, Exception):
        raise answer
    return answer


def _answer(connection: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        connection.send(function(*arguments))
    except Exception as error:
        connection.send(error)
