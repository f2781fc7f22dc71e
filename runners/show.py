"""sdopt show: print a finished result again."""

import json
import sys
from pathlib import Path

from sdopt.errors import UsageError, print_problems
from sdopt.terminal import console as terminal
from sdopt.terminal import print_line

from . import Arguments, answers, end_with_code, judged_in, only_json


@end_with_code
def main(argv: list[str]) -> int:
    """Prints what `sdopt run` printed at its end; returns the exit code."""
    parser = Arguments(
        prog="sdopt show",
        description="Print a finished result again: the answer, the table, and how to use the best option.",
    )
    parser.add_argument(
        "result",
        metavar="RESULT",
        help="a run's folder, its result.json, the folder of a sweep, a search or a load test, or an MLflow run id",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="show every figure, reason and note, as the page does",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the answer as one JSON object, and nothing else",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="tracking.KEY=VALUE",
        help="where to look for an MLflow run",
    )
    arguments = parser.parsed(argv)

    from sdopt.config.tracking import tracking_of
    from sdopt.report.answer import answer_shown
    from sdopt.report.header import header_of
    from sdopt.report.page.sections import text_sections
    from sdopt.report.terminal import sections_shown, shown
    from sdopt.search.record import FINAL, RECORD
    from sdopt.statistics.summary import summary_of
    from sdopt.tracking.finding import find_results

    folder = Path(arguments.result)
    if arguments.json:
        with only_json(wanted=True) as say:
            found = find_results(
                judged_in(arguments.result), tracking_of(arguments.overrides)
            )
            print_problems([*found.damaged, *found.remarks])
            code = UsageError.exit_code if found.damaged else 0
            say(answers(found, code))
        return code
    console = terminal()
    if (folder / _LOAD).is_file():
        _print_load_test(folder, brief=not arguments.all)
        return 0
    if (folder / RECORD).is_file():  # a search: its answer, and the study that judged
        _print_search(folder)
        folder = folder / FINAL
        if not (folder / "result.json").is_file():
            return 0
    found = find_results(str(folder), tracking_of(arguments.overrides))
    if found.sweep and found.studies:
        console.print(shown(found.sweep.blocks(arguments.all), console.width))
    for result, folder in found.studies:
        if found.sweep and not arguments.all:
            break  # the table above has them
        summary = summary_of(result)
        if arguments.all:
            console.print(answer_shown(summary, console.width))
            for line in header_of(result):
                print_line(console, line, whole=False)
            console.print(
                sections_shown(list(text_sections(summary))[1:], console.width)
            )
        else:
            console.print(answer_shown(summary, console.width, folder))
    print_problems([*found.damaged, *found.remarks])
    return UsageError.exit_code if found.damaged else 0


_LOAD = "load.json"
"""The file of a load test."""


def _print_load_test(folder: Path, brief: bool) -> None:
    # Its record knows the client that sends requests, which no other result needs.
    from sdopt.apps.loadtest.record import LoadRecord, blocks_of
    from sdopt.report.terminal import shown

    console = terminal()
    console.print(shown(blocks_of(LoadRecord.read(folder), brief), console.width))


def _print_search(folder: Path) -> None:
    """Prints the answer of a search, and where everything is that it tried."""
    from sdopt.search.record import PAGE, RECORD

    console = terminal()
    record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    print_line(console, record["sentence"], "bold", whole=False)
    if (folder / PAGE).is_file():
        print_line(console, f"Everything that was tried: {folder / PAGE}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
