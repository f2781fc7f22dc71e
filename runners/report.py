"""sdopt report: write a finished result as one self-contained page, in HTML and in Markdown."""

import sys
from pathlib import Path

from sdopt.errors import UsageError, print_problems

from . import Arguments, end_with_code, judged_in


@end_with_code
def main(argv: list[str]) -> int:
    """Writes report.html and report.md for each result, and logs them where it was tracked; returns the exit code."""
    parser = Arguments(
        prog="sdopt report",
        description="Write a finished result as one self-contained page: report.html, and report.md. Where the "
        "run is logged to MLflow, both become its artifacts.",
        epilog="examples: sdopt report outputs/runs/quickstart/<time>; sdopt report outputs/sweeps/pair/<time>; "
        "sdopt report <MLflow run id> --output reports",
    )
    parser.add_argument(
        "results",
        nargs="*",
        metavar="RESULT | tracking.KEY=VALUE",
        help="a run's folder, its result.json, a sweep's folder (one report of all its jobs), a search's (of the study "
        "that judged), or an MLflow run id; and overrides of the tracking group (default: the store in which the run was "
        "tracked)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="where to write (default: beside the result; outputs/reports/ID)",
    )
    arguments = parser.parsed(argv)

    from sdopt.config.overrides import names_and_overrides
    from sdopt.config.tracking import tracking_of
    from sdopt.tracking.finding import find_results, track_report, write_report

    names, overrides = names_and_overrides(arguments.results)
    if not names:
        raise UsageError(
            "RESULT: name a run's folder, a sweep's folder or an MLflow run id"
        )
    if arguments.output and len(names) > 1:
        raise UsageError(
            f"--output {arguments.output}: takes one RESULT, because each has a report.html of its own"
        )
    chosen, code = tracking_of(overrides), 0
    for name in names:
        source = find_results(judged_in(name), chosen)
        if not source.studies:
            raise UsageError(source.damaged)
        files = write_report(source, arguments.output)
        print(f"report: {files[0]}")
        print(
            track_report(
                source, files, chosen if overrides or source.downloaded else None
            )
        )
        print_problems([*source.damaged, *source.remarks])
        code = UsageError.exit_code if source.damaged else code
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
