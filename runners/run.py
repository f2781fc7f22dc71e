"""sdopt run: measure a study, or with -m a sweep of them."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sdopt.errors import UsageError, command_line, print_problems
from sdopt.schema import Tracking
from sdopt.terminal import console as terminal

from . import (
    Arguments,
    answers,
    end_with_code,
    exit_code_of,
    found_in,
    interrupts_deferred,
    only_json,
)

if TYPE_CHECKING:
    from sdopt.launching import Launched


@end_with_code
def main(argv: list[str]) -> int:
    """Runs the study or the sweep that the command line asks for; returns the exit code."""
    flags = Arguments(add_help=False, allow_abbrev=False)
    flags.add_argument("--export", type=Path, metavar="FOLDER")
    flags.add_argument("--json", action="store_true")
    given, argv = flags.parse_known_args(argv)
    if {"-h", "--help"} & set(argv):
        return _help()

    from sdopt.config.command import CommandLine
    from sdopt.measure.garbage import no_garbage

    with only_json(given.json) as say, ExitStack() as stack:
        if given.export is not None:
            from sdopt.apps.exchange.scores import require_new

            require_new(given.export)
        informative = CommandLine.of(argv).informative
        with interrupts_deferred(), no_garbage():
            # The thread that shows it is begun here, so that it takes no signal either.
            ready = (lambda: None) if informative else stack.enter_context(_starting())
            from sdopt.launching import InterruptedStudy, launch
            from sdopt.study.timeline import process_begun
        code = 0
        try:
            launched = launch(argv, ready=ready, began=process_begun())
        except InterruptedStudy as interrupt:
            launched, code = interrupt.launched, exit_code_of(interrupt)
            _say_interrupted(launched)
        code = _finish(launched, code, given.export)
        if given.json:
            say(answers(found_in(launched.folder), code))
        return code


def _help() -> int:
    from omegaconf import OmegaConf

    from sdopt.config.paths import CONF, CONFIG_NAME

    from .keys import options_in_words

    words = OmegaConf.load(CONF / f"{CONFIG_NAME}.yaml").hydra.help
    print(f"{words.header}\n{options_in_words()}\n\n{words.footer}", end="")
    return 0


@contextmanager
def _starting() -> Iterator[Callable[[], None]]:
    """Says that the command is starting; yields a function that ends the display, which is one in a terminal alone."""
    console, what = (
        terminal(),
        "starting: composing the study, importing PyTorch and diffusers",
    )
    if not console.is_terminal:
        print(what, file=sys.stderr, flush=True)
    with console.status(what) as status:
        yield status.stop


def _say_interrupted(launched: "Launched") -> None:
    print("sdopt: interrupted", file=sys.stderr)
    folder = launched.folder
    if folder is not None and any(folder.rglob("result.json")):
        again = command_line("run", f"resume={folder}", *launched.functions)
        what = "sweep" if launched.sweep else "study"
        print(
            f"What was measured is kept; `{again}` continues the {what}.",
            file=sys.stderr,
        )


def _finish(launched: "Launched", code: int, target: Path | None) -> int:
    """Exports what was measured, and sums a sweep up; returns the exit code, which is `code` unless that is 0."""
    from sdopt.launching import summarise_sweep

    if launched.occupied:
        return max(code, 2)
    if launched.folder is None:
        return code or launched.code
    if target is not None:
        _export(launched.folder, target)
    if launched.sweep:
        from sdopt.gate.judge import worst_code

        of_sweep = summarise_sweep(launched.folder, terminal(), launched.functions)
        return code or worst_code((of_sweep, 3 if launched.lost else 0))
    from sdopt.report.sweep import exit_code

    return code or exit_code(launched.folder)


def _export(folder: Path, target: Path) -> None:
    """Writes the images and times of a study, or of each job of a sweep, as `sdopt judge` reads them."""
    from sdopt.apps.exchange.scores import export
    from sdopt.tracking.finding import find_results

    try:
        found = find_results(str(folder), Tracking(kind="none"))
        for result, own in found.studies:
            export(result, own, target / found.job(own) if found.sweep else target)
    except UsageError as error:  # what was measured is kept
        print_problems(error.problems)
    else:
        print(f"images and times: {target}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
