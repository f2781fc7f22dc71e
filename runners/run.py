"""sdopt run: measure a study, or with -m a sweep of them."""

import math
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from sdopt.config.parse import RunConfig
    from sdopt.results.records import StudyResult
    from sdopt.schema import Tracking
    from sdopt.study.timeline import Timeline
    from sdopt.worker.forkserver import StartContext
    from sdopt.worker.machine import Machine

_INFORMATIVE = (
    "--help",
    "-h",
    "--hydra-help",
    "--version",
    "--cfg",
    "-c",
    "--info",
    "-i",
    "--package",
    "--shell-completion",
    "-sc",
)


def main(argv: list[str]) -> int:
    """Runs Hydra on the command line's overrides; returns the exit code."""
    if any(argument.partition("=")[0] in _INFORMATIVE for argument in argv):
        return _with_hydra(argv, None)
    from sdopt.worker.forkserver import start_fork_server

    # Started before anything heavy is imported here, so that the server imports the same beside us.
    context = start_fork_server()
    try:
        code = _with_hydra(argv, context)
    except KeyboardInterrupt:
        print("sdopt: interrupted", file=sys.stderr)
        code = 130

    if code == 130 and "sdopt.report.sweep" not in sys.modules:
        return code  # nothing had begun, and half-imported libraries cannot be imported again

    from sdopt.config.hydra_job import RememberFolder
    from sdopt.report.sweep import exit_code

    if code == 130 and (folder := RememberFolder.sweep or RememberFolder.run):
        print(f"What was measured is kept; `sdopt run resume={folder}` goes on with it.", file=sys.stderr)
    if RememberFolder.occupied:
        return max(code, 2)
    if RememberFolder.sweep is not None:
        return max(code, _summarise(RememberFolder.sweep))
    return code or (exit_code(RememberFolder.run) if RememberFolder.run else 0)


def _with_hydra(argv: list[str], context: "StartContext | None") -> int:
    import hydra

    from sdopt.config.groups import CONF, CONFIG_NAME, reject_null_groups
    from sdopt.config.hydra_job import RememberFolder, with_resumed
    from sdopt.config.messages import explain
    from sdopt.errors import UsageError

    RememberFolder.run, RememberFolder.sweep, RememberFolder.occupied = None, None, False
    try:
        argv = with_resumed(argv)
        reject_null_groups(argv)
        _reject_other_configs(argv)
    except UsageError as error:
        print("\n".join(f"sdopt: {problem}" for problem in error.problems), file=sys.stderr)
        return 2
    # Users' own optimizations live in modules beside where they work, as with `python -m`.
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name=CONFIG_NAME)
    def job(_cfg: Any) -> Any:
        assert context is not None
        return _job(context)

    before, wants_trace = sys.argv, os.environ.get("HYDRA_FULL_ERROR") == "1"
    sys.argv = ["sdopt run", *argv]
    # Hydra then raises what it would otherwise print, some of it as a traceback, before ending with 1.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        job()
        return 0
    except SystemExit as error:
        return 2 if error.code else 0
    except Exception as error:
        if wants_trace:
            traceback.print_exc()
        said = explain(error)
        if isinstance(error, OSError) and error.strerror:
            said = f"{error.filename or RememberFolder.run or RememberFolder.sweep}: {error.strerror}"
        print(f"sdopt: {said or type(error).__name__}", file=sys.stderr)
    finally:
        sys.argv = before
        os.environ["HYDRA_FULL_ERROR"] = "1" if wants_trace else "0"
    # Until a job had a folder it was the command line.
    folders = [RememberFolder.run] if RememberFolder.run else _jobs(RememberFolder.sweep)
    return 3 if any(folder.is_dir() for folder in folders) else 2


def _jobs(sweep: Path | None) -> list[Path]:
    return [path for path in sweep.iterdir() if path.is_dir()] if sweep and sweep.is_dir() else []


def _reject_other_configs(argv: list[str]) -> None:
    from sdopt.errors import UsageError

    for argument in argv:
        name = argument.partition("=")[0]
        if name in ("--config-name", "-cn", "--config-path", "-cp"):
            raise UsageError(
                f"{name}: sdopt composes its own; add groups with --config-dir, and presets as experiment=…"
            )


