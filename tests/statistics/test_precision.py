"""How many processes a precision takes: Stein's two stages, by hand and by simulation."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from sdopt.errors import UsageError
from sdopt.record.records import IntervalWidth, StudyResult
from sdopt.record.samples import Measurement, ShapeSamples
from sdopt.report.notes import notes_of
from sdopt.report.summary import summary_of
from sdopt.schema import Gate, Protocol
from sdopt.statistics.precision import processes_needed, require_precision
from sdopt.statistics.ratios import log_speedup
from tests.records import known, reconfigure, timed
from tests.trial.noise import precise, two_stages, until_narrow

PILOT = {
    "baseline": [1.0, 1.02, 1.05],
    "bfloat16": [0.9, 0.93, 0.91],
    "batches of four": [1.0, 1.2, 0.9],
}
MARGIN = math.log(1.03)


def ask(result: StudyResult, precision: float | None) -> None:
    reconfigure(result, "protocol", precision=precision)
    for row in result.variants:
        row.config = replace(row.config, protocol=result.config.protocol)


@pytest.fixture
def study(result: StudyResult) -> StudyResult:
    """A pilot of three processes, each with one round."""
    ask(result, 0.03)
    result.sessions = result.sessions[:1]
    for row in result.variants:
        if row.status.measured:
            times = PILOT.get(row.name, PILOT["baseline"])
            row.measurements = [
                Measurement(number, shapes=[ShapeSamples(calls=timed([seconds]))])
                for number, seconds in enumerate(times)
            ]
    return result


def half_width(candidate: str) -> float:
    """Of Student's interval of a pilot, on the log scale."""
    logs = [np.log(PILOT[name]) for name in (candidate, "baseline")]
    pooled = np.mean([values.var(ddof=1) for values in logs])
    return float(stats.t.ppf(0.975, 4) * math.sqrt(2 * pooled / 3))


def test_as_many_processes_are_needed_as_make_the_pilots_interval_narrow_enough(
    study: StudyResult,
) -> None:
    needed = processes_needed(study)
    narrow = {
        name: math.ceil(3 * (half_width(name) / MARGIN) ** 2)
        for name in ("bfloat16", "batches of four")
    }
    assert needed == narrow
    assert needed["bfloat16"] < needed["batches of four"]
    ask(study, 0.9)
    assert set(processes_needed(study).values()) == {3}, "the pilot suffices"


def test_an_interval_is_around_the_mean_of_all_with_the_deviation_of_the_pilot(
    study: StudyResult,
) -> None:
    for row in study.variants:
        if row.status.measured:
            row.measurements += [
                Measurement(
                    3 + n, 1, shapes=[ShapeSamples(calls=timed([1.0 + 0.2 * (n % 2)]))]
                )
                for n in range(6)
            ]
    found = known(log_speedup(study.variant("bfloat16"), study.variant("baseline")))
    # Those that were added are the same on both sides.
    own = np.log(PILOT["baseline"]).sum() - np.log(PILOT["bfloat16"]).sum()
    assert found.mean == pytest.approx(own / 9)
    assert (found.n, found.freedom) == (9, 4)
    high = known(found.interval(0.95).high)
    assert math.log(high) - found.mean == pytest.approx(
        half_width("bfloat16") / math.sqrt(3)
    )


def test_a_note_names_what_kept_the_study_going_and_what_did_not_reach_it(
    study: StudyResult,
) -> None:
    needed = processes_needed(study)
    study.precision = IntervalWidth(needed, 3, 60.0, "protocol.budget_s=60 was spent")
    [note] = [
        note
        for note in notes_of(summary_of(study))
        if note.startswith("Precision: ±3 %")
    ]
    for name in ("bfloat16", "batches of four"):
        assert f"{name} (3 of {needed[name]} processes)" in note
    assert note.endswith(
        "not reached by bfloat16, batches of four: protocol.budget_s=60 was spent."
    )


@pytest.mark.parametrize(
    ("protocol", "gate", "problem"),
    [
        (
            Protocol(replicates=2, precision=0.03),
            Gate(),
            "precision=0.03: needs protocol.replicates=3 or more",
        ),
        (Protocol(precision=0.03), Gate(replicates=1), "or more, not 1"),
    ],
)
def test_what_cannot_be_reached_is_refused(
    protocol: Protocol, gate: Gate, problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        require_precision(protocol, gate)


STUDIES = 300


def test_two_stages_hold_the_truth_as_often_as_they_say_and_stopping_at_will_does_not() -> (
    None
):
    two, naive = (
        precise(rule, 3, 0.03, 0.7, STUDIES) for rule in (two_stages, until_narrow)
    )
    error = math.sqrt(0.95 * 0.05 / STUDIES)
    assert two.covered > 0.95 - 2 * error
    assert two.width <= 0.0301
    assert naive.covered < 0.95 - 2 * error
