"""What a study says of its options."""

import pytest

from sdopt.record.records import Status, StudyResult
from sdopt.statistics.outcomes import Standing, outcomes_of


def standings(result: StudyResult) -> dict[tuple[str, str], Standing]:
    return {(found.group, found.option): found.standing for found in outcomes_of(result)}


@pytest.mark.parametrize("status", [Status.FAILED, Status.OUT_OF_MEMORY, Status.KILLED])
def test_what_failed_alone_cannot_run(result: StudyResult, status: Status) -> None:
    result.variant("bfloat16").status = status
    assert standings(result)["precision", "bf16"] is Standing.CANNOT_RUN


@pytest.mark.parametrize("status", [Status.TIMEOUT, Status.INTERRUPTED, Status.PENDING])
def test_a_limit_of_time_says_nothing_of_an_option(result: StudyResult, status: Status) -> None:
    """It was once published as an option that cannot run on that machine."""
    assert standings(result)["precision", "bf16"] in (Standing.PROVEN, Standing.REFUTED)
    row = result.variant("bfloat16")
    row.status, row.measurements = status, []
    assert ("precision", "bf16") not in standings(result)
