"""sdopt search: find the fastest stack of options that keeps the quality."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from sdopt.errors import print_problems
from sdopt.terminal import console as terminal
from sdopt.terminal import print_line

from . import Arguments, composable, end_with_code, exit_code_of, indented, only_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import RenderableType

    from sdopt.search.record import SearchRecord

_ANSWERED_BEFORE = (
    "answered before (a larger budget goes on from there, --again begins anew)"
)

_HELP = """\
usage: sdopt search [--again] [--config-dir DIR] search.groups=[…] [key=value ...]

Find the fastest (or smallest, or closest) combination of options that passes the gate, within limits. All other keys
are those of `sdopt run`; they compose the baseline. Candidates are screened side by side, with few calls and prompts;
those that cannot be told from the best one race; the first of these are judged by the gate, on prompts, noise and
processes that the search has not seen, and only these figures are reported for them.
The same command continues a search that was interrupted, and with a larger budget one that ended; --again begins anew.

examples:
  sdopt search 'search.groups=[precision,layout,caching]' search.budget_s=900
  sdopt search model=sd15 precision=fp16 'search.groups=[attention,compiler,memory]' search.memory_gib=8
  sdopt search 'search.groups=[caching]' 'search.keys={{caching.interval: [2,3,5], workload.steps: [15,25]}}'
  sdopt search 'search.groups=[precision,caching]' 'search.objectives=[latency,distance]'     the Pareto front
  sdopt search ... dry_run=true                                      what would be varied, and what cannot run here

keys of the search and their defaults:
{keys}

Exit codes: 0 a winner was found; 2 usage or configuration; 3 none passed, or something could not be measured."""


def _help() -> str:
    from sdopt.search.config import search_file

    from .keys import own_keys

    return _HELP.format(keys=indented(own_keys(search_file(), "search")))


@end_with_code
def main(argv: list[str]) -> int:
    """Starts or continues a search; returns the exit code."""
    began = time.monotonic()
    parser = Arguments(prog="sdopt search", text=_help)
    parser.add_config_dir()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parsed(argv)
    with only_json(arguments.json) as say:

        def told(record: "SearchRecord") -> "RenderableType":
            from sdopt.record.files import read_result
            from sdopt.report.answer_json import answer_of, to_json
            from sdopt.report.summary import summary_of

            folder = Path(record.folder)
            summaries = [
                summary_of(read_result(folder / study)) for study in record.judged
            ]
            studies = [to_json(answer_of(summary, folder)) for summary in summaries]
            say(
                {
                    "exit_code": 0 if record.winner else 3,
                    "search": to_json(record),
                    "studies": studies,
                }
            )
            return record.sentence

        answer = told if arguments.json else None
        return searched(
            arguments.overrides,
            arguments.config_dir,
            began,
            answer,
            again=arguments.again,
        )


def searched(
    overrides: "Sequence[str]",
    config_dir: Path | None,
    began: float,
    answer: "Callable[[SearchRecord], RenderableType] | None" = None,
    hand_out: "Callable[[SearchRecord], None] | None" = None,
    again: bool = False,
) -> int:
    """Starts or continues a search, and prints its answer; returns the exit code.

    Args:
        overrides: those of a command line, `search.…` among them.
        config_dir: a folder with the user's own config groups.
        began: when the command began, in seconds of the monotonic clock.
        answer: what is printed of a search that ended; None for the table of all candidates.
        hand_out: writes further files of a search that ended.
        again: whether it begins anew, whatever earlier calls have found.
    """
    from sdopt.config.overrides import asks_dry_run, key_of
    from sdopt.search.answered import answered_before, question_of
    from sdopt.search.record import read_record

    dry = asks_dry_run(overrides)
    overrides = [override for override in overrides if key_of(override) != "dry_run"]
    question = question_of(overrides, config_dir)
    earlier = None if dry or again else answered_before(overrides, config_dir)
    if earlier is not None:
        return _told(read_record(earlier), answer, f"{_ANSWERED_BEFORE}: {earlier}")

    return _run(overrides, config_dir, began, answer, hand_out, again, dry, question)


def _run(
    overrides: "Sequence[str]",
    config_dir: Path | None,
    began: float,
    answer: "Callable[[SearchRecord], RenderableType] | None",
    hand_out: "Callable[[SearchRecord], None] | None",
    again: bool,
    dry: bool,
    question: str,
) -> int:
    """Runs a search that was not answered before, or says what it would try (`dry`); returns the exit code."""
    overrides = composable(overrides, config_dir, ("search.",))
    console = terminal()
    if not console.is_terminal:
        _say("starting: looks at this machine, and at what can run on it")
    with console.status("starting: importing PyTorch and diffusers"):
        from sdopt.report.terminal import shown
        from sdopt.search.command import answered, begun, concluded, logged, prepare
        from sdopt.search.record import PAGE, space_table
        from sdopt.tracking.client import TrackingError
        from sdopt.worker.forkserver import independent_children

    with independent_children():
        with console.status("starting: looking at this machine"):
            prepared = prepare(overrides, config_dir, dry)
        if dry:
            console.print(shown(space_table(prepared.space), console.width))
            lines, fits = prepared.foreseen()
            for line in lines:
                _say(line)
            return 0 if fits else 3
        with begun(
            prepared, began, _say, brief=answer is not None, again=again
        ) as search:
            folder, tracking = search.studies.folder, prepared.baseline.tracking
            try:
                search.run()
            except KeyboardInterrupt as interrupt:
                record = concluded(search, ended=False)
                print(f"sdopt: interrupted. {record.sentence}", file=sys.stderr)
                print(
                    f"All of it: {folder / PAGE}. The same command continues the search.",
                    file=sys.stderr,
                )
                return exit_code_of(interrupt)
            record = concluded(search)
            if hand_out is not None:
                hand_out(record)
            try:
                if tracking.kind == "mlflow":
                    with console.status("logging to MLflow"):
                        logged(search, record, tracking)
                answered(search, question)
            except TrackingError as error:
                print_problems([f"not logged to {error}; the same command logs it"])
            return _told(record, answer, f"search: {folder}")


def _say(line: str) -> None:
    print_line(terminal(), line)


def _told(
    record: "SearchRecord",
    answer: "Callable[[SearchRecord], RenderableType] | None",
    last: str,
) -> int:
    """Prints the answer of a search, and a last line; returns the exit code."""
    from sdopt.report.terminal import shown
    from sdopt.search.record import blocks_of

    console = terminal()
    console.print(
        answer(record)
        if answer
        else shown(blocks_of(record, brief=True), console.width)
    )
    _say(last)
    return 0 if record.winner else 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
