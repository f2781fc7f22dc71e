"""Turns whatever ends a command into lines for a person and an exit code. Imports nothing heavy.

Code 1 means a regression, and only what a command returns can say so: whatever else ends a command has another code.
"""

import codecs
import os
import signal
import sys
import traceback
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any, TextIO

from sdopt.errors import (
    ENDINGS,
    SdoptError,
    UnavailableError,
    UsageError,
    one_line,
    os_problem,
    print_problems,
    way_out,
)
from sdopt.step_summary import report_problems

INTERRUPTED = 128 + signal.SIGINT
"""The exit code of Ctrl-C, as shells have it."""


class Ended(KeyboardInterrupt):
    """A signal that a command handles like Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


def end_with_code(main: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """Turns what a command raises into a line for each problem and an exit code.

    The code is 2 for a usage error; 3 if something is unavailable, for example a file, memory or a process, and for a
    defect of sdopt; 128 plus the signal's number for a signal. `HYDRA_FULL_ERROR=1` shows the traceback as well.
    """

    @wraps(main)
    def command(argv: list[str]) -> int:
        with _endings_raised(), patient_streams():
            try:
                return main(argv)
            except KeyboardInterrupt as interrupt:
                print(
                    f"sdopt: interrupted{f' by {interrupt}' if str(interrupt) else ''}",
                    file=sys.stderr,
                )
                return exit_code_of(interrupt)
            except SystemExit as end:
                # argparse has printed its message; a library that exits with 1 does not mean a regression.
                if isinstance(end.code, str):
                    print_problems([end.code])
                unavailable = UnavailableError.exit_code if end.code else 0
                return (
                    end.code
                    if end.code in (UsageError.exit_code, UnavailableError.exit_code)
                    else unavailable
                )
            except Exception as error:
                if os.environ.get("HYDRA_FULL_ERROR") == "1":
                    traceback.print_exc()
                if isinstance(error, SdoptError):
                    report_problems(error.problems)
                    return error.exit_code
                report_problems([explained(error)])
                return UnavailableError.exit_code

    return command


def explained(error: Exception) -> str:
    """Returns a line on an error that is none of sdopt's own; of one that it did not foresee, where it came up."""
    if isinstance(error, OSError):
        return os_problem(error)
    if todo := way_out(error):
        return f"{one_line(error) or 'out of memory'}{todo}"
    if isinstance(error, ModuleNotFoundError):
        return f"{error}; is sdopt installed with its dependencies? pip install sdopt"
    frames = traceback.extract_tb(error.__traceback__)
    inside = [
        frame
        for frame in frames
        if {"sdopt", "runners"} & {*Path(frame.filename).parts[-4:]}
    ] or frames
    where = (
        f" (at {Path(inside[-1].filename).name}:{inside[-1].lineno})" if inside else ""
    )
    said = one_line(error)
    return (
        f"a defect of sdopt: {type(error).__name__}{f': {said}' if said else ''}{where}; please report it, with what "
        "the same command shows with HYDRA_FULL_ERROR=1 set"
    )


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

    def end(number: int, _frame: Any) -> None:
        for other in handled:
            signal.signal(other, signal.SIG_IGN)
        raise Ended(number)

    # nohup leaves SIGHUP ignored, and outside of the main thread no handler can be set.
    handled = [
        number for number in ENDINGS if signal.getsignal(number) is signal.SIG_DFL
    ]
    with suppress(ValueError):
        for number in handled:
            signal.signal(number, end)
    try:
        yield
    finally:
        with suppress(ValueError):
            for number in handled:
                signal.signal(number, signal.SIG_DFL)


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Holds back Ctrl-C, SIGTERM and the like for some seconds of imports.

    A library that is half imported may end the process by abort().
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *ENDINGS})
    try:
        yield
    finally:
        # A signal that came meanwhile is raised here.
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def patient_streams() -> Iterator[None]:
    """Lets a command continue where its output cannot be written, and spell what a terminal cannot show."""
    before = sys.stdout, sys.stderr
    if any(
        isinstance(stream, _Patient) for stream in before
    ):  # a command within a command
        yield
        return
    sys.stdout, sys.stderr = (_Patient(stream) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before


class _Patient:
    """A text stream that drops what is written to it once nobody reads, as after `head`, or the disk is full."""

    lost: OSError | None = None
    """Why the output could not be written, unless it was closed on purpose."""

    def __init__(self, stream: TextIO | None) -> None:
        # A shell's `>&-` leaves no stream at all.
        self._stream = (
            open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
            if stream is None
            else stream
        )
        if hasattr(self._stream, "reconfigure"):
            self._stream.reconfigure(errors=PLAIN)

    def write(self, text: str) -> int:
        """Writes; does nothing once the reader has closed the pipe."""
        try:
            return self._stream.write(text)
        except UnicodeError:
            raise
        except (OSError, ValueError) as error:
            self._drop(error)
            return len(text)

    def flush(self) -> None:
        """Flushes; does nothing once the reader has closed the pipe."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._drop(error)

    def _drop(self, error: Exception) -> None:
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            self.lost = error
        # Replaces the broken pipe, so that the interpreter's own flush at exit does not fail either.
        with (
            suppress(OSError, ValueError),
            open(os.devnull, "w", encoding="utf-8") as nothing,  # noqa: PTH123
        ):
            os.dup2(nothing.fileno(), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


PLAIN = "sdopt.plain"
"""The name of the way, for `str.encode`, in which what an encoding lacks is spelt."""

_SPELT = {
    "×": "x",
    "≈": "~",
    "≥": ">=",
    "≤": "<=",
    "…": "...",
    "→": "->",
    "±": "+-",
    "²": "2",
    "µ": "u",
    "Δ": "d",
}
_SPELT |= {
    "•": "*",
    "·": "*",
    "✓": "ok",
    "✗": "no",
    **dict.fromkeys("–—−", "-"),
    **dict.fromkeys("“”", '"'),
}
_SPELT |= dict.fromkeys("‘’", "'")


def _spelt(error: UnicodeError) -> tuple[str, int]:
    """Spells what an encoding such as ASCII lacks: `×` as `x`, and what has no such spelling as `?`."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    plain = (
        _SPELT.get(c)
        or unicodedata.normalize("NFKD", c).encode("ascii", "ignore").decode()
        or "?"
        for c in text
    )
    return "".join(plain), error.end


codecs.register_error(PLAIN, _spelt)
