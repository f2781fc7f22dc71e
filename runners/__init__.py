"""One thin file per command: `sdopt <command>` and `python -m runners.<command>` do the same.

A command parses, calls one function of `sdopt`, and prints.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, TextIO

INTERRUPTED = 128 + signal.SIGINT
"""The exit code of Ctrl-C, as shells have it."""

ENDED = (0, 1, 3)
"""The exit codes of a completed study: passed, regression, or not all measured or judged. Any other code means a usage
error or a signal, after which a command that ran the study stops."""


class Ended(KeyboardInterrupt):
    """A signal that a command handles like Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


def end_with_code(main: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """Turns what a command raises into a line for each problem and an exit code.

    The code is 2 for a usage error; 3 if something is unavailable, for example a file, memory or a process; 128 plus
    the signal's number for a signal. `HYDRA_FULL_ERROR=1` shows the traceback as well.
    """

    @wraps(main)
    def command(argv: list[str]) -> int:
        from sdopt.errors import SdoptError, UnavailableError, print_problems, way_out

        with _endings_raised(), _patient_streams():
            try:
                return main(argv)
            except SdoptError as error:
                if os.environ.get("HYDRA_FULL_ERROR") == "1":
                    traceback.print_exc()
                print_problems(error.problems)
                return error.exit_code
            except KeyboardInterrupt as interrupt:
                print(f"sdopt: interrupted{f' by {interrupt}' if str(interrupt) else ''}", file=sys.stderr)
                return exit_code_of(interrupt)
            except Exception as error:
                if os.environ.get("HYDRA_FULL_ERROR") != "1" and (todo := way_out(error)):
                    where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
                    message = getattr(error, "strerror", None) or " ".join(str(error).split()) or "out of memory"
                    print_problems([f"{where}{message}{todo}"])
                    return UnavailableError.exit_code
                # A bug in sdopt. Python would end with 1, which means that a gate failed.
                traceback.print_exc()
                return 3

    return command


def with_help(text: Callable[[], str]) -> Callable[[Callable[[list[str]], int]], Callable[[list[str]], int]]:
    """Prints `text()` for `-h` or `--help` anywhere among the overrides; builds the text only if needed."""

    def helped(main: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
        @wraps(main)
        def command(argv: list[str]) -> int:
            if {"-h", "--help"} & set(argv):
                print(text())
                return 0
            return main(argv)

        return command

    return helped


def indented(lines: Iterable[str]) -> str:
    """Joins lines, indented as in a help text."""
    return "\n".join(f"  {line}" for line in lines)


def exit_code_of(interrupt: BaseException) -> int:
    """Returns the exit code of Ctrl-C or of the signal that an interrupt came from."""
    cause: BaseException | None = interrupt
    while cause is not None:
        if isinstance(cause, Ended):
            return cause.exit_code
        cause = cause.__cause__
    return INTERRUPTED


@contextmanager
def _endings_raised() -> Iterator[None]:
    """Raises `Ended` for the first of these signals, so that what was measured is kept; ignores further ones."""
    from sdopt.errors import ENDINGS

    def end(number: int, _frame: Any) -> None:
        for other in taken:
            signal.signal(other, signal.SIG_IGN)
        raise Ended(number)

    # nohup leaves SIGHUP ignored, and outside of the main thread no handler can be set.
    taken = [number for number in ENDINGS if signal.getsignal(number) is signal.SIG_DFL]
    with suppress(ValueError):
        for number in taken:
            signal.signal(number, end)
    try:
        yield
    finally:
        with suppress(ValueError):
            for number in taken:
                signal.signal(number, signal.SIG_DFL)


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Holds back Ctrl-C, SIGTERM and the like for some seconds of imports.

    A library that is half imported may end the process by abort().
    """
    from sdopt.errors import ENDINGS

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *ENDINGS})
    try:
        yield
    finally:
        # A signal that came meanwhile is raised here.
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _patient_streams() -> Iterator[None]:
    """Lets a command continue after the reader of its output has closed the pipe, as `head` does after ten lines."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Patient(sys.stdout), _Patient(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class _Patient:
    """A text stream that drops what is written to it once nobody reads."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes; does nothing once the reader has closed the pipe."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        """Flushes; does nothing once the reader has closed the pipe."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._drop()

    def _drop(self) -> None:
        # Replaces the broken pipe, so that the interpreter's own flush at exit does not fail either.
        with open(os.devnull, "w") as nothing:  # noqa: PTH123 (a device)
            os.dup2(nothing.fileno(), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
