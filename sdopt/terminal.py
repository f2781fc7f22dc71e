"""Where a command prints: a live display in an interactive terminal, plain lines everywhere else."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.text import Text

OVERWRITES = "SDOPT_OVERWRITES"
"""Variable set where the output is a notebook's: a line that begins with a carriage return replaces the last one."""

LOG_WIDTH = 160
"""Columns of what is no terminal: nobody can widen a log file, and lines there may be long."""


class _Whole(Console):
    """Lets a line that must not be broken leave the width: of a command in two lines, the first one runs alone."""

    def print(self, *objects: Any, crop: bool = False, **named: Any) -> None:
        """Prints as rich does."""
        super().print(*objects, crop=crop, **named)


def console(stderr: bool = False) -> Console:
    """Returns the console of a command.

    Cursor movements and spinners are for an interactive terminal alone: `FORCE_COLOR` and `TTY_COMPATIBLE`, which CI
    systems set, ask for colours in a log and not for them. `NO_COLOR` takes the colours away, anywhere.
    """
    stream = sys.stderr if stderr else sys.stdout
    live = bool(stream.isatty()) and os.environ.get("TERM", "").lower() not in (
        "",
        "dumb",
        "unknown",
    )
    forced = (
        os.environ.get("FORCE_COLOR", "") not in ("", "0")
        or os.environ.get("TTY_COMPATIBLE") == "1"
    )
    terminal = _Whole(
        stderr=stderr,
        force_terminal=live,
        color_system="auto"
        if live
        else ("standard" if forced and not os.environ.get("NO_COLOR") else None),
        width=_width(stream),
        emoji=False,  # `:key:` in a path is no emoji
    )
    return _Whole(emoji=False) if terminal.is_jupyter else terminal


def _width(stream: TextIO) -> int | None:
    """Returns the columns of a stream; None where rich finds them, as those of a terminal that changes its size."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns) > 0:
        return None
    if not stream.isatty():
        return LOG_WIDTH
    # Without a size of its own, as in some containers, a terminal is said to have 0: rich would print nothing.
    return shutil.get_terminal_size().columns if columns.isdigit() else None


def print_line(
    console: Console, text: str, style: str = "", whole: bool = True
) -> None:
    """Prints a line as it is: square brackets are no markup, and it is not broken at the width if it stays `whole`."""
    console.print(Text(text, style), soft_wrap=whole)


@contextmanager
def working(shown: Console, what: str) -> Iterator[Callable[[str], None]]:
    """Says what a command works on; yields a function that says more: a spinner in a terminal, lines elsewhere."""
    if shown.is_terminal or shown.is_jupyter:
        with shown.status(escape(what)) as status:
            yield lambda more: status.update(f"{escape(what)}: {escape(more)}")
        return
    said: list[str] = []

    def say(more: str) -> None:
        if more not in said:
            said.append(more)
            print_line(shown, f"{what}: {more}")

    yield say
