"""sdopt compare: two finished results side by side."""

import sys

from sdopt.terminal import console as terminal

from . import Arguments, end_with_code


@end_with_code
def main(argv: list[str]) -> int:
    """Prints both results and their differences; returns the exit code."""
    parser = Arguments(
        prog="sdopt compare",
        description="Show two finished results side by side. Ratios are shown only for the same machine, versions and "
        "work; `sdopt gate NEW --against OLD` judges whether something got worse.",
    )
    for name in ("A", "B"):
        parser.add_argument(
            name,
            metavar=name,
            help="a run's folder, its result.json, or an MLflow run id",
        )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="tracking.KEY=VALUE",
        help="where to look for MLflow runs",
    )
    arguments = parser.parsed(argv)

    from sdopt.config.tracking import tracking_of
    from sdopt.report.comparing import comparison_of
    from sdopt.report.terminal import shown
    from sdopt.tracking.finding import find_result

    tracking = tracking_of(arguments.overrides)
    (first, _), (second, _) = (
        find_result(name, tracking) for name in (arguments.A, arguments.B)
    )
    console = terminal()
    console.print(shown(comparison_of(first, second), console.width))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
