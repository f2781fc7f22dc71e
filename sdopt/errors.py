"""Errors that a user can cause or meet; they are printed as single lines, never as a traceback."""

import errno
import re
import shlex
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

ENDINGS = (signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU)
"""Signals that a command handles like Ctrl-C: CI and Slurm send SIGTERM, a terminal that is closed SIGHUP, and the
kernel SIGXCPU when the processor time is used up."""


class SdoptError(Exception):
    """An error that ends a command with an exit code.

    Args:
        problems: one line each, naming what is at fault and the way out; all are shown together.
    """

    exit_code: ClassVar[int]

    def __init__(self, problems: str | Sequence[str]) -> None:
        lines = [problems] if isinstance(problems, str) else problems
        self.problems = list(map(without_passwords, lines))
        super().__init__(
            self.problems
        )  # the list, because it travels between processes

    def __str__(self) -> str:
        return "\n".join(self.problems)


class UsageError(SdoptError):
    """A mistake in a command line or a configuration file, whose key each problem names: exit code 2."""

    exit_code: ClassVar[int] = 2


class ConflictError(UsageError):
    """Choices that are each valid, but cannot run together, with this model or on this machine."""


class OccupiedError(UsageError):
    """A folder that another process writes, or that holds the result of another run."""


def require_texts(function: str, overrides: Iterable[object]) -> None:
    """Raises UsageError unless all overrides of a call of `sdopt.<function>` are texts."""
    if wrong := [override for override in overrides if not isinstance(override, str)]:
        raise UsageError(
            f"{wrong[0]!r}: each override is an argument of its own, as in sdopt.{function}(*overrides)"
        )


class UnavailableError(SdoptError):
    """A resource that a command needs is unavailable, or an operation failed: exit code 3."""

    exit_code: ClassVar[int] = 3


_WAYS_OUT = {
    (
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
    ): "run as a user with permission, or choose another folder",
    (errno.ENOSPC, errno.EDQUOT): "make room",
    (errno.EMFILE, errno.ENFILE): "raise the limit of open files (ulimit -n)",
    (errno.ENOMEM,): "raise the memory limit (ulimit -v), or end other programs",
    (errno.EAGAIN,): "raise the limit of processes (ulimit -u)",
    (errno.EFBIG,): "raise the limit of file sizes (ulimit -f)",
}
"""How to solve an error of the operating system, by its error numbers."""


_MESSAGES = {
    "failed to map segment": errno.ENOMEM,
    "cannot allocate memory": errno.ENOMEM,
    "can't allocate memory": errno.ENOMEM,
    "can't start new thread": errno.EAGAIN,
}
"""The same numbers, by the messages of errors in loading libraries, allocating memory and starting threads."""


def way_out(error: Exception) -> str:
    """Returns, after a semicolon, how to solve an error of the operating system; "" for other errors."""
    number = None
    if isinstance(error, OSError):
        number = error.errno
    elif isinstance(error, MemoryError):
        number = errno.ENOMEM
    elif isinstance(error, ImportError | RuntimeError):
        number = next(
            (
                number
                for words, number in _MESSAGES.items()
                if words in str(error).lower()
            ),
            None,
        )
    return next(
        (f"; {way}" for numbers, way in _WAYS_OUT.items() if number in numbers), ""
    )


def os_problem(error: OSError, folder: Path | None = None) -> str:
    """Returns a line on an error of the operating system: the file, what is wrong with it, and how to solve it."""
    reason = error.strerror or one_line(error)
    where = (
        error.filename if isinstance(error.filename, str) and error.filename else folder
    )
    return f"{f'{where}: ' if where else ''}{reason}{'' if ';' in reason else way_out(error)}"


def one_line(error: BaseException) -> str:
    """Returns what an error says as one line, of at most 300 characters."""
    return " ".join(str(error).split())[:300]


def first_line(error: BaseException) -> str:
    """Returns the first line of what an error says; its type if it says nothing, as a bare `assert`."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def some_of(names: Sequence[str], most: int = 1) -> str:
    """Returns the first of some names and how many more there are, as in `unet.conv_in and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def counted(number: int, noun: str) -> str:
    """Returns a number of things, as in `1 graph` and `3 graphs`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def with_type(error: BaseException) -> str:
    """Returns an error as one line: its type, and what it says."""
    return f"{type(error).__name__}: {one_line(error)}"


def command_line(*words: object) -> str:
    """Returns a command of sdopt as it can be pasted into a shell, without passwords: `sdopt run resume='a b'`."""
    return " ".join(
        ["sdopt", *(shell_word(without_passwords(str(word))) for word in words)]
    )


def shell_word(word: str) -> str:
    """Quotes what a shell would not take literally; of `key=value` only the value, as people write it."""
    key, sign, value = word.partition("=")
    if not (sign and re.fullmatch(r"[\w.+~@/-]+", key)):
        key, sign, value = "", "", word
    plain = shlex.quote(value) if value or not sign else ""
    # Hydra's own quotes are single ones.
    readable = (
        f'"{value}"' if "'" in value and not set(value) & set('"$`\\!\n') else plain
    )
    return f"{key}{sign}{readable}"


def print_problems(problems: Iterable[str]) -> None:
    """Prints each problem as a line on standard error."""
    for problem in problems:
        print(f"sdopt: {without_passwords(without_controls(problem))}", file=sys.stderr)


def without_controls(text: str) -> str:
    """Returns a text without what controls a terminal: a server's words may hold it, and a file's names of tensors."""
    return re.sub(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda odd: ascii(odd[0])[1:-1], text
    )


def without_passwords(text: str) -> str:
    """Returns a text without the passwords of addresses in it: what is printed and recorded is passed on to others."""
    text = re.sub(r"(://[^:/@\s]*):[^/\s]+@", rf"\1:{HIDDEN}@", text)
    # On the web, a name without a password is a key.
    text = re.sub(r"(https?://)[^:/@\s]+:?@", rf"\1{HIDDEN}@", text)
    return _IN_QUERY.sub(rf"\1{HIDDEN}", text)


# What MLflow calls a key is the name of a view of its page.
_IN_QUERY = re.compile(
    r"([?&](?!viewStateShareKey=)(?:[\w.-]*(?:password|passwd|pwd|token|secret|key|signature|jwt)|sig|auth|code|pass)=)[^&\s'\"`]+",
    re.IGNORECASE,
)

HIDDEN = "***"
"""What stands for a password."""
