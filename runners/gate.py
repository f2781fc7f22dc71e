"""sdopt gate: judge a finished result, or compare it with an earlier one; needs no GPU."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from . import end_with_code

if TYPE_CHECKING:
    from rich.console import Console

    from sdopt.config.composer import GateConfig
    from sdopt.results.records import StudyResult


@end_with_code
def main(argv: list[str]) -> int:
    """Judges a result; returns 0 if all passed, 1 for a regression, 2 for a usage error, 3 if not all were judged."""
    parser = argparse.ArgumentParser(
        prog="sdopt gate",
        description="Judge a result by a gate's rules, or, with --against, whether it is worse than an earlier one.",
        epilog="examples: sdopt gate outputs/runs/quickstart/<time> gate=strict; "
        "sdopt gate <new> --against <old> --waive versions",
    )
    parser.add_argument(
        "result", metavar="RESULT", help="a run's folder, its result.json, a sweep's folder, or an MLflow run id"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="as in gate=strict, gate.replicates=…, tracking.uri=…"
    )
    parser.add_argument("--against", metavar="RESULT", help="an earlier result of the same study")
    parser.add_argument(
        "--waive",
        default="",
        metavar="NAMES",
        help="differences to allow with --against, separated by commas: versions, sdopt, options",
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="folder for verdicts.{json,md,xml}; for a sweep, with a subfolder for each job (default: beside the "
        "result; for an MLflow run outputs/reports/<id>)",
    )
    arguments = parser.parse_intermixed_args(argv)

    from sdopt.worker.forkserver import prepare_environment

    prepare_environment()
    from sdopt.config.composer import gate_of
    from sdopt.errors import UsageError, print_problems
    from sdopt.gate.judge import judged_comparisons, worst_code
    from sdopt.tracking.finding import find_results

    config = gate_of(arguments.overrides)
    if not config.gate.judges:
        raise UsageError(
            f"gate={config.gate.name}: has no rules; choose gate=default, gate=strict or a gate of your own"
        )
    waived = _waived(arguments.waive, arguments.against)
    found = find_results(arguments.result, config.tracking)
    codes, problems = [], list(found.damaged)
    judged = [study for study in found.studies if arguments.against or judged_comparisons(study[0])]
    if found.studies and not judged:
        raise UsageError([*problems, f"{arguments.result}: has no comparison to judge"])
    for result, folder in judged:
        try:
            # Each job of a sweep has verdicts of its own.
            output = arguments.output / folder.name if arguments.output and found.sweep else arguments.output
            codes.append(_judge(result, folder, config, arguments.against, waived, output))
        except UsageError as error:
            problems += error.problems
    print_problems(problems)
    codes += [UsageError.exit_code] * len(problems)
    return worst_code(codes)


def _waived(names: str, against: str | None) -> tuple[str, ...]:
    """Returns the waivers of a command line. Raises UsageError if one does not exist, or `--against` is missing."""
    from sdopt.errors import UsageError
    from sdopt.gate.drift import WAIVERS

    waived = tuple(filter(None, names.split(",")))
    problems = []
    if unknown := sorted(set(waived) - set(WAIVERS)):
        problems.append(f"--waive {','.join(unknown)}: unknown; choose from {', '.join(WAIVERS)}")
    if waived and against is None:
        problems.append(
            f"--waive {names}: allows differences to an earlier result; name that with --against, or leave it out"
        )
    if problems:
        raise UsageError(problems)
    return waived


def _judge(
    result: "StudyResult",
    folder: Path,
    config: "GateConfig",
    against: str | None,
    waived: tuple[str, ...],
    output: Path | None,
) -> int:
    from rich.console import Console

    from sdopt.errors import UnavailableError
    from sdopt.gate.calibration import calibration_for
    from sdopt.gate.drift import judge_drift
    from sdopt.gate.judge import exit_code, judge
    from sdopt.report.catalog import write_reports
    from sdopt.report.table import answer_group
    from sdopt.report.verdicts import verdict_table, write_verdicts
    from sdopt.tracking.finding import find_result

    calibration = calibration_for(result, config.gate.calibration)
    if against is None:
        judge(result, config.gate, calibration)
        _keep(result, folder, verdicts=output is None)
        judgements = result.judgements
    else:
        earlier, then = find_result(against, config.tracking)
        result.gate = config.gate.name
        judgements = judge_drift(
            result, earlier, config.gate, calibration, waived, _with_images(result, folder, earlier, then)
        )
    console = Console()
    console.print(verdict_table(result, judgements))
    target = output or folder
    try:
        target.mkdir(parents=True, exist_ok=True)
        write_verdicts(result, judgements, target)
    except OSError as error:
        raise UnavailableError(f"{target}: {error.strerror}; choose another folder with --output") from error
    console.print(f"verdicts: {target / 'verdicts.md'}", markup=False, highlight=False, soft_wrap=True)
    if against is None:
        console.print(answer_group(result))
        if output is None:
            for _ in write_reports(result, folder):
                pass
            _update_tracker(result, folder, config, console)
    return exit_code(judgements, config.gate.report_only)


def _keep(result: "StudyResult", folder: Path, verdicts: bool) -> None:
    """Records this look in the run's `result.json`, so that a study extended later has spent it.

    Records the judgements too if `verdicts` is true, that is, unless `--output` sends the verdicts elsewhere.
    """
    from contextlib import suppress

    from sdopt.results.files import read_result, write_result

    if not (folder / "result.json").is_file():  # it is an MLflow run's
        return
    kept = read_result(folder)
    # A folder that cannot be written, as CI's may be, still gets its verdicts.
    if kept.id == result.id and kept.status == "finished":
        before = kept.looks, kept.judgements, kept.gate
        kept.looks = result.looks
        if verdicts:
            kept.judgements, kept.gate = result.judgements, result.gate
        if before != (kept.looks, kept.judgements, kept.gate):
            with suppress(OSError):
                write_result(kept, folder)


def _update_tracker(result: "StudyResult", folder: Path, config: "GateConfig", console: "Console") -> None:
    """Updates the verdicts of the study's MLflow runs, if it was logged."""
    from sdopt.schema import Tracking
    from sdopt.tracking.runs import update_verdicts
    from sdopt.tracking.store import TrackingError

    # The result says where it was logged, unless the command names another place.
    tracking = config.tracking if config.tracking != Tracking() else result.config.tracking
    try:
        run = update_verdicts(result, folder, tracking)
    except TrackingError as error:
        print(f"sdopt: the verdicts were not logged to MLflow: {error}", file=sys.stderr)
        return
    if run is not None:
        console.print(f"MLflow: the verdicts of run {run} are up to date", markup=False, highlight=False)


def _with_images(result: "StudyResult", folder: Path, earlier: "StudyResult", then: Path) -> tuple[Path, Path] | None:
    there = all(
        (where / record.path).is_file()
        for where, study in ((folder, result), (then, earlier))
        for variant in study.variants
        for record in variant.images
    )
    return (folder, then) if there else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
