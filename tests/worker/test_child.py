"""Processes with a pipe: answers, errors, notes, time limits, and how they end, whatever happens to either side."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import pytest

from sdopt.errors import UsageError
from sdopt.worker import child as child_module
from sdopt.worker.child import (
    ChildDiedError,
    ChildProcess,
    ChildTimeoutError,
    call_apart,
    in_process,
)
from sdopt.worker.forkserver import StartContext, start_fork_server
from tests.command import ROOT, eventually, has_ended, workers


class OddError(Exception):
    """Cannot be pickled: what it is made from is not what it keeps."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


def double(number: int) -> int:
    return 2 * number


def count(number: int, note: Callable[[Any], None]) -> str:
    for found in range(number):
        note(found)
    return "done"


def refuse(what: str) -> None:
    raise UsageError([what, "and more"])


def fail_oddly() -> None:
    raise OddError(1, 2)


def return_what_cannot_travel() -> Callable[[], None]:
    return lambda: None


def end(code: int) -> None:
    os._exit(code)


def sleep() -> None:
    os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "600")
    time.sleep(600)


def parent_of_a_sleeper(connection: Connection) -> None:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as apart:
        connection.send(("reply", apart.pid))


def answers_and_leaves_a_sleeper(connection: Connection) -> None:
    connection.send(
        ("reply", os.spawnlp(os.P_NOWAIT, "setsid", "setsid", "sleep", "600"))
    )
    with suppress(EOFError):
        connection.recv()


def sleeper(connection: Connection) -> None:
    connection.send(("reply", os.getpid()))
    time.sleep(600)


@pytest.fixture
def context() -> StartContext:
    return start_fork_server()


class TestCall:
    def test_tells_notes_in_their_order(self, context: StartContext) -> None:
        notes: list[int] = []
        assert call_apart(context, count, 3, note=notes.append) == "done"
        assert notes == [0, 1, 2]

    def test_raises_what_the_function_raises(self, context: StartContext) -> None:
        with pytest.raises(UsageError) as caught:
            call_apart(context, refuse, "no")
        assert caught.value.problems == ["no", "and more"]

    def test_says_what_an_error_was_that_cannot_be_pickled(
        self, context: StartContext
    ) -> None:
        with pytest.raises(RuntimeError, match="OddError: 1 and 2"):
            call_apart(context, fail_oddly)

    def test_says_that_a_result_cannot_be_pickled(self, context: StartContext) -> None:
        with pytest.raises(Exception, match="pickle"):
            call_apart(context, return_what_cannot_travel)

    def test_says_how_a_process_died(self, context: StartContext) -> None:
        with pytest.raises(ChildDiedError, match="ended with exit code 7"):
            call_apart(context, end, 7)
        with pytest.raises(
            UsageError, match="the device: the process that should answer has ended"
        ):
            in_process(context, end, 7, what="the device")

    def test_ends_one_that_takes_too_long_with_all_that_it_started(
        self, context: StartContext
    ) -> None:
        others = workers()
        with pytest.raises(ChildTimeoutError):
            call_apart(context, sleep, timeout_s=0.5)
        assert set(workers()) <= set(others)


class TestKill:
    def test_gives_up_after_a_limit_with_a_warning(
        self, context: StartContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As of a process that waits within a driver, where no signal reaches it."""
        warnings: list[str] = []
        child = ChildProcess(context, sleeper, warn=warnings.append)
        child.receive()
        monkeypatch.setattr(child_module, "KILL_LIMIT_S", 0.2)
        with monkeypatch.context() as patched:
            patched.setattr(os, "killpg", lambda *_: None)
            begun = time.monotonic()
            child.kill()
        with suppress(ProcessLookupError):  # it has ended by itself
            os.kill(child.pid, signal.SIGKILL)
        assert time.monotonic() - begun < 5
        assert warnings == [
            f"process {child.pid} was killed, but has not ended within 0.2 s; it is left running"
        ]
        assert not child.alive

    @pytest.mark.slow  # it imports PyTorch
    def test_of_one_that_does_not_end_does_not_keep_the_parent_from_exiting(
        self,
    ) -> None:
        code = """
import multiprocessing
import os
from sdopt.worker import child
from tests.worker.test_child import sleeper

if __name__ == "__main__":
    stuck = child.ChildProcess(multiprocessing.get_context("forkserver"), sleeper)
    stuck.receive()
    child.KILL_LIMIT_S = 0.2
    os.killpg = lambda *_: None
    stuck._life.close = lambda: None
    stuck.kill()
"""
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "was killed, but has not ended within 0.2 s" in done.stderr

    @pytest.mark.parametrize(
        ("program", "end"),
        [
            (parent_of_a_sleeper, ChildProcess.kill),
            (answers_and_leaves_a_sleeper, ChildProcess.stop),
        ],
    )
    def test_ends_what_it_started_in_another_session(
        self,
        context: StartContext,
        program: Callable[[Connection], None],
        end: Callable[[ChildProcess], None],
    ) -> None:
        child = ChildProcess(context, program)
        apart: int = child.receive(60)
        if program is parent_of_a_sleeper:
            os.kill(apart, signal.SIGSTOP)
        end(child)
        assert eventually(lambda: has_ended(apart))
