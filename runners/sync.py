"""sdopt sync: log finished results to MLflow that are not logged yet, for example because a server did not answer."""

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from sdopt.errors import (
    UnavailableError,
    UsageError,
    print_problems,
    with_type,
    without_passwords,
)

from . import Arguments, end_with_code

if TYPE_CHECKING:
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
    arguments = parser.parsed(argv).arguments

    from sdopt.config.overrides import names_and_overrides
    from sdopt.config.tracking import tracking_of
    from sdopt.gate.judge import worst_code
    from sdopt.record.files import read_result
    from sdopt.record.images import remarks_on_images
    from sdopt.report.markdown import written
    from sdopt.report.sweep import read_sweep
    from sdopt.tracking.runs import log_study, log_sweep
    from sdopt.tracking.store import elsewhere

    named, overrides = names_and_overrides(arguments)
    tracking = tracking_of(overrides)
    if tracking.kind == "none":
        raise UsageError(
            "tracking=none: names no store to log to; choose one with tracking.uri=…"
        )
    _require_of_store(tracking)
    folders = list(map(Path, named)) or [Path("outputs")]
    problems: dict[str, int] = {}
    sweeps: dict[Path, Tracking] = {}
    for path in [*chain.from_iterable(map(_results, folders))]:
        with _noted(path.parent, problems):
            own = path.parent.resolve()  # of `.`, the name
            result = read_result(path)
            print_problems(remarks_on_images(result, path.parent))
            store = _store_for(tracking, result.config.tracking, overrides)
            if warning := elsewhere(store):
                problems[warning] = 0
            _say(path.parent, log_study(result, own, store), store)
            # A job's folder may lie several folders below that of its sweep.
            if above := next(
                (
                    up
                    for up in list(own.parents)[:5]
                    if (up / "multirun.yaml").is_file()
                ),
                None,
            ):
                sweeps[above] = store
    for folder, store in sweeps.items():
        sweep = read_sweep(folder)
        problems.update((problem, UsageError.exit_code) for problem in sweep.damaged)
        with _noted(folder, problems):
            table = written(sweep.blocks())
            _say(folder, log_sweep(sweep, table, store), store)
    print_problems(problems)
    return worst_code(problems.values())


def _store_for(
    tracking: "Tracking", recorded: "Tracking", overrides: Sequence[str]
) -> "Tracking":
    """Returns where a result goes: to the store that is named, also the usual one, or else where it was to be logged."""
    from sdopt.config.overrides import key_of
    from sdopt.tracking.store import store_of

    if recorded.kind != "mlflow" or "tracking.uri" in map(key_of, overrides):
        return tracking
    return store_of(tracking, recorded)


def _require_of_store(tracking: "Tracking") -> None:
    """Raises UsageError for what runs of a finished result have from the result."""
    for key in ("tags", "note"):
        if getattr(tracking, key):
            raise UsageError(
                f"tracking.{key}: has no effect on a finished result, which has its own; "
                f"`sdopt run resume=FOLDER tracking.{key}=…` changes it"
            )


@contextmanager
def _noted(folder: Path, problems: dict[str, int]) -> Iterator[None]:
    """Notes what is wrong with one result or sweep, each line with its exit code, so that the others are logged.

    Raises:
        UnavailableError: the store is at fault, and so would be for all.
    """
    try:
        yield
    except UnavailableError:
        raise
    except UsageError as error:
        problems.update((problem, error.exit_code) for problem in error.problems)
    except Exception as error:
        reason = with_type(error)
        problems[f"{folder}: could not be logged ({reason})"] = (
            UnavailableError.exit_code
        )


def _say(folder: Path, logged: "Logged", store: "Tracking") -> None:
    done = "logged" if logged.new else "already logged"
    print(f"{folder}: {done} as {logged.run} in {without_passwords(store.uri)}")


def _results(folder: Path) -> list[Path]:
    # MLflow keeps a copy among the artifacts of a run, by its id, without the images beside it.
    copies = re.compile(r".*/[0-9a-f]{32}/artifacts/result\.json")
    below = [
        path
        for path in sorted(folder.rglob("result.json"))
        if not copies.fullmatch(str(path.absolute()))
    ]
    found = [folder] if folder.name == "result.json" else below
    if not found:
        raise UsageError(f"{folder}: no result.json at or below it")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
