"""sdopt sync: log to MLflow what a dead server, or a machine without one, left behind."""

import argparse
import sys
from pathlib import Path


def main(argv: list[str]) -> int:
    """Logs every result below the folders that is not logged yet; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="sdopt sync", description="Log results to MLflow that are not there yet; what is there is left alone."
    )
    parser.add_argument("folders", nargs="*", type=Path, help="run or sweep folders, or ones above (default: outputs)")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="tracking.uri=…")
    arguments = parser.parse_args(argv)

    from sdopt.forkserver import prepare_environment

    prepare_environment()
    from sdopt.config import tracking_of
    from sdopt.errors import UsageError
    from sdopt.results import read_result
    from sdopt.tracking import TrackingError, log_study

    try:
        tracking = tracking_of(arguments.overrides)
        files = [path for folder in arguments.folders or [Path("outputs")] for path in _results(folder)]
        for path in files:
            run, new = log_study(read_result(path), path.parent, tracking)
            print(f"{path.parent}: {'logged' if new else 'there already'} as {run}")
    except UsageError as error:
        print("\n".join(f"sdopt: {problem}" for problem in error.problems), file=sys.stderr)
        return 2
    except TrackingError as error:
        print(f"sdopt: {error}", file=sys.stderr)
        return 3
    return 0


def _results(folder: Path) -> list[Path]:
    from sdopt.errors import UsageError

    found = [folder] if folder.name == "result.json" else sorted(folder.rglob("result.json"))
    if not found:
        raise UsageError(f"{folder}: there is no result.json in or below it")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
