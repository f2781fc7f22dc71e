"""sdopt report: write a result that exists as one page to send, in HTML and in Markdown."""

import argparse
import sys
from pathlib import Path

from . import end_with_code


@end_with_code
def main(argv: list[str]) -> int:
    """Writes report.html and report.md of each result, and logs them where it was tracked; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="sdopt report",
        description="Write a result as one page that needs nothing beside it: report.html, and report.md. Where the "
        "run is logged to MLflow, both become its artifacts.",
        epilog="examples: sdopt report outputs/runs/quickstart/<time>; sdopt report outputs/sweeps/pair/<time>; "
        "sdopt report <MLflow run id> --output reports",
    )
    parser.add_argument(
        "results",
        nargs="+",
        metavar="RESULT | tracking.KEY=VALUE",
        help="a run's folder, its result.json, a sweep's folder (one report of all its jobs), or an MLflow run id; and "
        "overrides of the tracking group (default: the store in which the run was tracked)",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="where to write (default: beside the result; outputs/reports/ID)"
    )
    arguments = parser.parse_intermixed_args(argv)
    overrides = [word for word in arguments.results if word.startswith("tracking") and "=" in word]
    names = [word for word in arguments.results if word not in overrides]

    from sdopt.worker.forkserver import prepare_environment

    prepare_environment()
    from sdopt.config.composer import tracking_of
    from sdopt.errors import UsageError
    from sdopt.tracking.reporting import find_source, track_report, write_report

    if not names:
        raise UsageError("RESULT: name a run's folder, a sweep's folder or an MLflow run id")
    if arguments.output and len(names) > 1:
        raise UsageError(f"--output {arguments.output}: takes one RESULT, because each has a report.html of its own")
    chosen, code = tracking_of(overrides), 0
    for name in names:
        source = find_source(name, chosen)
        files = write_report(source, arguments.output)
        print(f"report: {files[0]}")
        print(track_report(source, files, chosen if overrides or source.downloaded else None))
        for problem in source.damaged:
            print(f"sdopt: {problem}", file=sys.stderr)
            code = UsageError.exit_code
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
