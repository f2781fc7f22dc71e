"""Runs a study: measures its missing parts, session by session, and keeps its result up to date."""

from pathlib import Path

from sdopt.record.files import write_at_last
from sdopt.record.records import Schedule, Status, StudyResult, append_reason
from sdopt.schema import Protocol, Quality
from sdopt.scratch import scratch_folder
from sdopt.statistics.effects import effects_of
from sdopt.statistics.ratios import compare
from sdopt.study.designs import Plan
from sdopt.study.missing import missing_of
from sdopt.study.precision import PrecisionPlan
from sdopt.study.progress import Progress
from sdopt.study.rounds import Blocks, Rounds
from sdopt.study.session import DoesNotFitError, Session, Study
from sdopt.study.status import now, progress_of, set_final_statuses
from sdopt.study.warmup import Warmup
from sdopt.worker.machine import Machine
from sdopt.worker.process import StartWorker


def run_study(
    plan: Plan,
    result: StudyResult,
    protocol: Protocol,
    machine: Machine,
    start_worker: StartWorker,
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
    result.status, result.finished = "running", None
    try:
        with scratch_folder("study") as scratch:
            study = Study(plan, result, protocol, quality, machine, start_worker, folder, scratch, progress)
            precision = PrecisionPlan(result, protocol)
            measure_missing(study, first_schedule(protocol, machine))
            while precision.grant():
                measure_missing(study, Schedule(result.sessions[-1].schedule, result.schedule.reason))
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


def measure_missing(study: Study, schedule: Schedule) -> None:
    """Measures the missing parts in a new session; if memory runs out in it, measures the rest in another."""
    while (missing := missing_of(study.result)).variants:
        session = Session(study, missing, schedule)
        try:
            Warmup(session).prepare()
            (Rounds if session.interleaved else Blocks)(session).measure()
            return
        except DoesNotFitError as error:
            # Complete rounds are kept, paired within their own session.
            schedule = session.after(error)
        finally:
            session.kill_all()


def first_schedule(protocol: Protocol, machine: Machine) -> Schedule:
    """Returns the schedule to begin with; `auto` begins interleaved if the device takes several processes at once."""
    if protocol.schedule == "blocks":
        return Schedule("blocks", "protocol.schedule=blocks")
    mode = str(machine.gpu.get("compute_mode", ""))
    if protocol.schedule == "auto" and mode.startswith("exclusive"):
        return Schedule("blocks", f"the device is in compute mode {mode}, and takes one process at a time")
    return Schedule()
