"""sdopt skill: how an agent measures a change honestly, on one page."""

import json
import sys

from . import Arguments, end_with_code, printed


@end_with_code
def main(argv: list[str]) -> int:
    """Prints the page for agents, or the schema of their answers; returns the exit code."""
    parser = Arguments(
        prog="sdopt skill",
        description="Print the page that tells an agent how to measure a change honestly.",
    )
    parser.add_argument(
        "--schema",
        action="store_true",
        help="print the JSON schema of an answer (--json) instead",
    )
    arguments = parser.parsed(argv)
    if arguments.schema:
        print(json.dumps(printed().model_json_schema(), indent=1))
        return 0

    from sdopt.about import PACKAGE

    print((PACKAGE / "agents" / "SKILL.md").read_text(encoding="utf-8"), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
