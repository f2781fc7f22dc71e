"""sdopt benchmark-overhead: measure the time that sdopt adds to the calls of the pipeline."""

import subprocess
import sys
import time
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

from sdopt.errors import UnavailableError, UsageError, print_problems
from sdopt.schema import Tracking
from sdopt.terminal import console as terminal
from sdopt.terminal import print_line

from . import Arguments, end_with_code


@end_with_code
def main(argv: list[str]) -> int:
    """Runs a study as a user would, and says where its time went; returns the study's exit code."""
    parser = Arguments(
        prog="sdopt benchmark-overhead",
        description="Run eight variants of the reference model for ten rounds, and show where the time went.",
        epilog="It runs `sdopt run experiment=overhead` in a separate process, with an existing database.",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        help="Hydra overrides for that run, as in protocol.rounds=2",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="folder for the run and overhead.json (default: outputs/overhead/…)",
    )
    arguments = parser.parsed(argv)

    from sdopt.apps.doctor.overhead import (
        overhead_blocks,
        read_overhead,
        write_overhead,
    )
    from sdopt.report.terminal import shown

    begun = datetime.now().astimezone().strftime("%Y-%m-%d_%H-%M-%S")
    folder: Path = arguments.folder or Path("outputs/overhead") / begun
    console = terminal()
    folder.mkdir(parents=True, exist_ok=True)
    with console.status("creating the database"):
        tracking = _warm_database(folder)
    run = folder / "run"
    overrides = [
        "experiment=overhead",
        f"hydra.run.dir='{run}'",
        *tracking,
        *arguments.overrides,
    ]
    command = [sys.executable, "-m", "sdopt.cli", "run", *overrides]
    began = time.monotonic()
    try:
        code = subprocess.run(command, check=False).returncode
    except KeyboardInterrupt:  # it reached the whole foreground group
        return 130
    wall_s = time.monotonic() - began
    if code:
        print_problems(
            [f"the run ended with exit code {code}, so there is no overhead to report"]
        )
        return code if code == UsageError.exit_code else UnavailableError.exit_code
    found = read_overhead(run, wall_s, ["sdopt", "run", *overrides])
    console.print(shown(overhead_blocks(found), console.width))
    print_line(console, f"overhead: {write_overhead(found, folder)}")
    return 0


def _warm_database(folder: Path) -> list[str]:
    """Lets MLflow create its schema, which takes seconds once; returns the overrides that log to that database."""
    if find_spec("mlflow") is None:
        return ["tracking=none"]
    from sdopt.tracking.store import ui_pages

    uri = f"sqlite:///{folder}/mlflow.db"
    ui_pages(Tracking(uri=uri))
    return [f"tracking.uri='{uri}'", f"tracking.artifacts='{folder}/mlartifacts'"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
