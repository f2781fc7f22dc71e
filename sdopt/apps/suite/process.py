"""Runs one command in a process of its own, with a time limit."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sdopt.worker.child import KILL_LIMIT_S

PATIENCE_S = 20.0
"""Seconds that a command may take to save its results after SIGTERM; then it is killed."""


@dataclass(frozen=True)
class PartRun:
    """A command that ended.

    Attributes:
        code: its exit code; a negative code is the signal that killed it.
        seconds: how long it took.
        stopped: whether it was ended at its limit.
    """

    code: int
    seconds: float
    stopped: bool


def run_limited(
    command: Sequence[str],
    log: Path,
    limit_s: float,
    patience_s: float = PATIENCE_S,
    out: Path | None = None,
) -> PartRun:
    """Runs a command, and ends it at its time limit; appends its output to `log`.

    With `out`, standard output replaces that file, and only standard error goes to `log`. At the limit, the command
    gets SIGTERM, on which `sdopt run` saves its measurements and ends its workers; then its whole process group is
    killed. The same happens if this process is interrupted meanwhile.
    """
    began = time.monotonic()
    with (
        log.open("ab") as logged,
        log.open("ab") if out is None else out.open("wb") as output,
    ):
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=logged,
            start_new_session=True,
        )
        stopped = False
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            stopped = True
        finally:
            if left := _end(process, patience_s):
                logged.write(f"sdopt: {left}\n".encode())
    return PartRun(process.returncode, time.monotonic() - began, stopped)


def _end(process: "subprocess.Popen[bytes]", patience_s: float) -> str:
    """Ends a process that still runs, and all of its group; says so if the kernel does not let it go."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    with suppress(ProcessLookupError):  # no process of the group is left
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(KILL_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.returncode = -signal.SIGKILL
        return f"process {process.pid} was killed, but has not ended within {KILL_LIMIT_S:g} s; it is left running"
    return ""


def last_words(log: Path) -> str:
    """Returns the last message of a command as one line: sdopt's own message if there is one, else its last lines."""
    with suppress(OSError):
        lines = log.read_bytes()[-8192:].decode(errors="replace").splitlines()
        texts = [line.strip() for line in lines if line.strip()]
        messages = [
            number for number, line in enumerate(texts) if line.startswith("sdopt: ")
        ]
        return " / ".join(texts[messages[-1] :] if messages else texts[-3:])[:500]
    return ""
