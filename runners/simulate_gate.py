"""python -m runners.simulate_gate: how often the gate is wrong about speed, and how much it sees; takes minutes."""

import argparse
import sys
from pathlib import Path


def main(argv: list[str]) -> int:
    """Simulates studies and prints two Markdown tables; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m runners.simulate_gate", description=__doc__)
    parser.add_argument("--studies", type=int, default=2000, help="for each row (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="also write the tables to this file")
    arguments = parser.parse_args(argv)

    from sdopt.gate.trial.simulation import FIRST_LOOK, REPEATED_LOOKS, first_look, repeated_looks
    from sdopt.report.markdown import markdown

    tables = markdown(FIRST_LOOK, first_look(arguments.studies), [])
    tables += "\n" + markdown(REPEATED_LOOKS, repeated_looks(arguments.studies), [])
    print(tables)
    if arguments.output:
        arguments.output.write_text(tables, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
