"""sdopt report: write a finished result as one self-contained page, in HTML and in Markdown."""

import sys
from pathlib import Path

from sdopt.errors import UsageError, command_line, print_problems

from . import Arguments, end_with_code


@end_with_code
def main(argv: list[str]) -> int:
    """Writes report.html and report.md for each result, and logs them where it was tracked; returns the exit code."""
    parser = Arguments(
        prog="sdopt report",
        description="Write a finished result as one self-contained page: report.html, and report.md. Where the "
        "run is logged to MLflow, both become its artifacts.",
        epilog="examples: sdopt report outputs/runs/quickstart/<time>; sdopt report outputs/sweeps/pair/<time>; "
        "sdopt report <MLflow run id> --output reports; sdopt report --readme README.md",
    )
    parser.add_argument(
        "results",
        nargs="*",
        metavar="RESULT | tracking.KEY=VALUE",
        help="a run's folder, its result.json, a sweep's folder (one report of all its jobs), or an MLflow run id; and "
        "overrides of the tracking group (default: the store in which the run was tracked)",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="where to write (default: beside the result; outputs/reports/ID)"
    )
    parser.add_argument(
        "--readme",
        type=Path,
        metavar="PAGE",
        help="update the tables of results in a Markdown page, between <!-- sdopt:table FOLDER --> and "
        "<!-- sdopt:end -->, instead of writing a report; FOLDER holds a result, and is relative to the page",
    )
    parser.add_argument(
        "--check", action="store_true", help="with --readme: change nothing, and exit with 2 if the page is out of date"
    )
    arguments = parser.parsed(argv)

    from sdopt.config.overrides import names_and_overrides
    from sdopt.config.tracking import tracking_of
    from sdopt.tracking.finding import find_results, track_report, write_report

    names, overrides = names_and_overrides(arguments.results)
    if arguments.readme:
        return _embed(arguments.readme, arguments.check)
    if not names:
        raise UsageError("RESULT: name a run's folder, a sweep's folder or an MLflow run id")
    if arguments.output and len(names) > 1:
        raise UsageError(f"--output {arguments.output}: takes one RESULT, because each has a report.html of its own")
    chosen, code = tracking_of(overrides), 0
    for name in names:
        source = find_results(name, chosen)
        if not source.studies:
            raise UsageError(source.damaged)
        files = write_report(source, arguments.output)
        print(f"report: {files[0]}")
        print(track_report(source, files, chosen if overrides or source.downloaded else None))
        print_problems(source.damaged)
        code = UsageError.exit_code if source.damaged else code
    return code


def _embed(page: Path, check: bool) -> int:
    """Updates the results in a page, or with `check` only says whether they are up to date; returns the exit code."""
    from sdopt.apps.loadtest.record import embedded
    from sdopt.record.files import write_atomically
    from sdopt.report.embedded import embed

    text = embed(page, {"load": embedded})
    if text.encode() == page.read_bytes():
        print(f"{page}: is up to date")
        return 0
    if check:
        raise UsageError(f"{page}: is out of date; run `{command_line('report', '--readme', page)}`")
    write_atomically(page, text.encode())
    print(f"{page}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
