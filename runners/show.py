"""sdopt show: print a finished result again."""

import argparse
import sys

from . import end_with_code


@end_with_code
def main(argv: list[str]) -> int:
    """Prints what `sdopt run` printed at its end; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="sdopt show", description="Print a finished result again: what was measured, the tables and the answer."
    )
    parser.add_argument(
        "result", metavar="RESULT", help="a run's folder, its result.json, a sweep's folder, or an MLflow run id"
    )
    parser.add_argument("overrides", nargs="*", metavar="tracking.KEY=VALUE", help="where to look for an MLflow run")
    arguments = parser.parse_args(argv)

    from sdopt.worker.forkserver import prepare_environment

    prepare_environment()
    from sdopt.config.composer import tracking_of
    from sdopt.errors import UsageError, print_problems
    from sdopt.report.table import answer_group, show, sweep_table
    from sdopt.report.verdicts import verdict_table
    from sdopt.terminal import console as terminal
    from sdopt.tracking.finding import find_results

    console = terminal()
    found = find_results(arguments.result, tracking_of(arguments.overrides))
    if found.sweep and len(found.studies) > 1:
        console.print(sweep_table(found.sweep.rows, console.width))
    for result, folder in found.studies:
        show(result, console, folder)
        if result.judgements:
            console.print(verdict_table(result, result.judgements))
        console.print(answer_group(result))
    print_problems(found.damaged)
    return UsageError.exit_code if found.damaged else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
