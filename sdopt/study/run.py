"""Runs a study: measures its missing parts, session by session, and keeps its result up to date."""

import time
from pathlib import Path

from sdopt.record.choices import PATCH, as_choice
from sdopt.record.files import write_at_last
from sdopt.record.records import (
    IntervalWidth,
    Schedule,
    Status,
    StudyResult,
    VariantResult,
    append_reason,
    now,
)
from sdopt.schema import Protocol
from sdopt.scratch import scratch_folder
from sdopt.statistics.comparing import compare
from sdopt.statistics.effects import effects_of
from sdopt.statistics.precision import processes_needed
from sdopt.study.budget import Spending
from sdopt.study.designs import Plan
from sdopt.study.progress import Progress
from sdopt.study.resume import missing_of
from sdopt.study.rounds import Blocks, Rounds
from sdopt.study.session import BaselineFailedError, DoesNotFitError, Session, Study
from sdopt.study.warmup import Warmup
from sdopt.worker.machine import Machine
from sdopt.worker.process import StartWorker
from sdopt.worker.protocol import TimeUpError

_NO_BASELINE = "the baseline failed, so that there is nothing to compare with"


def run_study(
    plan: Plan,
    result: StudyResult,
    machine: Machine,
    start_worker: StartWorker,
    folder: Path,
    progress: Progress,
) -> StudyResult:
    """Measures the missing parts of a study, and keeps `result.json` in `folder` up to date meanwhile.

    A worker that fails ends its variant and no other, unless it is the baseline's, which ends the study. On
    KeyboardInterrupt, keeps and compares the measurements, ends the workers, and raises the interrupt again; when a
    worker says that the time is up, it does the same and returns the result, whose status is `interrupted`. If the file
    cannot be written, measuring continues, and writing is tried again after every round.

    Raises:
        OSError: the file could not be written at the end; the message says where the result is instead.
    """
    result.status, result.finished = "running", None
    begun, protocol = time.monotonic(), result.config.protocol
    try:
        with scratch_folder("study") as scratch:
            study = Study(
                plan, result, machine, start_worker, folder, scratch, progress
            )
            study.begun_after_s = progress.timeline.elapsed_s
            before_s = result.precision.spent_s if result.precision else 0.0
            measure_missing(study, first_schedule(protocol, machine))
            while more_processes(result, before_s + time.monotonic() - begun):
                measure_missing(
                    study,
                    Schedule(result.sessions[-1].schedule, result.schedule.reason),
                )
        set_final_statuses(result)
        result.status = "finished"
    except BaselineFailedError:
        for row in result.variants:
            if row.status is Status.PENDING:
                row.status, row.reason = (
                    Status.INTERRUPTED,
                    append_reason(row, _NO_BASELINE),
                )
        set_final_statuses(result)
        result.status = "finished"
    except (KeyboardInterrupt, TimeUpError) as end:
        result.status = "interrupted"
        lacking = missing_of(result).variants
        for row in result.variants:
            if row.status is Status.PENDING and row.name in lacking:
                row.status = Status.INTERRUPTED
                row.reason = append_reason(row, _how_far(row, protocol.rounds))
        set_final_statuses(result)
        if isinstance(end, KeyboardInterrupt):
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


def _how_far(row: VariantResult, rounds: int) -> str:
    done = min((len(times) for times in row.samples.values()), default=0)
    if done >= rounds:
        return (
            "interrupted after all rounds, before its evidence and images were complete"
        )
    return f"interrupted after {done} of {rounds} rounds"


def measure_missing(study: Study, schedule: Schedule) -> None:
    """Measures the missing parts in a new session; if memory runs out in it, measures the rest in another."""
    while (missing := missing_of(study.result)).variants:
        session = Session(study, missing, schedule)
        try:
            spending = Spending(session)
            Warmup(session, spending).prepare()
            (Rounds if session.interleaved else Blocks)(session, spending).measure()
            return
        except DoesNotFitError as error:
            # Complete rounds are kept, paired within their own session.
            schedule = session.after(error)
        finally:
            for process in session.processes:
                process.kill()


def first_schedule(protocol: Protocol, machine: Machine) -> Schedule:
    """Returns the schedule to begin with; `auto` begins interleaved if the device takes several processes at once."""
    if protocol.schedule == "blocks":
        return Schedule("blocks", "protocol.schedule=blocks")
    mode = str(machine.gpu.get("compute_mode", ""))
    if protocol.schedule == "auto" and mode.startswith("exclusive"):
        return Schedule(
            "blocks",
            f"the device is in compute mode {mode}, and takes one process at a time",
        )
    return Schedule()


def more_processes(result: StudyResult, spent_s: float) -> bool:
    """Grants the next processes to speed-ups that are not precise enough, as many at a time as the pilot had.

    Returns False where none is needed, or the budget has no room for it; measuring took `spent_s` so far.
    """
    protocol = result.config.protocol
    if protocol.precision is None:
        return False
    result.precision = precision = result.precision or IntervalWidth(
        granted=result.config.replicates
    )
    precision.needed, precision.spent_s = (
        precision.needed or processes_needed(result),
        spent_s,
    )
    running = {row.name for row in result.variants if row.is_in_the_race}
    needed = max(
        (n for name, n in precision.needed.items() if name in running), default=0
    )
    if needed <= precision.granted:
        return False
    granted = min(needed, precision.granted + result.config.replicates)
    if protocol.budget_s is not None:
        timed = sum(len(row.samples) for row in result.variants)
        # The baseline and the control of each session too.
        more = (granted - precision.granted) * (
            2 + sum(n > precision.granted for n in precision.needed.values())
        )
        if spent_s * (1 + more / max(timed, 1)) > protocol.budget_s:
            precision.stopped = f"protocol.budget_s={protocol.budget_s:g} was spent"
            return False
    precision.granted = granted
    return True


def set_final_statuses(result: StudyResult) -> None:
    """Sets the final status of each fully measured variant."""
    for row in result.variants:
        if row.status in (Status.PENDING, Status.OK, Status.NOT_ENGAGED):
            row.status, row.reason = _status_by_evidence(row)


_UNDONE = " (if the function undoes it, leave one of the two out)"


def _status_by_evidence(row: VariantResult) -> tuple[Status, str]:
    """Returns the status of a measured variant, and the reason: `ok` with evidence of every option, else `not_engaged`.

    The evidence is what each option's proof found in a traced call (`PipelineHost.prove`), in every process at every
    shape. It lacks if a proof finds that its option took no effect, or if the traced call failed, so that a process has
    none (`VariantResult.silent`). A user's function may undo a default that promises nothing.
    """
    if not row.measurements:
        return row.status, row.reason
    shapes = row.config.shapes
    idle: set[str] = set()
    changed: set[str] = set()
    for measurement in row.measurements:
        for shape, samples in zip(shapes, measurement.shapes, strict=True):
            where = f" (at {shape})" if len(shapes) > 1 else ""
            for evidence in samples.evidence:
                if evidence.engaged:
                    continue
                option = as_choice(evidence.axis, evidence.option)
                text = f"{option}: {evidence.summary}{where}"
                if not row.shows_no_effect(evidence):
                    changed.add(f"the function changed what {text}")
                elif row.is_patched and evidence.axis != PATCH:
                    idle.add(text + _UNDONE)
                else:
                    idle.add(text)
    status = Status.NOT_ENGAGED if idle or row.silent else Status.OK
    return status, append_reason(row, *sorted(idle), *([] if idle else sorted(changed)))