def _job(context: "StartContext") -> Any:
    """One Hydra job: one study. Returns the objective; a failed job returns NaN, so that a sweep goes on."""
    from rich.console import Console

    from sdopt.config.composer import HydraComposer
    from sdopt.config.hydra_job import RememberFolder, in_sweep, job_folder
    from sdopt.errors import ConflictError, OccupiedError, UsageError
    from sdopt.locks import lock_folder
    from sdopt.results.folders import JobError, write_error
    from sdopt.results.records import Status
    from sdopt.study.timeline import Timeline, process_begun

    console = Console()
    folder = job_folder()
    # A sweep's later jobs begin where the one before them ended.
    timeline = Timeline("Python, Hydra and their imports", None if in_sweep() else process_begun())
    try:
        timeline.enter("composing and planning")
        composer = HydraComposer.of_this_job()
        with lock_folder(folder) as ours:
            if not ours:
                raise OccupiedError(f"{folder}: another process is measuring there")
            result = _study(composer, context, folder, console, timeline, alone=not in_sweep())
    except OccupiedError as error:
        print(f"sdopt: {error}", file=sys.stderr)
        RememberFolder.occupied = True  # an error.json there would be taken for the other's
        return math.nan
    except UsageError as error:
        for problem in error.problems:
            print(f"sdopt: {problem}", file=sys.stderr)
        skipped = in_sweep() and isinstance(error, ConflictError)
        write_error(JobError(0 if skipped else 2, error.problems, Status.SKIPPED if skipped else Status.FAILED), folder)
        return math.nan
    except OSError as error:
        problem = f"{error.filename or folder}: {error.strerror or error}"
        print(f"sdopt: {problem}", file=sys.stderr)
        with suppress(OSError):  # the disk that is full is full for this too
            write_error(JobError(3, [problem]), folder)
        return math.nan
    except Exception as error:
        # A mistake of ours: it must not take the jobs of a sweep along that are still to come.
        traceback.print_exc()
        write_error(JobError(3, [f"{type(error).__name__}: {error}"]), folder)
        return math.nan
    return _objective(composer.current, result) if result else math.nan


