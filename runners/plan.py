"""sdopt plan: seconds and GiB on a card that one does not have."""

import argparse
import sys
from pathlib import Path

from sdopt.errors import UsageError
from sdopt.terminal import console as terminal
from sdopt.terminal import print_line

from . import Arguments, composable, end_with_code


@end_with_code
def main(argv: list[str]) -> int:
    """Prints predictions, or how well they meet published figures; returns the exit code."""
    parser = Arguments(
        prog="sdopt plan",
        description="Predict seconds and memory of a call on a card that you do not have, and between which values "
        "four in five such calls lie.",
        epilog="examples: sdopt plan model=sdxl precision=fp16 hardware=rtx3060; "
        "sdopt plan model=sd15 precision=fp16 'plan.hardware=[t4,l4,rtx4090,h100]'; "
        "sdopt plan model=sdxl hardware=l4 study=one_at_a_time 'study.options=[compiler,attention,memory]'",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        help="as of sdopt run; besides plan.hardware=[…], plan.torch=2.3, plan.measured=RUN",
    )
    parser.add_config_dir()
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="draw times and memory into a picture",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--check",
        type=Path,
        metavar="TRUTH.csv",
        help="hold predictions against published figures, each predicted without its device; see "
        "sdopt/apps/foresight/README.md for the columns",
    )
    parser.add_argument(
        "--by",
        choices=("chip", "generation", "publisher", "both"),
        default="chip",
        help="with --check: what is left out of the fit for each figure; both is its chip and its publisher [chip]",
    )
    arguments = parser.parsed(argv)

    return _check(arguments) if arguments.check else _plan(arguments)


def _plan(arguments: argparse.Namespace) -> int:
    # A card may have any name.
    composable(arguments.overrides, arguments.config_dir, ("plan.", "hardware"))
    from sdopt.apps.foresight.plan import plan_of, text_of
    from sdopt.apps.foresight.tables import plan_table, remarks, rows_of
    from sdopt.report.terminal import shown

    if arguments.by != "chip":
        raise UsageError("--by: only applies to --check")
    if arguments.plot and arguments.plot.suffix != ".png":
        raise UsageError(f"--plot {arguments.plot}: must end in .png")
    predictions, notes, command = plan_of(arguments.overrides, arguments.config_dir)
    if arguments.json:
        print(_as_json(rows_of(predictions, notes)))
    else:
        console = terminal()
        if len(predictions) == 1:
            [only] = predictions
            print_line(console, text_of(only))
            print_line(console, f"That is {only.variant}: {only.work}.")
        else:
            console.print(shown([plan_table(predictions)], console.width))
        for line in (*notes, *remarks(predictions, command)):
            print_line(console, line)
    if arguments.plot:
        from sdopt.apps.foresight.charts import picture_of

        arguments.plot.parent.mkdir(parents=True, exist_ok=True)
        arguments.plot.write_bytes(picture_of(predictions))
        print(f"written: {arguments.plot}", file=sys.stderr)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from sdopt.apps.foresight.check import check
    from sdopt.apps.foresight.latency import coefficients
    from sdopt.apps.foresight.published import read_figures
    from sdopt.apps.foresight.tables import check_blocks
    from sdopt.report.terminal import shown
    from sdopt.worker.preload import import_all

    if arguments.overrides or arguments.plot:
        raise UsageError("--check: takes no overrides and draws no plot")
    import_all(
        ("diffusers.models",)
    )  # without what other libraries say of themselves when they are imported
    figures, refusals = read_figures(arguments.check)
    if not figures and not refusals:
        raise UsageError(f"{arguments.check}: has no figures")
    found = check(figures, refusals, coefficients(), arguments.by)
    if arguments.json:
        print(_as_json(found))
        return 0
    console = terminal()
    console.print(shown(check_blocks(found), console.width))
    return 0


def _as_json(found: object) -> str:
    """Returns a value as JSON, with null for what that cannot hold."""
    from pydantic_core import to_json

    return to_json(found, indent=1, inf_nan_mode="null").decode()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
