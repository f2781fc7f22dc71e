"""python -m tests.trial.simulate: simulate the error rates and the power of speed-ups and the gate; takes minutes."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def main(argv: list[str]) -> int:
    """Simulates studies and prints Markdown tables; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.trial.simulate", description=__doc__)
    parser.add_argument("--studies", type=int, default=2000, help="studies for each row (default: %(default)s)")
    parser.add_argument(
        "--only", choices=("looks", "interference", "precision", "tails", "search"), help="print one group of tables"
    )
    parser.add_argument("--output", type=Path, help="also write the tables to this file")
    arguments = parser.parse_args(argv)

    from sdopt.report.markdown import markdown
    from tests.trial import search as simulation
    from tests.trial.noise import DISTURBED, STOPPING, disturbed_rounds, stopping
    from tests.trial.simulation import FIRST_LOOK, REPEATED_LOOKS, first_look, repeated_looks
    from tests.trial.tails import HEADINGS, tails

    groups: dict[str, list[tuple[Sequence[str], Callable[[int], list[tuple[str, ...]]]]]] = {
        "looks": [(FIRST_LOOK, first_look), (REPEATED_LOOKS, repeated_looks)],
        "interference": [(DISTURBED, disturbed_rounds)],
        "precision": [(STOPPING, stopping)],
        "tails": [(HEADINGS, tails)],
        "search": [(simulation.HEADINGS, simulation.searches)],
    }
    chosen = [arguments.only] if arguments.only else list(groups)
    tables = "\n".join(
        markdown(headings, rows(arguments.studies), []) for group in chosen for headings, rows in groups[group]
    )
    print(tables)
    if arguments.output:
        arguments.output.write_text(tables, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