def _study(
    composer: Any, context: "StartContext", folder: Path, console: "Console", timeline: "Timeline", alone: bool
) -> "StudyResult | None":
    from sdopt.config.groups import data_sheets
    from sdopt.errors import ConflictError, OccupiedError
    from sdopt.pipelines.hub import fetch_models
    from sdopt.report.table import show, terminal_table
    from sdopt.report.verdicts import verdict_table
    from sdopt.results.files import read_result, write_result
    from sdopt.results.records import Status
    from sdopt.study.missing import missing_of
    from sdopt.study.plan import plan_result, require_room
    from sdopt.study.progress import Progress
    from sdopt.study.resume import merge_resumed
    from sdopt.study.run import run_study
    from sdopt.tracking.store import require_mlflow, require_store
    from sdopt.worker.machine import find_machine, planned_machine

    run: RunConfig = composer.current
    there = (folder / "result.json").is_file()
    if there and not run.resume:
        raise OccupiedError(f"{folder}: holds a result; `sdopt run resume={folder}` goes on with it, or choose another")
    (folder / "error.json").unlink(missing_ok=True)
    if run.tracking.kind == "mlflow":
        require_mlflow()
    plan = run.study.plan(composer)
    timeline.enter("waiting for the fork server, and asking for the device")
    sheet = run.hardware.sheet
    if run.dry_run and sheet is not None:
        machine = planned_machine(sheet)
    else:
        machine, context = find_machine(context, run.hardware, data_sheets)
    for problem in machine.warnings:
        print(f"sdopt: {problem}", file=sys.stderr)
    if not run.dry_run:
        timeline.enter("fetching models")
        fetch_models([variant.model for variant in plan.variants if not variant.conflicts(machine.device)])
    timeline.enter("composing and planning")
    command = ["sdopt", "run", *sys.argv[1:]]
    design = type(run.study).__name__.lower()
    result = plan_result(plan, run.study.name, design, dict(run.recorded), machine, command)
    if run.dry_run:
        _show_plan(result, console)
        return None
    if there:
        result = merge_resumed(read_result(folder), result, folder, run.retry_failed)
        if result.status == "finished" and not missing_of(result).variants:
            console.print(f"nothing is missing: {folder}", markup=False, highlight=False, soft_wrap=True)
            scored, judged = any(row.quality for row in result.variants), result.gate or not run.gate.judges
            if not (scored and judged):
                _assess(result, folder, run, machine, context, console)
            if not (folder / "plot.png").is_file():
                _draw(result, folder, console)
            _track(result, folder, run.tracking, console)
            return result
    if run.tracking.kind == "mlflow" and (warning := require_store(run.tracking)):
        print(f"sdopt: {warning}", file=sys.stderr)
    candidates = [row for row in result.variants if row.role != "control"][1:]
    if candidates and all(row.status is Status.SKIPPED for row in candidates):
        # Nothing is left to compare with the baseline.
        if alone:
            raise ConflictError([reason for variant in plan.variants for reason in variant.conflicts(machine.device)])
        for row in result.variants:
            row.status, row.reason = Status.SKIPPED, row.reason or "nothing is left to compare with it"
        result.status = "finished"
        write_result(result, folder)
        console.print(terminal_table(result, console.width))
        _track(result, folder, run.tracking, console)
        return result
    require_room(plan, folder)
    write_result(result, folder)  # a disk that is full is better found before measuring than after it
    try:
        with Progress(console, timeline) as progress:
            run_study(plan, result, run.protocol, machine, context, folder, progress, run.quality)
        timeline.enter("quality and verdicts")
        _assess(result, folder, run, machine, context, console)
    finally:
        timeline.enter("table and pictures")
        show(result, console, folder)
        if result.judgements:
            console.print(verdict_table(result, result.judgements))
        _draw(result, folder, console)
        timeline.enter("logging to MLflow")
        _track(result, folder, run.tracking, console)
        with suppress(OSError):  # the result is what counts, and it is written
            timeline.write(folder)
    return result


def _assess(
    result: "StudyResult",
    folder: Path,
    run: "RunConfig",
    machine: "Machine",
    context: "StartContext",
    console: "Console",
) -> None:
    """Scores the images and, where a gate is chosen, judges; what was measured is kept whatever happens here."""
    from rich.markup import escape

    from sdopt.errors import UsageError
    from sdopt.gate.calibration import calibration_for
    from sdopt.gate.judge import judge
    from sdopt.quality.evaluation import EvaluationError, Settings, evaluate_apart
    from sdopt.quality.settings import features_of, reference_of
    from sdopt.report.verdicts import write_verdicts
    from sdopt.results.files import write_at_last

    if not run.quality.metrics:
        return
    settings = Settings(
        features=features_of(run.quality, run.model),
        reference=reference_of(run.quality, run.model),
        lpips=run.quality.lpips,
        device=machine.device.torch_name,
        trained=run.model.weights != "random",
    )
    try:
        with console.status("quality") as status:
            evaluate_apart(result, folder, settings, context, lambda name: status.update(f"quality: {escape(name)}"))
    except (EvaluationError, UsageError) as error:
        print(f"sdopt: quality could not be computed: {error}", file=sys.stderr)
    if run.gate.judges:
        judge(result, run.gate, calibration_for(result, run.gate.calibration))
    write_at_last(result, folder)
    if run.gate.judges:
        write_verdicts(result, result.judgements, folder)


