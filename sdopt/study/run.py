"""Runs a study: measures its missing parts, session by session, and keeps its result up to date."""

from contextlib import suppress
from pathlib import Path

from sdopt.analysis.effects import effects_of
from sdopt.analysis.ratios import compare
from sdopt.locks import Presence
from sdopt.results.files import write_at_last
from sdopt.results.records import MeasurementSession, Schedule, Status, StudyResult, append_reason
from sdopt.results.samples import Measurement, ShapeSamples
from sdopt.schema import Protocol, Quality
from sdopt.scratch import scratch_folder
from sdopt.study.designs import CONTROL, Plan
from sdopt.study.forecast import calls_ahead
from sdopt.study.image_cache import ImageCache
from sdopt.study.missing import Missing, missing_of
from sdopt.study.precision import PrecisionPlan
from sdopt.study.preparation import prepare_processes
from sdopt.study.progress import Progress
from sdopt.study.rounds import blocks, interleaved_rounds
from sdopt.study.state import StudyRun, VariantProcess
from sdopt.study.status import now, progress_of, set_final_statuses
from sdopt.worker.forkserver import StartContext
from sdopt.worker.machine import Machine


def run_study(
    plan: Plan,
    result: StudyResult,
    protocol: Protocol,
    machine: Machine,
    context: StartContext,
    folder: Path,
    progress: Progress,
    quality: Quality,
) -> StudyResult:
    """Measures the missing parts of a study, and keeps `result.json` in `folder` up to date meanwhile.

    A worker that fails ends its variant and no other. On KeyboardInterrupt, keeps and compares the measurements, ends
    the workers, and raises the interrupt again. If the file cannot be written, measuring continues, and writing is
    tried again after every round.

    Raises:
        OSError: the file could not be written at the end; the message says where the result is instead.
    """
    images = ImageCache(Path(quality.cache) if quality.cache and quality.metrics else None)
    presence = Presence(machine.device, str(folder))
    result.status, result.finished = "running", None
    try:
        with (
            scratch_folder("study") as scratch,
            presence,
        ):
            run = StudyRun(
                plan, result, protocol, quality, machine, context, folder, scratch, progress, presence, images
            )
            try:
                precision = PrecisionPlan(run)
                measure_missing(run, first_schedule(protocol, machine))
                while precision.grant():
                    measure_missing(run, Schedule(run.session.schedule, result.schedule.reason))
            finally:
                run.kill_all()
        set_final_statuses(result)
        result.status = "finished"
    except KeyboardInterrupt:
        result.status = "interrupted"
        lacking = missing_of(result).variants
        for row in result.variants:
            if row.status is Status.PENDING and row.name in lacking:
                row.status, row.reason = Status.INTERRUPTED, append_reason(row, progress_of(row, protocol))
        set_final_statuses(result)
        raise
    finally:
        if result.status == "running":
            result.status = "crashed"
        progress.timeline.enter("comparing")
        result.finished = now()
        compare(result)
        result.effects = effects_of(result, plan.factors)
        write_at_last(result, folder)
    return result


def measure_missing(run: StudyRun, schedule: Schedule) -> None:
    """Measures the missing parts in a new session; if memory runs out in its rounds, measures the rest in another."""
    next_schedule: Schedule | None = schedule
    while next_schedule is not None:
        missing = missing_of(run.result)
        if not missing.variants:
            return
        _open_session(run, missing, next_schedule)
        prepare_processes(run)
        if run.interleaved:
            # Complete rounds are kept, paired within their own session.
            next_schedule = interleaved_rounds(run)
        else:
            blocks(run)
            next_schedule = None


def first_schedule(protocol: Protocol, machine: Machine) -> Schedule:
    """Returns the schedule to begin with; `auto` begins interleaved if the device takes several processes at once."""
    if protocol.schedule == "blocks":
        return Schedule("blocks", "protocol.schedule=blocks")
    mode = str(machine.gpu.get("compute_mode", ""))
    if protocol.schedule == "auto" and mode.startswith("exclusive"):
        return Schedule("blocks", f"the device is in compute mode {mode}, and takes one process at a time")
    return Schedule()


def _open_session(run: StudyRun, missing: Missing, schedule: Schedule) -> None:
    """Begins a session, with new processes for all variants that take part."""
    result, protocol = run.result, run.protocol
    variants = {variant.name: variant for variant in run.plan.variants} | {CONTROL: run.plan.baseline}
    rows = [row for row in result.variants if row.name in missing.variants]
    # The control is measured right after the baseline, so that the floor is known early.
    rows.sort(key=lambda row: (row.name != result.baseline, not row.is_control))
    number = len(result.sessions)
    result.sessions.append(MeasurementSession(now()))
    run.set_schedule(schedule)
    run.rounds, run.processes = missing.rounds, []
    for replicate in sorted({replicate for _, replicate in missing.processes}):
        for row in rows:
            timed = (row.name, replicate) in missing.timed
            if (row.name, replicate) not in missing.processes:
                continue
            slug = f"{run.slug(row)}-{replicate}" + (f"-session-{number}" if number else "")
            measurement = Measurement(replicate, number, [ShapeSamples() for _ in result.shapes])
            process = VariantProcess(row, variants[row.name], measurement, slug, timed)
            row.measurements.append(process.measurement)
            run.processes.append(process)
    for sub in ("logs", "images"):
        with suppress(OSError):  # the code that needs the folder reports the error
            (run.folder / sub).mkdir(exist_ok=True)
    taking_part = [variants[row.name] for row in rows]
    calls = calls_ahead(taking_part, len(run.processes), run.rounds, protocol, run.drawing_batch)
    run.progress.start(calls, run.rounds)
    run.checkpoint()
