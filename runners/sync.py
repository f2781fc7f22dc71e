"""sdopt sync: log finished results to MLflow that are not logged yet, for example because a server did not answer."""

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from . import Arguments, end_with_code

if TYPE_CHECKING:
    from sdopt.report.sweep import Sweep
    from sdopt.schema import Tracking
    from sdopt.tracking.client import Logged


@end_with_code
def main(argv: list[str]) -> int:
    """Logs every result below the folders that is not logged yet; returns the exit code."""
    parser = Arguments(
        prog="sdopt sync",
        description="Log finished results to MLflow; results that are there already stay unchanged.",
        epilog="example: sdopt sync outputs/runs/quickstart tracking.uri=http://localhost:5000",
    )
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="FOLDER | tracking.KEY=VALUE",
        help="folders of runs or sweeps, or above them (default: outputs); and overrides of the tracking group",
    )
    arguments = parser.parse_args(argv).arguments

    from sdopt.worker.forkserver import prepare_environment

    prepare_environment()
    from sdopt.config.composer import tracking_of
    from sdopt.config.overrides import names_and_overrides
    from sdopt.errors import UsageError, print_problems
    from sdopt.gate.judge import worst_code
    from sdopt.report.sweep import read_sweep

    named, overrides = names_and_overrides(arguments)
    tracking = tracking_of(overrides)
    if tracking.kind == "none":
        raise UsageError("tracking=none: names no store to log to; choose one with tracking.uri=…")
    folders = list(map(Path, named)) or [Path("outputs")]
    problems: dict[str, int] = {}
    sweeps: dict[Path, None] = {}
    for path in [path for folder in folders for path in _results(folder)]:
        # A job's folder may lie several folders below that of its sweep.
        above = next((up for up in list(path.parents)[1:6] if (up / "multirun.yaml").is_file()), None)
        logged = _logged(path.parent, partial(_log_result, path, tracking), problems)
        if logged and above is not None:
            sweeps[above] = None
    for folder in sweeps:
        sweep = read_sweep(folder)
        problems.update((problem, UsageError.exit_code) for problem in sweep.damaged)
        _logged(folder, partial(_log_sweep, sweep, tracking), problems)
    print_problems(problems)
    return worst_code(problems.values())


def _logged(folder: Path, log: "Callable[[], Logged]", problems: dict[str, int]) -> bool:
    """Logs one result or sweep, and says so; what is wrong with it does not keep the others from being logged.

    Args:
        folder: of the run or the sweep.
        log: logs it.
        problems: gets what is wrong, each line with its exit code.

    Returns:
        whether it is logged.

    Raises:
        UnavailableError: the store is at fault, and so would be for all.
    """
    from sdopt.errors import UnavailableError, UsageError

    try:
        logged = log()
    except UnavailableError:
        raise
    except UsageError as error:
        problems.update((problem, error.exit_code) for problem in error.problems)
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        problems[f"{folder}: could not be logged ({reason})"] = UnavailableError.exit_code
    else:
        print(f"{folder}: {'logged' if logged.new else 'already logged'} as {logged.run}")
        return True
    return False


def _log_result(path: Path, tracking: "Tracking") -> "Logged":
    from sdopt.record.files import read_result
    from sdopt.tracking.runs import log_study

    return log_study(read_result(path), path.parent, tracking)


def _log_sweep(sweep: "Sweep", tracking: "Tracking") -> "Logged":
    from sdopt.report.markdown import written
    from sdopt.tracking.runs import log_sweep

    return log_sweep(list(sweep.studies.values()), sweep.folder, written(sweep.blocks()), tracking)


def _results(folder: Path) -> list[Path]:
    from sdopt.errors import UsageError

    # MLflow keeps a copy among the artifacts of a run, by its id, without the images beside it.
    copies = re.compile(r".*/[0-9a-f]{32}/artifacts/result\.json")
    below = [path for path in sorted(folder.rglob("result.json")) if not copies.fullmatch(str(path.absolute()))]
    found = [folder] if folder.name == "result.json" else below
    if not found:
        raise UsageError(f"{folder}: no result.json at or below it")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