def _draw(result: "StudyResult", folder: Path, console: "Console") -> None:
    from sdopt.report.contact_sheet import broken_sheet, comparison_sheet
    from sdopt.report.plots import study_plot

    for name, draw in (("plot", study_plot), ("images", comparison_sheet), ("broken images", broken_sheet)):
        try:
            path = draw(result, folder)
        except Exception as error:  # a picture that cannot be drawn must not keep a result from being logged
            print(f"sdopt: no {name}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        if path is not None:
            console.print(f"{name}: {path}", markup=False, highlight=False, soft_wrap=True)


def _track(result: "StudyResult", folder: Path, tracking: "Tracking", console: "Console") -> None:
    from sdopt.tracking.runs import log_study
    from sdopt.tracking.store import TrackingError

    if tracking.kind == "none":
        return
    try:
        with console.status("logging to MLflow"):
            log_study(result, folder, tracking)
    except TrackingError as error:
        print(f"sdopt: not logged to {error}\nNothing is lost: `sdopt sync {folder}` logs it later.", file=sys.stderr)
        return
    console.print("MLflow: sdopt ui")


def _show_plan(result: "StudyResult", console: "Console") -> None:
    from rich.markup import escape
    from rich.table import Table

    environment = result.environment
    # A plan is only ever made with a sheet of the device that is meant; a real one has a driver.
    planned = environment.sheet is not None and environment.device["driver"] is None
    where = f" on {environment.device['name']}, by its data sheet" if planned else ""
    table = Table(title=escape(f"{result.name}: what would be measured{where}"), title_justify="left")
    for heading in ("variant", "choices beyond the defaults", "contract", "would run?"):
        table.add_column(heading)
    baseline = result.variant(result.baseline).choices
    from sdopt.study.designs import difference

    for row in result.variants:
        chosen = ", ".join(f"{axis}={option}" for axis, option in difference(row.choices, baseline).items())
        table.add_row(escape(row.name), escape(chosen), row.contract, "no" if row.reason else "yes")
    console.print(table)
    for row in result.variants:
        if row.reason:
            console.print(f"  {row.name}: no: {row.reason}", markup=False, highlight=False, soft_wrap=True)
    edges = Table(title="what would be compared", title_justify="left")
    for heading in ("candidate", "against", "credits"):
        edges.add_column(heading)
    for edge in result.comparisons:
        edges.add_row(*map(escape, (edge.candidate, edge.reference, edge.credit)))
    console.print(edges)


def _objective(run: "RunConfig", result: "StudyResult") -> Any:
    from sdopt.analysis.figures import metrics_of
    from sdopt.results.records import Status

    candidates = [row for row in result.variants if row.role != "control"]
    # An option that failed, or that took no effect, has nothing that a sweeper should prefer.
    metrics = metrics_of(result, candidates[-1]) if candidates[-1].status is Status.OK else {}
    missing = [name for name in run.objective if name not in metrics]
    if missing and metrics:
        print(f"sdopt: objective={','.join(missing)}: there are {', '.join(sorted(metrics))}", file=sys.stderr)
    values = tuple(metrics.get(name, math.nan) for name in run.objective)
    return values if len(values) > 1 else values[0]


def _summarise(folder: Path) -> int:
    """The table of a sweep, in the terminal, in its folder and in MLflow; returns the exit code of them all."""
    from rich.console import Console

    from sdopt.report.markdown import sweep_markdown
    from sdopt.report.sweep import read_sweep
    from sdopt.report.table import sweep_table
    from sdopt.schema import Tracking
    from sdopt.tracking.runs import log_sweep
    from sdopt.tracking.store import TrackingError

    if not folder.is_dir():
        return 2
    sweep = read_sweep(folder)
    if not sweep.studies:
        return sweep.exit_code
    console = Console()
    console.print(sweep_table(sweep.rows, console.width))
    try:
        (folder / "sweep.md").write_text(sweep_markdown(sweep.rows))
    except OSError as error:
        print(f"sdopt: no table: {folder / 'sweep.md'}: {error.strerror}", file=sys.stderr)
    console.print(f"sweep: {folder}", markup=False, highlight=False, soft_wrap=True)
    studies = list(sweep.studies.values())
    tracking = Tracking(**studies[0].config["tracking"])
    # A sweep that is resumed may be told to track nothing, which those of its jobs say that were run then.
    if all(study.config["tracking"]["kind"] == "mlflow" for study in studies):
        try:
            log_sweep(studies, folder, sweep_markdown(sweep.rows), tracking)
        except TrackingError as error:
            print(f"sdopt: the sweep's own run was not logged to {error}", file=sys.stderr)
    return sweep.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
