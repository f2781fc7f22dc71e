"""sdopt sync: log finished results to MLflow that are not logged yet, for example because a server did not answer."""

import argparse
import sys
from pathlib import Path

from . import end_with_code


@end_with_code
def main(argv: list[str]) -> int:
    """Logs every result below the folders that is not logged yet; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="sdopt sync",
        description="Log finished results to MLflow; results that are there already stay unchanged.",
        epilog="examples: sdopt sync outputs/runs/quickstart tracking.uri=http://localhost:5000; "
        "sdopt sync s3://bucket/sweeps/attention tracking.uri=http://localhost:5000",
    )
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="FOLDER | ADDRESS | tracking.KEY=VALUE",
        help="folders of runs or sweeps, or above them (default: outputs), also as an address of fsspec, such "
        "as s3://…; and overrides of the tracking group",
    )
    arguments = parser.parse_args(argv).arguments

    from sdopt.worker.forkserver import prepare_environment

    prepare_environment()
    from sdopt.config.composer import tracking_of
    from sdopt.errors import UsageError, print_problems
    from sdopt.report.markdown import sweep_markdown
    from sdopt.report.sweep import read_sweep
    from sdopt.results.files import read_result
    from sdopt.tracking.remote import download, is_address
    from sdopt.tracking.runs import log_study, log_sweep

    named = [argument for argument in arguments if "=" not in argument or is_address(argument)]
    tracking = tracking_of([argument for argument in arguments if argument not in named])
    if tracking.kind == "none":
        raise UsageError("tracking=none: names no store to log to; choose one with tracking.uri=…")
    copies = {download(name): name.rstrip("/") for name in named if is_address(name)}
    folders = [*copies, *(Path(name) for name in named if not is_address(name))] or [Path("outputs")]

    def shown(path: Path | str) -> str:
        """Returns a path as text, with the address in place of the downloaded copy."""
        for copy, name in copies.items():
            path = str(path).replace(str(copy), name)
        return str(path)

    problems: list[str] = []
    sweeps: dict[Path, None] = {}
    for path in [path for folder in folders for path in _results(folder)]:
        try:
            run, new = log_study(read_result(path), path.parent, tracking)
        except UsageError as error:
            problems += map(shown, error.problems)
            continue
        print(f"{shown(path.parent)}: {'logged' if new else 'already logged'} as {run}")
        if (path.parent.parent / "multirun.yaml").is_file():
            sweeps[path.parent.parent] = None
    for folder in sweeps:
        sweep = read_sweep(folder)
        problems += [line for problem in sweep.damaged if (line := shown(problem)) not in problems]
        run, new = log_sweep(list(sweep.studies.values()), folder, sweep_markdown(sweep.rows), tracking)
        print(f"{shown(folder)}: {'logged' if new else 'already logged'} as {run}")
    print_problems(problems)
    return UsageError.exit_code if problems else 0


def _results(folder: Path) -> list[Path]:
    from sdopt.errors import UsageError

    # MLflow keeps a copy among a run's artifacts, without the images beside it.
    below = [path for path in sorted(folder.rglob("result.json")) if path.parent.name != "artifacts"]
    found = [folder] if folder.name == "result.json" else below
    if not found:
        raise UsageError(f"{folder}: no result.json in it or below it")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
