"""sdopt score: give out the images of a result, and take in scores that other programs computed."""

import sys
from pathlib import Path

from sdopt.errors import UsageError, command_line, print_problems
from sdopt.schema import Tracking

from . import Arguments, end_with_code


@end_with_code
def main(argv: list[str]) -> int:
    """Exports images, or imports scores; returns the exit code."""
    parser = Arguments(
        prog="sdopt score",
        description="Score the images of a finished result with any program: --export writes them with their prompts "
        "and times, as `sdopt judge` reads them, and a list of all (images.csv); add a column for each metric to that "
        "list, and --import reads it. Rules of a gate, tables, plots and MLflow then have score_<name>.",
        epilog="example: sdopt score outputs/runs/quickstart/<time> --import scores.csv --lower aesthetic_loss",
    )
    parser.add_argument(
        "result", metavar="RESULT", help="a run's folder, or its result.json"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--export",
        type=Path,
        metavar="FOLDER",
        help="a new folder for images and times",
    )
    what.add_argument(
        "--import",
        dest="table",
        type=Path,
        metavar="TABLE",
        help=".csv or .jsonl: variant, file, and columns of scores",
    )
    parser.add_argument(
        "--lower",
        default="",
        metavar="NAMES",
        help="metrics of which less is better, with commas",
    )
    arguments = parser.parsed(argv)

    from sdopt.apps.exchange.scores import export, import_scores
    from sdopt.record.files import write_result
    from sdopt.record.images import remarks_on_images
    from sdopt.report.catalog import write_reports
    from sdopt.report.summary import summary_of
    from sdopt.tracking.finding import find_result

    result, folder = find_result(arguments.result, Tracking(kind="none"))
    if arguments.export is not None:
        export(result, folder, arguments.export)
        print(f"images and times: {arguments.export}")
        return 0
    if replaced := remarks_on_images(result, folder):
        raise UsageError(replaced)  # nobody tells which of the two were scored
    lower = tuple(filter(None, map(str.strip, arguments.lower.split(","))))
    judged, judging = bool(result.judgements), result.gate
    names = import_scores(result, arguments.table, lower)
    write_result(result, folder)
    for _ in write_reports(summary_of(result), folder):
        pass
    print(
        f"{folder}: has {', '.join(names)}; `{command_line('sync', folder)}` logs it to MLflow"
    )
    if judged and not result.judgements:
        again = command_line("gate", folder, f"gate={judging}")
        print_problems(
            [
                f"{folder}: its verdicts were of other scores, and are dropped; `{again}` judges again"
            ]
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
