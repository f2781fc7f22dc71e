"""Sets the final status of each variant, with its reason."""

from datetime import UTC, datetime

from sdopt.record.choices import PATCH, as_choice
from sdopt.record.records import Status, StudyResult, VariantResult, append_reason
from sdopt.schema import Protocol


def progress_of(row: VariantResult, protocol: Protocol) -> str:
    """Returns how far an interrupted variant had come, in words."""
    done = min((len(times) for times in row.samples.values()), default=0)
    return f"interrupted after {min(done, protocol.rounds)} of {protocol.rounds} rounds"


def set_final_statuses(result: StudyResult) -> None:
    """Sets the final status of each fully measured variant."""
    for row in result.variants:
        if row.status is Status.PENDING or row.status.measured:
            row.status, row.reason = _engagement(row)


def _engagement(row: VariantResult) -> tuple[Status, str]:
    """Returns status and reason: without evidence of every option in every replicate at every shape, not engaged."""
    if not row.measurements:
        return row.status, row.reason
    shapes = row.config.shapes
    found = [
        (evidence, f"{as_choice(evidence.axis, evidence.option)}: {evidence.summary}{where}")
        for measurement in row.measurements
        for shape, samples in zip(shapes, measurement.shapes, strict=True)
        for evidence in samples.evidence
        for where in [f" (at {shape})" if len(shapes) > 1 else ""]
        if not evidence.engaged
    ]
    idle = {
        f"{text}{_UNDONE if row.is_patched and evidence.axis != PATCH else ''}"
        for evidence, text in found
        if row.lacks(evidence)
    }
    changed = {f"the function changed what {text}" for evidence, text in found if not row.lacks(evidence)}
    # A process that was killed before it showed evidence is replaced by another of the same replicate.
    shown = {
        measurement.replicate
        for measurement in row.measurements
        if all(samples.evidence for samples in measurement.shapes)
    }
    silent = shown != {measurement.replicate for measurement in row.measurements}
    status = Status.NOT_ENGAGED if idle or silent else Status.OK
    return status, append_reason(row, *sorted(idle), *([] if idle else sorted(changed)))


_UNDONE = " (if the function undoes it, leave one of the two out)"


def now() -> str:
    """Returns the current time in UTC, in the format of records."""
    return datetime.now(UTC).isoformat(timespec="seconds")
