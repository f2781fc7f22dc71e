"""sdopt show: print a finished result again."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdopt.errors import UsageError, print_problems
from sdopt.terminal import console as terminal
from sdopt.terminal import print_line

from . import Arguments, answers, end_with_code, has_judged, judged_in, only_json

if TYPE_CHECKING:
    from sdopt.record.records import StudyResult


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
    parser.add_json()
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="tracking.KEY=VALUE",
        help="where to look for an MLflow run",
    )
    arguments = parser.parsed(argv)

    if arguments.json:
        return _print_json(arguments.result, arguments.overrides)

    from sdopt.config.tracking import tracking_of
    from sdopt.report.terminal import shown
    from sdopt.search.record import RECORD
    from sdopt.tracking.finding import find_results

    folder, console = Path(arguments.result), terminal()
    if (folder / _LOAD).is_file():
        _print_load_test(folder, brief=not arguments.all)
        return 0
    if (folder / RECORD).is_file():  # a search: its answer, and the study that judged
        _print_search(folder)
        if not has_judged(folder):
            return 0
    name = judged_in(arguments.result)
    found = find_results(name, tracking_of(arguments.overrides))
    if found.sweep and found.studies:
        console.print(shown(found.sweep.blocks(arguments.all), console.width))
    if arguments.all or not found.sweep:  # else the table above has them
        for result, folder in found.studies:
            _print_study(result, folder, arguments.all)
    print_problems([*found.damaged, *found.remarks])
    return UsageError.exit_code if found.damaged else 0


def _print_json(name: str, overrides: Sequence[str]) -> int:
    from sdopt.config.tracking import tracking_of
    from sdopt.search.record import RECORD
    from sdopt.tracking.finding import find_results

    folder = Path(name)
    is_search = (folder / RECORD).is_file()
    with only_json(wanted=True) as say:
        search = {"search": _search_record(folder)} if is_search else {}
        if is_search and not has_judged(folder):
            say({"studies": [], **search})
            return 0
        found = find_results(judged_in(name), tracking_of(overrides))
        print_problems([*found.damaged, *found.remarks])
        code = UsageError.exit_code if found.damaged else 0
        say(answers(found, code) | search)
    return code


def _print_study(result: "StudyResult", folder: Path, whole: bool) -> None:
    """Prints the answer, or everything that the page has."""
    from sdopt.report.answer import answer_shown
    from sdopt.report.header import header_of
    from sdopt.report.page.sections import text_sections
    from sdopt.report.summary import summary_of
    from sdopt.report.terminal import sections_shown

    console, summary = terminal(), summary_of(result)
    if not whole:
        console.print(answer_shown(summary, console.width, folder))
        return
    console.print(answer_shown(summary, console.width))
    for line in header_of(result):
        print_line(console, line, whole=False)
    sections = list(text_sections(summary))[1:]
    console.print(sections_shown(sections, console.width))


_LOAD = "load.json"
"""The file of a load test."""


def _print_load_test(folder: Path, brief: bool) -> None:
    # Its record knows the client that sends requests, which no other result needs.
    from sdopt.apps.loadtest.record import LoadRecord
    from sdopt.apps.loadtest.report import blocks_of
    from sdopt.report.terminal import shown

    console = terminal()
    console.print(shown(blocks_of(LoadRecord.read(folder), brief), console.width))


def _search_record(folder: Path) -> dict[str, Any]:
    from sdopt.search.record import RECORD

    return dict(json.loads((folder / RECORD).read_text(encoding="utf-8")))


def _print_search(folder: Path) -> None:
    """Prints the answer of a search, and where everything is that it tried."""
    from sdopt.search.record import PAGE

    console = terminal()
    sentence = _search_record(folder)["sentence"]
    print_line(console, sentence, "bold", whole=False)
    if (folder / PAGE).is_file():
        print_line(console, f"Everything that was tried: {folder / PAGE}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
