"""Errors that a user can cause or meet, which never show a traceback, and how they are printed."""

import errno
import signal
import sys
from collections.abc import Iterable, Sequence
from typing import ClassVar

ENDINGS = (signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU)
"""What CI and Slurm send, what a terminal sends that is closed, and the kernel where processor time is limited: a
command answers them as it answers Ctrl-C."""


class UsageError(Exception):
    """A mistake in a command line or a configuration file: exit code 2.

    Args:
        problems: one line each, naming the key at fault and the way out; all are shown together.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__(self.problems)  # the list, because it travels between processes

    def __str__(self) -> str:
        return "\n".join(self.problems)


class ConflictError(UsageError):
    """Choices that are each valid, but cannot run together, with this model or on this machine."""


class OccupiedError(UsageError):
    """A folder that another process writes, or that holds the result of another run."""


class UnavailableError(Exception):
    """Something that a command needs cannot be had or done: exit code 3.

    Args:
        problems: one line each, saying what failed and the way out.
    """

    exit_code: ClassVar[int] = 3

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__(self.problems)  # the list, because it travels between processes

    def __str__(self) -> str:
        return "\n".join(self.problems)


_WAYS_OUT = {
    (errno.EACCES, errno.EPERM, errno.EROFS): "run as a user who may, or name another place",
    (errno.ENOSPC, errno.EDQUOT): "make room",
    (errno.EMFILE, errno.ENFILE): "allow more open files (ulimit -n)",
    (errno.ENOMEM,): "allow more memory (ulimit -v), or end other programs",
    (errno.EAGAIN,): "allow more processes (ulimit -u)",
    (errno.EFBIG,): "allow larger files (ulimit -f)",
}
"""What to do about what a machine refuses, by the numbers of its errors."""


_SAID = {
    "failed to map segment": errno.ENOMEM,
    "cannot allocate memory": errno.ENOMEM,
    "can't allocate memory": errno.ENOMEM,
    "can't start new thread": errno.EAGAIN,
}
"""The same numbers, by what is said where libraries are loaded, memory is allocated, and threads are started."""


def way_out(error: Exception) -> str:
    """Says, after a semicolon, what to do where the machine refuses something; "" of other errors."""
    number = None
    if isinstance(error, OSError):
        number = error.errno
    elif isinstance(error, MemoryError):
        number = errno.ENOMEM
    elif isinstance(error, ImportError | RuntimeError):
        number = next((number for words, number in _SAID.items() if words in str(error).lower()), None)
    return next((f"; {way}" for numbers, way in _WAYS_OUT.items() if number in numbers), "")


def print_problems(problems: Iterable[str]) -> None:
    """Says on standard error what went wrong, a line each."""
    for problem in problems:
        print(f"sdopt: {problem}", file=sys.stderr)
