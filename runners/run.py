"""sdopt run: measure a study, or with -m a sweep of them."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from . import end_with_code, exit_code_of, interrupts_deferred

if TYPE_CHECKING:
    from sdopt.config.command import Folders


@end_with_code
def main(argv: list[str]) -> int:
    """Runs the study or the sweep that the command line asks for; returns the exit code."""
    from sdopt.config.command import is_informative
    from sdopt.worker.forkserver import start_fork_server

    informative = is_informative(argv)
    if not informative:
        # Started before heavy imports here, so that the server imports them in parallel.
        start_fork_server()
    with ExitStack() as stack:
        with interrupts_deferred():
            # The thread that shows it is begun here, so that it takes no signal either.
            ready = (lambda: None) if informative else stack.enter_context(_starting())
            from sdopt.launching import launch
        return _run(argv, partial(launch, ready=ready))


@contextmanager
def _starting() -> Iterator[Callable[[], None]]:
    """Shows in a terminal that the command is starting; yields a function that ends the display."""
    from rich.console import Console

    with Console().status("starting: importing PyTorch and diffusers, composing the study") as status:
        yield status.stop


def _run(argv: list[str], launch: "Callable[[list[str]], Folders]") -> int:
    from sdopt.launching import InterruptedStudy, summarise_sweep
    from sdopt.report.sweep import exit_code

    code = 0
    try:
        folders = launch(argv)
    except InterruptedStudy as interrupt:
        print("sdopt: interrupted", file=sys.stderr)
        folders, code = interrupt.folders, exit_code_of(interrupt)
        if folder := folders.sweep or folders.run:
            print(f"What was measured is kept; `sdopt run resume={folder}` continues the study.", file=sys.stderr)
    if folders.occupied:
        return max(code, 2)
    if folders.sweep is not None:
        from rich.console import Console

        from sdopt.gate.judge import worst_code

        found = worst_code((summarise_sweep(folders.sweep, Console()), 3 if folders.lost else 0))
        return code or found
    return code or (exit_code(folders.run) if folders.run else 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
