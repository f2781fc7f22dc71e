"""What a study says of its options."""

import pytest

from sdopt.record.records import Status, StudyResult
from sdopt.statistics.outcomes import Standing, outcomes_of


def standings(result: StudyResult) -> dict[tuple[str, str], Standing]:
    return {(found.group, found.option): found.standing for found in outcomes_of(result)}


@pytest.mark.parametrize(
    ("status", "standing"),
    [
        *((status, Standing.CANNOT_RUN) for status in (Status.FAILED, Status.OUT_OF_MEMORY, Status.KILLED)),
        # A limit of time says nothing of an option.
        *((status, None) for status in (Status.TIMEOUT, Status.INTERRUPTED, Status.PENDING)),
    ],
)
def test_what_failed_alone_cannot_run(result: StudyResult, status: Status, standing: Standing | None) -> None:
    assert standings(result)["precision", "bf16"] in (Standing.PROVEN, Standing.REFUTED)
    row = result.variant("bfloat16")
    row.status, row.measurements = status, []
    assert standings(result).get(("precision", "bf16")) is standing
