"""One thin file per command: `sdopt <command>` and `python -m runners.<command>` do the same.

A command parses, calls one function of `sdopt`, and prints.
"""

from collections.abc import Callable, Iterable
from functools import wraps

from sdopt.guard import INTERRUPTED, Ended, end_with_code, exit_code_of, interrupts_deferred

__all__ = [
    "ENDED",
    "INTERRUPTED",
    "Ended",
    "end_with_code",
    "exit_code_of",
    "indented",
    "interrupts_deferred",
    "with_help",
]

ENDED = (0, 1, 3)
"""The exit codes of a completed study: passed, regression, or not all measured or judged. Any other code means a usage
error or a signal, after which a command that ran the study stops."""


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
