"""python -m tests.trial.simulate: simulate the error rates and the power of speed-ups and the gate; takes minutes."""

import argparse
import sys
from collections.abc import Callable


def main(argv: list[str]) -> int:
    """Simulates studies and prints Markdown tables; returns 0."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.trial.simulate", description=__doc__
    )
    parser.add_argument(
        "--studies",
        type=int,
        default=2000,
        help="studies for each row (default: %(default)s)",
    )
    parser.add_argument(
        "--only",
        choices=("looks", "interference", "precision", "tails", "search"),
        help="print one group of tables",
    )
    arguments = parser.parse_args(argv)

    from sdopt.report.markdown import markdown
    from tests.trial.noise import disturbed_rounds, stopping
    from tests.trial.search import searches
    from tests.trial.simulation import first_look, repeated_looks, tails

    groups: dict[str, list[Callable[[int], list[dict[str, str]]]]] = {
        "looks": [first_look, repeated_looks],
        "interference": [disturbed_rounds],
        "precision": [stopping],
        "tails": [tails],
        "search": [searches],
    }
    chosen = [arguments.only] if arguments.only else list(groups)
    found = [rows(arguments.studies) for group in chosen for rows in groups[group]]
    print(
        "\n".join(
            markdown(tuple(rows[0]), [tuple(row.values()) for row in rows])
            for rows in found
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
